"""What a run's first lines say of flags and data that go together, and may not be meant so."""

import os
from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc

from common.checkpoint.secrets import flags_of
from common.dataset.store import PromptSet

MOST_LR = 0.1
"""Each step of the optimizers here changes a weight by up to about the learning rate; most weights are below 0.1."""


def notes(args: Any, sizes: tuple[int, int], train_set: Any, val_set: Any) -> Iterator[str]:
    """What to say of a run, a line each. `sizes`: its steps, and the rows of a step. `train_set`, `val_set` (or None):
    as the scripts load them."""
    total_steps, rows_per_step = sizes
    flags, num_rows = flags_of(args), len(train_set)
    for optim in sorted(flag.removesuffix(".lr") for flag in flags if flag.endswith("optim.lr")):
        if flags[f"{optim}.lr"] > MOST_LR:
            yield (f"{optim}.lr {flags[f'{optim}.lr']:g}: a step changes each weight by up to about that, more than "
                   f"most weights are")
        if flags[f"{optim}.warmup-steps"] >= total_steps:
            yield (f"{optim}.warmup-steps {flags[f'{optim}.warmup-steps']}: the run ends with its {total_steps} steps "
                   f"before the learning rate reaches its peak")
    if rows_per_step > num_rows:
        yield f"a step takes {rows_per_step} of {num_rows} rows: some come twice in it"
    if num_rows and train_set.loaded.num_without_truth == num_rows:
        yield "all ground truths of the training rows are empty texts: a reward that compares with them is constant"
    if val_set is not None:
        yield from shared_rows(train_set, val_set)


def shared_rows(train_set: Any, val_set: Any) -> Iterator[str]:
    """Whether the validation shows rows that the training shows, too."""
    trained = {os.path.realpath(file) for file in train_set.loaded.files}
    shared = [file for file in val_set.loaded.files if os.path.realpath(file) in trained]
    if shared:
        yield f"{len(shared)} files of --val-data are also in --train-data: {', '.join(shared[:3])}"
    elif train_set.loaded.data_hash == val_set.loaded.data_hash:
        yield "--val-data has the same rows as --train-data"
    elif isinstance(train_set, PromptSet):
        # the set of values is the smaller one; the other is read from its file in pieces
        is_shared = pc.is_in(train_set.table["row"], value_set=val_set.table["row"])
        if count := pc.sum(is_shared).as_py():
            yield f"{count} training rows are also in --val-data"


def check_best_metric(metric: str, val_set: Any) -> None:
    """Raise ValueError if --save.best-metric names a data source that the validation does not have, before anything is
    loaded; what else it may misspell is found after the first validation."""
    sources = sorted(val_set.loaded.data_sources) if val_set is not None else []
    known = tuple(f"val-core/{source}/" for source in sources)
    if known and metric.startswith("val-core/") and not metric.startswith(known):
        raise ValueError(f"--save.best-metric {metric} must be of a data source of --val-data: it begins with "
                         f"{' or '.join(known[:10])}")
