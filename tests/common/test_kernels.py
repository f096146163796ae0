"""The chunked log-prob kernel against a word-by-word oracle, naive log_softmax, numerical derivatives, and itself."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch.autograd import gradcheck

import distill
from common.kernels import CPU_TILE, CUDA_TILE_BYTES, Head, divergence, tile_shape
from common.kernels import logp as kernel
from tests import oracles

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {F64: 1e-10, F32: 5e-5}           # relative to max(1, |oracle|); float32 holds logits of 200 to 1e-5
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 3.0, "temperature": 0.8},
    "scaled": {"logit_scale": 0.25, "temperature": 1.5},
    "scaled and capped": {"logit_scale": 1.7, "softcap": 5.0},
}


def inputs(N=11, H=6, V=29, dtype=F64, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, H, generator=g, dtype=F64) * size, torch.randn(V, H, generator=g, dtype=F64)
    targets = torch.randint(V, (N,), generator=g)
    targets[:2] = torch.tensor([0, V - 1])
    up = torch.randn(2, N, generator=g, dtype=F64).to(dtype)
    return hidden.to(dtype), weight.to(dtype), targets, up


def naive(hidden, weight, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    """What the kernel replaces: all logits at once, in float32 (or float64)."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, F32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logps = (logits / temperature).log_softmax(dim=-1)
    return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(dim=-1)


def tiles(tokens: int, vocab: int):
    """In this block a tile has this many tokens and words."""
    return mock.patch.object(kernel, "CPU_TILE", (tokens, vocab))


def linear_logp(hidden, weight, targets, temperature=1.0, softcap=None, logit_scale=1.0, **more):
    """With the signature of the oracle and of `naive`."""
    return kernel.linear_logp(hidden, Head(weight, softcap, logit_scale), targets, temperature, **more)


def gradients(function, hidden, weight, targets, up, entropy=True, **settings):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp, ent, *_ = function(hidden, weight, targets, **settings)
    objective = (logp * up[0]).sum() + ((ent * up[1]).sum() if entropy else 0)
    return logp.detach(), ent.detach(), *torch.autograd.grad(objective, (hidden, weight))


def error(got, want) -> float:
    got, want = torch.as_tensor(got, dtype=F64), torch.as_tensor(want, dtype=F64)
    assert got.shape == want.shape
    assert want.abs().max() > 1e-3
    return float(((got - want).abs() / want.abs().clamp(min=1)).max())


def kernel_errors(dtype, seed, settings, entropy) -> tuple[float, float]:
    """Worst error in (logp, entropy) and in their gradients (hidden, weight) against the oracle."""
    hidden, weight, targets, up = inputs(dtype=dtype, seed=seed, size=2.0)
    if seed == 1:
        hidden *= 20                                                   # peaked: probabilities of 0 and 1
    want_logp, want_entropy, d_logp, d_entropy = oracles.linear_logp(
        hidden.tolist(), weight.tolist(), targets.tolist(), **settings)
    want = [torch.tensor(x, dtype=F64) for x in d_logp(up[0].tolist())]
    if entropy:
        want = [a + torch.tensor(b, dtype=F64) for a, b in zip(want, d_entropy(up[1].tolist()))]
    with tiles(4, 7):
        got = gradients(linear_logp, hidden, weight, targets, up, entropy, **settings)
    assert got[0].dtype == got[1].dtype == dtype
    value = max(error(got[0], want_logp), error(got[1], want_entropy))
    return value, max(error(g, w) for g, w in zip(got[2:], want))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("entropy", [False, True])
