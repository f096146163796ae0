"""What a step should take on the machines on which others published their steps: `python -m tests.bench.published`.

PREDICTIONS of simulate.py on the H100 of h100.py: nothing here was measured on a GPU. PUBLISHED are measurements of
NeMo-RL 0.4 with Megatron-Core and vLLM (its docs/about/performance-summary.md, GRPO on policy, bfloat16). Their
responses' lengths are known by the mean and the longest alone; here they are log-normal with that mean.
"""

from typing import NamedTuple

import numpy as np

from tests.bench.h100 import H100
from tests.bench.simulate import Job, Shape, step_seconds, update_work
from tools.plan import SHAPES, shape

PROMPT = 128                            # tokens, of OpenMathInstruct-2: assumed
SIGMA = 0.6                             # of the logarithm of the lengths: assumed
LLAMA_8B = shape("llama", 4096, 14336, 32, 32, 8, 128256)


class Published(NamedTuple):
    model: str
    gpus: int
    responses: int
    minibatches: int
    mean: int                           # tokens of prompt and response
    longest: int
    tp: int                             # of the engine
    step_s: float
    layout: str                         # of the training: tensor, context, expert, pipeline parallel


PUBLISHED = [
    Published("Llama-3.1-8B", 16, 2048, 4, 1060, 4096, 1, 97.7, "pipeline 2"),
    Published("Qwen3-30B-A3B", 32, 2048, 4, 3154, 4096, 4, 225, "tensor 2, expert 8"),
    Published("Qwen3-32B", 32, 2048, 4, 3206, 4096, 4, 393, "tensor 4, pipeline 4"),
    Published("Qwen3-235B-A22B", 128, 512, 1, 5671, 8192, 16, 506, "tensor 2, context 2, expert 16, pipeline 8"),
]


def lengths_of(row: Published) -> np.ndarray:
    """Response lengths [S] with the published mean: log-normal, cut at the longest."""
    draws = np.random.default_rng(0).standard_normal(row.responses)
    low, high = 1.0, 20.0 * row.longest
    for _ in range(60):                 # the median by bisection: the mean of cut lengths grows with it
        median = (low * high) ** 0.5
        lengths = np.clip(median * np.exp(SIGMA * draws), 1, row.longest - PROMPT)
        low, high = (median, high) if lengths.mean() < row.mean - PROMPT else (low, median)
    return lengths.astype(int)


def predict(row: Published) -> dict[str, float]:
    config = LLAMA_8B if row.model == "Llama-3.1-8B" else SHAPES[row.model]
    lengths = lengths_of(row)
    sizes = Shape.of(config)
    for max_tokens, offload in ((32768, False), (16384, False), (16384, True), (row.longest, True)):
        job = Job(np.full(len(lengths), PROMPT), lengths, 16, row.gpus, row.tp, max_tokens, row.minibatches,
                  checkpointing=True, offload=offload)
        found = step_seconds(H100, sizes, job)
        if found["fits"]:
            break
    work = update_work(sizes, job)
    tokens = float((job.prompt_lengths + lengths).sum())
    if found["fits"]:
        seconds = found["update_s"] + found["old_log_prob_s"]
        found |= {"mfu": work["flops"].sum() / found["update_s"] / row.gpus / H100.flops,
                  "tokens_per_s": tokens / found["step_s"] / row.gpus,
                  "received_gb": float(work["all_gather"] + work["reduce_scatter"]) / 1e9,
                  "network_s": float(work["all_gather"] + work["reduce_scatter"]) / (8 * H100.nic_bytes_per_s),
                  "train_s": seconds}
    return found | {"max_tokens": max_tokens, "offload": offload}


def main() -> None:
    print("H100s: PREDICTED, beside what NeMo-RL 0.4 measured\n")
    columns = ["rollout_s", "sync_s", "offload_s", "old_log_prob_s", "update_s", "mfu", "received_gb",
               "network_bound_frac", "train_gb", "tokens_per_s"]
    print("| model, GPUs | published s, layout | predicted s | ratio | tokens a micro-batch, offload | "
          + " | ".join(columns) + " |\n|" + " --- |" * (5 + len(columns)))
    for row in PUBLISHED:
        found = predict(row)
        predicted = found.get("step_s")
        shown = [f"{found[name]:.3g}" if name in found else "" for name in columns]
        said = f"{predicted:.0f} | {predicted / row.step_s:.2f}" if predicted else "does not fit | "
        print(f"| {row.model}, {row.gpus} | {row.step_s:g}, {row.layout} | {said} | {found['max_tokens']}, "
              f"{found['offload']} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
