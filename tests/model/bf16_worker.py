"""Run by test_bf16_adamw.py: `bf16_worker.py MODEL FOLDER` on 4 ranks, two copies of two shards. Each rank
writes its shards after two steps, and which numbers of a weight, all equal, were rounded up."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from common.model.bf16_adamw import make_optimizer
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from common.parallel import ranks
from common.parallel.ranks import make_groups

if __name__ == "__main__":
    world = ranks.init()
    world = replace(world, **make_groups("cpu", ranks.collective_timeout(60), replicas=2))
    policy = load_policy(sys.argv[1], ModelConfig(replicas=2), world, dtype=torch.bfloat16)
    optimizer = make_optimizer(policy, OptimConfig(kind="adamw-bf16"))
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    torch.manual_seed(world.rank)                                       # ranks may have drawn other numbers before
    for _ in range(2):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    found = {name: p.detach().to_local().clone() for name, p in policy.named_parameters()}
    weight = policy.lm.model.embed_tokens.weight
    state = optimizer.state[weight]
    weight.detach().to_local().fill_(1.0)
    state["step"].fill_(0)
    state["exp_avg"].to_local().zero_()
    state["exp_avg_sq"].to_local().zero_()
    for group in optimizer.param_groups:
        group["lr"] = 2.0**-9                                           # half of the last digit below 1
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found["up"] = weight.detach().to_local() == 1.0
    torch.save(found, Path(sys.argv[2]) / f"{world.rank}.pt")
    ranks.shutdown()
