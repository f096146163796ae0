"""What a step should take on the machines on which others published their steps or recipes, by the arithmetic of
simulate.py: `python -m tests.bench.published`, or `python -m tests.bench.advise --published`.

PREDICTIONS: nothing here was measured on a GPU. PUBLISHED are measurements and recipes of others, with Megatron-Core
unless the layout says FSDP:

* NeMo-RL 0.4, docs/about/performance-summary.md: GRPO on policy.
* verl, docs/advance/fully_async.md (the rows "colocate sync", settings of its shell/ folder; 7B trains with FSDP2 and
  sequence parallel 4) and docs/perf/dpsk.md (MFU), measured on H20s. The recipes without seconds are
  examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh and run_qwen3_235b_a22b_megatron.sh, and
  recipe/dapo/run_dapo_qwen2.5_32b.sh without its dynamic sampling, all on 64 GPUs.
* slime, scripts/run-qwen3-30B-A3B.sh and run-qwen3-32B.sh (for 8 GPUs, here on 64), run-qwen3-235B-A22B.sh; no seconds
  are published.

Response lengths are log-normal and cut at the longest. No mean is published by verl and slime. Where the seconds of the
update are, the mean is the one for which the predicted update takes as long, so that only the other phases say
something; else there are two predictions, for means of a quarter and of half of the longest.
"""

from dataclasses import dataclass, replace

import numpy as np

from tests.bench.h100 import H100
from tests.bench.simulate import Job, Machine, Shape, step_seconds, update_seconds, update_work
from tools.plan import SHAPES, shape

SIGMA = 0.6                             # of the logarithm of the lengths: assumed
LLAMA_8B = shape("llama", 4096, 14336, 32, 32, 8, 128256)
H20 = replace(H100, name="H20", flops=148e12, bytes_per_s=4.0e12, memory_gb=96)
"""148 TFLOP/s, 4.0 TB/s and 96 GB are NVIDIA's numbers; shares and networks are those assumed for H100s."""
BATCHES = ((32768, False, False), (16384, False, False), (16384, True, False), (0, True, False), (16384, True, True),
           (0, True, True))
"""Tokens of a micro-batch (0: one longest sequence), whether masters and moments are in host memory during the rollout,
and whether moments are there always: the first with which the model fits is taken."""


@dataclass(frozen=True)
class Published:
    who: str
    model: str
    gpus: int
    prompts: int
    samples: int
    minibatches: int
    longest: int                        # tokens of a response
    tp: int                             # of the engine
    layout: str                         # of the training: tensor, context, expert, pipeline parallel
    step_s: float | None = None         # None: not published
    phases: str = ""                    # seconds of rollout, old log-probs, reference
    update_s: float | None = None
    mfu: float | None = None
    mean: int | None = None             # tokens of a response; None: not published
    prompt: int = 128                   # tokens: assumed
    reference: bool = False             # a reference model scores all responses
    machine: Machine = H100


PUBLISHED = [
    Published("NeMo-RL", "Llama-3.1-8B", 16, 128, 16, 4, 3968, 1, "pipeline 2", 97.7, mean=932),
    Published("NeMo-RL", "Qwen3-30B-A3B", 32, 128, 16, 4, 3968, 4, "tensor 2, expert 8", 225, mean=3026),
    Published("NeMo-RL", "Qwen3-32B", 32, 128, 16, 4, 3968, 4, "tensor 4, pipeline 4", 393, mean=3078),
    Published("NeMo-RL", "Qwen3-235B-A22B", 128, 32, 16, 1, 8064, 16, "tensor 2, context 2, expert 16, pipeline 8",
              506, mean=5543),
    Published("verl", "Qwen2.5-7B", 32, 512, 16, 16, 28672, 2, "FSDP2", 790, "357, 108, none", 270, machine=H20),
    Published("verl", "Qwen2.5-7B", 64, 512, 16, 16, 28672, 2, "FSDP2", 365, "151, 70, none", 133, machine=H20),
    Published("verl", "Qwen2.5-7B", 128, 512, 16, 16, 28672, 2, "FSDP2", 356, "178, 54, none", 114, machine=H20),
    Published("verl", "Qwen3-30B-A3B", 32, 512, 16, 4, 8192, 4, "expert 8", mfu=0.31, reference=True, machine=H20),
    Published("verl", "Qwen3-30B-A3B", 128, 512, 16, 4, 8192, 4, "expert 8", 498, "348, 29, 21", 86, reference=True,
              machine=H20),
    Published("verl", "Qwen3-30B-A3B", 64, 512, 8, 32, 8192, 4, "tensor 4, expert 2, pipeline 2"),
    Published("verl", "Qwen2.5-32B", 64, 512, 16, 16, 20480, 4, "FSDP, sequence 8"),
    Published("verl", "Qwen3-235B-A22B", 64, 128, 16, 1, 4096, 8, "tensor 4, expert 4, pipeline 8", reference=True),
    Published("slime", "Qwen3-30B-A3B", 64, 32, 8, 1, 8192, 8, "tensor 4, expert 8"),
    Published("slime", "Qwen3-32B", 64, 32, 8, 1, 8192, 8, "tensor 8"),
    Published("slime", "Qwen3-235B-A22B", 64, 8, 8, 1, 8192, 32,
              "tensor 4, context 2, expert 16, pipeline 4; 64 more GPUs sample"),
]