def test_kernel_matches_the_oracle(dtype, settings, entropy):
    for seed in range(3):
        assert max(kernel_errors(dtype, seed, settings, entropy)) < TOLERANCE[dtype]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_kernel_gradcheck(settings):
    hidden, weight, targets, _ = inputs(N=5, H=3, V=8)

    def f(hidden, weight):
        return linear_logp(hidden, weight, targets, **settings)[:2]

    with tiles(2, 3):
        assert gradcheck(f, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("chunks", [(1, 1), (3, 29), (11, 5), (100, 100)])
def test_chunks_do_not_change_the_result(chunks):
    args = inputs()
    want = gradients(naive, *args)
    with tiles(*chunks):
        got = gradients(linear_logp, *args)
    assert max(error(g, w) for g, w in zip(got, want)) < 1e-13


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_the_sum_of_squared_probabilities(dtype, settings):
    """Word by word: p of the oracle with each word as the target. The other results and gradients stay as they are."""
    hidden, weight, targets, up = inputs(dtype=dtype, size=2.0)
    hidden[0] *= 20                                                    # a probability near 1
    rows = (hidden.tolist(), weight.tolist())
    words = [oracles.linear_logp(*rows, [v] * len(hidden), **settings)[0] for v in range(len(weight))]
    want = [math.fsum(math.exp(2 * word[n]) for word in words) for n in range(len(hidden))]
    with tiles(4, 7):
        *_, got = linear_logp(hidden.requires_grad_(), weight, targets, with_sum_p2=True, **settings)
        plain = gradients(linear_logp, hidden.detach(), weight, targets, up, **settings)
        with_it = gradients(linear_logp, hidden.detach(), weight, targets, up, **settings,
                            with_sum_p2=True)
    assert got.dtype == dtype and not got.requires_grad
    assert error(got, want) < TOLERANCE[dtype] and max(want) > 1.1 * min(want) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, with_it))


@pytest.mark.parametrize("parts", [(1, 0), (0, 1), (1, 1)], ids=["logp", "entropy", "both"])
def test_the_gradient_by_the_entropy_is_computed_where_a_loss_has_it(parts, monkeypatch):
    """A term of the entropy in a fork's loss has its gradient, and costs time only there."""
    seen, slope = set(), kernel._slope
    monkeypatch.setattr(kernel, "_slope", lambda *args: seen.add(args[-1] is not None) or slope(*args))
    found = []
    for function in (naive, linear_logp):
        hidden, weight, targets, up = inputs()
        logp, entropy, *_ = function(hidden.requires_grad_(), weight.requires_grad_(), targets)
        terms = [part for is_in_loss, part in zip(parts, (logp * up[0], entropy * up[1])) if is_in_loss]
        found.append(torch.autograd.grad(sum(terms).sum(), (hidden, weight)))
    assert max(error(got, want) for want, got in zip(*found)) < 1e-13
    assert seen == {bool(parts[1])}


def test_closed_forms():
    """Equal logits: logp = -log V, entropy log V. Two words: the logistic function."""
    V = 37
    with tiles(512, 5):
        logp, entropy, _ = linear_logp(torch.zeros(2, 4), torch.randn(V, 4), torch.tensor([0, 3]))
    assert torch.cat([-logp, entropy]).tolist() == pytest.approx([math.log(V)] * 4)
    z = torch.tensor([[-40.0], [-1.0], [0.5], [40.0]], dtype=F64)
    head = torch.tensor([[1.0], [0.0]], dtype=F64)
    with tiles(512, 1):
        logp, _, _ = linear_logp(z, head, torch.zeros(4, dtype=torch.long), temperature=2.0)
    assert logp.tolist() == pytest.approx([-math.log1p(math.exp(-x / 2)) for x in z[:, 0].tolist()], rel=1e-14)


def test_bfloat16_inputs_have_float32_logits():
    """Log-probs as exact as float32's, at |z| up to 100; a bfloat16 product would be off by a quarter there."""
    hidden, weight, targets, up = inputs(N=64, H=128, V=999, dtype=F32, size=2.0)
    hidden, weight = hidden.to(BF16), weight.to(BF16)
    want = gradients(naive, hidden.double(), weight.double(), targets, up, entropy=False)
    with tiles(20, 100):
        got = gradients(linear_logp, hidden, weight, targets, up, entropy=False)
    rounded = gradients(naive, hidden, weight, targets, up, entropy=False)
    assert (hidden.float() @ weight.float().T).abs().max() > 60
    assert [x.dtype for x in got] == [F32, F32, BF16, BF16]
    assert error(got[0], want[0]) < 1e-5
    assert error(got[1], want[1]) < 1e-5
    assert (rounded[0] - want[0]).abs().max() > 0.1                    # the negative control
    for g, w in zip(got[2:], want[2:]):
        assert float((g.double() - w).norm() / w.norm()) < 5e-3        # bfloat16 has 2^-9


