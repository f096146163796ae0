"""What a run does at this moment: RUN_DIR/now.json, which `python -m tools.report RUN --watch` shows."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

EVERY_S = 1.0
"""Least seconds between two writes within a phase."""
PACE = 10
"""Last steps whose seconds are averaged."""


class Now:
    """Rank 0 writes RUN_DIR/now.json: `step` that runs (from 1) of `total_steps`; `phase` and `phase_start`; `done` of
    its `total` responses or micro-batches; of the last steps `step_s`, their mean seconds, and `tokens_per_s` of all
    ranks; `step_start`. Times are seconds since 1970. A reader may find a line that is being written."""

    def __init__(self, run_dir: Path, is_main: bool):
        self.file = run_dir / "now.json"
        self.is_main = is_main
        self.state: dict[str, Any] = {}
        self.steps_s: deque[float] = deque(maxlen=PACE)
        self.written = 0.0

    def step(self, step: int, total_steps: int) -> None:
        """A step begins; `step` counts from 0."""
        self.state |= {"step": step + 1, "total_steps": total_steps, "step_start": time.time()}

    def phase(self, name: str) -> None:
        """A phase begins: of a step ("gen", "update_actor"), of a save, or "after gen"."""
        for key in ("done", "total"):
            self.state.pop(key, None)
        self.state |= {"phase": name, "phase_start": time.time()}
        self._write()

    def progress(self, done: int, total: int) -> None:
        self.state |= {"done": done, "total": total}
        if time.time() - self.written > EVERY_S:
            self._write()

    def logged(self, metrics: dict[str, float]) -> None:
        """The metrics of a step that has ended."""
        if "timing_s/step" not in metrics:  # a validation before the first step
            return
        self.steps_s.append(metrics["timing_s/step"])
        self.state["step_s"] = sum(self.steps_s) / len(self.steps_s)
        if "perf/total_num_tokens" in metrics:
            self.state["tokens_per_s"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]

    def _write(self) -> None:
        if self.is_main:
            self.file.write_text(json.dumps(self.state))
            self.written = time.time()
