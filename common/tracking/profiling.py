"""What the machine can do and did: peak FLOP/s, seconds by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from common.parallel.ranks import World

# Dense bfloat16 FLOP/s of a chip, from the makers' data sheets, by a part of torch.cuda.get_device_name(): the first
# that fits. A product with several forms (PCIe, SXM) stands here with each.
PEAK_FLOPS = {
    "B300": 2.25e15, "B200": 2.25e15, "B100": 1.75e15, "H200": 9.89e14, "H100 PCIe": 7.56e14, "H100 NVL": 8.35e14,
    "H100": 9.89e14, "H800": 9.89e14, "H20": 1.48e14, "A100": 3.12e14, "A800": 3.12e14, "A40": 1.50e14,
    "A30": 1.65e14, "A10G": 7.0e13, "A10": 1.25e14, "L40S": 3.62e14, "L40": 1.81e14, "L4": 1.21e14,
}

OUT_OF_MEMORY = """ran out of memory in phase {}. If the engine was awake, lower --rollout.gpu-memory-utilization; else
lower --max-tokens-per-gpu or set --policy.gradient-checkpointing True"""


def peak_flops(world: World, dtype: str) -> float | None:
    """FLOP/s that one rank's chip can do at most in matrix products of `dtype` ("bfloat16", "float32"). None if the
    table does not say: on CPUs, on other GPUs and for float32."""
    if world.device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(world.device)
    return next((flops for chip, flops in PEAK_FLOPS.items() if chip in name), None)


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears each phase's name at its start. Out of
    a GPU's memory: the error says the phase and the flags to turn."""

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
        except torch.OutOfMemoryError as error:                         # GPUs raise it
            error.add_note(OUT_OF_MEMORY.format(phase))
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()}
