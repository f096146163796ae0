"""Run by test_sharding.py: the bfloat16 gradients that ranks bring, and the means that they get."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from common.batch import Batch
from common.model import sharding
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.parallel import ranks


class Case(NamedTuple):
    model: str
    part: int
    """Numbers that are float32 at a time, on all ranks that sum."""
    replicas: int = 1
    expert_parallel: int = 1


def run(case: Case, folder: str, world: ranks.World) -> dict:
    """`sums`: of each sum what all of its ranks brought [ranks, numbers], and what this rank got. `sent`: how many
    numbers each call sent, and their dtype. Also the gradient, and that of FSDP2's own sums."""
    world = replace(world, **ranks.make_groups("cpu", ranks.collective_timeout(60), case.replicas, 1,
                                               case.expert_parallel))
    sums, sent = [], []
    in_parts, reduce_scatter = sharding.ReduceInParts.__call__, sharding.reduce_scatter_single

    def record(comm, output_tensor, input_tensor, group, op):
        brought = input_tensor.new_empty(group.size(), len(input_tensor))
        dist.all_gather(list(brought), input_tensor, group)
        in_parts(comm, output_tensor, input_tensor, group, op)
        sums.append((brought, output_tensor.clone(), dist.get_rank(group)))

    def count(output, input, op, group, **others):
        sent.append((input.numel(), input.dtype, output.dtype))
        return reduce_scatter(output, input, op, group, **others)

    with mock.patch.object(sharding, "PART", case.part), \
            mock.patch.object(sharding.ReduceInParts, "__call__", record), \
            mock.patch.object(sharding, "reduce_scatter_single", count):
        gradient = gradient_of(case, folder, world)
    with mock.patch.object(sharding.FSDPModule, "set_custom_reduce_scatter"):
        plain = gradient_of(case, folder, world)
    return {"sums": sums, "sent": sent, "gradient": gradient, "plain": plain}


def gradient_of(case: Case, folder: str, world: ranks.World) -> dict[str, torch.Tensor]:
    """Of the log-probs of 20 tokens, other ones on each rank."""
    config = ModelConfig(replicas=case.replicas, expert_parallel=case.expert_parallel)
    policy = load_policy(folder, config, world)
    tokens = torch.randint(3, 53, (24,), generator=torch.Generator().manual_seed(world.rank)).tolist()
    logp, _ = policy(Batch.build([tokens[:4]], [tokens[4:]]), 1.0)
    logp.sum().backward()
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}
    return {name: parameter.grad.full_tensor() for name, parameter in policy.lm.named_parameters()}


def main(folder: Path, run: Callable[..., dict]) -> None:
    """`run` each case of FOLDER/todo.pt; what this rank found is in FOLDER/found_RANK.pt."""
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    found = {case: run(case, todo["models"][case.model], world) for case in todo["cases"]}
    torch.save(found, folder / f"found_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
