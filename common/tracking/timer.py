"""Seconds by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from common.tracking.profiling import is_out_of_memory, memory_note


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears each phase's name at its start. Out of
    memory: the error says the phase and the flags to turn."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None):
        self.on_phase, self.start = on_phase, time.perf_counter()
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
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()} | {"timing_s/step": total}
