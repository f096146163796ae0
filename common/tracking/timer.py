"""Seconds by phase."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.tracking.profiling import is_out_of_memory, memory_note, snapshot


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears each phase's name at its start. Out of
    memory: the error says the phase and the flags to turn, and on a GPU a snapshot is left in `run_dir/profiles`."""

    def __init__(self, run_dir: Path | None = None, on_phase: Callable[[str], None] = lambda name: None):
        self.run_dir, self.on_phase, self.start = run_dir, on_phase, time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(phase):
                yield
        except RuntimeError as error:                                   # torch.OutOfMemoryError is one
            if is_out_of_memory(error):
                error.add_note(memory_note(phase))
                if self.run_dir is not None and torch.cuda.is_available():
                    snapshot(self.run_dir / f"profiles/out_of_memory_rank{os.environ['RANK']}.pickle")
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()} | {"timing_s/step": total}
