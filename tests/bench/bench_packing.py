"""How well and how fast samples are packed: padding, imbalance and planning time on log-normal lengths.

    python -m tests.bench.bench_packing [--out packing.jsonl]

One JSON line a case on stdout (and in --out), then a table. Needs one core and no GPU. Columns:
    padding        share of the tokens in rank 0's micro-batches that are padding. "if padded": with rows as long as
                   the longest sample
    rank           cost on the slowest rank over the mean rank, minus 1 (the goal is under 3%)
    lockstep       the same where ranks wait for each other in every micro-batch: sum over micro-batches of the slowest
    dealt          `rank` when samples are dealt in order, not balanced
    bound          `rank` that no plan can beat: the dearest single sample against the mean rank
    fill           tokens over the budget of all micro-batches
    plan_s         CPU seconds of one core for plan_step, the least of 5
"""

import argparse
import json
import platform
import time

import numpy as np
import torch
from transformers import Qwen2Config

from common.batch import Batch
from common.model.flops import sequence_cost
from common.packing import Sequences, plan_step
from tests.bench.record import report

QWEN_7B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064}
PROMPT, MEDIAN, SIGMA, LONGEST = 200, 800, 0.7, 8192       # tokens; responses are cut at LONGEST
BUDGET = 16384


def measure(world_size: int, samples_per_rank: int, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    responses = rng.lognormal(np.log(MEDIAN), SIGMA, world_size * samples_per_rank)
    lengths = PROMPT + np.minimum(responses, LONGEST).astype(np.int64)
    costs = sequence_cost(lengths, Qwen2Config(**QWEN_7B))
    times = []
    for _ in range(5):
        start = time.process_time()
        plan = plan_step(Sequences(lengths, costs), 1, world_size, BUDGET, seed)
        times.append(time.process_time() - start)

    microbatches = plan.minibatches[0]
    per_rank = np.array([[costs[share].sum() for share in ranks] for ranks in microbatches])    # [micro-batch, rank]
    tokens = np.array([[lengths[share].sum() for share in ranks] for ranks in microbatches])
    padded = sum(len(share) * lengths[share].max() for ranks in microbatches for share in ranks if len(share))
    mean = costs.sum() / world_size
    assert tokens.sum() == lengths.sum()
    assert tokens.max() <= BUDGET
    mine = torch.from_numpy(np.flatnonzero(plan.rank == 0))
    ends = torch.from_numpy(np.append(0, lengths[mine].cumsum())).int()
    num_tokens = int(ends[-1])
    batch = Batch(torch.zeros(num_tokens).long(), torch.zeros(num_tokens).bool(), ends, mine, mine)
    computed = sum(len(batch.microbatch(ranks[0]).tokens) for ranks in microbatches)
    return {"world_size": world_size, "samples": len(lengths), "seed": seed, "num_microbatches": len(microbatches),
            "padding": float(1 - lengths[mine].sum() / computed),
            "padding_if_padded": float(1 - lengths.sum() / padded),
            "rank": float(per_rank.sum(0).max() / mean - 1), "lockstep": float(per_rank.max(1).sum() / mean - 1),
            "dealt": float(costs.reshape(world_size, -1).sum(1).max() / mean - 1),
            "bound": max(0.0, float(costs.max() / mean - 1)), "fill": float(tokens.mean() / BUDGET),
            "plan_s": min(times)}


def main(out: str | None) -> None:
    print(f"{platform.machine()}, numpy {np.__version__}; prompts {PROMPT}, responses log-normal, median {MEDIAN}, "
          f"sigma {SIGMA}, at most {LONGEST}; {BUDGET} tokens a micro-batch; cost of a 7B model; worst of 3 seeds")
    lines, table, worst_of = [], [], []
    for world_size, samples_per_rank in [(8, 32), (32, 32), (128, 32), (512, 32), (1024, 32), (1024, 8)]:
        cases = [measure(world_size, samples_per_rank, seed) for seed in range(3)]
        lines += [json.dumps(case) for case in cases]
        worst = {key: max(case[key] for case in cases) for key in cases[0]}
        worst_of.append(worst)
        share = {key: f"{100 * worst[key]:.2f}%" for key in ("padding", "rank", "lockstep", "dealt", "bound")}
        table.append(f"| {world_size} | {worst['samples']} | {worst['num_microbatches']} | {share['padding']} "
                     f"({100 * worst['padding_if_padded']:.0f}% if padded) | {share['rank']} | {share['lockstep']} | "
                     f"{share['dealt']} | {share['bound']} | {100 * worst['fill']:.0f}% | {worst['plan_s']:.3f} |")
    print("\n".join(lines))
    print("\n| ranks | samples | micro-batches | padding | rank | lockstep | dealt | bound | fill | plan_s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(table))
    report("packing", worst_of_3_seeds=worst_of)
    if out:
        with open(out, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON lines to this file")
    main(parser.parse_args().out)