def test_mixed_dtypes_and_autocast():
    hidden, weight, targets, up = inputs(N=20, dtype=F32)
    want = gradients(linear_logp, hidden, weight, targets, up, entropy=False)
    with torch.autocast("cpu", dtype=BF16):
        got = gradients(linear_logp, hidden, weight, targets, up, entropy=False)
    assert all(torch.equal(g, w) for g, w in zip(got, want))
    got = gradients(linear_logp, hidden.to(BF16), weight, targets, up, entropy=False)
    want = gradients(naive, hidden.to(BF16).float(), weight, targets, up, entropy=False)
    assert error(got[0], want[0]) < 1e-5
    assert got[2].dtype == BF16


def test_precision_setting_is_restored():
    before = torch.backends.mkldnn.matmul.fp32_precision
    hidden, weight, targets, up = inputs(dtype=BF16)
    gradients(linear_logp, hidden, weight, targets, up, entropy=False)
    with pytest.raises(RuntimeError, match="int64"):
        linear_logp(hidden, weight, targets.float())
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_frozen_head_frozen_hidden_and_no_tokens():
    hidden, weight, targets, up = inputs()
    full = gradients(linear_logp, hidden, weight, targets, up, entropy=False)
    logp, _, _ = linear_logp(hidden.requires_grad_(), weight, targets)
    assert torch.equal(torch.autograd.grad((logp * up[0]).sum(), hidden)[0], full[2])
    logp, _, _ = linear_logp(hidden.detach(), weight.requires_grad_(), targets)
    assert torch.equal(torch.autograd.grad((logp * up[0]).sum(), weight)[0], full[3])
    logp, entropy, *grads = gradients(linear_logp, hidden[:0].detach(), weight.detach(), targets[:0], up[:, :0])
    assert logp.shape == entropy.shape == (0,)
    assert grads[0].shape == (0, 6)
    assert (grads[1] == 0).all()


def test_tied_head_sums_both_gradients():
    """An embedding that is also the head: gradients of both uses add up, as with naive log_softmax."""
    table, ids = inputs()[1], torch.randint(29, (9,), generator=torch.Generator().manual_seed(2))
    grads = []
    for function in (naive, linear_logp):
        tied = table.clone().requires_grad_()
        logp, *_ = function(torch.tanh(tied[ids]), tied, ids.roll(-1))
        grads.append(torch.autograd.grad(logp.sum(), tied)[0])
    assert error(grads[1], grads[0]) < 1e-13


