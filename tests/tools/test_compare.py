"""What a start leaves in the run folder, and what `tools.compare` says of runs."""

import json
import os
import subprocess
import sys

import pytest

from common.tracking import logger
from tools import compare, seeds


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
    compare.main([[a], [b]])
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert "-y = 2\n+y = 3" in code and "x = 1" in code
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\n\n"
    reward = next(line for line in curves.splitlines() if line.startswith("critic/rewards/mean"))
    assert reward.split()[1:] == ["0.1", "0.22"]                        # of 0.3 0.1 0.3 0.1 0.3
    steps = next(line for line in curves.splitlines() if line.startswith("steps"))
    assert steps.split()[1:] == ["9", "10"]                             # the ends are of other steps
    greedy = next(line for line in curves.splitlines() if line.startswith("val-core"))
    assert greedy.split()[1:] == ["0.250", "->", "0.750", "0.250", "->", "0.750"]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no start_N/start.json: it must be a run folder"):
        compare.main([[tmp_path], [tmp_path]])


def test_escapes_in_code_flags_and_names_are_shown(make_run, capsys):
    a = make_run("a", "x = 1\n", {"seed": "\x1b[31m"}, [0.1])
    b = make_run("b", "x = '\x1b]0;t\x07'\n", {"seed": "\u202e"}, [0.1])
    (b / "metrics.jsonl").write_text(json.dumps({"step": 1, "val-core/\x1b[2J/acc": 1.0}) + '\n{"step": 2, "x')
    compare.main([[a], [b]])
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
    compare.main([[a], [a]])
    assert capsys.readouterr().out.count("the same") == 2
    for text in ("{half", "[1]", '{"a":' * 9000):
        (a / "start_1/start.json").write_text(text)
        with pytest.raises(ValueError, match=r"start_1/start.json is damaged"):
            compare.main([[a], [a]])


def test_seeds_have_a_mean_and_a_range(make_run, capsys):
    """The flags of a side are all values of its runs; those that both sides have, as three seeds, are no difference."""
    a = [make_run(f"a{seed}", "x = 1\n", {"seed": seed, "optim": {"lr": 0.1}}, [reward] * 6)
         for seed, reward in ((1, 0.2), (2, 0.3), (3, 0.7))]
    b = [make_run(f"b{seed}", "x = 2\n" if seed < 3 else "x = 3\n", {"seed": seed, "optim": {"lr": 0.2}}, [0.5] * 6)
         for seed in (3, 2, 1)]
    compare.main(compare.sides_of(compare.Args(a=tuple(a), b=tuple(b))))
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert "-x = 1\n+x = 3" in code and "b: not all of its runs have the same script" in code and "a: not" not in code
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\n\n"
    reward = next(line for line in curves.splitlines() if line.startswith("critic/rewards/mean"))
    half = 4.302653 * 0.07 ** 0.5 / 3 ** 0.5                            # Student's table, 2 degrees of freedom
    a_side, b_side = f"0.4 ± {half:.2g} (0.2 to 0.7)", "0.5 ± 0 (0.5 to 0.5)"
    assert reward.split()[1:] == f"{a_side} {b_side} +0.1 ± {half:.2g}".split()  # Welch's, of which b adds nothing
    assert "a: 3 runs" in curves and "b - a" in curves and "0.250 -> 0.750 ± 0 (0.750 to 0.750)" in curves
    compare.main([a[:1], b[:2]])
    code, flags, curves = capsys.readouterr().out.split("== ")[1:]
    assert flags == "flags\noptim.lr: 0.1 -> 0.2\nseed: 1 -> 3 | 2\n\n" and "2 runs" in curves


@pytest.mark.parametrize("args", [{}, {"runs": ("a",)}, {"runs": ("a",), "a": ("b",)}, {"a": ("a",)},
                                  {"runs": ("a", "b"), "b": ("c",)}])
def test_two_sides_are_needed(args):
    with pytest.raises(ValueError, match=r"^name two or more run folders"):
        compare.sides_of(compare.Args(**args))


