"""--save.keep-best: the checkpoint of the best validated step stays and is named, whatever ends the run."""

# ruff: noqa: F811  (fixtures that are imported)

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest

from common.checkpoint import best, files
from common.checkpoint.manager import SaveConfig
from tests.checkpoint.test_checkpoint import model, names, resume, trained, watch  # noqa: F401 (fixtures)
from tests.checkpoint.test_resume import assert_same_run, flags, metrics, start, steps_on_disk  # noqa: F401
from tests.conftest import launch
from tests.rank_worker import STATE, checkpoints_of
from tools.checkpoints import read_best

GREEDY, MEAN = "val-core/sums/acc/greedy", "val-core/sums/acc/mean@4"


@pytest.fixture
def run(trained, world, watch, tmp_path):
    """run(values, every=1, ...): steps from `first` on, each with this value of MEAN, None without a validation."""
    def run(*values: float | None, first: int = 1, metric: str = MEAN, **flags):
        checkpoints = checkpoints_of(tmp_path, world, *trained, watch, **{"keep_best": True, "keep": 1} | flags)
        checkpoints.resume()
        for step, value in enumerate(values, start=first):
            results = {} if value is None else {metric: value}
            checkpoints.after_step(STATE | {"step": step, "total_steps": 99}, results)
        checkpoints.wait()
        return checkpoints
    return run


def on_disk(run_dir) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names(run_dir)]


@pytest.mark.parametrize(("metric", "lower_is_better"), [
    ("val/loss", True), ("val-aux/a/format_loss/mean@4", True), ("val-aux/a/loss/greedy", True),
    ("val-aux/reward/kl_loss", True), ("val-aux/hair_loss/reward/mean@4", False), (MEAN, False), (GREEDY, False),
    ("val-core/loss/acc/best@4/mean", False), ("val-aux/a/reward/mean@4", False)])
def test_a_loss_is_known_by_its_name(metric, lower_is_better):
    """Of any number called so that a reward function returns, too."""
    higher = best.better(2, {metric: 2.0}, metric, {"value": 1.0})
    lower = best.better(2, {metric: 0.5}, metric, {"value": 1.0})
    assert (bool(lower), bool(higher)) == (lower_is_better, not lower_is_better)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("values", "kept", "found"), [
    ([0.2, 0.9, 0.5, None, 0.7], [2, 5], 2),
    ([0.2, 0.9, 0.9], [2, 3], 2),                                       # the earlier of equal ones
    ([math.nan, 0.1, math.nan], [2, 3], 2),
    ([0.2, 0.9, 0.5, 1.0], [4], 4),                                     # the best is the newest; the old best goes
    ([-0.5, -0.7], [1, 2], 1),
    ([None, None], [2], None),
])
def test_the_best_stays_beside_the_newest(in_background, values, kept, found, run, tmp_path):
    run(*values, async_=in_background)
    assert on_disk(tmp_path) == kept
    want = {} if found is None else {"step": found, "metric": MEAN, "value": values[found - 1]}
    assert read_best(tmp_path) == want
    assert (tmp_path / "best.json").exists() == bool(want)
    for folder in files.complete_checkpoints(tmp_path):
        assert not files.check_files(folder)


def test_the_best_is_saved_when_no_save_is_due(run, tmp_path):
    run(0.2, 0.5, 0.4, 0.6, 0.1, every=0, keep=2)
    assert on_disk(tmp_path) == [2, 4]                                  # of 1, 2, 4
    run(0.3, None, first=5, every=0, keep=2)
    assert on_disk(tmp_path) == [2, 4]                                  # 0.3 is not the best of the resumed run


def test_without_the_flag_no_step_is_the_best(run, tmp_path):
    run(0.2, 0.9, 0.5)
    assert on_disk(tmp_path) == [2, 3]
    run(0.95, first=4, keep_best=False)
    assert on_disk(tmp_path) == [4] and not (tmp_path / "best.json").exists()
    run(0.1, first=5, every=0)                                          # on again: nothing is known of the steps before
    assert on_disk(tmp_path) == [5] and read_best(tmp_path)["step"] == 5


def test_of_a_loss_the_lowest_is_the_best(run, tmp_path, capsys):
    run(3.0, 2.0, 2.5, metric="val/loss", best_metric="val/loss")
    assert read_best(tmp_path) == {"step": 2, "metric": "val/loss", "value": 2.0}
    assert "the checkpoint with the lowest val/loss is kept (--save.best-metric)" in capsys.readouterr().out


def test_a_resumed_run_knows_the_best(run, tmp_path, capsys):
    run(0.2, 0.9, 0.5)
    (tmp_path / "best.json").unlink()                                   # the checkpoint knows it
    resumed = run(0.8, 0.9, first=4)
    assert resumed.best == {"step": 2, "metric": MEAN, "value": 0.9} == read_best(tmp_path)
    assert on_disk(tmp_path) == [2, 5]
    assert capsys.readouterr().out.count(f"the checkpoint with the highest {MEAN} is kept") == 2    # once a start
    run(0.1, first=6, best_metric=GREEDY, metric=GREEDY)                # ranked by another one: it begins anew
    assert read_best(tmp_path)["step"] == 6


