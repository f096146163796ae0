"""What a run's first lines say of flags and data that go together, and may not be meant so."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc

from common.dataset.store import PromptSet
from common.flags.secrets import flags_of

MOST_LR = 0.1
"""Each step of the optimizers here changes a weight by up to about the learning rate; most weights are below 0.1."""

RESULT = re.compile(r"(.+)/((?:greedy|[a-z]+@\d+)(?:/[a-z]+)?)")
"""A variable of a validation and what is told of it: reward/mean@4, acc/greedy/stderr."""


def notes(args: Any, sizes: tuple[int, int], train_set: Any, val_set: Any) -> Iterator[str]:
    """What to say of a run, a line each. `sizes`: its steps, and the rows of a step. `train_set`, `val_set` (or None):
    as the scripts load them."""
    total_steps, rows_per_step = sizes
    flags = flags_of(args)
    num_rows = len(train_set)
    for flag in sorted(flags):
        if not flag.endswith("optim.lr"):
            continue
        optim = flag.removesuffix(".lr")
        lr = flags[flag]
        warmup_steps = flags[f"{optim}.warmup-steps"]
        if lr > MOST_LR:
            yield (f"{optim}.lr {lr:g}: a step changes each weight by up to about that, more than "
                   f"most weights are")
        if warmup_steps >= total_steps:
            yield (f"{optim}.warmup-steps {warmup_steps}: the run ends with its {total_steps} steps "
                   f"before the learning rate reaches its peak")
    if rows_per_step > num_rows:
        yield f"a step takes {rows_per_step} of {num_rows} rows: some come twice in it"
    if num_rows and train_set.loaded.num_without_truth == num_rows:
        yield "all ground truths of the training rows are empty texts: a reward that compares with them is constant"
    if val_set is not None:
        yield from shared_rows(train_set, val_set)


def shared_rows(train_set: Any, val_set: Any) -> Iterator[str]:
    """Whether the validation shows rows that the training shows, too."""
    trained = {*map(os.path.realpath, train_set.loaded.files)}
    shared = []
    for file in val_set.loaded.files:
        if os.path.realpath(file) in trained:
            shared.append(file)
    if shared:
        yield f"{len(shared)} files of --val-data are also in --train-data: {', '.join(shared[:3])}"
    elif train_set.loaded.data_hash == val_set.loaded.data_hash:
        yield "--val-data has the same rows as --train-data"
    elif isinstance(train_set, PromptSet):
        # the set of values is the smaller one; the other is read from its file in pieces
        is_shared = pc.is_in(train_set.table["row"], value_set=val_set.table["row"])
        count = pc.sum(is_shared).as_py()
        if count:
            yield f"{count} training rows are also in --val-data"


def check_best_metric(metric: str, val_set: Any, num_samples: int | None = None) -> None:
    """Raise ValueError if --save.best-metric names a data source that the validation does not have, or a result that no
    validation with `num_samples` (--eval-n) gives, before anything is loaded; what else it may misspell is found after
    the first validation."""
    sources: list[str] = []
    if val_set is not None:
        sources = sorted(val_set.loaded.data_sources)
    section, _, rest = metric.partition("/")
    is_result = RESULT.fullmatch(rest) is not None
    is_of_source = section == "val-core"
    if section == "val-aux":
        # it has metrics of no data source, too: val-aux/num_turns/mean, or val-aux/reward/NAME with any NAME
        is_of_source = is_result and not rest.startswith("reward/")
    if not sources or not is_of_source:
        return
    found = []                                      # the metric without each data source that it may begin with
    for source in sources:
        if rest.startswith(f"{source}/"):
            found.append(rest.removeprefix(f"{source}/"))
    if not found:
        known = []
        for source in sources:
            known.append(f"{section}/{source}/")
        raise ValueError(f"--save.best-metric {metric} must be of a data source of --val-data: it begins with "
                         f"{' or '.join(known[:10])}")
    if is_result and num_samples is not None:
        check_result(metric, section, found, num_samples)


def check_result(metric: str, section: str, found: list[str], num_samples: int) -> None:
    """Raise ValueError if a validation gives none of `found`, what may follow the data source in `metric`."""
    core, aux = results_of(num_samples)
    given = aux
    if section == "val-core":
        given = core
    for name in found:
        match = RESULT.fullmatch(name)
        if match is None:
            continue
        variable, result = match.groups()
        if result in given.get(variable, given.get("NAME", ())):
            return
    known = [f"val-core/SOURCE/acc/ with {', '.join(core['acc'])}"]
    for variable, results in aux.items():
        known.append(f"val-aux/SOURCE/{variable}/ with {', '.join(results)}")
    raise ValueError(f"--save.best-metric {metric} must be a result of a validation with --eval-n "
                     f"{num_samples}: {'; '.join(known)}")


def results_of(num_samples: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What a validation may give of a data source, in val-core/ and in val-aux/: variable -> results. NAME stands for
    the other numbers of a reward dict."""
    N = num_samples
    means = ["greedy"]
    if N:
        means.append(f"mean@{N}")
    others = []
    for name in means:
        others.append(f"{name}/stderr")
    several: list[str] = []
    if N > 1:
        several = [f"best@{N}/mean", f"maj@{N}/mean"]
        others.append(f"std@{N}")
    k = 2
    while k < N:
        others.append(f"best@{k}/mean")
        k *= 2
    core = {"acc": means + several}
    aux = {"acc": others, "reward": means + several + others, "NAME": means}
    return core, aux
