"""Numbers of a run: the meter against numbers by hand, files that a resumed run continues, messages for people."""

import gzip
import importlib.util
import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import termios
import textwrap
import time
from dataclasses import dataclass, field

import pytest
import torch

from common.flags.data import find_files
from common.metrics import Meter, Timer, spread
from common.parallel.ranks import World, print_on_main
from common.tracking import console
from common.tracking.console import step_line
from common.tracking.health import HealthCheck
from common.tracking.logger import LogConfig, Tracker
from common.tracking.noise_scale import NoiseScale
from common.tracking.step import peak_flops
from tests.conftest import ROOT, launch
from tests.rank_worker import fill_meter
from tools.flags import exit_with_error
from tools.model_source import read_adapter

WORLD = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


@dataclass
class Args:
    lr: float = 0.5
    log: LogConfig = field(default_factory=LogConfig)


@dataclass
class ArgsWithSecret(Args):
    kwargs: str = '{"api_key": "hunter2"}'


# --------------------------------------------------------------------------- meter and timer

def test_meter_on_one_rank_by_hand():
    """Without a process group: [1 2 3] and [10]; masked 5 and 7; 1 of 4 flags; (3 + 5) / 2; maxima."""
    assert fill_meter(0).reduce() == {
        "mean": 4.0, "masked": 6.0, "flags": 0.25, "total": 4.0, "max": -3.0, "only rank 0": -2.5,
        "of rank 0": 2.0, "total of rank 0": 2.0, "least of rank 0": -1.0,
    }


def test_meter_on_two_ranks_by_hand(tmp_path):
    """Means weigh values, not ranks: (1 + 2 + 3 + 10 + 4) / 5; (5 + 7 + 5) / 3; 3 of 8; (3 + 5 + 4 + 5) / 2. A name
    that one rank has, such as of a data source, keeps its numbers."""
    launch("tests/rank_worker.py", "meters", tmp_path, ranks=2, warm=True)
    found = [torch.load(tmp_path / f"metrics_{rank}.pt") for rank in range(2)]
    assert found[0] == found[1]
    assert found[0] == pytest.approx({
        "mean": 4.0, "masked": 17 / 3, "flags": 0.375, "total": 8.5, "max": -3.0, "only rank 0": -2.5,
        "of rank 0": 2.0, "total of rank 0": 2.0, "least of rank 0": -1.0,
        "of rank 1": 2.5, "total of rank 1": 3.0, "least of rank 1": -2.0,
    }, abs=1e-12)


def test_meter_sums_in_float64_and_holds_no_graph():
    meter, values = Meter(), torch.full((4,), 0.1, requires_grad=True)
    meter.mean("big", torch.cat([torch.tensor([1e9]), values]))
    meter.total("loss", values.sum())
    assert meter.reduce()["big"] == pytest.approx((1e9 + 4 * float(torch.tensor(0.1))) / 5, rel=1e-15)
    assert not meter.sums["loss"].requires_grad
    assert Meter().reduce() == {}


