"""The first lines of a run: what they say of flags and data that go together."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest

from common.checkpoint.secrets import flags_of
from common.dataset.loaded import Loaded
from common.dataset.store import PromptSet
from common.model.optimizers import OptimConfig
from common.prompts import DataConfig
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
