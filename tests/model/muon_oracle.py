"""Muon as torch has it, on whole float32 weights, and gradients that every layout of ranks takes its part of, for
test_muon.py and its ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from common.checkpoint.state import tensors_of
from common.model.loading import Weights, load_critic, load_policy
from common.model.lora import LoRAConfig
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, PackedModel
from common.model.sharding import shard_slice
from common.optim import OptimConfig
from common.parallel import ranks
from common.parallel.ranks import make_groups
from tests.parallel import DIVIDES_EXPERTS

LR, DECAY = 0.01, 0.1
ADAPTERS = Weights(lora=LoRAConfig(rank=4))
MODELS: dict[str, tuple[str, Callable, Weights]] = {                    # folder, loader, weights
    "llama": ("llama", load_policy, Weights()), "adapters": ("llama", load_policy, ADAPTERS),
    "critic": ("llama", load_critic, Weights()), "mixture": ("mixture", load_policy, Weights()),
}

LAYOUTS = {2: {"2 shards": {}},
           4: {"4 shards": {}, "2 copies": {"replicas": 2},
               **({"other experts": {"expert_parallel": 2}} if DIVIDES_EXPERTS else {})}}
"""Number of ranks -> how they may divide a model."""
CASES = [(ranks, layout, name) for ranks, layouts in LAYOUTS.items() for layout, flags in layouts.items()
         for name in MODELS if name == "mixture" or "expert_parallel" not in flags]


def start(name: str, folder: Path, world: ranks.World, **layout: int) -> tuple[PackedModel, torch.optim.Optimizer]:
    """A model of MODELS on the ranks of a layout."""
    place = make_groups("cpu", ranks.collective_timeout(60), layout.get("replicas", 1), 1,
                        layout.get("expert_parallel", 1)) if world.size > 1 else {}
    of, load, weights = MODELS[name]
    torch.manual_seed(0)                                                # of new adapters
    model = load(str(folder / of), ModelConfig(**layout), replace(world, **place), weights)
    return model, make_optimizer(model, OptimConfig(kind="muon", lr=LR, weight_decay=DECAY))


def trained(model: PackedModel) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Made up, the same on any number of ranks. Whole; of low rank in the middle steps, as gradients are."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    found = torch.randn(shape, generator=generator) * 10.0 ** (step - 2)
    if step % 2 and len(shape) > 1:
        found[..., 1:, :] = found[..., :1, :] * torch.randn(*shape[:-2], shape[-2] - 1, 1, generator=generator)
    return found


def train(model: PackedModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for name, p in trained(model).items():
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(gradient(name, p.shape, step)[shard_slice(p)])
        optimizer.step()
        optimizer.zero_grad()


def whole(model: PackedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a checkpoint holds, unsharded."""
    return {name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
            for name, tensor in tensors_of({"policy": (model, optimizer)}).items()}
