"""The best validated step of a run, whose checkpoint stays beside the newest ones (--save.keep-best)."""

import json
import math
import re
from pathlib import Path
from typing import Any

from common.checkpoint.files import sync

FILE = "best.json"


def better(step: int, results: dict[str, float], metric: str, best: dict[str, Any]) -> dict[str, Any]:
    """`step` as {step, metric, value} if its validation ranks it above `best`, another step in this form or {}; else
    {}: so of equal values the earlier step stays. `metric`: from `choose_metric`; of a loss the lowest is the best."""
    value = results[metric]
    if is_loss(metric):
        is_better = value < best.get("value", math.inf)                 # False for NaN
    else:
        is_better = value > best.get("value", -math.inf)
    if not is_better:
        return {}
    return {"step": step, "metric": metric, "value": value}


def is_loss(metric: str) -> bool:
    """Whether lower is better: val/loss, and val-aux/SOURCE/my_loss/mean@4."""
    return re.sub(r"/(greedy|[a-z]+@\d+(/mean)?)$", "", metric).endswith("loss")


def choose_metric(results: dict[str, float], name: str) -> str:
    """The metric of the validation that ranks its steps: `name`, or if that is empty the first val-core/.../mean@N in
    alphabetical order, without one the first val-core/. Raises ValueError where `results` does not have it."""
    core = sorted(metric for metric in results if metric.startswith("val-core/"))
    if not name:
        for metric in core:
            if "/mean@" in metric:
                return metric
        if core:
            return core[0]
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
