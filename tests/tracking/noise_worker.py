"""Optimizer steps with gradients of a known signal and noise, which are the same on any number of ranks: prints what
NoiseScale has seen. `python noise_worker.py MODEL KIND MAX_NORM`."""

import json
import sys

import torch

from common.flags.model import ModelConfig
from common.model.loading import load_policy
from common.model.optimizers import make_optimizer
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from common.tracking.noise_scale import NoiseScale

STEPS = 150
NOISE = 3.0
"""tr(Sigma) / b, of 20 numbers in each matrix; |G| is 1."""


def main(model: str, kind: str, max_norm: str) -> None:
    world = ranks.init()
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    config = OptimConfig(kind=kind, max_grad_norm=float(max_norm))
    optimizer = make_optimizer(policy, config)
    NoiseScale({}, decay=1.0).watch(policy, optimizer)
    parameters = [*policy.parameters()]
    generator = torch.Generator().manual_seed(0)
    signal = [torch.randn(p.shape, generator=generator) for p in parameters]
    size = torch.stack([part.norm() for part in signal]).norm()
    for _ in range(STEPS):
        for parameter, part in zip(parameters, signal):
            whole = part / size
            whole.view(-1)[:20] += torch.randn(20, generator=generator) * (NOISE / 20 / len(parameters)) ** 0.5
            pieces, rank = whole.chunk(world.size), world.rank          # FSDP2's cut
            parameter.grad = torch.zeros_like(parameter)
            if rank < len(pieces):
                parameter.grad.to_local().copy_(pieces[rank])
        optimizer_step(policy, optimizer, 0.0, config)
    if world.is_main:
        print(json.dumps([policy.noise_scale.state, policy.noise_scale.metrics(8)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
