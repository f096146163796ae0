"""How a script starts and ends: help, mistakes in one line, a full disk, the last words."""

import errno
import json
import math
import re
import shutil
import statistics
import sys

import pytest

import grpo
import grpo_variants
import ppo
from common.rollouts.validation import spread_rows
from common.tracking.console import summary
from tests.conftest import ROOT, launch
from tools.command_line import run_script
from tools.flags import read_flags, refuse_others_flags, without_nested


def help_of(monkeypatch, capsys, flag: str, script=grpo) -> str:
    monkeypatch.setattr(sys, "argv", ["grpo.py", flag])
    with pytest.raises(SystemExit) as stop:
        run_script(pytest.fail, script.Args, script.__doc__)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_help_all_is_complete(monkeypatch, capsys):
    short, all_flags = (help_of(monkeypatch, capsys, flag) for flag in ("--help", "--help-all"))
    for own in ("--clip-high", "--prompts-per-step", "--train-data", "--help-all"):
        assert own in short
    assert "--rollout.temperature" in all_flags and "--rollout.temperature" not in short
    assert len(short.splitlines()) < 120 < len(all_flags.splitlines())
    assert "--no-no-" not in all_flags
    assert "--gamma" in help_of(monkeypatch, capsys, "-h", ppo)


def test_flags_are_read_as_they_are_declared(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "m", "--train-data", "d", "--rollout.temperature", "0.5"])
    given = read_flags(grpo.Args, grpo.__doc__)
    assert type(given) is grpo.Args and given.rollout.temperature == 0.5
    assert without_nested(grpo.Args)(model="m", train_data=("d",)).rollout == grpo.Args("m", ("d",)).rollout


@pytest.mark.parametrize(("name", "flags", "scripts"), [
    ("grpo.py", ["--loss", "gspo"], {"grpo_variants.py", "rloo.py", "online_dpo.py", "dpo.py"}),
    ("mine.py", ["--kl-reward-coef=0.1"], {"grpo_variants.py", "rloo.py", "ppo.py"}),
    ("grpo.py", ["--gamma", "0.9"], {"rloo.py", "ppo.py"}),
])
def test_a_flag_of_another_script_is_one_line_that_names_it(name, flags, scripts, tmp_path):
    """Of this project's scripts, wherever a fork is; the one with the most flags in common comes first."""
    script = ROOT / name
    if name == "mine.py":
        script = shutil.copy(ROOT / "grpo.py", tmp_path / name)
    done = launch(str(script), "--model", "m", *flags, check=False)
    start = f"error: {name} has no flag {flags[0].partition('=')[0]}; it is one of "
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(start)
    named = done.stderr.removeprefix(start).strip().split(", ")
    assert len(named) == len(scripts) and {*named} == scripts
    assert named[0] == "grpo_variants.py" or "grpo_variants.py" not in named


@pytest.mark.parametrize("flags", [
    ["--rollout.tp", "2", "--rollout.loss", "x"],                       # nested: tyro's own
    ["--no-norm-by-std", "--clip_low", "0.1", "--run-dir=a.b", "--max-staleness-of-milk", "1"],
    ["--loss", "gspo", "--help"], ["--loss", "gspo", "-h"], ["--"], ["--no-"], ["-loss"],
])
def test_other_flags_are_left_to_tyro(flags):
    refuse_others_flags(grpo.Args, flags, "grpo.py")


def test_a_switch_of_another_script_and_a_script_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.flags.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        "class Args:\n    async_: bool = True\n\n    both: int = 0\n    '''One.\n    half: of it'''\n")
    (tmp_path / "b.py").write_text("class Args:\n    half =")
    (tmp_path / "c.py").write_text("class Other:\n    both: int = 0\n")
    for flag in ("--async", "--no-async", "--both"):
        with pytest.raises(ValueError, match=f"^mine.py has no flag {flag}; it is one of a.py$"):
            refuse_others_flags(grpo.Args, [flag], "x/mine.py")
    refuse_others_flags(grpo.Args, ["--half"], "mine.py")


@pytest.mark.parametrize(("flags", "said"), [
    (["--kl-loss-coef", "nan"], "--kl-loss-coef nan"),
    (["--rollout.max-probe-diff", "NaN"], "--rollout.max-probe-diff nan"),
    (["--optim.betas", "0.9", "nan"], ""),                              # tyro's words: the flag's own check is first
    (["--reward.weights", "1", "nan"], r"--reward.weights \[1.0, nan\]"),
    (["--loss-numbers", "tau_pos", "nan"], r"--loss-numbers.tau-pos nan"),
])
def test_flags_that_are_no_number_are_refused(flags, said, monkeypatch, capsys):
    """A bound that is compared with NaN holds, and the limits that are flags would be off."""
    monkeypatch.setattr(sys, "argv", ["grpo_variants.py", "--model", "m", "--train-data", "d", *flags])
    with pytest.raises(SystemExit) as stop:
        run_script(pytest.fail, grpo_variants.Args, grpo_variants.__doc__)
    assert stop.value.code == 2
    assert re.fullmatch(rf"error: {said} must be a number\n" if said else r"(?s).*must be in \[0, 1\), both.*",
                        capsys.readouterr().err)


def test_infinite_flags_may_be_meant(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "m", "--train-data", "d", "--clip-high", "inf"])
    assert read_flags(grpo.Args, grpo.__doc__).clip_high == math.inf


def test_an_error_of_a_library_keeps_its_traceback(tiny_llama, small_train, monkeypatch, capsys):
    """Its message names no flag; the last frame alone says whose error it is."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", tiny_llama, "--train-data", small_train])
    with pytest.raises(statistics.StatisticsError):
        run_script(lambda args: statistics.mean([]), grpo.Args, grpo.__doc__)
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_one_line(tiny_llama, small_train, monkeypatch, capsys):
    def main(args):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", tiny_llama, "--train-data", small_train])
    with pytest.raises(SystemExit) as stop:
        run_script(main, grpo.Args, grpo.__doc__)
    said = "error: the disk is full: [Errno 28] No space left on device: 'runs/a/metrics.jsonl'\n"
    assert (stop.value.code, capsys.readouterr().err) == (2, said)


def test_the_last_words_of_a_run(tmp_path):
    rows = [
        {"step": 0, "val-core/a/acc/greedy": 0.25},
        {"step": 1, "timing_s/step": 2.0, "perf/cpu_memory_peak_gb": 3.0},
        {"step": 2, "timing_s/step": 4.0, "perf/cpu_memory_peak_gb": 3.5, "val-core/a/acc/greedy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary(tmp_path).splitlines() == [
        "validation, before -> after", "  a/acc/greedy  0.250 -> 0.500",
        "2 steps in 6 s, peak memory of a rank 3.5 GiB",
        f"run folder file://{tmp_path}, report: python -m tools.report {tmp_path}",
    ]
    on_gpu = {"step": 3, "timing_s/step": 1.0, "perf/cpu_memory_peak_gb": 9.0, "perf/max_memory_reserved_gb": 70.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(on_gpu))
    assert summary(tmp_path).startswith("1 steps in 1 s, peak memory of a rank 70.0 GiB\n")      # not the host's


def test_validation_rows_are_spread():
    assert spread_rows(10, 0) == list(range(10)) == spread_rows(10, 99)
    assert spread_rows(1319, 4) == [0, 329, 659, 989]
    assert len(set(spread_rows(1319, 512))) == 512
