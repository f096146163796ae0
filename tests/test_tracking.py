"""Numbers of a run: the meter against numbers by hand, files that a resumed run continues, messages for people."""

import json
import math
from dataclasses import dataclass, field

import pytest
import torch

from common import tracking
from common.data import find_files
from common.dist import World
from common.tracking import LogConfig, Meter, Timer, Tracker, spread, step_line
from tests.conftest import launch
from tests.rank_worker import fill_meter

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


@dataclass
class Args:
    lr: float = 0.5
    log: LogConfig = field(default_factory=LogConfig)


# --------------------------------------------------------------------------- meter and timer

def test_meter_on_one_rank_by_hand():
    """Without a process group: [1 2 3] and [10]; masked 5 and 7; 1 of 4 flags; (3 + 5) / 2; maxima."""
    assert fill_meter(0).reduce() == {
        "mean": 4.0, "masked": 6.0, "flags": 0.25, "total": 4.0, "max": -3.0, "only rank 0": -2.5,
    }


def test_meter_on_two_ranks_by_hand(tmp_path):
    """Means weigh values, not ranks: (1 + 2 + 3 + 10 + 4) / 5; (5 + 7 + 5) / 3; 3 of 8; (3 + 5 + 4 + 5) / 2."""
    launch("tests/rank_worker.py", "meters", tmp_path, ranks=2, timeout=170)
    found = [torch.load(tmp_path / f"metrics_{rank}.pt") for rank in range(2)]
    assert found[0] == found[1]
    assert found[0] == pytest.approx({
        "mean": 4.0, "masked": 17 / 3, "flags": 0.375, "total": 8.5, "max": -3.0, "only rank 0": -2.5,
    }, abs=1e-12)


def test_meter_sums_in_float64_and_holds_no_graph():
    meter, values = Meter(), torch.full((4,), 0.1, requires_grad=True)
    meter.mean("big", torch.cat([torch.tensor([1e9]), values]))
    meter.total("loss", values.sum())
    assert meter.reduce()["big"] == pytest.approx((1e9 + 4 * float(torch.tensor(0.1))) / 5, rel=1e-15)
    assert not meter.sums["loss"].requires_grad
    assert Meter().reduce() == {}


def test_timer_adds_up_phases(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0, 11.0, 20.0])
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: next(clock))
    timer = Timer()
    for phase in ("gen", "update", "gen"):
        with timer(phase):
            pass
    assert timer.metrics() == {"timing_s/gen": 3.0, "timing_s/update": 0.5, "timing_s/step": 20.0}


def test_spread_by_hand():
    assert spread("x", torch.tensor([1, 2, 6])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}


def test_memory_is_plausible():
    metrics = tracking.memory(WORLD)
    assert 0.05 < metrics["perf/cpu_memory_used_gb"] <= metrics["perf/cpu_memory_peak_gb"] < 1000


def test_step_line_by_hand():
    metrics = {
        "critic/rewards/mean": 0.51234, "response_length/mean": 27.06, "actor/grad_norm": 0.456, "actor/lr": 3e-5,
        "actor/ppo_kl": -1.23e-4, "timing_s/gen": 2.54, "timing_s/reward": 0.04, "timing_s/update_actor": 4.06,
        "timing_s/step": 6.96, "unknown/thing": 1.0,
    }
    numbers, seconds = step_line(7, 100, metrics).split("  |  ")
    assert numbers == "step   7/100  reward 0.512  length 27.1  kl -1.2e-04  grad 0.46  lr 3.0e-05"
    assert seconds == "7.0 s: gen 2.5 update_actor 4.1"


# --------------------------------------------------------------------------- files

