"""Run by test_copies.py: gradients of several micro-batches where the ranks hold copies of the model, and how often the
copies summed them; and with different shares of the layers recomputed."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from common.batch import Batch
from common.flags.model import OptimConfig
from common.model.loading import Weights, load_critic, load_policy
from common.model.lora import LoRAConfig
from common.model.optimizers import make_optimizer
from common.model.policy import Critic, ModelConfig, PackedModel
from common.optim import optimizer_step
from common.parallel import ranks
from common.rollout import Minibatch
from tests.parallel.reduce_worker import main


class Case(NamedTuple):
    model: str
    num_microbatches: int = 3
    critic: bool = False
    rank: int = 0
    """Of adapters."""
    expert_parallel: int = 1
    recompute: float = 0.0
    bfloat16: bool = False
    """Weights, and so the gradients that an optimizer gets."""


def load(case: Case, folder: str, world: ranks.World, replicas: int) -> PackedModel:
    place = ranks.make_groups("cpu", ranks.collective_timeout(60), replicas, 1, case.expert_parallel)
    config = ModelConfig(compute_dtype="bfloat16" if case.bfloat16 else "float32", replicas=replicas,
                         expert_parallel=case.expert_parallel, gradient_checkpointing=case.recompute)
    weights = Weights(lora=LoRAConfig(rank=case.rank), dtype=torch.bfloat16 if case.bfloat16 else torch.float32)
    model = (load_critic if case.critic else load_policy)(folder, config, replace(world, **place), weights)
    for name, parameter in model.named_parameters():
        if name.startswith("head.") or name.endswith("lora_B"):         # of zeros others would have no gradient
            parameter.detach().to_local().fill_(0.01)
    return model


def microbatches_of(case: Case, world: ranks.World) -> list[Batch]:
    """Other tokens on each rank; the last rank has nothing in the last micro-batch, and runs a dummy."""
    generator = torch.Generator().manual_seed(world.rank)
    batches = []
    for length in range(7, 7 + case.num_microbatches):
        tokens = torch.randint(3, 53, (length,), generator=generator).tolist()
        batches.append(Batch.build([tokens[:3]], [tokens[3:]]))
    if world.rank == world.size - 1:
        batches[-1] = batches[-1].dummy()
    return batches


def backward(model: PackedModel, microbatch: Batch) -> None:
    output = model(microbatch) if isinstance(model, Critic) else model(microbatch, 1.0)[0]
    (output * microbatch.mask).sum().backward()


def gradient(model: PackedModel, microbatches: list[Batch]) -> tuple[dict[str, torch.Tensor], int]:
    """The whole gradient, and how many sums over copies there were."""
    sums = []
    all_reduce = dist.all_reduce

    def count(tensor, op=dist.ReduceOp.SUM, group=None, **others):
        sums.append(tensor.dtype)
        return all_reduce(tensor, op, group, **others)

    with mock.patch.object(dist, "all_reduce", count):
        for microbatch in microbatches:
            backward(model, microbatch)
    assert set(sums) <= {torch.float32}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name: parameter.grad.full_tensor() for name, parameter in trained}
    model.zero_grad(set_to_none=True)
    return found, len(sums)


def run(case: Case, folder: str, world: ranks.World) -> dict:
    microbatches = microbatches_of(case, world)
    model = load(case, folder, world, replicas=2)
    each = gradient(model, microbatches)                                # no mini-batch: summed after each
    Minibatch(microbatches, torch.zeros(1))
    once = gradient(model, microbatches)
    again = gradient(model, microbatches)                               # nothing is left of the one before
    single = gradient(load(case, folder, world, replicas=1), microbatches)
    shares = []                                                         # of layers that are recomputed
    for share in (0.0, 0.5, 1.0):
        shares.append(gradient(load(case._replace(recompute=share), folder, world, replicas=1), microbatches)[0])
    refused = ""
    if case.num_microbatches > 1:
        optimizer = make_optimizer(model, OptimConfig())
        backward(model, microbatches[0])
        try:
            optimizer_step(model, optimizer, 0.1, OptimConfig())
        except RuntimeError as error:
            refused = str(error)
    return {"each": each, "once": once, "again": again, "single": single, "refused": refused, "shares": shares}


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
