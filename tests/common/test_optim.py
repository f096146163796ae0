"""The learning rate, AdamW's step and clipping by hand; gradients that are not finite change nothing."""

import math

import pytest
import torch
from torch._inductor import metrics
from transformers import LlamaConfig, get_scheduler

from common.kernels.logp import compiled
from common.model.loading import load_policy
from common.model.optimizers import factors_of, first_state, make_optimizer, random_bits, tables_of, update
from common.optim import OptimConfig, learning_rate, optimizer_step
from tests.model.test_policy import FLOAT32, SIZES, save_model


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> str:
    return save_model(LlamaConfig(**SIZES, tie_word_embeddings=False), tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize(
    ("config", "total", "want"),
    [
        (OptimConfig(lr=2.0), 4, [2, 2, 2, 2]),
        (OptimConfig(lr=2.0, warmup_steps=2), 4, [1, 2, 2, 2]),
        (OptimConfig(lr=8.0, warmup_steps=4, schedule="linear"), 8, [2, 4, 6, 8, 8, 6, 4, 2]),
        (OptimConfig(lr=10.0, schedule="linear", min_lr_frac=0.2), 4, [10, 8, 6, 4]),
        (OptimConfig(lr=1.0, schedule="linear", min_lr_frac=1.0), 3, [1, 1, 1]),
        (OptimConfig(lr=4.0, schedule="cosine"), 4, [4, 2 + math.sqrt(2), 2, 2 - math.sqrt(2)]),
        (OptimConfig(lr=4.0, schedule="cosine", warmup_steps=1, min_lr_frac=0.5), 3, [4, 4, 3]),
        (OptimConfig(lr=3.0, schedule="linear"), 1, [3]),
        (OptimConfig(lr=3.0, schedule="linear"), 2, [3, 1.5]),
        (OptimConfig(lr=3.0, schedule="cosine", warmup_steps=3), 3, [1, 2, 3]),
    ],
)
def test_learning_rate_by_hand(config, total, want):
    assert [learning_rate(config, step, total) for step in range(total)] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 10), (1, 2)])