def test_timer_adds_up_phases(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = Timer()
    for phase in ("gen", "update", "gen"):
        with timer(phase):
            pass
    assert timer.metrics() == {"timing_s/gen": 3.0, "timing_s/update": 0.5}


def test_spread_by_hand():
    assert spread("x", torch.tensor([1, torch.nan, 2, 6])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}
    assert spread("x", torch.tensor([torch.nan])) == {}


def test_step_line_by_hand():
    metrics = {
        "critic/rewards/mean": 0.51234, "response_length/mean": 27.06, "actor/grad_norm": 0.456, "actor/lr": 3e-5,
        "actor/ppo_kl": -1.23e-4, "timing_s/gen": 2.54, "timing_s/reward": 0.04, "timing_s/update_actor": 4.06,
        "timing_s/step": 6.96, "unknown/thing": 1.0,
    }
    numbers, seconds, left = step_line(7, 100, metrics).split(" | ")
    assert numbers == "step   7/100  reward 0.512  length 27  kl -1.2e-04  grad 0.46"
    assert seconds == "6.96 s: update_actor 4.06 gen 2.54 rest 0.36"
    assert left == "11 min left"                                        # 93 steps of 6.96 s
    assert step_line(7, 100, metrics | {"timing_s/testing": 3.0}).endswith("6 min left")        # without validation
    assert step_line(7, 100, metrics | {"timing_s/save_checkpoint": 3.0}).endswith("6 min left")
    part = metrics | {"timing_s/agent_loop/tool_calls/mean": 5.0}       # of the phase "gen"
    assert step_line(7, 100, part) == step_line(7, 100, metrics)
    # samplers of their own work while the trainers do
    assert "| 6.96 s: update_actor 4.06 wait 2 rest 0.9, samplers 2.54 |" in step_line(
        7, 100, metrics | {"timing_s/wait": 2.0})
    metrics |= {"actor/ppo_kl": 0.0, "actor/entropy": 12.345, "actor/pg_clipfrac": 0.0, "timing_s/gen": 2999.9}
    line = step_line(999, 1000, metrics | {"response_length/mean": 32768.0, "timing_s/step": 3456.7})
    assert " kl " not in line and " clip " not in line and len(line) < 132, line


def test_spread_of_a_meter_by_hand():
    meter = Meter()
    meter.spread("x", torch.tensor([1.0, -2.0, 90.0]), torch.tensor([True, True, False]))
    meter.spread("x", torch.tensor([7.0]))
    meter.spread("nothing", torch.zeros(0))
    assert meter.reduce() == {"x/mean": 2.0, "x/max": 7.0, "x/min": -2.0}


def test_batch_units_in_words():
    assert console.batch_line((16, 8, 2, 1), 4096, 600, 2) == (         # 6 of the longest in a micro-batch, 32 a rank
        "16 prompts x 8 samples = 128 responses a step, 2 mini-batch(es) of 64, 1 epoch(s), micro-batches of up to "
        "4,096 tokens on each of 2 rank(s), about 6 at the longest lengths")


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
        "to": [], "wandb_project": "rl", "rollouts_every": 5, "rollouts_max": 64, "signal": 0, "signal_rewards": []}}


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
    for step in range(5):
        tracker.log(step, {"try": 1}, "")
        if step == 2:
            state = json.loads(json.dumps(tracker.state_dict(2)))       # as a checkpoint keeps it
    tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, state)
    for step in range(3, 5):
        tracker.log(step, {"try": 2}, "")
    assert [(row["step"], row["try"]) for row in lines(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_line_that_a_kill_cut_short_does_not_stop_the_resumed_run(tmp_path):
    tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
    for step in range(2):
        tracker.log(step, {"try": 1}, "")
    state = tracker.state_dict(1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tr')
    Tracker(LogConfig(), str(tmp_path), Args(), WORLD, state).log(2, {"try": 2}, "")
    assert [(row["step"], row["try"]) for row in lines(tmp_path)] == [(0, 1), (1, 1), (2, 2)]
    (tmp_path / "metrics.jsonl").unlink()                               # what is lost is not made up
    Tracker(LogConfig(), str(tmp_path), Args(), WORLD, state).log(2, {"try": 3}, "")
    assert [(row["step"], row["try"]) for row in lines(tmp_path)] == [(2, 3)]


def test_a_new_run_starts_anew(tmp_path):
    for value in (1, 2):
        Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {}).log(1, {"try": value}, "")
    assert lines(tmp_path) == [{"step": 1, "try": 2}]


def test_only_rank_0_writes(tmp_path, capsys):
    other = World(rank=1, size=2, device=torch.device("cpu"), mesh=None)
    tracker = Tracker(LogConfig(), str(tmp_path / "run"), Args(), other, {})
    tracker.log(1, {"reward": 0.5}, "step one")
    tracker.close()
    assert tracker.state_dict(1) == {
        "step": 1, "wandb_id": None, "trackio_id": None, "size": 0, "noise": NoiseScale({}).state}
    print_on_main(other, "hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_wandb_offline_and_resumed_under_the_same_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LogConfig(to=("wandb",), wandb_project="tests")
    tracker = Tracker(config, str(tmp_path), ArgsWithSecret(log=config), WORLD, {})
    tracker.log(1, {"reward": 0.30517578125}, "")             # no number of the system's looks like it
    state = tracker.state_dict(1)
    assert len(state["wandb_id"]) >= 8
    assert tracker.wandb.offline
    assert tracker.wandb.config["lr"] == 0.5 and tracker.wandb.config["kwargs"] == '{"api_key": "***"}'
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
    assert sum(b"0.30517578125" in file.read_bytes() for file in files) == 1
    assert not any(b"hunter2" in file.read_bytes() for file in (tmp_path / "wandb").rglob("*") if file.is_file())


def test_tensorboard_of_a_resumed_run(tmp_path):
    """Read back by TensorBoard's own reader: killed in step 4, resumed after step 2, no step twice."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars() -> dict[str, list[tuple[int, float]]]:
        found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    config, state = LogConfig(to=("tensorboard",)), {}
    for first, last, value in ((1, 3, 0.25), (3, 5, 0.5)):
        tracker = Tracker(config, str(tmp_path), Args(), WORLD, state)
        for step in range(first, last + 1):
            tracker.log(step, {"critic/rewards/mean": value, "val-core/a/acc/mean@4": step / 8}, "")
            if step == 2:
                state = json.loads(json.dumps(tracker.state_dict(2)))
        assert scalars()["critic/rewards/mean"][-1] == (last, value)    # written as the step ends, not as the run does
    tracker.close()
    assert scalars() == {
        "critic/rewards/mean": [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)],
        "val-core/a/acc/mean@4": [(step, step / 8) for step in range(1, 6)],
    }
    Tracker(config, str(tmp_path), Args(), WORLD, {}).close()           # a new run starts anew
    assert scalars() == {}


@pytest.mark.sweep
def test_trackio_of_a_resumed_run(tmp_path, monkeypatch):
    """Read back from Trackio's database: killed in step 4, resumed after step 2, no step twice. A run of another folder
    with the same name, and a run that starts anew, leave it as it is."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))        # read as it is imported
    program = textwrap.dedent("""
        import json, sys
        from pathlib import Path
        import trackio
        from common.tracking.logger import LogConfig, Tracker
        from tests.tracking.test_tracking import WORLD, ArgsWithSecret

        folder, first, last, state = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
        config = LogConfig(to=("trackio",), wandb_project="tests")
        tracker = Tracker(config, str(folder), ArgsWithSecret(log=config), WORLD, state)
        for step in range(first, last + 1):
            tracker.log(step, {"critic/rewards/mean": step / 8, "val-core/a/acc/mean@4": float(first)}, "")
            if step == 2:
                print("STATE", json.dumps(tracker.state_dict(2)))
        if "kill" in sys.argv:
            import os
            os._exit(1)
        tracker.close()
        for run in trackio.Api().runs("tests"):
            rows = trackio.sqlite_storage.SQLiteStorage.get_logs("tests", run.name, run_id=run.id)
            names = ("step", "critic/rewards/mean", "val-core/a/acc/mean@4")
            print("RUN", json.dumps([run.name, run.config["kwargs"], [[row[name] for name in names] for row in rows]]))
    """)

    def start(folder: str, *arguments) -> list:
        """What it printed after STATE, or each RUN."""
        command = [sys.executable, "-c", program, tmp_path / folder / "run", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == ("kill" in arguments), done.stderr
        word = "STATE" if "kill" in arguments else "RUN"
        return [json.loads(line.removeprefix(word)) for line in done.stdout.splitlines() if line.startswith(word)]

    secret, first = '{"api_key": "***"}', [[1, 0.125, 1.0], [2, 0.25, 1.0]]
    assert start("other", 1, 1, "{}") == [["run", secret, first[:1]]]
    (state,) = start("mine", 1, 4, "{}", "kill")
    resumed = ["run", secret, [*first, [3, 0.375, 3.0], [4, 0.5, 3.0]]]
    assert sorted(start("mine", 3, 4, json.dumps(state))) == sorted([["run", secret, first[:1]], resumed])
    assert len(start("mine", 1, 2, "{}")) == 3


def test_tensorboard_is_rank_0s(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    other = World(rank=1, size=2, device=torch.device("cpu"), mesh=None)
    tracker = Tracker(LogConfig(to=("tensorboard",)), str(tmp_path), Args(), other, {})
    tracker.log(1, {"reward": 0.5}, "")
    tracker.close()
    assert not (tmp_path / "tensorboard").exists()


def test_rollouts_that_the_checkpoint_has_not_seen_are_dropped(tmp_path):
    def files() -> list[str]:
        return sorted(path.name for path in (tmp_path / "rollouts").iterdir())

    (tmp_path / "rollouts").mkdir()
    for name in ("step_000001", "step_000005", "step_000010", "val_000000", "val_000010"):
        (tmp_path / f"rollouts/{name}.parquet").touch()
    Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {"step": 5, "wandb_id": None, "size": 0})
    assert files() == ["step_000001.parquet", "step_000005.parquet", "val_000000.parquet"]
    Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
    assert files() == []


def test_loggers_that_cannot_work_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for package in ("wandb", "tensorboard", "trackio"):
        with pytest.raises(ValueError, match=f"--log.to {package} needs the package {package}: pip install {package}"):
            LogConfig(to=(package,))
    LogConfig()
    with pytest.raises(ValueError, match=r"--log.rollouts-max 0 must be at least 1"):
        LogConfig(rollouts_max=0)
    with pytest.raises(ValueError, match=r"--log.rollouts-every -1 must be at least 0"):
        LogConfig(rollouts_every=-1)


def test_wandb_without_an_account_is_refused_at_once(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(ValueError, match=r"--log.to wandb finds no account: set WANDB_API_KEY, or WANDB_MODE=offline"):
        LogConfig(to=("wandb",))


# --------------------------------------------------------------------------- progress

def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[-1])
    tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
    with tracker.progress("rollout", 4) as advance:
        for now in (10.0, 31.0, 50.0, 62.0):
            clock.append(now)
            advance()
    shown = capsys.readouterr().out.replace("\r", "")
    assert shown.rstrip(" ") == "  rollout 2/4, 00:31\n  rollout 4/4, 01:02\n"
    with tracker.progress("rollout", 4) as advance:
        advance()
    assert capsys.readouterr().out == ""                                # a short phase says nothing
    other = World(rank=1, size=2, device=torch.device("cpu"), mesh=None)
    with Tracker(LogConfig(), str(tmp_path), Args(), other, {}).progress("rollout", 4) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_progress_on_a_terminal_is_a_bar(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
        with tracker.progress("rollout", 64) as advance:
            for _ in range(64):
                time.sleep(0.005)                                       # the bar moves every 0.1 s
                advance()
        terminal.flush()
        said = b""
        waiting = select.poll()                                         # select takes no file above 1,023
        waiting.register(ours, select.POLLIN)
        while waiting.poll(1000):                                       # a terminal hands over what it has, in pieces
            said += os.read(ours, 1 << 16)                              # which may end inside a character
    os.close(ours)
    shown = said.decode()
    assert "rollout:   0%" in shown and len(set(re.findall(r"\d+/64 ", shown))) > 2
    assert re.fullmatch(r" *", shown.split("\r")[-2])                    # and is wiped off in the end


# --------------------------------------------------------------------------- profiles and memory

def test_a_profile_names_the_phases(tmp_path):
    """As docs/metrics.md shows it."""
    trace = torch.profiler.tensorboard_trace_handler(str(tmp_path), use_gzip=True)
    with torch.profiler.profile(on_trace_ready=trace), Timer()("update_actor"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    (file,) = tmp_path.iterdir()
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    (phase,) = [event for event in events if event.get("name") == "update_actor" and "dur" in event]
    (product,) = [event for event in events if event.get("name") == "aten::mm"]
    assert phase["ts"] <= product["ts"] and product["ts"] + product["dur"] <= phase["ts"] + phase["dur"]


def test_out_of_memory_says_the_phase_and_the_flag():
    """Other errors are left as they are."""
    timer = Timer()
    with pytest.raises(torch.OutOfMemoryError) as caught, timer("update_actor"):        # the class that GPUs raise
        raise torch.OutOfMemoryError("CUDA out of memory")
    (note,) = caught.value.__notes__
    assert note.startswith("ran out of memory in phase update_actor. If ") and "--max-tokens-per-gpu" in note
    assert timer.seconds == {}
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught, timer("gen"):     # what CPUs raise
        torch.empty(1 << 60, dtype=torch.uint8)
    (note,) = caught.value.__notes__
    assert note.startswith("ran out of memory in phase gen. ") and "--rollout.kv-cache-gb" in note
    for error in (RuntimeError("no"), KeyError("no")):
        with pytest.raises(type(error)) as caught, Timer()("gen"):
            raise error
        assert not hasattr(caught.value, "__notes__")


def test_peak_flops_from_the_table_or_unknown(monkeypatch):
    """The name in full decides: an H100 PCIe is no H100 SXM, an L40S no L4."""
    gpu = World(rank=0, size=1, device=torch.device("cuda"), mesh=None)
    for name, flops in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12),
                        ("NVIDIA L4", 121e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10", 125e12),
                        ("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA A10G", 70e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(gpu, "bfloat16") == flops, name
    assert peak_flops(gpu, "float32") is None and peak_flops(WORLD, "bfloat16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro P400")
    assert peak_flops(gpu, "bfloat16") is None


# --------------------------------------------------------------------------- warnings

HEALTHY = {"reward/constant_group_frac": 0.6, "actor/ppo_kl": 1e-4, "actor/entropy": 1.0, "actor/grad_norm": 1.0,
           "response_length/clip_ratio": 0.1, "training/rollout_probs_diff_mean": 0.004, "actor/skipped_steps": 0.0,
           "reward/error_frac": 0.0, "reward/timeout_frac": 0.0}


@pytest.mark.parametrize(("change", "words"), [
    ({"reward/constant_group_frac": 1.0}, "in every group all rewards are equal"),
    ({"actor/ppo_kl": 0.06}, r"the policy is 0.06 nats a token from the one that sampled.*--optim.lr"),
    ({"actor/ppo_kl": math.nan}, "the policy is nan nats"),
    ({"response_length/clip_ratio": 0.75}, "75% of the responses reach .*--rollout.max-response-length"),
    ({"training/rollout_probs_diff_mean": 0.0123}, "differ by 0.012 .*--correction.preset"),
    ({"training/rollout_probs_diff_mean": math.nan}, "differ by nan"),
    ({"reward/timeout_frac": 0.25, "reward/error_frac": 0.125}, "37.5% of the samples have no reward.*--reward"),
])
def test_each_failure_is_told_in_words(change, words):
    watch = HealthCheck()
    for step in range(10):
        assert watch.look(step, HEALTHY) == []
    (warning,) = watch.look(10, HEALTHY | change)
    assert warning.startswith("warning, step 10: ")
    with pytest.raises(AssertionError, match=words):                    # pytest shows the text that does not fit
        raise AssertionError(warning)


def test_probabilities_that_weights_correct_for_are_no_mismatch():
    """As those under top-p or a grammar. Stale weights are seen in the probe."""
    weighted = HEALTHY | {"training/rollout_probs_diff_mean": 0.3, "rollout_corr/rollout_is_mean": 0.7}
    assert HealthCheck().look(1, weighted) == HealthCheck().look(1, weighted | {"sync/probe_prob_diff": 0.001}) == []
    (told,) = HealthCheck().look(1, weighted | {"sync/probe_prob_diff": 0.02})
    assert "differ by 0.020 in the mean probability" in told


@pytest.mark.parametrize(("advantages", "is_told"), [
    ({"critic/advantages/min": -1.2, "critic/advantages/max": 0.9}, False),     # of a critic: groups have one response
    ({"critic/advantages/min": -1.0, "critic/advantages/max": 0.0}, False),     # ReMax: greedy ones are better
    ({"critic/advantages/min": 0.0, "critic/advantages/max": 1e-17}, True), ({}, True)])
def test_equal_rewards_are_told_only_where_nothing_else_teaches(advantages, is_told):
    told = HealthCheck().look(1, HEALTHY | {"reward/constant_group_frac": 1.0} | advantages)
    assert ["nothing is learned" in line for line in told] == [True] * is_told


def test_entropy_collapse_is_told_and_noise_is_not():
    watch, told = HealthCheck(), []
    for step, entropy in enumerate([2.0, 1.0, 0.5, 0.05, 0.6, 0.3, 0.2, 0.1, 0.1, 0.09, 0.08, 0.07, 0.07, 0.06]):
        told += [(step, line) for line in watch.look(step, {"actor/entropy": entropy})]
    ((step, line),) = told                   # .2 .1 .1 .09 .08 is .114, then .088
    assert step == 11 and "entropy fell to 0.088 nats (mean of 5 steps) from 2" in line


def test_a_warning_is_not_repeated_for_some_steps(tmp_path, capsys):
    watch = HealthCheck()
    told = [step for step in range(1, 50) if watch.look(step, {"response_length/clip_ratio": 1.0})]
    assert told == [1, 21, 41]
    tracker = Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {})
    for step in (1, 2):
        tracker.log(step, {"response_length/clip_ratio": 1.0}, f"line {step}")
    first, warning, second = capsys.readouterr().out.splitlines()
    assert (first, second) == ("line 1", "line 2") and warning.startswith("warning, step 1: 100% of the responses")


def test_a_resumed_run_knows_from_where_entropy_fell(tmp_path, capsys):
    """Its warnings are those of the same steps in one go, also where a kill came between; none comes twice."""
    entropies = [2.0, 1.0, 0.5, 0.05, 0.6, 0.3, 0.2, 0.1, 0.1, 0.09, 0.08, 0.07, 0.07, 0.06]
    told = {}
    for resumed_after in (None, 8, 11):
        tracker = Tracker(LogConfig(), str(tmp_path / str(resumed_after)), Args(), WORLD, {})
        for step, entropy in enumerate(entropies):
            tracker.log(step, {"actor/entropy": entropy}, "")
            if step == resumed_after:
                tracker = Tracker(LogConfig(), str(tracker.run_dir), Args(), WORLD, tracker.state_dict(step))
        told[resumed_after] = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(told[None]) == 1 and "step 11: entropy fell to 0.088 nats (mean of 5 steps) from 2" in told[None][0]
    assert told[8] == told[11] == told[None]


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
            exit_with_error(error)


def test_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    try:
        find_files([])
    except ValueError as error:
        with pytest.raises(SystemExit) as stop:
            exit_with_error(error)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("[rank 3] error: no data files given")


def test_a_message_about_downloaded_data_cannot_steer_the_terminal(capsys, tmp_path):
    """An adapter's settings, with a title and a colour for the terminal; a real line end stays."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "\x1b]0;title\x07\x9b31m\u202ered"}))
    try:
        read_adapter(tmp_path)
    except ValueError as error:
        with pytest.raises(SystemExit):
            exit_with_error(error)
    said = capsys.readouterr().err
    assert said.endswith("\n") and said[:-1].isprintable()
    assert r"these are \x1b]0;title\x07\x9b31m\u202ered" in said


def test_nan_is_written_as_json_that_python_reads(tmp_path):
    Tracker(LogConfig(), str(tmp_path), Args(), WORLD, {}).log(1, {"actor/grad_norm": math.nan}, "")
    assert math.isnan(lines(tmp_path)[0]["actor/grad_norm"])