def lengths_of(row: Published, mean: float) -> np.ndarray:
    """Response lengths [S] with this mean: log-normal, cut at the longest."""
    draws = np.random.default_rng(0).standard_normal(row.prompts * row.samples)
    low, high = 1.0, 20.0 * row.longest
    for _ in range(60):                 # the median by bisection: the mean of cut lengths grows with it
        median = (low * high) ** 0.5
        lengths = np.clip(median * np.exp(SIGMA * draws), 1, row.longest)
        low, high = (median, high) if lengths.mean() < mean else (low, median)
    return lengths.astype(int)


def predict(row: Published, mean: float) -> dict[str, float]:
    """Seconds and bytes of a step, for responses of this mean length; only the memory if it does not fit."""
    lengths = lengths_of(row, mean)
    sizes = Shape.of(LLAMA_8B if row.model == "Llama-3.1-8B" else SHAPES[row.model])
    for max_tokens, offload, host_moments in BATCHES:
        job = Job(np.full(len(lengths), row.prompt), lengths, row.samples, row.gpus, row.tp,
                  max(max_tokens, row.prompt + row.longest), row.minibatches, checkpointing=True, offload=offload,
                  host_moments=host_moments)
        found = step_seconds(row.machine, sizes, job)
        if found["fits"]:
            break
    if not found["fits"]:
        return found
    work = update_work(sizes, job)
    found["mean"] = mean
    if row.reference:                   # a pass as that of the old policy, which one mini-batch does not need
        two = replace(job, minibatches=max(2, job.minibatches))
        found["reference_s"] = found["old_log_prob_s"] or update_seconds(row.machine, sizes, two)["old_log_prob_s"]
    found["step_s"] += found.get("reference_s", 0.0)
    tokens = float((job.prompt_lengths + lengths).sum())
    gathers = float(work["all_gather"]) * (1 + (found["old_log_prob_s"] > 0) / 2 + row.reference / 2)
    return found | {
        "max_tokens": job.max_tokens, "mfu": work["flops"].sum() / found["update_s"] / row.gpus / row.machine.flops,
        "tokens_per_s": tokens / found["step_s"] / row.gpus, "gathered_gb": gathers / 1e9,
        "scattered_gb": float(work["reduce_scatter"]) / 1e9, "sync_gb": float(work["sync"]) / 1e9,
        "exchanged_gb": float(work["exchange"].max()) / 1e9,
    }


def predictions(row: Published) -> list[dict[str, float]]:
    """One, or two where the mean length is not known."""
    if row.mean:
        return [predict(row, row.mean)]
    if row.update_s is None:
        return [predict(row, row.longest / 4), predict(row, row.longest / 2)]
    found = predict(row, row.longest / 16)
    for _ in range(3):                  # the update's seconds grow almost in proportion
        found = predict(row, found["mean"] * row.update_s / found["update_s"])
    return [found]


def cell(found: list[dict[str, float]], name: str, scale: float = 1.0) -> str:
    """The number of one prediction, or the range of two; nothing if it is 0."""
    shown = [f"{x:,.0f}" if x >= 99.5 else f"{x:.2g}" for x in (f[name] * scale for f in found if name in f)]
    return "" if set(shown) <= {"0"} else " to ".join(dict.fromkeys(shown))


def table(published: list[Published]) -> str:
    columns = {"mean": "mean tokens", "rollout_s": "rollout", "sync_s": "sync", "offload_s": "offload",
               "old_log_prob_s": "old log-probs", "reference_s": "reference", "update_s": "update", "mfu": "MFU",
               "network_bound_frac": "network-bound", "gathered_gb": "gathered GB", "scattered_gb": "scattered GB",
               "sync_gb": "sync GB", "exchanged_gb": "exchanged GB", "tokens_per_s": "tokens/s/GPU",
               "max_tokens": "tokens a micro-batch"}
    lines = ["| who, model, GPUs | published: layout | published: s (MFU) | predicted s | ratio | "
             + " | ".join(columns.values()) + " |", "|" + " --- |" * (5 + len(columns))]
    for row in published:
        found = predictions(row)
        fits = all(f["fits"] for f in found)
        said = "none" if row.step_s is None else f"{row.step_s:g}"
        said += f": {row.phases}, {row.update_s:g}" if row.phases else ""
        said += f" ({row.mfu:g})" if row.mfu else ""
        ratio = cell(found, "step_s", 1 / row.step_s) if row.step_s and fits else ""
        shown = [cell(found, name) if fits else "" for name in columns]
        lines.append(f"| {row.who}, {row.model}, {row.gpus} {row.machine.name.split()[0]} | {row.layout} | {said} | "
                     f"{cell(found, 'step_s') if fits else 'does not fit'} | {ratio} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    print("PREDICTED, beside what others measured (seconds of a step: rollout, old log-probs, reference, update)\n")
    print(table(PUBLISHED))


if __name__ == "__main__":
    main()