@pytest.mark.parametrize(("N", "H", "want"), [
    (0, 16, (1, 2**22)), (100, 16, (100, 671_080 // 128 * 128)), (8192, 16, (8192, 8192)), (100_000, 16, (8192, 8192)),
    (0, 8192, (1, 8192)), (1, 8192, (1, 8192)), (100_000, 8192, (8192, 8192)),
])
def test_tiles_on_a_gpu_have_256_megabytes(N, H, want):
    """By hand, on tensors without memory: 2^28 bytes are 2^26 float32 numbers; a width is a multiple of 128. With few
    tokens it is the float32 gradient of the head's rows that would be large (3.9 GiB of a 70B's)."""
    hidden, weight = torch.empty(N, H, device="meta"), torch.empty(150_000, H, device="meta")
    tokens, vocab = tile_shape(hidden, weight)
    assert (tokens, vocab) == want
    assert max(tokens, H) * vocab * 4 <= CUDA_TILE_BYTES == 2**28
    assert tile_shape(torch.empty(N, H), torch.empty(150, H)) == CPU_TILE == (512, 4096)


def test_never_holds_all_logits():
    """Peak of live tensor bytes, forward and backward, inputs and gradients included: far under one [N, V]."""
    from tests.bench.bench_kernels import measure
    hidden, weight, targets, up = inputs(N=4096, H=32, V=8192, dtype=F32)
    peak = measure(lambda: gradients(linear_logp, hidden, weight, targets, up, entropy=False)).peak_bytes
    logits = 4096 * 8192 * 4
    assert measure(lambda: gradients(naive, hidden, weight, targets, up, entropy=False)).peak_bytes > 2 * logits
    assert peak < 0.4 * logits


# --------------------------------------------------------------------------- divergences of two models

def divergence_by_words(z_ours, z_theirs, settings, kind, beta):
    """The divergence of each token and its derivative by the student's product, in numbers, word by word."""
    temperature, softcap = settings.get("temperature", 1.0), settings.get("softcap")
    scale = settings.get("logit_scale", 1.0)

    def logits(row):
        capped = [softcap * math.tanh(z * scale / softcap) if softcap else z * scale for z in row]
        top = max(z / temperature for z in capped)
        total = math.log(math.fsum(math.exp(z / temperature - top) for z in capped)) + top
        return [z / temperature - total for z in capped]

    values, slopes = [], []
    for ours, theirs in zip(z_ours.tolist(), z_theirs.tolist()):
        p, q = [[math.exp(x) for x in logits(row)] for row in (ours, theirs)]
        m = [beta * b + (1 - beta) * a for a, b in zip(p, q)]
        # f(p) of each word and df/dp
        terms = {
            "reverse-kl": [(a * math.log(a / b), math.log(a / b) + 1) for a, b in zip(p, q)],
            "forward-kl": [(b * math.log(b / a), -b / a) for a, b in zip(p, q)],
            "jsd": [(beta * b * math.log(b / c) + (1 - beta) * a * math.log(a / c), (1 - beta) * math.log(a / c))
                    for a, b, c in zip(p, q, m)],
        }[kind]
        values.append(math.fsum(value for value, _ in terms))
        mean = math.fsum(a * slope for a, (_, slope) in zip(p, terms))
        slopes.append([
            a * (slope - mean) * (scale / temperature) * (1 - math.tanh(z * scale / softcap) ** 2 if softcap else 1)
            for a, (_, slope), z in zip(p, terms, ours)
        ])
    return torch.tensor(values, dtype=F64), torch.tensor(slopes, dtype=F64)


def divergence_errors(kind: str, dtype, seed: int, settings: dict, rows: int = 4) -> tuple[float, float]:
    """Of value and gradient, relative to max(1, |oracle|). The teacher is wider, and its head has padding beyond the
    student's vocabulary. `rows`: of a chunk."""
    beta, temperature = 0.3, settings.get("temperature", 1.0)
    hidden, weight, _, up = inputs(dtype=dtype, seed=seed)
    g = torch.Generator().manual_seed(seed + 9)
    wide, other = (torch.randn(size, 10, generator=g, dtype=F64).to(dtype) for size in (11, 32))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    heads = [Head(w, settings.get("softcap"), settings.get("logit_scale", 1.0)) for w in (weight, other)]
    formula = partial(distill.DIVERGENCES[kind], beta=beta)
    with mock.patch.object(divergence, "CHUNK_BYTES", {"cpu": 4 * 29 * rows}):
        value = divergence.linear_divergence((hidden, heads[0]), (wide, heads[1]), formula, temperature)
        found = torch.autograd.grad((value * up[0]).sum(), (hidden, weight))
    assert value.dtype == dtype
    products = [(x.detach().double() @ w.detach().double().T) for x, w in ((hidden, weight), (wide, other[:29]))]
    want, slope = divergence_by_words(*products, settings, kind, beta)
    assert want.min() > 0.001
    slope *= up[0].double()[:, None]
    wanted = slope @ weight.detach().double(), slope.T @ hidden.detach().double()
    errors = [((ours.double() - oracle).abs().max() / max(1, oracle.abs().max())).item()
              for ours, oracle in ((value.detach(), want), *zip(found, wanted))]
    return errors[0], max(errors[1:])


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("kind", distill.DIVERGENCES)
@pytest.mark.parametrize("name", SETTINGS)
def test_divergences_word_by_word(name, kind, dtype, rows):
    assert max(divergence_errors(kind, dtype, 0, SETTINGS[name], rows)) <= TOLERANCE[dtype]


def test_divergences_are_torchs_kl_div():
    """A second oracle: `torch.nn.functional.kl_div`, of which TRL's GKD loss is made (arXiv 2306.13649, eq. 1)."""
    hidden, weight, _, _ = inputs(N=40, V=300)
    g = torch.Generator().manual_seed(3)
    wide, other = torch.randn(40, 9, generator=g, dtype=F64), torch.randn(300, 9, generator=g, dtype=F64)
    logp, logq = [(x @ w.T / 0.7).log_softmax(-1) for x, w in ((hidden, weight), (wide, other))]
    kl = partial(torch.nn.functional.kl_div, reduction="none", log_target=True)             # (log b, log a): KL(a || b)
    for beta in (0.1, 0.5, 0.9):
        logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
        want = {"reverse-kl": kl(logq, logp), "forward-kl": kl(logp, logq),
                "jsd": beta * kl(logm, logq) + (1 - beta) * kl(logm, logp)}
        for kind, values in want.items():
            formula = partial(distill.DIVERGENCES[kind], beta=beta)
            found = divergence.linear_divergence((hidden, Head(weight)), (wide, Head(other)), formula, 0.7)
            assert (found - values.sum(-1)).abs().max() < 1e-10


def test_a_divergence_without_tokens_or_of_a_frozen_head():
    """A dummy has no sampled token; below adapters the head has no gradient."""
    hidden, weight, _, _ = inputs()
    formula = partial(distill.reverse_kl, beta=0.5)
    none, weight = hidden[:0].clone().requires_grad_(), weight.requires_grad_()
    value = divergence.linear_divergence((none, Head(weight)), (hidden[:0], Head(weight.detach())), formula)
    grads = torch.autograd.grad(value.sum(), (none, weight))
    assert value.shape == (0,) and grads[0].shape == none.shape and not grads[1].any()
    hidden, other = hidden.requires_grad_(), torch.flip(weight.detach(), [0])
    both = (hidden, Head(weight)), (hidden.detach(), Head(other))
    frozen = (hidden, Head(weight.detach())), both[1]
    ours, theirs = (torch.autograd.grad(divergence.linear_divergence(*pair, formula).sum(), hidden)[0]
                    for pair in (both, frozen))
    assert ours.any() and torch.equal(ours, theirs)


def test_bfloat16_divergences_sum_the_heads_gradient_in_float32():
    """128 chunks, one token each. Summed in bfloat16, the small terms would be lost."""
    hidden, weight, _, _ = inputs(N=128, H=16, V=64, dtype=BF16)
    _, other, _, _ = inputs(N=128, H=16, V=64, dtype=BF16, seed=1)
    formula = partial(distill.reverse_kl, beta=0.5)

    def gradient(dtype, rows):
        w = weight.to(dtype).requires_grad_()
        with mock.patch.object(divergence, "CHUNK_BYTES", {"cpu": 4 * 64 * rows}):
            models = (hidden.to(dtype), Head(w)), (hidden.to(dtype), Head(other.to(dtype)))
            found = divergence.linear_divergence(*models, formula)
        return torch.autograd.grad(found.sum(), w)[0].double()

    exact, ours = gradient(F64, 128), gradient(BF16, 1)
    assert ((ours - exact).abs() / exact.abs().max()).max() < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize("with_entropy", [False, True])
def test_compiled_tiles_are_those_of_the_same_code(with_entropy, monkeypatch):
    """What GPUs run, compiled for a CPU, with tiles of several sizes."""
    found = []
    for compiled in (False, True):
        hidden, weight, targets, up = inputs(N=37, H=8, V=300, dtype=F32)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        monkeypatch.setattr(kernel, "CPU_TILE", (16, 128))
        if compiled:
            for name in ("_absorb", "_slope"):
                monkeypatch.setattr(kernel, name, kernel.compiled(getattr(kernel, name)))
        logp, entropy, sum_p2 = kernel.linear_logp(hidden, Head(weight), targets, 0.7, True)
        loss = (logp * up[0]).sum() + ((entropy * up[1]).sum() if with_entropy else 0)
        found.append([logp, entropy, sum_p2, *torch.autograd.grad(loss, leaves)])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-5)
