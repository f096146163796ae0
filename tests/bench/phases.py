"""Seconds of a step, phase by phase, before and after what was changed for GPUs, for four workloads on H100s:
`python -m tests.bench.phases`. The same numbers with what they stand on: `--json`.

CALCULATED, no GPU ran these workloads: simulate.py's arithmetic with the rates of h100.py, how many layers are
recomputed by tools.plan, and what was measured on one H100 (MEASURED). One update a step, no reference, AdamW.
"""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import tyro
from transformers import PretrainedConfig

from common.memory.plan import ENOUGH_TOKENS
from tests.bench.h100 import H100
from tests.bench.simulate import (
    Job,
    Machine,
    Shape,
    carried_seconds,
    rollout_seconds,
    sync_seconds,
    update_seconds,
)
from tools.plan import SHAPES, fitting

MEASURED = {
    "s a tensor of a sync, before": 0.43e-3,        # tests/evidence/h100.md: 0.125 s for 290 tensors, 1 GB
    "s a tensor of a sync, vLLM's loading": 0.09e-3,  # the same
    "s a weight, adamw-bf16, before": 7.8e-3 / 4096**2,  # the same, one step of 4,096 x 4,096
    "s a request and decode step that is saved": 3.3e-6,  # bench_decode, 128 to 1,024 requests on a CPU
}
LAUNCHES_S = 4 * 5e-6
"""Of two checksums a tensor, two operations each, at 5 us of the host (tests/cuda/launches.py)."""
OPTIMIZER_BYTES = 14
"""That a step of adamw-bf16 reads and writes a weight."""
IN_FLIGHT = 1.5


@dataclass(frozen=True)
class Workload:
    """Responses are log-normal with this mean, cut at the longest."""

    name: str
    model: str
    gpus: int
    tp: int
    prompts: int
    mean: int
    longest: int
    mfu: float  # of the update: 0.35 was measured for 1.7B, the others are assumed

    @property
    def shape(self) -> PretrainedConfig:
        return SHAPES[self.model]


WORKLOADS = (
    Workload("1.5B, 8 GPUs", "Qwen2.5-1.5B", 8, 1, 128, 2000, 8192, 0.35),
    Workload("7B, 8 GPUs", "Qwen2.5-7B", 8, 1, 128, 2000, 8192, 0.38),
    Workload("32B, 64 GPUs, tp 2", "Qwen2.5-32B", 64, 2, 256, 4000, 16384, 0.38),
    Workload("30B-A3B, 16 GPUs, tp 2", "Qwen3-30B-A3B", 16, 2, 128, 4000, 16384, 0.13),
)
SAMPLES = 8
PROMPT = 512
SIGMA = 0.8


@dataclass
class Args:
    json: bool = False
    """Print what each number stands on, too."""


def recomputed(work: Workload) -> tuple[float, int, str]:
    """By the plan: the share of the layers, the tokens of a micro-batch, and the flags without which it does not
    fit."""
    found = fitting(work.shape, work.gpus, H100.memory_gb, ENOUGH_TOKENS, work.longest)
    if found is None:
        raise ValueError(f"{work.name} does not fit")
    command, flags = found
    policy = command.plan.policy
    return policy.num_recomputed / policy.num_blocks, command.tokens, " ".join(f"{k} {v}" for k, v in flags.items())


def seconds(work: Workload) -> dict[str, tuple[float, float]]:
    """Phase -> before, after."""
    rng = np.random.default_rng(0)
    median = work.mean / np.exp(SIGMA**2 / 2)
    lengths = np.clip(rng.lognormal(np.log(median), SIGMA, work.prompts * SAMPLES), 1, work.longest).astype(int)
    share, tokens, _ = recomputed(work)
    shape = Shape.of(work.shape)
    job = Job(np.full(len(lengths), PROMPT), lengths, SAMPLES, work.gpus, work.tp,
              max_tokens=max(tokens, PROMPT + int(lengths.max())))
    machine = dataclasses.replace(H100, update_mfu=work.mfu)
    slots = len(lengths) * work.tp // work.gpus
    saved = MEASURED["s a request and decode step that is saved"]
    shorter = dataclasses.replace(machine, decode_sequence_s=machine.decode_sequence_s - saved)
    whole = update_seconds(machine, shape, dataclasses.replace(job, checkpointing=True))["update_s"]
    none = update_seconds(machine, shape, job)["update_s"]
    weights = shape.weights / work.gpus
    return {
        "rollout": (rollout_seconds(machine, shape, job, slots)["rollout_s"],
                    rollout_seconds(shorter, shape, job, slots)["rollout_s"]),
        f"rollout, in flight {IN_FLIGHT:g}": (carried_seconds(machine, shape, job, 2 * slots, IN_FLIGHT)["rollout_s"],
                                              carried_seconds(shorter, shape, job, 2 * slots, IN_FLIGHT)["rollout_s"]),
        "sync": (sync_of(machine, shape, job, MEASURED["s a tensor of a sync, before"]),
                 sync_of(machine, shape, job, MEASURED["s a tensor of a sync, vLLM's loading"] + LAUNCHES_S)),
        "update": (whole, none + share * (whole - none)),
        "adamw-bf16": (weights * MEASURED["s a weight, adamw-bf16, before"],
                       weights * OPTIMIZER_BYTES / (machine.bytes_per_s * machine.memory_frac)),
    }


def sync_of(machine: Machine, shape: Shape, job: Job, tensor_s: float) -> float:
    return sync_seconds(dataclasses.replace(machine, tensor_s=tensor_s), shape, job)


def main(args: Args) -> None:
    found = {work.name: seconds(work) for work in WORKLOADS}
    shares = {work.name: recomputed(work) for work in WORKLOADS}
    if args.json:
        print(json.dumps({"calculated": found, "recomputed": shares, "measured": MEASURED, "launches_s": LAUNCHES_S,
                          "machine": dataclasses.asdict(H100), "workloads": [*map(dataclasses.asdict, WORKLOADS)]},
                         indent=1))
        return
    print(f"| seconds, before / after | {' | '.join(found)} |\n{'| --- ' * (1 + len(found))}|")
    for phase in found[WORKLOADS[0].name]:
        cells = (" / ".join(f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in phases[phase]) for phases in found.values())
        print(f"| {phase} | {' | '.join(cells)} |")
    print(f"| layers recomputed | {' | '.join(f'100% / {share:.0%}' for share, *_ in shares.values())} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