def test_a_best_checkpoint_that_is_gone_is_said(run, tmp_path, capsys):
    run(0.2, 0.9, 0.5)
    shutil.rmtree(tmp_path / "checkpoints/step_000002")
    run(0.3, first=4)
    assert "step_000002, which was the best checkpoint, is gone" in capsys.readouterr().out
    assert read_best(tmp_path)["step"] == 4


def test_a_step_that_is_validated_after_a_stop_can_be_the_best(run, trained, world, watch, tmp_path):
    """It was saved without its validation; the model before training, or another run's, is never the best."""
    run(0.5, 0.2, None)
    assert on_disk(tmp_path) == [1, 3]
    again = run()
    again.after_validation({MEAN: 0.9})
    assert on_disk(tmp_path) == [3] and read_best(tmp_path) == {"step": 3, "metric": MEAN, "value": 0.9}
    again.after_step(STATE | {"step": 4, "total_steps": 99}, {MEAN: 0.7})
    assert on_disk(tmp_path) == [3, 4]
    for more in ({}, {"resume": str(tmp_path)}):
        other = checkpoints_of(tmp_path / "other", world, *trained, watch, keep_best=True, **more)
        other.resume()
        other.after_validation({MEAN: 0.9})
        assert other.best == {} and read_best(tmp_path / "other") == {}


def test_a_validation_without_the_metric_makes_no_step_the_best(run, trained, world, watch, tmp_path, capsys):
    """maj@N is missing where no sample has a vote. The default metric stays the one of the first validation."""
    checkpoints = run(0.5)
    checkpoints.after_step(STATE | {"step": 2, "total_steps": 99}, {GREEDY: 0.9})
    checkpoints.after_step(STATE | {"step": 3, "total_steps": 99}, {GREEDY: 0.9, MEAN: 0.4})
    assert read_best(tmp_path) == {"step": 1, "metric": MEAN, "value": 0.5}
    said = f"the validation after step 2 has no {MEAN}: this step cannot be the best"
    assert capsys.readouterr().out.count(said) == 1
    assert on_disk(tmp_path) == [1, 3]


def test_a_resumed_run_with_a_wrong_name_loses_no_step(run, tmp_path):
    """It validates steps later. What it has trained meanwhile, and the best checkpoint, are kept."""
    run(0.5, 0.2)
    with pytest.raises(ValueError, match=r"--save.best-metric acc must be a metric that this validation gives"):
        run(None, None, 0.9, first=3, every=0, best_metric="acc")
    assert on_disk(tmp_path) == [1, 5]
    assert run(0.1, first=6).best == {"step": 1, "metric": MEAN, "value": 0.5}


@pytest.mark.parametrize("content", [b"", b'{"step": 2, "me', b"\xff\xfe", b"[]", b'{"step": 2}'])
def test_a_damaged_best_json_is_written_again(content, run, tmp_path):
    run(0.2, 0.9, 0.5)
    (tmp_path / "best.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"best.json is damaged: delete it; the run's next start writes it again"):
        read_best(tmp_path)
    run()
    assert read_best(tmp_path)["step"] == 2


def test_another_runs_best_stays_its_own(run, model, world, watch, tmp_path, capsys):
    run(0.9)
    state, *_ = resume(tmp_path / "other", model, world, watch, resume=str(tmp_path), keep_best=True)
    assert state["step"] == 1 and "best" not in state and not (tmp_path / "other/best.json").exists()
    assert "is gone" not in capsys.readouterr().out


@pytest.mark.parametrize("ends_at", ["best.json", "deleted"])
def test_a_kill_between_writing_and_deleting_loses_no_best(ends_at, run, monkeypatch, tmp_path):
    """As step 3 becomes the best: what ends the process before best.json has its name, or as the first is deleted."""
    checkpoints, rename = run(0.5, 0.2), Path.rename

    def rename_or_end(path: Path, target: Path) -> Path:
        if ends_at in target.name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_end)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.after_step(STATE | {"step": 3, "total_steps": 99}, {MEAN: 0.9})
    named = read_best(tmp_path)["step"]
    assert named in on_disk(tmp_path) and named == (1 if ends_at == "best.json" else 3)
    run(0.3, first=4)
    assert on_disk(tmp_path) == [3, 4] and read_best(tmp_path) == {"step": 3, "metric": MEAN, "value": 0.9}


def test_the_metric_is_chosen_by_name():
    results = {
        "val-core/b/acc/mean@4": 0.5, "val-core/a/acc/greedy": 0.25, "val-core/a/acc/best@4/mean": 1.0,
        "val-core/a/acc/mean@4": 0.75, "val-aux/a/reward/mean@4": 3.0,
    }
    assert best.choose_metric(results, "") == "val-core/a/acc/mean@4"
    assert best.choose_metric({"val-core/b/greedy": 0.1, "val-core/a/greedy": 0.2}, "") == "val-core/a/greedy"
    assert best.choose_metric(results, "val-aux/a/reward/mean@4") == "val-aux/a/reward/mean@4"
    said = ("--save.best-metric acc must be a metric that this validation gives: val-aux/a/reward/mean@4, "
            "val-core/a/acc/best@4/mean, val-core/a/acc/greedy, val-core/a/acc/mean@4, val-core/b/acc/mean@4")
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        best.choose_metric(results, "acc")
    with pytest.raises(ValueError, match=r"--save.best-metric acc needs --save.keep-best"):
        SaveConfig(best_metric="acc")


