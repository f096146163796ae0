"""Mistyped commands: one or two lines with the value, the rule and the flag, before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint.faulty import python_path
from tests.conftest import MODEL, ROOT, launch
from tests.scripts.mistyped import EARLY, parts, prepare
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS
from tools.command_line import check_command, definitions, in_one_line, keep_compiled_code_at_home

# What `python SCRIPT` does first, once for each command, in a fork of a process that has imported neither torch nor
# transformers. Of the hub's name, no network answers here or in CI.
SERVER = """
import json, os, sys
import tools.command_line
from pathlib import Path

for script, *arguments, environment in json.load(sys.stdin):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.dup2(theirs, 2)
        sys.argv, code = [script, *arguments], 0
        os.environ.update(environment)
        try:
            tools.command_line.check_command(Path(script).resolve())
        except BaseException as end:
            code = end.code if isinstance(end, SystemExit) else f"{type(end).__name__}: {end}"
        heavy = [name for name in sorted(tools.command_line.HEAVY) if name in sys.modules]
        os.write(2, f"\\n{json.dumps([code, heavy])}".encode())
        os._exit(0)
    os.close(theirs)
    print(json.dumps(os.fdopen(ours).read()), flush=True)
    os.wait()
"""


def answers(commands: list[list]) -> list[tuple[str, int, list[str]]]:
    """What each command said, its exit code, and which of the packages that take long it imported."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", SERVER], cwd=ROOT, env=environment | {"PYTHONPATH": python_path(ROOT)},
                          input=json.dumps(commands), capture_output=True, text=True, check=True)
    found = []
    for line in done.stdout.splitlines():
        said, _, end = json.loads(line).rpartition("\n")
        found.append((said, *json.loads(end)))
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory, smollm):
    folder = tmp_path_factory.mktemp("mistyped")
    prepare(folder)
    commands = []
    for command, *_ in EARLY.values():
        words, environment = parts(command, folder)
        commands.append([*words, environment])
    return dict(zip(EARLY, answers(commands), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("what", EARLY)
def test_a_mistyped_command_gets_one_line_before_torch_is_imported(what, said):
    text, code, heavy = said[what]
    assert (code, heavy) == (2, []), text
    assert text.startswith(("error: ", "[rank")) and text.count("\n") <= 2 and "Traceback" not in text
    assert [word for word in EARLY[what][1:] if word not in text] == [], text


GOOD = {
    "grpo.py": [], "ppo.py": [], "dapo.py": [], "rloo.py": [], "online_dpo.py": [],
    "grpo_variants.py": ["--loss", "gspo", "--teacher", "MODEL", "--kl-loss-coef", "1"],
    "distill.py": ["--teacher", "MODEL"], "sft.py": [], "dpo.py": [], "rm.py": [], "evaluate.py": [],
    "async_grpo.py": ["--samplers", "1"],
}


def test_a_good_command_passes_without_torch(tmp_path, smollm):
    """Of every script, and of a fork in another folder that has a flag and a check of its own."""
    assert set(GOOD) == {*SCRIPTS, *OFFLINE, *ALONE}
    prepare(tmp_path)
    fork = tmp_path / "mine.py"
    text = (ROOT / "grpo.py").read_text().replace("    # the objective\n", "    mine: Literal['a', 'b'] = LIST[0]\n", 1)
    fork.write_text(text.replace("@dataclass\nclass", "LIST = []\nLIST[:] = ['b']\n\n\n@dataclass\nclass", 1))
    data = [str(tmp_path / "data.jsonl")]
    commands = []
    for script, own in {**GOOD, str(fork): ["--mine", "a"]}.items():
        flags = ["--val-data" if script == "evaluate.py" else "--train-data", *data]
        own = [str(MODEL) if word == "MODEL" else word for word in own]
        ranks = {"WORLD_SIZE": "2"} if script == "async_grpo.py" else {}
        commands.append([str(ROOT / script), "--model", str(MODEL), *flags, *own, ranks])
    commands.append([str(fork), "--model", str(MODEL), "--train-data", *data, "--mine", "c", {}])
    *good, bad = answers(commands)
    assert good == [("", 0, [])] * len(good)
    assert bad[0].startswith("error: invalid choice 'c' for argument '--mine'") and bad[1] == 2


def test_the_scripts_check_before_they_import(tmp_path):
    """With a torch that cannot be imported, a mistake still has its line, and without one torch is what fails."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    prepare(tmp_path)
    start = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}]; script = sys.argv[0] = sys.argv.pop(1); "
    start += "runpy.run_path(script, run_name='__main__')"
    for script in GOOD:
        done = launch("-c", start, script, "--modle", check=False)
        assert done.returncode == 2 and "--model" in done.stderr, done.stderr
        assert "torch was imported" not in done.stderr
    done = launch("-c", start, "grpo.py", "--model", MODEL, "--train-data", tmp_path / "data.jsonl", check=False)
    assert done.stderr.strip() == "torch was imported"


def test_a_check_that_needs_torch_is_left_to_the_script(tmp_path):
    """Definitions never import it: neither at once nor below an `if`."""
    file = tmp_path / "some.py"
    file.write_text("import os\nif os.sep:\n    import torch\nsize = 1\nsize = size + len(os.sep)\n"
                    "def used():\n    return torch.zeros(size)\n")
    found = definitions(file)
    assert found["size"] == 2 and found["used"].__globals__["size"] == 2
    with pytest.raises(Exception, match="torch") as refused:
        found["used"]()
    assert type(refused.value).__name__ == "NeedsModels"
    with pytest.raises(AttributeError, match="nothing"):
        found.module.nothing  # noqa: B018


def test_nothing_of_the_check_stays(tmp_path):
    """pickle asks all modules for the name of an object that names no module. torch.compile does, in vLLM on a GPU."""
    prepare(tmp_path)
    code = "import pickle, sys; from pathlib import Path; from tools.command_line import check_command\n" \
           "script = Path(sys.argv[1]).resolve(); del sys.argv[0]; check_command(script); thing = object()\n" \
           "print(pickle.whichmodule(thing, 'torch'), [x for x in sys.modules if x.startswith('definitions')])"
    flags = ["--model", MODEL, "--train-data", tmp_path / "data.jsonl", "--reward.function", "tools/try_script.py"]
    for script in ("grpo.py", "tools/report.py"):  # the latter is no script of this kind
        done = launch("-c", code, script, *flags, check=False)
        assert done.stdout.split() == ["__main__", "[]"], done.stderr


def test_a_forks_own_exit_keeps_its_words(tmp_path, monkeypatch):
    file = tmp_path / "fork.py"
    file.write_text("import sys\nfrom dataclasses import dataclass\nfrom tools.command_line import run_script\n"
                    "@dataclass\nclass Args:\n    run_dir: str = '.'\ndef check(args):\n    sys.exit('mine')\n")
    monkeypatch.setattr(sys, "argv", [str(file)])
    with pytest.raises(SystemExit, match=r"^mine$"):
        check_command(file)


def test_a_framed_message_in_one_line():
    framed = ("╭─ Title ────╮\n│ Unrecognized options: --modle,  │\n│ x  │\n│ ───── │\n│ Perhaps you meant: │\n"
              "│     --model STR  │\n│   Help. │\n│ ──── │\n│ For full helptext, run x --help │\n╰─────╯\n")
    assert in_one_line(framed) == "Unrecognized options: --modle, x; did you mean --model?"
    assert in_one_line("no frame\nat all") == "no frame at all"


@pytest.mark.parametrize(("home", "mine", "kept"), [
    ("there", None, "there/.cache/torchinductor"), ("there", "mine", "mine"), ("missing", None, None)])
def test_compiled_code_comes_from_no_folder_that_others_can_make(home, mine, kept, tmp_path, monkeypatch):
    """torch's own default is a folder in /tmp with a name that all users know."""
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine or "")
    if not mine:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code_at_home()
    found = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert found == (kept and (kept if mine else str(tmp_path / kept)))
