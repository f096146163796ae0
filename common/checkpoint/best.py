"""The best validated step of a run, whose checkpoint stays beside the newest ones (--save.keep-best)."""

import json
import math
from pathlib import Path
from typing import Any

from common.checkpoint.files import sync
from common.parallel.ranks import World, print_on_main

FILE = "best.json"


class Best:
    """Which validated step is the best so far. Every rank has the same results, and so the same answer."""

    def __init__(self, world: World, is_kept: bool, metric: str):
        """`is_kept`: --save.keep-best; without it no step is the best. `metric`: --save.best-metric."""
        self.world = world
        self.is_kept = is_kept
        self.asked = metric
        self.metric = ""                                        # what ranks, known at the first validation
        self.step: dict[str, Any] = {}
        """The best step as {step, metric, value}, which checkpoints keep and best.json shows; {}: none is known."""

    def better(self, step: int, results: dict[str, float] | None) -> dict[str, Any]:
        """This step as {step, metric, value} if its validation ranks it above all before; else {}. Raises ValueError if
        the first validation has no metric of the name --save.best-metric."""
        if not self.is_kept or not results:
            return {}
        metric = self.metric or choose_metric(results, self.asked)
        lower_is_better = metric.endswith("loss")
        if not self.metric:
            self.metric = metric
            what = "lowest" if lower_is_better else "highest"
            print_on_main(self.world, f"the checkpoint with the {what} {metric} is kept (--save.best-metric)")
        if metric not in results:                               # maj@N, if no sample has a vote
            print_on_main(self.world, f"the validation after step {step} has no {metric}: this step cannot be the best")
            return {}
        if metric != self.step.get("metric"):                   # an earlier start ranked by another one
            self.step = {}
        before = self.step.get("value", math.inf if lower_is_better else -math.inf)
        value = results[metric]
        is_better = value < before if lower_is_better else value > before       # False for NaN and for equal values
        return {"step": step, "metric": metric, "value": value} if is_better else {}


def choose_metric(results: dict[str, float], name: str) -> str:
    """The metric of the validation that ranks its steps: `name`, or if that is empty the first val-core/.../mean@N in
    alphabetical order, without one the first val-core/. Raises ValueError where `results` does not have it."""
    core = sorted(metric for metric in results if metric.startswith("val-core/"))
    if not name and core:
        return min(core, key=lambda metric: "/mean@" not in metric)     # the first of those that are smallest
    if name not in results:
        raise ValueError(f"--save.best-metric {name or '(not given)'} must be a metric that this validation gives: "
                         f"{', '.join(sorted(results))}")
    return name


def write_best(run_dir: Path, best: dict[str, Any]) -> None:
    """Writes RUN_DIR/best.json, or removes it if no step is the best. A kill leaves the old file or the new one."""
    if not best:
        (run_dir / FILE).unlink(missing_ok=True)
        return
    partial = run_dir / f".{FILE}.partial"
    partial.write_text(json.dumps(best) + "\n")
    sync(partial)
    partial.rename(run_dir / FILE)
    sync(run_dir)