# --------------------------------------------------------------------------- real runs

@pytest.fixture(scope="module")
def best_flags(flags) -> list[str]:
    more = ["--eval-every", "1", "--save.every", "0", "--save.keep", "1", "--save.keep-best", "--save.best-metric",
            "val-core/sums/acc/greedy"]
    return [*flags, *more]


@pytest.fixture(scope="module")
def whole(best_flags, start, tmp_path_factory):
    run = tmp_path_factory.mktemp("best") / "run"
    assert start(run.with_name("log"), "none", "grpo.py", *best_flags, "--run-dir", run) == 0
    return run


def best_of(run_dir) -> tuple[int, float]:
    """The first of the steps with the highest value, from metrics.jsonl; not the model before training."""
    rows = metrics(run_dir)[1:]
    return max(((row["step"], row[GREEDY]) for row in rows), key=lambda found: (found[1], -found[0]))


def test_a_runs_best_step_is_kept_and_listed(whole):
    step, value = best_of(whole)
    assert json.loads((whole / "best.json").read_text()) == {"step": step, "metric": GREEDY, "value": value}
    assert steps_on_disk(whole) == sorted({step, 4})
    print([row[GREEDY] for row in metrics(whole)])
    done = launch("tools/checkpoints.py", "list", whole, warm=True)
    (line,) = [line for line in done.stdout.splitlines() if "best" in line]
    assert line.startswith(f"step_{step:06d}") and line.endswith(f"complete  best: {GREEDY} {value:.4g}")
    assert f"the checkpoint with the highest {GREEDY} is kept" in whole.with_name("log").read_text()


@pytest.mark.sweep
@pytest.mark.parametrize(("fault", "code"), [
    ("optimizer:7:0:kill", -signal.SIGKILL), ("prune:1:0:kill", -signal.SIGKILL),
    ("rollout:112:0:term", 128 + signal.SIGTERM),
])
def test_a_run_that_was_ended_keeps_the_same_best(fault, code, best_flags, start, whole, tmp_path):
    """Killed in step 4, killed as it deletes a checkpoint, stopped in a validation, which the next start makes up."""
    run, log = tmp_path / "run", tmp_path / "log"
    assert start(log, fault, "grpo.py", *best_flags, "--run-dir", run) == code, log.read_text()[-3000:]
    assert start(log, "none", "grpo.py", *best_flags, "--run-dir", run, "--save.async") == 0, log.read_text()[-3000:]
    assert (run / "best.json").read_bytes() == (whole / "best.json").read_bytes()
    assert steps_on_disk(run) == steps_on_disk(whole)
    assert_same_run(run, whole)


def test_what_cannot_rank_is_refused(best_flags, start, tmp_path):
    """Without validation files at once; an unknown metric at the first validation, before any step."""
    run, log = tmp_path / "run", tmp_path / "log"
    flags = [*best_flags, "--run-dir", run]
    at = flags.index("--val-data")
    assert start(log, "none", "grpo.py", *flags[:at], *flags[at + 2 :]) == 2
    assert "does nothing without --val-data: set --val-data, or leave" in log.read_text()
    assert not run.exists()
    assert start(log, "none", "grpo.py", *flags, "--save.best-metric", "acc") == 2
    said = "error: --save.best-metric acc must be a metric that this validation gives: "
    (line,) = [line for line in log.read_text().splitlines() if line.startswith(said)]
    assert GREEDY in line and "val-core/sums/acc/mean@1" in line and "step   1/4" not in log.read_text()
    for metric in ("val-aux/sums/reward/mean@4", "val-core/sums/reward/mean@1", "val-aux/sum/reward/mean@1"):
        assert start(log, "none", "grpo.py", *flags, "--save.best-metric", metric) == 2
        (line,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: --save.best-metric {metric} must be ") and "engine" not in log.read_text()


def test_a_run_is_ranked_by_its_reward(best_flags, start, tmp_path):
    """By the score's mean over the sampled responses, which is in val-aux/."""
    run, log, metric = tmp_path / "run", tmp_path / "log", "val-aux/sums/reward/mean@1"
    code = start(log, "none", "grpo.py", *best_flags, "--run-dir", run, "--save.best-metric", metric)
    assert code == 0, log.read_text()[-3000:]
    values = {row["step"]: row[metric] for row in metrics(run)[1:]}
    best = max(values, key=lambda step: (values[step], -step))
    assert json.loads((run / "best.json").read_text()) == {"step": best, "metric": metric, "value": values[best]}
    assert len({*values.values()}) > 1 and best in steps_on_disk(run)
