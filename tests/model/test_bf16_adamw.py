"""AdamW with bfloat16 weights and moments of 16 or 8 bits: rounding without bias, codes, steps in float64, resuming,
copies of shards and other numbers of them on real ranks."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from common.checkpoint.state import load_parts, tensors_of
from common.memory.offload import Offload, OffloadConfig
from common.memory.plan import Model
from common.model.loading import Weights, load_critic, load_policy
from common.model.lora import LoRAConfig
from common.model.optimizers import (
    BF16AdamW,
    block_size,
    code_values,
    decode,
    encode,
    make_optimizer,
    round_stochastically,
    tables_of,
)
from common.model.policy import ModelConfig
from common.optim import OptimConfig, optimizer_step
from tests.checkpoint import shards
from tests.conftest import launch
from tests.model.adamw_oracle import before_step, bytes_of_moments, check_step, dynamic_map, ulp, whole
from tests.rank_worker import everything, train

KINDS = "adamw-bf16", "adamw-8bit"
MIXTURE = Qwen3MoeConfig(                                               # rows of 24 have no blocks
    vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    max_position_embeddings=64, pad_token_id=0, decoder_sparse_step=1, mlp_only_layers=[],
)


def bits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).to(torch.int16)


def start(folder, world, kind="adamw-bf16", **flags):
    policy = load_policy(folder, ModelConfig(), world, Weights(dtype=torch.bfloat16, **flags))
    return policy, make_optimizer(policy, OptimConfig(kind=kind, weight_decay=0.1))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bf16_adamw") / "mixture"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE).save_pretrained(folder)
    return str(folder)


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


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_are_the_nearest_of_the_paper(name):
    """Blocks of numbers over 12 decades, against a search through the paper's 256 numbers in Python; a block of 0."""
    numbers = dynamic_map(name == "exp_avg")
    assert len(numbers) == 256 and code_values(name, torch.device("cpu")).tolist() == pytest.approx(numbers, rel=1e-6)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 16, generator=generator) * 10 ** (12 * torch.rand(40, 16, generator=generator) - 11)
    x = torch.cat([x if name == "exp_avg" else x.abs(), torch.zeros(1, 16)])
    scale = torch.full((41, 1), torch.nan)
    codes = encode(x, code_values(name, torch.device("cpu")), scale)
    assert len(codes.unique()) > 100
    for block, of_block, found in zip(x.tolist(), scale[:, 0].tolist(), codes.tolist()):
        largest = max(abs(number) for number in block)
        assert of_block == largest
        for number, code in zip(block, found):
            share = number / (largest or 1.0)
            distance = min(abs(share - other) for other in numbers)
            assert abs(share - numbers[code]) <= distance * (1 + 1e-4) + 1e-12
    pieces = {name: codes.to(torch.uint8), f"{name}_scale": scale}
    want = [[numbers[code] * largest for code in row] for row, largest in zip(codes.tolist(), scale[:, 0].tolist())]
    assert torch.allclose(decode(pieces, name, tables_of(pieces)), torch.tensor(want), rtol=1e-6, atol=0)
    assert not decode(pieces, name, tables_of(pieces))[-1].any()


def test_which_moments_are_codes():
    """Rows of whole blocks of 16 to 256 numbers, that no rank has a part of."""
    sizes = {(8, 4096): 256, (8, 576): 64, (3, 8, 48): 16, (8, 24): 1, (512,): 1}
    for shape, block in sizes.items():
        assert block_size("adamw-8bit", torch.Size(shape), [0]) == block
        assert block_size("adamw-bf16", torch.Size(shape), [0]) == 1
    assert block_size("adamw-8bit", torch.Size((3, 8, 64)), [0, 1]) == 64
    assert block_size("adamw-8bit", torch.Size((3, 8, 64)), [0, 2]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_adamw_in_float64(kind, tiny_llama, world):
    """Each step from what is stored, with rows and columns of 0 in the gradient. Vectors have no weight decay, their
    moments no codes."""
    policy, optimizer = start(tiny_llama, world, kind)
    assert isinstance(optimizer, BF16AdamW)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 4):
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)
            grad = torch.randn(p.shape, generator=generator) * 10 ** (step - 2)
            grad[..., :3] = 0
            grad[:2] *= float(p.ndim < 2)
            p.grad.to_local().copy_(grad)
        before = before_step(policy, optimizer)
        assert math.isfinite(optimizer_step(policy, optimizer, 0.01, OptimConfig(max_grad_norm=0.0)))
        seen = check_step(policy, optimizer, before, step, 0.01)
        assert seen["not nearest"] > 1000 and (seen["codes"] > 2 * seen["bfloat16"] / 1.01) == (kind == "adamw-8bit")


