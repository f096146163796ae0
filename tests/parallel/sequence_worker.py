"""Run by test_sequence_parallel.py: gradients in float64, for groups of ranks that run micro-batches together."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.batch import Batch
from common.forward import sequence_parallel
from common.model import loading, sharding
from common.model.loading import load_critic, load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.parallel.ranks import all_gather_single, make_groups
from tests.parallel.layout_worker import Step, gradient


class Case(NamedTuple):
    model: str
    sequence_parallel: int
    replicas: int = 1
    share_prompt: bool = False
    recompute: bool = False
    budget: int = 20
    aggregation: str = "token-mean"
    missing: str = ""
    """The reduction that is left out, of `without`."""


@contextlib.contextmanager
def in_float64(with_norms: bool = True) -> Iterator[None]:
    """Models are built, and their gradients reduced, in float64, in many parts. Norms and routers compute in it too,
    unless `families.Float64` is around the passes, which does this for all families."""
    build = loading._build

    def double(*args):
        model = build(*args).double()
        for config in (model.config, model.config.get_text_config()):
            config._experts_implementation = "eager"                    # grouped products know no float64
        for module in model.modules() if with_norms else ():
            name = type(module).__name__
            if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):    # transformers' own are float32
                module.forward = norm.__get__(module)
            if name.endswith("TopKRouter"):
                module.forward = route.__get__(module)
        return model

    def norm(module, x):
        return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    def route(module, x):
        logits = x @ module.weight.T
        return logits, *logits.softmax(-1).topk(module.top_k)

    def precision(param_dtype, reduce_dtype):
        return MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)

    with mock.patch.object(loading, "_build", double), \
            mock.patch.object(sharding, "MixedPrecisionPolicy", precision), mock.patch.object(sharding, "PART", 300):
        yield


class Unreduced(torch.autograd.Function):
    """A gather whose backward takes what this rank says of its own rows."""

    @staticmethod
    def forward(ctx, x, gathered, rank):
        ctx.rank, ctx.rows = rank, len(x)
        return gathered.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.view(-1, ctx.rows, *grad.shape[1:])[ctx.rank], None, None


def unreduced(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = all_gather_single(x.detach(), dim, group)
    return Unreduced.apply(x, gathered, dist.get_rank(group))


def own_chunk(output: torch.Tensor, input: torch.Tensor, op: object, group: dist.ProcessGroup) -> None:
    output.copy_(input.view(dist.get_world_size(group), -1)[dist.get_rank(group)])


def without(reduction: str, world: ranks.World) -> contextlib.AbstractContextManager:
    """A context in which one reduction of a gradient step is missing: of the gradients of keys and values over the
    group, of log-probs over the group, of gradients over the shards, or of gradients over the copies."""
    all_reduce = dist.all_reduce

    def but_for_copies(tensor, op=dist.ReduceOp.SUM, group=None):
        return None if group is world.mesh.get_group("replicate") else all_reduce(tensor, op, group)

    return {
        "": contextlib.nullcontext,
        "keys": lambda: mock.patch.object(sequence_parallel, "all_gather_single", unreduced),
        "log-probs": lambda: mock.patch.object(sequence_parallel, "all_reduce", lambda numbers, group: numbers),
        "shards": lambda: mock.patch.object(sharding, "reduce_scatter_single", own_chunk),
        "copies": lambda: mock.patch.object(dist, "all_reduce", but_for_copies),
    }[reduction]()


def place(world: ranks.World, case: Case) -> ranks.World:
    return replace(world, **make_groups("cpu", ranks.collective_timeout(60), case.replicas, case.sequence_parallel))


def config_of(case: Case) -> ModelConfig:
    return ModelConfig(compute_dtype="float32", share_prompt=case.share_prompt, gradient_checkpointing=case.recompute,
                       sequence_parallel=case.sequence_parallel)


def run(case: Case, folder: str, step: Step, world: ranks.World) -> tuple[dict[str, torch.Tensor], int, int]:
    world, config = place(world, case), config_of(case)
    policy = load_policy(folder, config, world)
    with without(case.missing, world):
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
        if "batch" in todo:
            found["critic"] = critic_of(todo["models"]["llama"], todo["batch"], world, Case("llama", 2))
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
