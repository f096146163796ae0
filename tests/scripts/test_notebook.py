"""notebooks/plainrl.ipynb: it is stored without outputs, its cells run in order, and each command that it starts exists
with the flags that it is given. The cells are executed here, but for the commands, which a list takes."""

import importlib
import json
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
import tyro

import tools.report
from tests.conftest import ROOT

NOTEBOOK = ROOT / "notebooks/plainrl.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
GPUS = {"none": "", "H100": "NVIDIA H100 80GB HBM3, 580.95.05, 9.0", "T4": "Tesla T4, 580.82.07, 7.5",
        "old driver": "NVIDIA L4, 550.54.15, 8.9"}


class Command(list):
    """The words, and the variables that it gets."""

    def __init__(self, words: Iterable[str], variables: dict[str, str]):
        super().__init__(words)
        self.variables = variables


def commands(monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: str = "", code: dict[str, str] = CODE,
             given: dict[str, str] | None = None) -> list[list[str]]:
    """Those that the cells start on a machine with this GPU, in a folder that has the scripts and nothing else."""
    shown, started = types.ModuleType("IPython.display"), []
    shown.IFrame = shown.Image = shown.display = lambda *_: None
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    (folder / "grpo.py").touch()
    (folder / "runs/notebook").mkdir(parents=True)
    (folder / "runs/notebook/report.html").touch()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpu}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder if gpu else ''}:/usr/bin:/bin")
    for variable in ("STEPS", "ENGINE", "REPOSITORY", "MODEL"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in (given or {}).items():
        monkeypatch.setenv(variable, value)
    (folder / "notebooks").mkdir()
    monkeypatch.chdir(folder / "notebooks")
    names: dict = {}
    for cell, text in code.items():
        exec(compile(text, cell, "exec"), names)
        names["run"] = lambda *command, **variables: started.append(Command(command, variables))
    assert Path.cwd() == folder
    return started


def problems(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with these commands. grpo.py's own checks accept its flags, or have only no model to read."""
    found = []
    monkeypatch.chdir(ROOT)
    for command in started:
        program, *arguments = command[1:] if command[0].endswith("python") else command
        if program != "-m" and not (ROOT / program).is_file():
            found.append(f"{program} does not exist")
        if program == "grpo.py" or arguments[:1] == ["tools.report"]:
            module = importlib.import_module("grpo") if program == "grpo.py" else tools.report
            flags = arguments if program == "grpo.py" else arguments[1:]
            try:
                args = tyro.cli(module.Args, args=flags, console_outputs=False)
                if program == "grpo.py":
                    module.check(args)
            except SystemExit:
                found.append(f"the flags do not parse: {' '.join(command)}")
            except ValueError as error:
                found += [] if "cannot read a model config" in str(error) else [str(error)]
        elif program.startswith("data/"):
            told = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=False)
            found += [f"{program} has no {flag}" for flag in arguments
                      if flag.startswith("--") and f"{flag} " not in told.stdout]
    return found


@pytest.mark.parametrize("gpu", GPUS)
def test_each_command_of_the_notebook_exists_with_its_flags(gpu, monkeypatch, tmp_path):
    started = commands(monkeypatch, tmp_path, GPUS[gpu])
    assert problems(started, monkeypatch) == []
    uses_gpu = gpu in ("H100", "T4")
    (trained,) = [command for command in started if "grpo.py" in command]
    assert trained[0] == (".venv-gpu/bin/python" if uses_gpu else ".venv/bin/python")
    emulates = not uses_gpu and "bf16" not in Path("/proc/cpuinfo").read_text()
    assert ("--policy.compute-dtype" in trained) == (gpu == "T4" or emulates)
    assert started[0] == ["tools/setup.sh", "gpu"] if uses_gpu else ["tools/setup.sh"]
    assert ("data/smollm2.py" in started[1]) != uses_gpu
    assert [command[-1] for command in started[-2:]] == ["runs/notebook/curves.png", "5"]


@pytest.mark.parametrize("gpu", ["none", "H100"])
def test_a_model_of_the_hub_may_be_downloaded(gpu, monkeypatch, tmp_path):
    """The one that a PyPI package holds needs no hub, which may not be reached then."""
    for model, offline in (("Qwen/Qwen3-0.6B", "0"), ("models/SmolLM2-135M-Instruct", "1")):
        (folder := tmp_path / offline).mkdir()
        started = commands(monkeypatch, folder, GPUS[gpu], given={"MODEL": model})
        (trained,) = [command for command in started if "grpo.py" in command]
        assert trained[3] == model and trained.variables["HF_HUB_OFFLINE"] == offline
        assert any("data/smollm2.py" in command for command in started) == (offline == "1")


@pytest.mark.parametrize("venv", [".venv", ".venv-gpu"])
def test_the_set_up_is_asked_whether_it_is_complete(venv, monkeypatch, tmp_path):
    """Of an earlier version, or with another engine, a stamp is there too."""
    (tmp_path / venv).mkdir()
    (tmp_path / venv / "complete-imports").touch()
    started = commands(monkeypatch, tmp_path, GPUS["H100" if venv == ".venv-gpu" else "none"])
    assert started[0][0] == "tools/setup.sh" and started[0].variables["PYTHON"] == sys.executable


def test_an_environment_keeps_its_python(monkeypatch, tmp_path):
    """That of the notebook may have another version, for which the set-up would empty the environment."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho /opt/python3.99\n")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    assert commands(monkeypatch, tmp_path)[0].variables["PYTHON"] == "/opt/python3.99"


def test_what_is_wrong_with_a_notebook_is_found(monkeypatch, tmp_path):
    """Guard: one mistake each."""
    for number, (cell, before, after, problem) in enumerate((
            ("train", "--optim.lr", "--optim.rate", "do not parse"), ("train", "grpo.py", "grop.py", "does not exist"),
            ("train", '"--samples-per-prompt", "8"', '"--samples-per-prompt", "1"', "must be at least 2"),
            ("curves", "--out", "--output", "do not parse"),
            ("setup", '"--out", DATA', '"--to", DATA', "has no --to"))):
        assert before in CODE[cell]
        (folder := tmp_path / str(number)).mkdir()
        changed = CODE | {cell: CODE[cell].replace(before, after)}
        found = problems(commands(monkeypatch, folder, code=changed), monkeypatch)
        assert any(problem in text for text in found), (found, problem)


def test_a_command_that_fails_ends_its_cell(monkeypatch, tmp_path, capsys):
    names: dict = {}
    monkeypatch.chdir(ROOT)
    exec(CODE["settings"], names)
    names["run"]("bash", "-c", "echo $WORD", WORD="as it comes")
    assert capsys.readouterr().out == "as it comes\n"
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        names["run"]("bash", "-c", "exit 3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="set REPOSITORY"):
        exec(CODE["settings"], {})


def test_the_notebook_is_stored_without_outputs():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS if cell["id"] in CODE)
    assert NOTEBOOK.stat().st_size < 20_000 and len(CODE) == 6
    assert list(CODE) == ["settings", "device", "setup", "train", "curves", "rollouts"]