def test_the_schedule_is_that_of_transformers(schedule, warmup, total):
    """After the warm-up, which begins with a rate of 0 there. The last step still learns."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs, rates = get_scheduler(schedule, optimizer, warmup, total), []
    for _ in range(total):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=warmup)
    ours = [learning_rate(config, step, total) for step in range(total)]
    assert ours[warmup:] == pytest.approx(rates[warmup:], abs=1e-12) and ours[-1] > 0


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("lr", 0.0, "0.0 must be positive"), ("lr", -1e-6, "must be positive"), ("lr", math.nan, "nan must be positive"),
    ("lr", math.inf, "must be positive"), ("warmup_steps", -1, "-1 must be at least 0"),
    ("min_lr_frac", 1.5, "1.5 must be in"), ("min_lr_frac", -0.1, "must be in"),
    ("betas", (0.9, 1.0), r"\(0.9, 1.0\) must be in \[0, 1\), both"), ("betas", (-0.1, 0.9), "both"),
    ("weight_decay", -0.1, "must be at least 0"), ("weight_decay", math.nan, "must be at least 0"),
    ("max_grad_norm", -1.0, "-1.0 must be at least 0 .0: no clipping"), ("max_grad_norm", math.nan, "no clipping"),
    ("max_skipped_steps", 0, "0 must be at least 1"),
])
def test_optimizer_flags_that_cannot_be_meant_are_refused(name, value, rule):
    with pytest.raises(ValueError, match=f"--optim.{name.replace('_', '-')} .*{rule}"):
        OptimConfig(**{name: value})


def test_optimizer_flags_may_be_at_their_bounds():
    OptimConfig(betas=(0.0, 0.0), min_lr_frac=1.0, weight_decay=0.0, max_grad_norm=0.0, max_skipped_steps=1)
    OptimConfig(min_lr_frac=0.0, warmup_steps=0, max_grad_norm=math.inf)


def test_only_skipped_steps_in_a_row_end_a_run(untied, world):
    policy = load_policy(untied, FLOAT32, world)
    config = OptimConfig(max_skipped_steps=3)
    optimizer = make_optimizer(policy, config)

    def step(value: float) -> None:
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer_step(policy, optimizer, 1e-3, config)

    for value, in_a_row in ((math.nan, 1), (math.inf, 2), (0.1, 0), (math.nan, 1), (math.nan, 2)):
        step(value)
        assert policy.skipped_in_a_row == in_a_row
    with pytest.raises(RuntimeError, match=r"not finite 3 times in a row \(--optim.max-skipped-steps\)"):
        step(math.nan)


def test_adamw_step_by_hand(untied, world):
    """Two steps on one number of a matrix, with decay, and one of a vector, without; clipped at norm 1."""
    policy = load_policy(untied, FLOAT32, world)
    optimizer = make_optimizer(policy, OptimConfig(lr=9.0, betas=(0.8, 0.9), weight_decay=0.5))
    matrix, vector = policy.lm.model.layers[0].mlp.up_proj.weight, policy.lm.model.norm.weight
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.5 if p.ndim == 2 else 0.0) for p in policy.parameters())

    generator, m, v = torch.Generator().manual_seed(0), [0.0, 0.0], [0.0, 0.0]
    numbers = matrix.detach().to_local()[3], vector.detach().to_local()
    want = [float(numbers[0][5]), float(numbers[1][7])]
    for step, lr in ((1, 0.1), (2, 0.01)):
        grads = [torch.randn(p.shape, generator=generator) for p in policy.parameters()]
        for parameter, grad in zip(policy.parameters(), grads):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(grad)
        picked = [float(matrix.grad.to_local()[3, 5]), float(vector.grad.to_local()[7])]
        norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads))
        assert norm > 10
        assert optimizer_step(policy, optimizer, lr, OptimConfig(max_grad_norm=1.0)) == pytest.approx(norm, rel=1e-6)
        for k, decay in ((0, 0.5), (1, 0.0)):
            g = picked[k] / norm
            m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g * g
            update = (m[k] / (1 - 0.8**step)) / (math.sqrt(v[k] / (1 - 0.9**step)) + 1e-8)
            want[k] = want[k] * (1 - lr * decay) - lr * update
        assert [float(numbers[0][5]), float(numbers[1][7])] == pytest.approx(want, rel=1e-5)
        assert policy.version == step
        assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_clipping_scales_the_whole_gradient(untied, world, max_grad_norm):
    """SGD shows the gradient that was used: scaled to the norm; untouched below it, and with 0, which clips nothing."""
    policy = load_policy(untied, FLOAT32, world)
    before = {name: tensor.clone() for name, tensor in policy.full_tensors(torch.float32)}
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    torch.manual_seed(1)
    grads = {name: torch.randn(p.shape) for name, p in policy.lm.named_parameters()}
    for name, parameter in policy.lm.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().copy_(grads[name])
    norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads.values()))
    config = OptimConfig(max_grad_norm=max_grad_norm)
    assert optimizer_step(policy, optimizer, 1.0, config) == pytest.approx(norm, rel=1e-6)
    scale = 1.0 if max_grad_norm == 0 else min(1.0, max_grad_norm / norm)
    assert (scale == 1.0) == (max_grad_norm != 0.5)
    for name, after in policy.full_tensors(torch.float32):
        assert torch.allclose(before[name] - after, grads[name] * scale, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(untied, world, bad):
    policy = load_policy(untied, FLOAT32, world)
    optimizer = make_optimizer(policy, OptimConfig(weight_decay=0.5))

    def fill(value):
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, value)

    fill(1.0)
    assert math.isfinite(optimizer_step(policy, optimizer, 0.1, OptimConfig(max_grad_norm=1.0)))
    before = {name: tensor.clone() for name, tensor in policy.full_tensors(torch.float32)}
    moments = {key: value.clone() for p in policy.parameters() for key, value in (
        (id(p), optimizer.state[p]["exp_avg"].to_local()), (-id(p), optimizer.state[p]["step"]))}
    fill(1.0)
    policy.lm.model.norm.weight.grad.to_local()[3] = bad
    assert not math.isfinite(optimizer_step(policy, optimizer, 0.1, OptimConfig(max_grad_norm=1.0)))
    assert policy.version == 1
    assert all(p.grad is None for p in policy.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.full_tensors(torch.float32))
    for p in policy.parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"].to_local(), moments[id(p)])
        assert torch.equal(optimizer.state[p]["step"], moments[-id(p)])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["adamw-bf16", "adamw-8bit"])
def test_what_gpus_run_compiled_is_the_same_step(kind):
    """Compiled for a CPU, two sizes of pieces with one compilation: sums in another order move few numbers by a last
    digit, and no rounding in another direction."""
    group = {"betas": (0.9, 0.95), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    kernels = []
    generator = torch.Generator().manual_seed(0)
    for num_rows in (96, 33):
        weight = torch.randn(num_rows, 64, generator=generator).bfloat16()
        pieces = {"weight": weight, "grad": torch.randn(num_rows, 64, generator=generator).bfloat16()}
        pieces |= first_state(weight, 1 if kind == "adamw-bf16" else 64)
        others = {name: tensor.clone() for name, tensor in pieces.items()}
        tables = tables_of(pieces)
        for step in range(1, 4):
            factors = factors_of(step, group)
            noise = random_bits(weight, generator)
            update(pieces, factors, noise, tables)
            compiled(update)(others, torch.tensor(factors).unbind(), noise, tables)
        for name, tensor in pieces.items():
            far = (others[name].float() - tensor.float()).abs() > 1e-6 * tensor.float().abs()
            assert far.float().mean() < 2e-3, name
        kernels.append(metrics.generated_kernel_count)
    assert kernels[0] == kernels[1] > 0  # nothing is compiled for another step or number of rows
