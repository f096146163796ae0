"""AdamW with bfloat16 weights: rounding without bias, steps in float64, resuming, copies of shards on real ranks."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from common.checkpoint.state import ShardWriter, load_parts, tensors_of
from common.model.bf16_adamw import BF16AdamW, make_optimizer, round_stochastically
from common.model.loading import load_critic, load_policy
from common.model.lora import LoRAConfig
from common.model.offload import Offload, OffloadConfig
from common.model.policy import ModelConfig
from common.optim import OptimConfig, optimizer_step
from tests.conftest import launch
from tests.rank_worker import everything, train

BF16 = OptimConfig(kind="adamw-bf16", weight_decay=0.1)


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance of bfloat16 numbers at x, float64: 8 bits of significand."""
    return 2.0 ** (x.double().abs().log2().floor() - 7)


def bits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).to(torch.int16)


def start(folder, world, **flags):
    policy = load_policy(folder, ModelConfig(), world, dtype=torch.bfloat16, **flags)
    return policy, make_optimizer(policy, BF16)


def test_rounding_has_no_bias_and_stays_beside_the_number():
    """64 numbers, 20,000 draws each: the mean is the number within 5 standard errors, and each result is one of the two
    bfloat16 numbers beside it. Numbers that bfloat16 has stay as they are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, generator=generator) * 10 ** (4 * torch.rand(64, generator=generator) - 3)
    draws = 20_000
    rounded = round_stochastically(x.repeat(draws), bits(draws * 64)).view(draws, 64).double()
    step = ulp(x)
    below = (x.double() / step).floor() * step
    assert ((rounded == below) | (rounded == below + step)).all()
    share = (x.double() - below) / step                                 # of draws that go up
    error = (rounded.mean(0) - x.double()).abs() / step
    assert (error <= 5 * (share * (1 - share) / draws).sqrt() + 1e-12).all()
    assert ((rounded == below).any(0) & (rounded == below + step).any(0)).sum() > 50
    exact = x.bfloat16()
    assert torch.equal(round_stochastically(exact.float().repeat(9), bits(9 * 64)), exact.repeat(9))


def test_steps_are_those_of_adamw_in_float64(tiny_llama, world):
    """Each step from what is stored: weights and moments are within a last digit of AdamW in float64, and not all are
    the nearest number. Vectors have no weight decay."""
    policy, optimizer = start(tiny_llama, world)
    assert isinstance(optimizer, BF16AdamW)
    generator = torch.Generator().manual_seed(2)
    not_nearest = 0
    for step in range(1, 4):
        before, grads = {}, {}
        for name, p in policy.lm.named_parameters():
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(torch.randn(p.shape, generator=generator) * 10 ** (step - 2))
            state = optimizer.state.get(p, {})
            none = torch.zeros_like(p)
            before[name] = [x.to_local().double().clone()
                            for x in (p.detach(), state.get("exp_avg", none), state.get("exp_avg_sq", none))]
            grads[name] = p.grad.to_local().double()
        assert math.isfinite(optimizer_step(policy, optimizer, 0.01, OptimConfig(max_grad_norm=0.0)))
        for name, p in policy.lm.named_parameters():
            (w, m, v), g = before[name], grads[name]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            change = 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            w = w * (1 - 0.01 * 0.1 * (p.ndim >= 2)) - change
            state = optimizer.state[p]
            assert state["step"] == step
            kept = p.detach(), state["exp_avg"], state["exp_avg_sq"]
            for want, found, old in zip((w, m, v), kept, before[name]):
                found, of_float32 = found.to_local(), 1e-6 * (old.abs() + (want - old).abs())
                assert found.dtype == torch.bfloat16
                assert ((found.double() - want).abs() <= ulp(want) + of_float32).all(), name
                not_nearest += int((found != want.bfloat16()).sum())
    assert not_nearest > 1000


def test_small_updates_arrive_and_second_moments_shrink(tiny_llama, world):
    """50 updates of a hundredth of a last digit move a weight by half of one, on average; 1,000 gradients of 0 let the
    second moment fall to 0.999^1000 of itself. Rounded to nearest, neither would change."""
    policy, optimizer = start(tiny_llama, world)
    weight = policy.lm.model.embed_tokens.weight                        # 4096 x 32
    weight.detach().to_local().fill_(1.0 + 2**-7)
    group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    group |= {"weight_decay": 0.0, "lr": 2**-7 / 100, "betas": (0.0, 0.0)}
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = (1.0 + 2**-7 - weight.detach().to_local().double()) / 2**-7
    assert moved.mean() == pytest.approx(0.5, abs=0.01)                 # standard error: 0.002
    assert moved.max() <= 8                                             # other random numbers in each step
    group |= {"lr": 0.0, "betas": (0.9, 0.999)}
    second = optimizer.state[weight]["exp_avg_sq"].to_local().fill_(1.0)
    for _ in range(1000):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert second.double().mean() == pytest.approx(0.999**1000, rel=0.01)


def test_a_resumed_run_goes_on_as_if_never_stopped(tiny_llama, world, tmp_path):
    """Three steps, saved, loaded into a new model whose random numbers were others before, two more steps: bit by bit
    what five steps give. Moments offloaded meanwhile."""
    policy, optimizer = start(tiny_llama, world)
    train(policy, optimizer, range(3))
    dcp.save(tensors_of({"policy": (policy, optimizer)}), storage_writer=ShardWriter(tmp_path / "saved"))
    train(policy, optimizer, range(3, 5))
    again, other = start(tiny_llama, world)
    Offload(OffloadConfig(optimizer=True), [again], [other])
    torch.manual_seed(77)
    load_parts({"policy": (again, other)}, tmp_path / "saved")
    train(again, other, range(3, 5))
    tensors_of({"policy": (again, other)})                              # brings the moments back
    want, found = everything(policy, optimizer), everything(again, other)
    assert want.keys() == found.keys() and all(torch.equal(want[name], found[name]) for name in want)
    assert all(x.dtype == torch.bfloat16 for name, x in want.items() if not name.endswith(" step"))


def test_a_checkpoint_of_the_other_kind_is_converted(tiny_llama, world, tmp_path):
    """--save.resume of a run with float32 weights: weights and moments are rounded to nearest."""
    plain = load_policy(tiny_llama, ModelConfig(), world)
    optimizer = make_optimizer(plain, OptimConfig())
    train(plain, optimizer, range(2))
    dcp.save(tensors_of({"policy": (plain, optimizer)}), storage_writer=ShardWriter(tmp_path / "saved"))
    policy, rounded = start(tiny_llama, world)
    load_parts({"policy": (policy, rounded)}, tmp_path / "saved")
    want, found = everything(plain, optimizer), everything(policy, rounded)
    for name, x in want.items():
        assert torch.equal(x if name.endswith(" step") else x.bfloat16(), found[name]), name


def test_what_else_is_trained(tiny_llama, world):
    """Adapters are bfloat16 and learn; a critic's head stays float32; a frozen copy is what the policy was; an infinite
    gradient changes nothing."""
    policy, optimizer = start(tiny_llama, world, lora=LoRAConfig(rank=4))
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16} and len(trained) == 2 * 14
    critic = load_critic(tiny_llama, ModelConfig(), world, dtype=torch.bfloat16)
    of_critic = make_optimizer(critic, BF16)
    train(critic, of_critic, range(1))
    assert critic.head.weight.dtype == of_critic.state[critic.head.weight]["exp_avg"].dtype == torch.float32
    assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    policy, optimizer = start(tiny_llama, world)
    frozen = load_policy(tiny_llama, ModelConfig(), world, frozen=True, like=policy)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(policy.parameters(), frozen.parameters()))
    train(policy, optimizer, range(1))
    before = everything(policy, optimizer)
    for p in policy.parameters():
        p.grad = torch.full_like(p, math.inf)
    assert not math.isfinite(optimizer_step(policy, optimizer, 0.1, BF16))
    after = everything(policy, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_copies_of_a_shard_draw_the_same_and_other_shards_others(tiny_llama, tmp_path):
    """Four gloo ranks in two copies: see bf16_worker.py."""
    launch("tests/model/bf16_worker.py", tiny_llama, tmp_path, ranks=4, warm=True)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for name in ranks[0]:
        for first, copy in ((0, 2), (1, 3)):
            assert torch.equal(ranks[first][name], ranks[copy][name]), name
    up = [rank["up"] for rank in ranks]                                 # of equal numbers, those that were rounded up
    assert 0.45 < up[0].double().mean() < 0.55
    assert 0.45 < (up[0] == up[1]).double().mean() < 0.55
