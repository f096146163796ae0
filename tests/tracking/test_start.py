"""The first lines of a run: what they say of flags and data that go together."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest

from common.dataset.loaded import Loaded
from common.dataset.store import PromptSet
from common.flags.secrets import flags_of
from common.model.optimizers import OptimConfig
from common.prompts import DataConfig, Prompt
from common.rollout import Sample
from common.rollouts.validation import validation_metrics
from common.tracking.start import check_best_metric, notes


@dataclass
class Flags:
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic_optim: OptimConfig = field(default_factory=OptimConfig)


def prompts(rows, file, without_truth=0, sources=("a",)):
    table = pa.table({"tokens": [[1]] * len(rows), "row": pa.array(rows, pa.large_string())})
    loaded = Loaded([str(file)], num_without_truth=without_truth, data_sources=set(sources), data_hash=repr(rows))
    return PromptSet(table, loaded, DataConfig(), None)


def said(flags=None, sizes=(100, 4), train=None, val=None):
    return list(notes(flags or Flags(), sizes, train or prompts(["r"] * 9, "t"), val))


def test_a_usual_run_says_nothing(tmp_path):
    assert said(val=prompts(["v"] * 3, "v")) == []
    assert flags_of(Flags())["--critic-optim.lr"] == 1e-6


@pytest.mark.parametrize(("changes", "line"), [
    ({"flags": Flags(OptimConfig(lr=1e6))}, "--optim.lr 1e+06: a step changes each weight by up to about that"),
    ({"flags": Flags(critic_optim=OptimConfig(lr=0.5))}, "--critic-optim.lr 0.5: a step"),
    ({"flags": Flags(OptimConfig(warmup_steps=50)), "sizes": (1, 4)}, "--optim.warmup-steps 50: the run ends with its"),
    ({"flags": Flags(OptimConfig(warmup_steps=4)), "sizes": (4, 4)}, "--optim.warmup-steps 4: "),
    ({"sizes": (100, 300), "train": prompts(["r"] * 270, "t")}, "a step takes 300 of 270 rows: some come twice"),
    ({"train": prompts(["r"] * 9, "t", without_truth=9)}, "all ground truths of the training rows are empty texts"),
    ({"train": prompts(["a", "b"] * 9, "t"), "val": prompts(["b", "c"], "v")}, "9 training rows are also in"),
    ({"train": prompts(["a"] * 9, "t"), "val": prompts(["a"] * 9, "copy")}, "--val-data has the same rows"),
])
def test_what_may_not_be_meant_has_a_line(changes, line):
    (only,) = said(**changes)
    assert only.startswith(line)


def test_the_same_file_in_training_and_validation_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"")
    (tmp_path / "link.parquet").symlink_to("rows.parquet")
    line, = said(train=prompts(["a"] * 9, tmp_path / "rows.parquet"), val=prompts(["b"], tmp_path / "link.parquet"))
    assert line == f"1 files of --val-data are also in --train-data: {tmp_path}/link.parquet"


@pytest.mark.parametrize(("metric", "is_refused"), [
    ("", False), ("val-core/openai/gsm8k/acc/greedy", False), ("val-aux/reward/format", False), ("acc", False),
    ("val-core/gsm8k/acc/greedy", True), ("val-core/openai/gsm8/acc/mean@4", True)])
def test_the_best_metric_is_of_a_source_of_the_validation(metric, is_refused):
    val = prompts(["v"], "v", sources=["openai/gsm8k", "math"])
    if is_refused:
        with pytest.raises(ValueError, match=r"begins with val-core/math/ or val-core/openai/gsm8k/$"):
            check_best_metric(metric, val)
    else:
        check_best_metric(metric, val)
    check_best_metric(metric, None)
    check_best_metric(metric, SimpleNamespace(loaded=Loaded([])))


@pytest.mark.parametrize("N", [0, 1, 2, 3, 4, 8, 32])
def test_the_best_metric_may_be_all_that_a_validation_gives(world, N):
    """And of the results that another --eval-n gives only those that are in both."""
    def given(N):
        extras = {"acc": 1.0, "pred": "4", "format": 0.5, "file.name/acc": 0.5}
        prompt = Prompt([], "openai/gsm8k", "4", {}, [])
        samples = [Sample(i, 0, 0, prompt, score=0.25, extras=extras) for i in range(max(N, 1))]
        greedy = validation_metrics(samples[:1], greedy=True)
        return greedy | (validation_metrics(samples, greedy=False) if N else {})

    val = prompts(["v"], "v", sources=["openai/gsm8k", "math"])
    names = given(N)
    assert len(names) >= 6 and "val-aux/openai/gsm8k/reward/greedy" in names
    for name in names:
        check_best_metric(name, val, N)
        with pytest.raises(ValueError, match="must be of a data source of --val-data: it begins with val-"):
            check_best_metric(name.replace("openai/", ""), val, N)
    for name in given(6).keys() - names.keys():
        with pytest.raises(ValueError, match=f"must be a result of a validation with --eval-n {N}: ") as raised:
            check_best_metric(name, val, N)
        assert "\n" not in str(raised.value) and "val-aux/SOURCE/reward/ with greedy, " in str(raised.value)


@pytest.mark.parametrize(("metric", "is_refused"), [
    ("val-core/math/reward/mean@4", True), ("val-core/math/format/mean@4", True), ("val-aux/math/acc/mean@4", True),
    ("val-aux/math/acc/greedy", True), ("val-aux/math/reward/mean@2", True), ("val-aux/math/reward/mean", False),
    ("val-aux/math/format/std@4", True), ("val-aux/math/reward/worst@4/mean", True), ("val-aux/math/greedy", True),
    ("val-core/math/acc/best@2/mean", True), ("val-core/math/acc/std@4", True), ("val-aux/mth/reward/greedy", True),
    ("val-aux/math/reward/best@3/mean", True), ("val-aux/math/reward/mean@4/std", True),
    ("val-aux/math/reward/mean@4", False), ("val-aux/math/reward/best@2/mean", False),
    ("val-aux/math/reward/mean@4/stderr", False), ("val-aux/math/my/format/mean@4", False),
    ("val-aux/reward/format", False), ("val-aux/reward/x/mean@4", False), ("val-aux/num_turns/mean", False),
    ("val-aux/episode/maze/score", False), ("val/loss", False), ("acc", False), ("", False),
])
def test_a_result_that_no_validation_gives_is_refused(metric, is_refused):
    val = prompts(["v"], "v", sources=["openai/gsm8k", "math"])
    if is_refused:
        with pytest.raises(ValueError, match=f"^--save.best-metric {metric} must be "):
            check_best_metric(metric, val, 4)
    else:
        check_best_metric(metric, val, 4)
    check_best_metric(metric, None, 4)
