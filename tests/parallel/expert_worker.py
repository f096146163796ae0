"""Run by test_expert_parallel.py: gradients, norms, steps and checkpoints in float64 where ranks have other experts."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common.checkpoint.state import load_parts, tensors_of
from common.model.loading import ALL_TRAINED, Weights, load_policy, read_config
from common.model.lora import LoRAConfig, is_adapter
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.model.sharding import local, shard_slice
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from common.parallel.gather import gathered_by_block
from tests.checkpoint import shards
from tests.parallel.layout_worker import Step, gradient
from tests.parallel.sequence_worker import config_of, in_float64

LORA = LoRAConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "experts"))
OPTIM = OptimConfig(max_grad_norm=0.5, weight_decay=0.1)


class Case(NamedTuple):
    expert_parallel: int
    sequence_parallel: int = 1
    replicas: int = 1
    recompute: bool = False
    share_prompt: bool = False
    model: str = "mixture"
    undivided: bool = False
    """Gradients of experts are divided by the ranks that have the same ones, not by all."""
    lora: bool = False
    """Adapters alone are trained, those of the experts among them."""
    aux: float = 0.0
    """Factor of the load balancing loss."""


SAVED = (Case(2), Case(2, lora=True))


def place(world: ranks.World, case: Case) -> ranks.World:
    sizes = case.replicas, case.sequence_parallel, case.expert_parallel
    return replace(world, **ranks.make_groups("cpu", ranks.collective_timeout(60), *sizes))


def config(case: Case) -> ModelConfig:
    return replace(config_of(case), router_aux_coef=case.aux)


def load(case: Case, folder: str, world: ranks.World) -> Policy:
    """The policy; with adapters, their matrices are the same in all processes, and none is 0."""
    weights = Weights(lora=LORA) if case.lora else ALL_TRAINED
    policy = load_policy(folder, config(case), world, weights)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if is_adapter(name):
            full = 0.3 * torch.randn(parameter.shape, generator=generator)
            local(parameter.detach()).copy_(full[shard_slice(parameter)])
    return policy


def whole(parts: dict) -> dict[str, Tensor]:
    return {name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
            for name, tensor in tensors_of(parts).items()}


def run(case: Case, folder: str, step: Step, world: ranks.World, saved: Path | None = None) -> dict:
    """The gradient, its norm, and weights and moments after a clipped step. `saved`: they are saved there, and loaded
    by a model whose experts are not divided among ranks, and by one whose are."""
    here = place(world, case)
    with mock.patch.object(FSDPModule, "set_all_reduce_hook") if case.undivided else contextlib.nullcontext():
        policy = load(case, folder, here)
    found = {"loaded": weights_of(policy)}
    found["by_block"] = found["loaded"]
    if not any(is_adapter(name) for name, _ in policy.named_parameters()):
        by_block = gathered_by_block(policy, torch.float64)
        found["by_block"] = {name.removeprefix("lm."): tensor for name, tensor in by_block}
    order = list(range(len(step.prompts)))
    found["gradient"], *_ = gradient(policy, here, read_config(folder, config(case)), step, order, 20, "token-mean")
    found["local"] = {name: tuple(p.to_local().shape) for name, p in policy.lm.named_parameters()}
    found["trained"] = [name for name, p in policy.lm.named_parameters() if p.requires_grad]
    parts = {"policy": (policy, make_optimizer(policy, OPTIM))}
    found["norm"] = optimizer_step(policy, parts["policy"][1], 0.01, OPTIM)
    found |= {"stepped": weights_of(policy), "state": whole(parts)}
    if saved is not None:
        shards.save(tensors_of(parts), saved)
        for loader in (world, here):
            again = load(case, folder, loader)
            parts = {"policy": (again, make_optimizer(again, OPTIM))}
            load_parts(parts, saved)
            found.setdefault("restored", []).append(whole(parts))
    return found


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_tensors(None)}


def main(folder: Path) -> None:
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    with in_float64():
        found = {case: run(case, todo["models"][case.model], todo["step"], world,
                           folder / f"saved_{i}" if case in SAVED else None)
                 for i, case in enumerate(todo["cases"])}
    torch.save(found, folder / f"found_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
