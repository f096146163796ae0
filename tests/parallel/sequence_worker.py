"""Run by test_sequence_parallel.py: gradients in float64, for groups of ranks that run micro-batches together."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.batch import Batch
from common.model import loading, sequence_parallel, sharding
from common.model.loading import load_critic, load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.parallel.ranks import make_mesh, make_sequence_group
from tests.parallel.layout_worker import Step, gradient


class Case(NamedTuple):
    model: str
    sequence_parallel: int
    replicas: int = 1
    share_prompt: bool = False
    recompute: bool = False
    budget: int = 20
    aggregation: str = "token-mean"
    is_broken: bool = False
    """Keys and values have the gradients of this rank's queries alone."""


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Models are built, and their gradients reduced, in float64."""
    build = loading._build

    def double(*args):
        model = build(*args).double()
        model.config._experts_implementation = "eager"                  # grouped products know no float64
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):               # transformers' own computes in float32
                module.forward = norm.__get__(module)
        return model

    def norm(module, x):
        return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    def precision(param_dtype, reduce_dtype):
        return MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)

    with mock.patch.object(loading, "_build", double), \
            mock.patch.object(sharding, "MixedPrecisionPolicy", precision):
        yield


class Unreduced(torch.autograd.Function):
    """A gather whose backward takes what this rank says of its own rows."""

    @staticmethod
    def forward(ctx, x, gathered, rank):
        ctx.rank = rank
        return gathered.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(2)[ctx.rank], None, None


def unreduced(x: torch.Tensor, dim: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    gathered = all_gather_single(x.detach(), dim, group)
    return Unreduced.apply(x, gathered, torch.distributed.get_rank(group))


def place(world: ranks.World, case: Case) -> ranks.World:
    timeout = ranks.collective_timeout(60)
    mesh, group = make_mesh("cpu", case.replicas, timeout), make_sequence_group(case.sequence_parallel, timeout)
    return replace(world, mesh=mesh, sequence=group)


def config_of(case: Case) -> ModelConfig:
    return ModelConfig(compute_dtype="float32", share_prompt=case.share_prompt, gradient_checkpointing=case.recompute,
                       sequence_parallel=case.sequence_parallel)


def run(case: Case, folder: str, step: Step, world: ranks.World) -> tuple[dict[str, torch.Tensor], int, int]:
    world, config = place(world, case), config_of(case)
    policy = load_policy(folder, config, world)
    gather = unreduced if case.is_broken else sequence_parallel.all_gather_single
    with mock.patch.object(sequence_parallel, "all_gather_single", gather):
        order = list(range(len(step.prompts)))
        return gradient(policy, world, read_config(folder, config), step, order, case.budget, case.aggregation)


def critic_of(folder: str, batch: Batch, world: ranks.World, case: Case) -> dict[str, torch.Tensor]:
    """Values of this rank's responses, and the gradient of a sum over all ranks' values."""
    world = place(world, case)
    critic = load_critic(folder, config_of(case), world)
    with torch.no_grad():
        critic.head.weight.to_local().copy_(torch.linspace(-1, 1, critic.backbone.config.hidden_size))
    mine = batch.select(torch.arange(world.rank, len(batch), world.size))
    values = critic(mine)
    (world.size * (values * values.detach().sign()).sum()).backward()
    full = {name: p.grad.full_tensor() for name, p in critic.backbone.named_parameters()}
    return full | {"values": critic.score(mine), "index": mine.index}


def main(folder: Path) -> None:
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    with in_float64():
        found = {case: run(case, todo["models"][case.model], todo["step"], world) for case in todo["cases"]}
        found["critic"] = critic_of(todo["models"]["llama"], todo["batch"], world, Case("llama", 2))
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
