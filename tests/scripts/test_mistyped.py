"""Mistyped commands: one or two lines with the value, the rule and the flag, before torch is imported."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import grpo
from tests.checkpoint.faulty import python_path
from tests.conftest import MODEL, ROOT, launch
from tests.scripts.mistyped import EARLY, parts, prepare
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS
from tools.command_line import check_command, in_one_line, keep_compiled_code_at_home, run_script

HEAVY = ("torch", "transformers", "vllm")
# `python SCRIPT`, once for each command, in a fork of a process that has imported what scripts import first, which is
# neither torch nor transformers. Of the hub's name, no network answers here or in CI.
SERVER = f"""
import json, os, runpy, sys
import tools.command_line

for script, *arguments, environment in json.load(sys.stdin):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.dup2(theirs, 2)
        sys.argv, code = [script, *arguments], 0
        os.environ.update(environment)
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException as end:
            code = end.code if isinstance(end, SystemExit) else f"{{type(end).__name__}}: {{end}}"
        heavy = [name for name in {HEAVY} if name in sys.modules]
        os.write(2, f"\\n{{json.dumps([code, heavy])}}".encode())
        os._exit(0)
    os.close(theirs)
    print(json.dumps(os.fdopen(ours).read()), flush=True)
    os.wait()
"""
NO_TORCH = "raise SystemExit('torch was imported')\n"
"""A file torch.py: a script that has checked its command ends with these words."""


def answers(commands: list[list], before: str = "") -> list[tuple[str, int | str, list[str]]]:
    """What each command said, its exit code, and which of the packages that take long it imported. `before`: a folder
    in which modules are found first."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "WORLD_SIZE")}
    environment["PYTHONPATH"] = f"{before}:{python_path(ROOT)}" if before else python_path(ROOT)
    done = subprocess.run([sys.executable, "-c", SERVER], cwd=ROOT, env=environment, input=json.dumps(commands),
                          capture_output=True, text=True, check=True)
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
    "distill.py": ["--teacher", "MODEL"], "sft.py": [], "dpo.py": [], "kto.py": [], "rm.py": [], "evaluate.py": [],
    "async_grpo.py": ["--samplers", "1"],
}


def test_a_good_command_passes_without_torch(tmp_path, smollm):
    """Of every script, and of a fork in another folder that has a flag and a check of its own."""
    assert set(GOOD) == {*SCRIPTS, *OFFLINE, *ALONE}
    (tmp_path / "torch.py").write_text(NO_TORCH)
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
    *good, bad = answers(commands, str(tmp_path))
    assert good == [("", "torch was imported", [])] * len(good)
    assert bad[0].startswith("error: invalid choice 'c' for argument '--mine'") and bad[1] == 2


def test_the_scripts_check_before_they_import(tmp_path):
    """Each in a process of its own: with a torch that cannot be imported, a mistake still has its line, and without one
    torch is what fails."""
    (tmp_path / "torch.py").write_text(NO_TORCH)
    prepare(tmp_path)
    start = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}]; script = sys.argv[0] = sys.argv.pop(1); "
    start += "runpy.run_path(script, run_name='__main__')"
    for script in GOOD:
        done = launch("-c", start, script, "--modle", check=False)
        assert done.returncode == 2 and "--model" in done.stderr, done.stderr
        assert "torch was imported" not in done.stderr
    done = launch("-c", start, "grpo.py", "--model", MODEL, "--train-data", tmp_path / "data.jsonl", check=False)
    assert done.stderr.strip() == "torch was imported"


def test_flags_and_their_checks_import_no_torch():
    """All modules that a script imports before its command line is checked, and the whole package of flags."""
    modules = {"tools.command_line", "tools.flag_checks", "tools.flags", "tools.model_name"}
    modules |= {f"common.flags.{file.stem}" for file in (ROOT / "common/flags").glob("[a-z]*.py")}
    for script in [*GOOD, "tools/play.py"]:
        before = (ROOT / script).read_text().partition('if __name__ == "__main__":')[0]
        for node in ast.parse(before).body:
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("common", "variants", "rewards"):
                modules.add(node.module)
    assert len(modules) > 15 and {"variants.settings", "rewards.runtime.pool", "common.flags.run"} <= modules
    code = f"import importlib, sys\nfor name in {sorted(modules)}:\n    importlib.import_module(name)\n" \
           f"print([name for name in {HEAVY} if name in sys.modules])"
    assert launch("-c", code).stdout.strip() == "[]"


def test_a_forks_own_exit_keeps_its_words(monkeypatch, capsys):
    @dataclass
    class Args:
        run_dir: str = "."

    def check(args):
        sys.exit("mine")

    monkeypatch.setattr(sys, "argv", ["fork.py"])
    with pytest.raises(SystemExit, match=r"^mine$"):
        check_command(Args, check, "")
    assert capsys.readouterr().err == ""


def test_both_calls_refuse_the_same(tmp_path, smollm, monkeypatch, capsys):
    """A fork without the early call is refused by `run_script`, before its `main`."""
    prepare(tmp_path)
    good = ["grpo.py", "--model", str(MODEL), "--train-data", str(tmp_path / "data.jsonl")]
    for wrong, word in {"--modle": "--model", "--seed=-1": "at least 0", "--eval-n=8": "--val-data",
                        "--rollout.top-p=2": "(0, 1]", "--reward.function=no.py:f": "no.py",
                        "--policy.replicas=2": "1 ranks"}.items():
        monkeypatch.setattr(sys, "argv", [*good, wrong])
        said = []
        for call in (check_command, run_script):
            function = pytest.fail
            arguments = (grpo.Args, function) if call is check_command else (function, grpo.Args)
            with pytest.raises(SystemExit) as stop:
                call(*arguments, grpo.__doc__)
            assert stop.value.code == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1] and word in said[0] and said[0].count("\n") == 1, said


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
