"""What a start leaves in the run folder, and what `tools.compare` says of two runs."""

import json
import os
import subprocess
import sys

import pytest

from common.tracking import logger
from tools import compare


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A run folder as a run leaves it, of a script with this text."""
    def make(name: str, script: str, flags: dict, rewards: list[float]):
        folder = tmp_path / name
        file = tmp_path / f"{name}_script" / "mine.py"
        file.parent.mkdir()
        file.write_text(script)
        monkeypatch.setattr(sys, "argv", [str(file), "--optim.lr", "1", "--reward.kwargs", '{"api_key": "abc123"}'])
        logger.record_start(folder, flags, num_ranks=2)
        rows = [{"step": 0, "val-core/sums/acc/greedy": 0.25}]
        rows += [{"step": i + 1, "critic/rewards/mean": reward} for i, reward in enumerate(rewards)]
        rows[-1]["val-core/sums/acc/greedy"] = 0.75
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder
    return make


def test_a_start_is_kept(make_run):
    """Script, command without its secrets, the commit that git names; a second start has a folder of its own."""
    key = "sk-" + "a1" * 10
    run = make_run("a", f"KEY = '{key}'\nprint(1)\n", {"seed": 1}, [0.5])
    logger.record_start(run, {"seed": 2}, num_ranks=1)
    assert (run / "start_1/mine.py").read_text() == "KEY = '***'\nprint(1)\n"
    first, second = (json.loads((run / f"start_{n}/start.json").read_text()) for n in (1, 2))
    assert first["flags"] == {"seed": 1} and second["flags"] == {"seed": 2} and first["ranks"] == 2
    assert first["command"][1:4] == ["--optim.lr", "1", "--reward.kwargs"] and "abc123" not in json.dumps(first)
    assert first["versions"]["torch"]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=logger.ROOT, capture_output=True, text=True)
    assert first["commit"] == git.stdout.strip()
    assert (run / "start_1/changes.diff").is_file()


def test_code_then_flags_then_curves(make_run, capsys):
    flags = {"seed": 1, "optim": {"lr": 0.1, "betas": [0.9]}, "run_dir": "a"}
    a = make_run("a", "x = 1\ny = 2\n", flags, [0.1] * 9)
    b = make_run("b", "x = 1\ny = 3\n", flags | {"optim": {"lr": 0.2, "betas": [0.9]}, "run_dir": "b"}, [0.1, 0.3] * 5)
    compare.main([a], [b])
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert "-y = 2\n+y = 3" in code and "x = 1" in code
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\n\n"
    reward = next(line for line in curves.splitlines() if line.startswith("critic/rewards/mean"))
    assert reward.split()[1:] == ["0.1", "0.22"]                        # of 0.3 0.1 0.3 0.1 0.3
    greedy = next(line for line in curves.splitlines() if line.startswith("val-core"))
    assert greedy.split()[1:] == ["0.250", "->", "0.750", "0.250", "->", "0.750"]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no start_N/start.json: it must be a run folder"):
        compare.main([tmp_path], [tmp_path])


def test_escapes_in_code_flags_and_names_are_shown(make_run, capsys):
    a = make_run("a", "x = 1\n", {"seed": "\x1b[31m"}, [0.1])
    b = make_run("b", "x = '\x1b]0;t\x07'\n", {"seed": "\u202e"}, [0.1])
    (b / "metrics.jsonl").write_text(json.dumps({"step": 1, "val-core/\x1b[2J/acc": 1.0}) + '\n{"step": 2, "x')
    compare.main([a], [b])
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert r"+x = '\x1b]0;t\x07'" in said and r"seed: \x1b[31m -> \u202e" in said and r"val-core/\x1b[2J/acc" in said


def test_runs_of_other_versions_and_damaged_ones(make_run, capsys):
    """Without metrics, without a diff, with a folder start_x, with fewer fields; the same run twice."""
    a = make_run("a", "x = 1\n", {"seed": 1}, [0.1])
    (a / "start_x").mkdir()
    (a / "start_x/start.json").write_text("{}")
    (a / "start_1/start.json").write_text(json.dumps({"flags": {"seed": 1}}))
    (a / "start_1/changes.diff").unlink()
    (a / "metrics.jsonl").unlink()
    compare.main([a], [a])
    assert capsys.readouterr().out.count("the same") == 2
    for text in ("{half", "[1]", '{"a":' * 9000):
        (a / "start_1/start.json").write_text(text)
        with pytest.raises(ValueError, match=r"start_1/start.json is damaged"):
            compare.main([a], [a])


def test_seeds_have_a_mean_and_a_range(make_run, capsys):
    """The flags of a side are all values of its runs; those that both sides have, as three seeds, are no difference."""
    a = [make_run(f"a{seed}", "x = 1\n", {"seed": seed, "optim": {"lr": 0.1}}, [reward] * 6)
         for seed, reward in ((1, 0.2), (2, 0.3), (3, 0.7))]
    b = [make_run(f"b{seed}", "x = 2\n" if seed < 3 else "x = 3\n", {"seed": seed, "optim": {"lr": 0.2}}, [0.5] * 6)
         for seed in (3, 2, 1)]
    compare.main(*compare.sides(compare.Args(a=tuple(a), b=tuple(b))))
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert "-x = 1\n+x = 3" in code and "b: not all of its runs have the same script" in code and "a: not" not in code
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\n\n"
    reward = next(line for line in curves.splitlines() if line.startswith("critic/rewards/mean"))
    assert reward.split()[1:] == ["0.4", "(0.2", "to", "0.7)", "0.5", "(0.5", "to", "0.5)"]
    assert "3 runs" in curves and "0.250 -> 0.750 (0.750 to 0.750)" in curves
    compare.main(a[:1], b[:2])
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\nseed: 1 -> 3 | 2\n\n" and "2 runs" in curves


@pytest.mark.parametrize("args", [{}, {"runs": ("a",)}, {"runs": ("a", "b", "c")}, {"a": ("a",)},
                                  {"runs": ("a", "b"), "b": ("c",)}])
def test_two_sides_are_needed(args):
    with pytest.raises(ValueError, match=r"^name two run folders"):
        compare.sides(compare.Args(**args))


def test_a_pipe_in_a_run_is_not_read(make_run):
    run = make_run("a", "x = 1\n", {}, [0.1])
    (run / "start_1/start.json").unlink()
    os.mkfifo(run / "start_1/start.json")
    with pytest.raises(ValueError, match=r"start.json is a folder, a pipe or a device"):
        compare.read_start(run)