@pytest.mark.parametrize("kind", ["adamw", *KINDS])
def test_bytes_of_moments_are_those_of_the_plan(kind, tiny_llama, mixture, world):
    for folder in (tiny_llama, mixture):
        dtype = torch.float32 if kind == "adamw" else torch.bfloat16
        policy = load_policy(folder, ModelConfig(), world, Weights(dtype=dtype))
        optimizer = make_optimizer(policy, OptimConfig(kind=kind))
        train(policy, optimizer, range(1))
        plan = Model(policy.lm.config, ModelConfig(), 1, kind=kind)
        assert bytes_of_moments(optimizer) == plan.moment_bytes
    numbers = {"adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2.75}         # here: of small and odd rows
    assert numbers[kind] * 0.9 < plan.moment_bytes / plan.all <= numbers[kind]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_as_if_never_stopped(kind, tiny_llama, world, tmp_path):
    """Three steps, saved, loaded into a new model whose random numbers were others before, two more steps: bit by bit
    what five steps give. Moments offloaded meanwhile."""
    policy, optimizer = start(tiny_llama, world, kind)
    train(policy, optimizer, range(3))
    shards.save(tensors_of({"policy": (policy, optimizer)}), tmp_path / "saved")
    train(policy, optimizer, range(3, 5))
    again, other = start(tiny_llama, world, kind)
    Offload(OffloadConfig(optimizer=True), [again], [other])
    torch.manual_seed(77)
    load_parts({"policy": (again, other)}, tmp_path / "saved")
    train(again, other, range(3, 5))
    moments = [x for state in other.state.values() for name, x in state.items() if name != "step"]
    assert not any(x.to_local().untyped_storage().nbytes() for x in moments)
    tensors_of({"policy": (again, other)})                              # brings the moments back
    want, found = everything(policy, optimizer), everything(again, other)
    assert want.keys() == found.keys() and all(torch.equal(want[name], found[name]) for name in want)
    assert {x.dtype for name, x in want.items() if name.endswith((".weight", "exp_avg", "exp_avg_sq"))} == {
        torch.bfloat16} | ({torch.uint8} if kind == "adamw-8bit" else set())


def test_a_checkpoint_of_the_other_kind_is_converted(tiny_llama, world, tmp_path):
    """--save.resume of a run with float32 weights: weights and moments are rounded to nearest. Codes are not made from
    moments, nor moments from codes: a clear error."""
    plain = load_policy(tiny_llama, ModelConfig(), world)
    optimizer = make_optimizer(plain, OptimConfig())
    train(plain, optimizer, range(2))
    shards.save(tensors_of({"policy": (plain, optimizer)}), tmp_path / "saved")
    policy, rounded = start(tiny_llama, world)
    load_parts({"policy": (policy, rounded)}, tmp_path / "saved")
    want, found = everything(plain, optimizer), everything(policy, rounded)
    for name, x in want.items():
        assert torch.equal(x if name.endswith(" step") else x.bfloat16(), found[name]), name
    policy, coded = start(tiny_llama, world, "adamw-8bit")
    with pytest.raises(ValueError, match=r"saved and this run have other moments, \S+_scale for example: --optim\.k"):
        load_parts({"policy": (policy, coded)}, tmp_path / "saved")
    shards.save(tensors_of({"policy": (policy, coded)}), tmp_path / "coded")
    with pytest.raises(ValueError, match=r"coded and this run have other moments, \S+_scale for example: --optim\.k"):
        load_parts({"policy": (plain, optimizer)}, tmp_path / "coded")


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_is_trained(kind, tiny_llama, world):
    """Adapters are bfloat16 and learn; a critic's head stays float32; a frozen copy is what the policy was; an infinite
    gradient changes nothing."""
    policy, optimizer = start(tiny_llama, world, kind, lora=LoRAConfig(rank=4))
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.bfloat16} and len(trained) == 2 * 14
    adapters = [p for p in policy.parameters() if p.requires_grad]
    for p in adapters:
        p.grad = torch.ones_like(p)
    before = before_step(policy, optimizer)
    optimizer_step(policy, optimizer, 0.01, OptimConfig(max_grad_norm=0.0))
    seen = check_step(policy, optimizer, before, 1, 0.01)
    of_a = sum(p.numel() for name, p in trained.items() if name.endswith("lora_A"))
    assert seen["codes"] == (2 * of_a if kind == "adamw-8bit" else 0)   # rows of B have 4 numbers
    critic = load_critic(tiny_llama, ModelConfig(), world, Weights(dtype=torch.bfloat16))
    of_critic = make_optimizer(critic, OptimConfig(kind=kind))
    train(critic, of_critic, range(1))
    assert critic.head.weight.dtype == of_critic.state[critic.head.weight]["exp_avg"].dtype == torch.float32
    assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    policy, optimizer = start(tiny_llama, world, kind)
    frozen = load_policy(tiny_llama, ModelConfig(), world, Weights(frozen=True, like=policy))
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(policy.parameters(), frozen.parameters()))
    train(policy, optimizer, range(1))
    before = everything(policy, optimizer)
    for p in policy.parameters():
        p.grad = torch.full_like(p, math.inf)
    assert not math.isfinite(optimizer_step(policy, optimizer, 0.1, OptimConfig(kind=kind)))
    after = everything(policy, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def ranks_found(tiny_llama, mixture, world, tmp_path_factory):
    """What four gloo ranks found (bf16_worker.py), after one rank had saved a first step of the mixture."""
    folder = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        policy, optimizer = start(mixture, world, kind)
        train(policy, optimizer, range(1))
        shards.save(tensors_of({"policy": (policy, optimizer)}), folder / f"{kind} one")
        torch.save(whole(policy, optimizer), folder / f"{kind} one.pt")
    launch("tests/model/bf16_worker.py", tiny_llama, mixture, folder, ranks=4, warm=True)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_other_numbers_of_ranks_and_experts(kind, ranks_found, mixture, world):
    """One rank saves, two shards go on, then four, then four with other experts on each two, then one: each loads all
    bytes that the one before saved. Steps have been those of float64 (bf16_worker.py)."""
    found = [torch.load(ranks_found / f"{kind} {rank}.pt")["run"] for rank in range(4)]
    saved = torch.load(ranks_found / f"{kind} one.pt")
    for layout, ours in found[0].items():
        assert ours["loaded"].keys() == saved.keys(), layout
        assert all(torch.equal(ours["loaded"][name], x) for name, x in saved.items()), layout
        saved = ours["trained"]
        codes = [of_rank[layout]["seen"]["codes"] for of_rank in found]
        assert all(codes) if kind == "adamw-8bit" else not any(codes)
        shape = {"replicas": 2} if layout == "copies" else {"expert_parallel": 2} if layout == "experts" else {}
        plan = Model(MIXTURE, ModelConfig(**shape), 2 if layout == "copies" else 4, kind=kind)
        assert max(of_rank[layout]["bytes"] for of_rank in found) == plan.moment_bytes
    policy, optimizer = start(mixture, world, kind)
    load_parts({"policy": (policy, optimizer)}, ranks_found / f"{kind} {layout}")
    last = whole(policy, optimizer)
    assert last.keys() == saved.keys() and all(torch.equal(last[name], x) for name, x in saved.items())
    assert {x.dtype for x in last.values()} == {torch.bfloat16, torch.float32} | (
        {torch.uint8} if kind == "adamw-8bit" else set())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_shard_draw_the_same_and_other_shards_others(kind, ranks_found):
    """Four gloo ranks in two copies: see bf16_worker.py."""
    ranks = [torch.load(ranks_found / f"{kind} {rank}.pt")["copies"] for rank in range(4)]
    for name in ranks[0]:
        for first, copy in ((0, 2), (1, 3)):
            assert torch.equal(ranks[first][name], ranks[copy][name]), name
    up = [rank["up"] for rank in ranks]                                 # of equal numbers, those that were rounded up
    assert 0.45 < up[0].double().mean() < 0.55
    assert 0.45 < (up[0] == up[1]).double().mean() < 0.55