def lines(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_has_one_line_a_step_and_config_the_flags(tmp_path, capsys):
    run = tmp_path / "runs/a"
    tracker = Tracker(LogConfig(), str(run), Args(), WORLD, {})
    tracker.log(1, {"reward": 0.5}, "step one")
    tracker.log(2, {"reward": 1e-17, "length": 3}, "step two")
    tracker.close()
    assert lines(run) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1e-17, "length": 3}]
    assert capsys.readouterr().out == "step one\nstep two\n"
    assert json.loads((run / "config.json").read_text()) == {"lr": 0.5, "log": {
        "to": ["console", "jsonl"], "wandb_project": "rl", "rollouts_every": 5, "rollouts_max": 64, "profile_steps": [],
        "warn_every": 20}}


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    tracker = Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, {})
    for step in range(5):
        tracker.log(step, {"try": 1}, "")
    state = json.loads(json.dumps(tracker.state_dict(2)))               # as a checkpoint keeps it
    tracker = Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, state)
    for step in range(3, 5):
        tracker.log(step, {"try": 2}, "")
    assert [(row["step"], row["try"]) for row in lines(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_line_that_a_kill_cut_short_does_not_stop_the_resumed_run(tmp_path):
    tracker = Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, {})
    for step in range(3):
        tracker.log(step, {"try": 1}, "")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tr')
    Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, tracker.state_dict(1)).log(2, {"try": 2}, "")
    assert [(row["step"], row["try"]) for row in lines(tmp_path)] == [(0, 1), (1, 1), (2, 2)]


def test_a_new_run_starts_anew(tmp_path):
    for value in (1, 2):
        Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, {}).log(1, {"try": value}, "")
    assert lines(tmp_path) == [{"step": 1, "try": 2}]


def test_only_rank_0_writes(tmp_path, capsys):
    other = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"), mesh=None)
    tracker = Tracker(LogConfig(), str(tmp_path / "run"), Args(), other, {})
    tracker.log(1, {"reward": 0.5}, "step one")
    tracker.close()
    assert tracker.state_dict(1) == {"step": 1, "wandb_id": None}
    tracking.say(other, "hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_wandb_offline_and_resumed_under_the_same_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LogConfig(to=("wandb",), wandb_project="tests")
    tracker = Tracker(config, str(tmp_path), Args(log=config), WORLD, {})
    tracker.log(1, {"reward": 0.25}, "")
    state = tracker.state_dict(1)
    assert len(state["wandb_id"]) >= 8
    assert tracker.wandb.offline
    assert tracker.wandb.config["lr"] == 0.5
    tracker.close()
    wandb.teardown()                                                    # as in a fresh process
    tracker = Tracker(config, str(tmp_path), Args(log=config), WORLD, json.loads(json.dumps(state)))
    assert tracker.wandb.id == state["wandb_id"] == tracker.state_dict(2)["wandb_id"]
    tracker.log(2, {"reward": 0.5}, "")
    tracker.close()
    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert [file.name for file in files] == 2 * [f"run-{state['wandb_id']}.wandb"]
    assert all(b"reward" in file.read_bytes() for file in files)
    assert sum(b"0.25" in file.read_bytes() for file in files) == 1
    assert not (tmp_path / "metrics.jsonl").exists()


# --------------------------------------------------------------------------- messages for people

def test_our_own_error_is_one_line_and_exit_code_2(tmp_path):
    done = launch("grpo.py", "--model", tmp_path / "missing", "--train-data", "none", check=False, timeout=170)
    assert done.returncode == 2
    rule = "--model must be a Hugging Face model folder or hub name"
    assert done.stderr == f"error: {tmp_path}/missing holds no config.json: {rule}\n"


def test_an_error_of_another_library_keeps_its_traceback():
    try:
        json.loads("{")                                                 # a ValueError too
    except ValueError as error:
        with pytest.raises(json.JSONDecodeError):
            tracking.fail(error)


def test_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    try:
        find_files([])
    except ValueError as error:
        with pytest.raises(SystemExit) as stop:
            tracking.fail(error)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("[rank 3] error: no data files given")


def test_nan_is_written_as_json_that_python_reads(tmp_path):
    Tracker(LogConfig(to=("jsonl",)), str(tmp_path), Args(), WORLD, {}).log(1, {"actor/grad_norm": math.nan}, "")
    assert math.isnan(lines(tmp_path)[0]["actor/grad_norm"])
