"""Offload: storages are empty while away, come back bit by bit, and training with it equals training without."""

import torch

from common.batch import Batch
from common.checkpoint.state import tensors_of
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.memory.offload import Offload, OffloadConfig
from common.model.loading import load_policy, read_config
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig, optimizer_step
from tests.rank_worker import everything, train

PROMPTS = [[5, 6, 7], [9, 10, 11, 12]]


def of_moments(optimizer):
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    return [moment.to_local().untyped_storage().nbytes() for moment in moments]


def storages(policy, optimizer):
    return [p.to_local().untyped_storage().nbytes() for p in policy.parameters()] + of_moments(optimizer)


def offloaded_bytes(offload: Offload) -> int:
    away = [tensors for tensors in [offload.params, *offload.moments] if tensors.emptied]
    return sum(len(buffer) for tensors in away for buffer in tensors.host)


def run(model, world, config: OffloadConfig):
    """Two rollouts with a training step before, between and after them."""
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    optimizer = make_optimizer(policy, OptimConfig())
    model_config, rollout = ModelConfig(compute_dtype="float32"), RolloutConfig(engine="hf", max_response_length=8)
    setup = EngineSetup(model, read_config(model, model_config), rollout, model_config, world, PROMPTS, [2], 32, 0)
    engine = make_engine(setup)
    engine.offload = Offload(config, [policy], [optimizer])
    engine.probe_every = 1
    seen = []
    for step in range(3):
        train(policy, optimizer, range(step, step + 1))
        if step < 2:
            engine.wake(policy)
            seen.append((storages(policy, optimizer), offloaded_bytes(engine.offload)))
            assert engine.sleep()["sync/probe_logp_diff"] < 1e-4
            awake = storages(policy, optimizer)
            num_params = len(awake) // 3                                # and two moments each
            assert [size == 0 for size in awake] == [False] * num_params + [config.optimizer] * 2 * num_params
    tensors_of({"policy": (policy, optimizer)})                         # of a save
    assert all(storages(policy, optimizer)) and offloaded_bytes(engine.offload) == 0
    saved = [x.clone() for x in everything(policy, optimizer).values()]
    engine.wake(policy)                                                 # they leave again
    assert (storages(policy, optimizer)[-1] == 0) == config.optimizer
    return saved, seen


def test_moments_and_activations_are_never_on_the_gpu_together(tiny_llama, world):
    """Moments have bytes while the optimizer steps, and in no forward or backward pass before or after it."""
    policy = load_policy(tiny_llama, ModelConfig(compute_dtype="float32"), world)
    optimizer = make_optimizer(policy, OptimConfig())
    Offload(OffloadConfig(optimizer=True), [policy], [optimizer])
    train(policy, optimizer, range(1))
    seen = []

    def look(name):
        seen.append((name, {size > 0 for size in of_moments(optimizer)}))

    policy.lm.register_forward_hook(lambda *_: look("forward"))
    policy.lm.base_model.register_forward_hook(lambda *_: look("forward"))
    next(policy.parameters()).register_post_accumulate_grad_hook(lambda *_: look("backward"))
    optimizer.register_step_pre_hook(lambda *_: look("step"))           # after the one that brings them back
    batch = Batch.build(PROMPTS, [[2, 3], [4]])
    for _ in range(2):
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        optimizer_step(policy, optimizer, 0.01, OptimConfig())
    assert {name for name, _ in seen} == {"forward", "backward", "step"}
    assert all(there == {name == "step"} for name, there in seen)


def test_offloading_changes_no_weight_and_frees_every_storage(tiny_llama, world):
    plain, kept = run(tiny_llama, world, OffloadConfig())
    num_params = len(kept[0][0]) // 3
    assert all(all(sizes) and away == 0 for sizes, away in kept)
    for config in (OffloadConfig(params=True, optimizer=True), OffloadConfig(optimizer=True)):
        weights, seen = run(tiny_llama, world, config)
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
        for sizes, away in seen:
            assert [size == 0 for size in sizes] == [config.params] * num_params + [True] * 2 * num_params
            assert away == sum(kept[0][0][0 if config.params else num_params :])
