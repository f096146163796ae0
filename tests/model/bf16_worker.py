"""Run by test_bf16_adamw.py: `bf16_worker.py MODEL MIXTURE FOLDER` on 4 ranks, for each kind of bfloat16 weights: which
numbers two copies of two shards draw, and a run of MIXTURE that goes on, with gradients of real passes, in two copies
of two shards, then in four shards, then with other experts on each two ranks."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from common.batch import Batch
from common.checkpoint.state import load_parts, tensors_of
from common.model.loading import Weights, load_policy
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from common.parallel import ranks
from common.parallel.ranks import make_groups
from tests.checkpoint import shards
from tests.model.adamw_oracle import before_step, bytes_of_moments, check_step, whole
from tests.parallel import DIVIDES_EXPERTS

LAYOUTS = {"copies": {"replicas": 2}, "shards": {}, **({"experts": {"expert_parallel": 2}} if DIVIDES_EXPERTS else {})}


def start(folder: str, world: ranks.World, kind: str, **layout: int):
    place = make_groups("cpu", ranks.collective_timeout(60), layout.get("replicas", 1), 1,
                        layout.get("expert_parallel", 1))
    policy = load_policy(folder, ModelConfig(**layout), replace(world, **place), Weights(dtype=torch.bfloat16))
    return policy, make_optimizer(policy, OptimConfig(kind=kind, lr=1e-3, weight_decay=0.1))


def copies(folder: str, world: ranks.World, kind: str) -> dict:
    """This rank's shards after two steps, and which numbers of a weight, all equal, were rounded up."""
    policy, optimizer = start(folder, world, kind, replicas=2)
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
    optimizer.state[weight] = {}
    for group in optimizer.param_groups:
        group |= {"lr": 2.0**-9, "weight_decay": 0.0}                   # half of the last digit below 1
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found["up"] = weight.detach().to_local() == 1.0
    return found | {f"state {name}": x.to_local() for name, x in state.items() if name != "step"}


def go_on(mixture: str, world: ranks.World, kind: str, folder: Path) -> dict:
    """What each layout loads and what it saves after two more steps, and what was checked meanwhile."""
    found, saved = {}, folder / f"{kind} one"
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        policy, optimizer = start(mixture, world, kind, **layout)
        load_parts({"policy": (policy, optimizer)}, saved)
        found[name] = {"loaded": whole(policy, optimizer), "bytes": bytes_of_moments(optimizer)}
        for step in range(2 * number + 2, 2 * number + 4):
            tokens = torch.randint(53, (4, 24), generator=torch.Generator().manual_seed(4 * step + world.rank)).tolist()
            batch = Batch.build([row[:4] for row in tokens], [row[4:] for row in tokens])
            logp, _ = policy(batch, 1.0)
            logp.sum().backward()
            before = before_step(policy, optimizer)
            assert all(grad.any() for key, (*_, grad) in before.items() if "experts" in key), name
            optimizer.step()
            found[name]["seen"] = check_step(policy, optimizer, before, step, 1e-3)
            optimizer.zero_grad()
        found[name]["trained"] = whole(policy, optimizer)
        saved = folder / f"{kind} {name}"
        shards.save(tensors_of({"policy": (policy, optimizer)}), saved)
    return found


if __name__ == "__main__":
    world, out = ranks.init(), Path(sys.argv[3])
    for kind in ("adamw-bf16", "adamw-8bit"):
        found = {"copies": copies(sys.argv[1], world, kind), "run": go_on(sys.argv[2], world, kind, out)}
        torch.save(found, out / f"{kind} {world.rank}.pt")
    ranks.shutdown()
