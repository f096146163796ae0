"""Offload: storages are empty while away, come back bit by bit, and training with it equals training without."""

import torch

from common.engine.base import RolloutConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.offload import Offload, OffloadConfig
from common.model.policy import ModelConfig
from common.optim import OptimConfig, make_optimizer
from tests.rank_worker import train

PROMPTS = [[5, 6, 7], [9, 10, 11, 12]]


def storages(policy, optimizer):
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    return [t.to_local().untyped_storage().nbytes() for t in [*policy.parameters(), *moments]]


def offloaded_bytes(offload: Offload) -> int:
    return sum(len(buffer) for _, buffer in [*offload.params.offloaded, *offload.moments.offloaded])


def run(model, world, config: OffloadConfig):
    """Two rollouts with a training step before, between and after them."""
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    optimizer = make_optimizer(policy, OptimConfig())
    model_config, rollout = ModelConfig(compute_dtype="float32"), RolloutConfig(engine="hf", max_response_length=8)
    engine = make_engine(model, read_config(model, model_config), rollout, model_config, world, PROMPTS, [2], 32, 0)
    engine.offload = Offload(config, [policy], [optimizer])
    seen = []
    for step in range(3):
        train(policy, optimizer, range(step, step + 1))
        if step < 2:
            engine.wake(policy)
            seen.append((storages(policy, optimizer), offloaded_bytes(engine.offload)))
            assert engine.sleep()["sync/probe_logp_diff"] < 1e-4
            assert all(storages(policy, optimizer)) and offloaded_bytes(engine.offload) == 0
    weights = [p.to_local().clone() for p in policy.parameters()]
    return weights, seen


def test_offloading_changes_no_weight_and_frees_every_storage(tiny_llama, world):
    plain, kept = run(tiny_llama, world, OffloadConfig())
    assert all(all(sizes) and away == 0 for sizes, away in kept)
    for config in (OffloadConfig(params=True, optimizer=True), OffloadConfig(optimizer=True)):
        weights, seen = run(tiny_llama, world, config)
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
        num_params = len(weights)
        for sizes, away in seen:
            assert [size == 0 for size in sizes] == [config.params] * num_params + [True] * 2 * num_params
            assert away == sum(kept[0][0][0 if config.params else num_params :])