def test_a_pipe_in_a_run_is_not_read(make_run):
    run = make_run("a", "x = 1\n", {}, [0.1])
    (run / "start_1/start.json").unlink()
    os.mkfifo(run / "start_1/start.json")
    with pytest.raises(ValueError, match=r"start.json is a folder, a pipe or a device"):
        compare.read_start(run)


def test_runs_are_put_together_by_their_setting(make_run, capsys):
    """Seven runs: two scripts, two rates, seeds; a column each, in the order of their first runs."""
    runs = [make_run(f"r{i}", script, {"seed": seed, "run_dir": f"r{i}", "optim": {"lr": lr}}, [reward] * 6)
            for i, (script, seed, lr, reward) in enumerate([
                ("x = 1\n", 1, 0.1, 0.2), ("x = 1\n", 1, 0.2, 0.5), ("x = 1\n", 2, 0.1, 0.4),
                ("x = 2\n", 1, 0.2, 0.7),
                ("x = 1\n", 2, 0.2, 0.6), ("x = 1\n", 3, 0.1, 0.3),
                ("x = 1\n", 3, 0.2, 0.7)])]
    sides = compare.sides_of(compare.Args(runs=tuple(runs)))
    assert [[run.name for run in side] for side in sides] == [["r0", "r2", "r5"], ["r1", "r4", "r6"], ["r3"]]
    compare.main(sides)
    names, code, flags, curves = capsys.readouterr().out.split("== ")
    assert names.splitlines()[2].startswith("c: ")
    assert "--- a: script\n+++ c: script" in code and "b: script" not in code
    assert "optim.lr: 0.1 -> 0.2 -> 0.2" in flags and "seed: 1 | 2 | 3 -> 1 | 2 | 3 -> 1" in flags
    reward = next(line for line in curves.splitlines() if line.startswith("critic/rewards/mean"))
    half = 4.302653 * 0.1 / 3 ** 0.5
    assert reward.split()[1:] == f"0.3 ± {half:.2g} (0.2 to 0.4) 0.6 ± {half:.2g} (0.5 to 0.7) 0.7".split()
    compare.main(compare.sides_of(compare.Args(runs=tuple(sides[0]))))  # seeds of one setting
    assert "b:" not in capsys.readouterr().out


def test_a_run_counts_once(make_run):
    """Three times the same run would be three seeds without any spread."""
    run = make_run("a", "x = 1\n", {"seed": 1}, [0.5])
    for args in ({"runs": (run, run, run)}, {"a": (run,), "b": (run,)}, {"runs": (run, run.parent / "b_script/../a")}):
        (run.parent / "b_script").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="a is named twice, and would count as two runs"):
            compare.sides_of(compare.Args(**args))


def test_intervals_by_the_published_tables():
    """Quantiles: Student's table. Welch's where his degrees of freedom are whole."""
    for freedom, at_95, at_99 in ((1, 12.7062, 63.6567), (2, 4.30265, 9.92484), (5, 2.57058, 4.03214),
                                  (30, 2.04227, 2.75000), (100, 1.98397, 2.62589)):
        assert seeds.t_quantile(freedom) == pytest.approx(at_95, rel=2e-5)
        assert seeds.t_quantile(freedom, 0.99) == pytest.approx(at_99, rel=1e-4)
    assert seeds.half_width([1.0, 3.0]) == pytest.approx(12.7062)       # their standard error is 1
    middle, half = seeds.difference([0.0, 2.0], [5.0, 7.0])             # equal variances: 2 degrees of freedom
    assert (middle, half) == (5.0, pytest.approx(4.30265 * 2 ** 0.5, rel=2e-5))
    middle, half = seeds.difference([1.0, 1.0, 1.0], [4.0, 6.0])        # one side has no variance: 1
    assert (middle, half) == (4.0, pytest.approx(12.7062, rel=2e-5))
    assert seeds.half_width([2.0, 2.0]) == 0 and seeds.difference([1.0, 1.0], [2.0, 2.0]) == (1.0, 0.0)
