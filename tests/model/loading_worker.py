"""Run by test_loading.py under torchrun: what these ranks load of each model, against `from_pretrained`; then what they
export, all of them together."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.checkpoint import export
from common.model.loading import Weights, load_critic, load_policy
from common.model.lora import LoRAConfig, is_adapter
from common.model.policy import ModelConfig, saved_buffers
from common.parallel import ranks
from common.parallel.ranks import make_groups

FLOAT32, BF16 = ModelConfig(compute_dtype="float32"), ModelConfig()


def own_part(full: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The rank's share by torch's own rule for chunks."""
    if not isinstance(held, DTensor):
        return full
    dim, mesh = held.placements[-1].dim, held.device_mesh
    shares = full.chunk(mesh.size(-1), dim)
    return shares[rank] if (rank := mesh.get_local_rank(-1)) < len(shares) else full.narrow(dim, 0, 0)


def differing(module: torch.nn.Module, source: torch.nn.Module) -> list[str]:
    """Names of the weights and buffers that are not those of `source`, to the bit, where this rank holds them."""
    wanted = dict(source.named_parameters()) | dict(source.named_buffers())
    held = {name: p.detach() for name, p in module.named_parameters() if not is_adapter(name)}
    held |= dict(module.named_buffers())
    assert held.keys() == wanted.keys() and (saved_buffers(module).keys() == saved_buffers(source).keys())
    dims.update(x.placements[-1].dim for x in held.values() if isinstance(x, DTensor))
    local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in held.items()}
    return [name for name, x in held.items()
            if not torch.equal(local[name], own_part(wanted[name].detach().to(local[name].dtype), x))]


def examine(folder: str, world: ranks.World) -> list[str]:
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = load_policy(folder, FLOAT32, world)
    wrong = differing(policy.lm, source)
    with torch.no_grad():                                               # what is copied is the policy's, not the file's
        first = next(policy.lm.parameters())
        kept = first.detach().clone()
        first.add_(1.0)
        copied = load_policy(folder, BF16, world, Weights(frozen=True, like=policy))
        again = next(copied.lm.parameters())
        assert torch.equal(again.to_local(), first.to_local().bfloat16())
        first.copy_(kept)
        again.copy_(kept)
    wrong += differing(copied.lm, source)
    wrong += differing(load_policy(folder, BF16, world, Weights(lora=LoRAConfig(rank=2))).lm, source)
    critic = load_critic(folder, FLOAT32, world)
    assert not critic.head.weight.to_local().any()
    wrong += differing(critic.backbone, source.base_model)
    files = {"config.json": (Path(folder) / "config.json").read_bytes()}
    export.export(policy, files, Path(folder) / f"again_{world.size}", world)
    return wrong


if __name__ == "__main__":
    world, dims = ranks.init(), set()
    export.FILE_BYTES = 6000                                            # many files
    places = [world]
    if world.size == 4:
        places.append(replace(world, **make_groups("cpu", ranks.collective_timeout(60), replicas=2)))
    found = []
    for folder in sys.argv[2:]:
        if "ForSequenceClassification" in (Path(folder) / "config.json").read_text():
            source = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            critic = load_critic(folder, FLOAT32, world, Weights(frozen=True))
            assert world.rank or torch.equal(critic.head.weight.to_local(), source.score.weight)
            found += differing(critic.backbone, source.base_model)
        else:
            found += [f"{folder}: {name}" for place in places for name in examine(folder, place)]
    found = ranks.all_gather_objects(found)
    if world.is_main:
        torch.save({"wrong": found, "dims": dims}, sys.argv[1])
    ranks.shutdown()
