"""Update FLOP/s against this machine's measured bfloat16 matmul rate: `python -m tests.bench.bench_update`.

Counted FLOPs: `packing.train_flops` (three times the forward's matrix products, the head on every token; what the loop
saves by running the head on response tokens only counts as not done, see `head_frac`). Median of alternating pairs.
"""

import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro

from common import dist, losses
from common.optim import OptimConfig, make_optimizer, optimizer_step
from common.packing import Batch, sequence_cost
from common.policy import ModelConfig, load_policy, read_config


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    prompt_tokens: int = 100
    response_tokens: int = 27
    tokens: int = 8192
    """Packed tokens of one update."""
    max_tokens: int = 2048
    """Of one micro-batch."""
    pairs: int = 3


def matmul_rate(n: int = 2048) -> float:
    a, b = torch.randn(n, n, dtype=torch.bfloat16), torch.randn(n, n, dtype=torch.bfloat16)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 1.0:
        a @ b
        count += 1
    return 2 * n**3 * count / (time.perf_counter() - start)


def main(args: Args) -> None:
    world = dist.init()
    policy = load_policy(args.model, ModelConfig(), world)
    optimizer = make_optimizer(policy, OptimConfig(lr=0.0))
    config, rng = read_config(args.model, ModelConfig()), np.random.default_rng(0)
    per_micro = args.max_tokens // (args.prompt_tokens + args.response_tokens)
    microbatches = []
    for _ in range(args.tokens // args.max_tokens):
        prompts = rng.integers(5, config.vocab_size, (per_micro, args.prompt_tokens)).tolist()
        responses = rng.integers(5, config.vocab_size, (per_micro, args.response_tokens)).tolist()
        microbatches.append(Batch.build(prompts, responses))
    tokens = sum(len(b.tokens) for b in microbatches)
    lengths = np.concatenate([b.lengths.numpy() for b in microbatches])
    flops = 3 * sequence_cost(lengths, config).sum()
    head = 3 * 2 * config.hidden_size * config.vocab_size * sum(int((~b.mask).sum()) for b in microbatches)

    def update() -> float:
        start = time.perf_counter()
        losses.set_weights(microbatches, "token-mean")
        for b in microbatches:
            b.advantage = b.mask.float()
            logp, _ = policy(b, 1.0)
            loss, _ = losses.ppo(logp, logp.detach(), b.advantage, b.mask, b.cu_seqlens, 0.2, 0.2)
            (loss * b.weight).sum().backward()
        optimizer_step(policy, optimizer, 0.0, OptimConfig())
        return time.perf_counter() - start

    update()
    rows = []
    for _ in range(args.pairs):
        rate, seconds = matmul_rate(), update()
        done = (flops - head) / seconds
        rows.append({"tokens_per_s": tokens / seconds, "seconds": seconds, "matmul_gflops": rate / 1e9,
                     "update_gflops": done / 1e9, "ratio": done / rate})
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(json.dumps({"bench": "update", "threads": torch.get_num_threads(), "tokens": tokens, **result,
                      "head_frac": head / flops}))
    dist.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
