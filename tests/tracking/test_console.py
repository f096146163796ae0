"""How a script starts and ends: help, mistakes in one line, a full disk, the last words."""

import errno
import json
import sys

import pytest

import grpo
import ppo
from common.rollouts.validation import spread_rows
from common.tracking.console import run_script, summary, without_nested


def help_of(monkeypatch, capsys, flag: str, script=grpo) -> str:
    monkeypatch.setattr(sys, "argv", ["grpo.py", flag])
    with pytest.raises(SystemExit) as stop:
        run_script(pytest.fail, script.Args, script.__doc__)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_help_all_is_complete(monkeypatch, capsys):
    short, all_flags = (help_of(monkeypatch, capsys, flag) for flag in ("--help", "--help-all"))
    for own in ("--clip-low", "--prompts-per-step", "--train-data", "--help-all"):
        assert own in short
    assert "--rollout.temperature" in all_flags and "--rollout.temperature" not in short
    assert len(short.splitlines()) < 120 < len(all_flags.splitlines())
    assert "--no-no-" not in all_flags
    assert "--gamma" in help_of(monkeypatch, capsys, "-h", ppo)


def test_flags_are_read_as_they_are_declared(monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "m", "--train-data", "d", "--rollout.temperature", "0.5"])
    run_script(given.append, grpo.Args, grpo.__doc__)
    assert type(given[0]) is grpo.Args and given[0].rollout.temperature == 0.5
    assert without_nested(grpo.Args)(model="m", train_data=("d",)).rollout == grpo.Args("m", ("d",)).rollout


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    def main(args):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--model", "m", "--train-data", "d"])
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
