"""Packed attention against a loop over queries and keys; packed rows against sequences one by one in real models."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from common.batch import Batch
from common.forward.attention import FEWER_KEY_HEADS, choose_attention, packed_sdpa, packed_varlen
from common.model.policy import ModelConfig, Policy
from tests import oracles

LENGTHS = [5, 1, 13, 5, 8, 2]                                              # the window of 4 is shorter than most
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
         "pad_token_id": 0, "initializer_range": 0.3, "attention_dropout": 0.0}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral, window 4": (MistralConfig, {"sliding_window": 4}),
    "gemma2": (Gemma2Config, {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
}


def model(name, implementation):
    kind, extra = CONFIGS[name]
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(kind(**SIZES | extra), attn_implementation=implementation)
    return lm.float().eval()


def rows():
    g = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (n,), generator=g) for n in LENGTHS]


def packed_kwargs(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths), "use_cache": False}


def logits_and_gradient(lm, forwards):
    """Logits of all rows, and the gradient of a weighted sum of them with regard to every parameter."""
    logits = torch.cat([f() for f in forwards])
    up = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    lm.zero_grad()
    (logits * up).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])


def packed(lm, lengths=LENGTHS):
    ids = torch.cat(rows())[None]
    return logits_and_gradient(lm, [lambda: lm(input_ids=ids, **packed_kwargs(lengths)).logits[0]])


def one_by_one(lm):
    return logits_and_gradient(lm, [lambda x=x: lm(input_ids=x[None], use_cache=False).logits[0] for x in rows()])


def relative(got, want):
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_one_by_one(name):
    """Transformers' own eager attention, a sequence at a time, is the oracle: float32, 1e-5 of the largest number."""
    want, want_grad = one_by_one(model(name, "eager"))
    lm = model(name, "packed_sdpa")
    got, got_grad = packed(lm)
    assert want.abs().max() > 1
    assert relative(got, want) < 1e-5
    assert relative(got_grad, want_grad) < 1e-5
    leaking, leaking_grad = packed(lm, [sum(LENGTHS)])                     # the negative control: one long sequence
    assert relative(leaking, want) > 1e-2
    assert relative(leaking_grad, want_grad) > 1e-2


@pytest.mark.parametrize("name", ["mistral, window 4", "gemma2", "gemma3"])
def test_the_window_and_softcap_matter(name):
    """The settings under test change the logits, so a function that ignored them would fail above."""
    lm = model(name, "packed_sdpa")
    got, _ = packed(lm)
    for module in lm.modules():
        if vars(module).get("sliding_window"):
            module.sliding_window = None
    lm.config.sliding_window = None
    without, _ = packed(lm)
    assert relative(without, got) > 1e-2
    if name == "gemma2":
        for layer in lm.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert relative(packed(lm)[0], without) > 1e-2


def test_no_mask_is_built():
    """The attention function gets None for a mask, in every layer, so no [T, T] tensor exists."""
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return packed_sdpa(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    for name in CONFIGS:
        packed(model(name, "spy"))
    assert len(seen) == 2 * len(CONFIGS)
    assert all(mask is None for mask in seen)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_sdpa_matches_the_loop(window, softcap, kv_heads):
    g = torch.Generator().manual_seed(3)
    lengths, D = [4, 1, 7], 5
    q, k, v = (torch.randn(1, heads, sum(lengths), D, generator=g, dtype=torch.float64).requires_grad_()
               for heads in (4, kv_heads, kv_heads))
    cu = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    got, _ = packed_sdpa(None, q, k, v, scaling=0.7, sliding_window=window, softcap=softcap, cu_seq_lens_q=cu,
                         cu_seq_lens_k=cu)
    assert got.shape == (1, 12, 4, D)
    for head in range(4):
        shared = head * kv_heads // 4
        for a, b in itertools.pairwise(cu):
            parts = [x[0, h, a:b].tolist() for x, h in ((q, head), (k, shared), (v, shared))]
            want = torch.tensor(oracles.attention(*parts, 0.7, window, softcap), dtype=torch.float64)
            assert (got[0, a:b, head] - want).abs().max() < 1e-12
    settings = {"scaling": 0.7, "sliding_window": window, "softcap": softcap, "cu_seq_lens_q": cu,
                "cu_seq_lens_k": cu}
    assert torch.autograd.gradcheck(lambda *x: packed_sdpa(None, *x, **settings)[0], (q, k, v), fast_mode=True)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_sink_takes_its_share(kv_heads, window):
    """Also for queries that continue after keys of a shared prompt; values and gradients, of the sinks too."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 9, 5, generator=g, dtype=torch.float64).requires_grad_()
               for heads in (4, kv_heads, kv_heads))
    sinks = torch.randn(4, generator=g, dtype=torch.float64).requires_grad_()
    ends, key_ends = torch.tensor([0, 4, 6, 9]), torch.tensor([0, 4, 10, 17])
    rows = torch.tensor([*range(4), *range(6), *range(4), *range(6, 9)])
    settings = {"scaling": 0.7, "sliding_window": window, "cu_seq_lens_q": ends, "cu_seq_lens_k": key_ends,
                "key_rows": rows}

    def run(q, k, v, sinks):
        return packed_sdpa(None, q, k, v, s_aux=sinks, **settings)[0]

    got = run(q, k, v, sinks)
    for first, last, before in ((0, 4, 0), (4, 6, 4), (6, 9, 4)):
        own = [*range(before), *range(first, last)]
        for head in range(4):
            shared = head * kv_heads // 4
            parts = [x[0, h, own].tolist() for x, h in ((q, head), (k, shared), (v, shared))]
            want = oracles.attention(*parts, 0.7, window, sink=float(sinks[head]))[before:]
            assert (got[0, first:last, head] - torch.tensor(want, dtype=torch.float64)).abs().max() < 1e-12
    assert (got - run(q, k, v, sinks - 50)).abs().max() > 0.1
    assert torch.autograd.gradcheck(run, (q, k, v, sinks), fast_mode=True)


def test_cost_is_the_sum_of_squares():
    """Counted operations: 16 sequences of 16 tokens cost 1/16 of one of 256."""
    counts = []
    for lengths in ([256], [16] * 16):
        q = torch.randn(1, 2, 256, 8)
        cu = torch.tensor([0, *lengths]).cumsum(0)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            packed_sdpa(None, q, q, q, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        counts.append(counter.get_total_flops())
    assert counts[0] == 16 * counts[1] > 0


def test_refusals():
    q = torch.randn(1, 2, 6, 4)
    for refused in ({"s_aux": torch.zeros(2)}, {"softcap": 2.0}):
        with pytest.raises(AssertionError, match="no soft-cap and no attention sinks"):
            packed_varlen(None, q, q, q, cu_seq_lens_q=torch.tensor([0, 6]), **refused)
    with pytest.raises(RuntimeError, match="sum exactly to 6"):
        packed_sdpa(None, q, q, q, cu_seq_lens_q=torch.tensor([0, 2, 5]), cu_seq_lens_k=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match="do not tell attention where"):    # nothing is taken for one sequence
        model("llama", "packed_sdpa")(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    layout = {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 6])}
    packed_sdpa(None, q, q, q, **layout, dropout=0.0, is_causal=True, position_bias=None)
    for dropped, rule in (({"attention_mask": torch.zeros(6, 6)}, "make a mask of their own"),
                          ({"is_causal": False}, "its attention is not causal"),
                          ({"position_bias": torch.zeros(6, 6)}, "tell attention position_bias, which packed")):
        for attention in (packed_sdpa, packed_varlen):
            with pytest.raises(ValueError, match=rule):
                attention(None, q, q, q, **layout | dropped)


@pytest.mark.parametrize("has_flash_attn", [True, False])
def test_choose_attention(monkeypatch, has_flash_attn):
    monkeypatch.setattr("common.forward.attention.is_flash_attn_2_available", lambda: has_flash_attn)
    config = {name: kind(**SIZES | extra) for name, (kind, extra) in CONFIGS.items()}
    default = ModelConfig()
    assert choose_attention("cpu", config["llama"], default) == "packed_sdpa"
    for gathers in (ModelConfig(share_prompt=True), ModelConfig(sequence_parallel=2)):
        assert choose_attention("cuda", config["llama"], gathers) == "packed_varlen"
        assert choose_attention("cuda:0", config["gemma2"], gathers) == "packed_sdpa"
        for head_dim, want in ((256, "packed_varlen"), (264, "packed_sdpa"), (20, "packed_sdpa")):
            assert choose_attention("cuda", LlamaConfig(**SIZES | {"head_dim": head_dim}), gathers) == want
        derived = LlamaConfig(**SIZES | {"head_dim": None, "hidden_size": 4 * 264})
        assert choose_attention("cuda", derived, gathers) == "packed_sdpa"
    assert choose_attention("cuda", config["llama"], ModelConfig(compute_dtype="float32")) == "packed_sdpa"
    for name in ("llama", "gemma2"):
        want = "flash_attention_2" if has_flash_attn else choose_attention("cuda", config[name], gathers)
        assert choose_attention("cuda", config[name], default) == want
    assert choose_attention("cuda", LlamaConfig(**SIZES | {"head_dim": 264}), default) == "packed_sdpa"
    for gathers in (default, ModelConfig(share_prompt=True)):
        assert choose_attention("cuda", GptOssConfig(), gathers) == "packed_sinks"
    for name in ("packed_sdpa", "packed_varlen", "packed_sinks"):
        model("llama", name)                                              # registered: transformers accepts the name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral, window 4", "gemma3"])
def test_packed_varlen_equals_packed_sdpa(name):
    """On a GPU: torch's varlen kernels against sdpa a sequence, both in bfloat16, and both against float32."""
    results = {}
    for implementation, dtype in (("packed_sdpa", torch.float32), ("packed_sdpa", torch.bfloat16),
                                  ("packed_varlen", torch.bfloat16)):
        lm = model(name, implementation).to("cuda", dtype)
        ids = torch.cat(rows())[None].cuda()
        kwargs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in packed_kwargs(LENGTHS).items()}
        logits = lm(input_ids=ids, **kwargs).logits[0].float()
        up = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).cuda()
        (logits * up).sum().backward()
        results[implementation, dtype] = logits.detach(), torch.cat([p.grad.flatten().float() for p in lm.parameters()])
    exact, rounded, varlen = results.values()
    for i in range(2):
        noise = float((rounded[i] - exact[i]).norm() / exact[i].norm())
        assert float((varlen[i] - exact[i]).norm() / exact[i].norm()) < 1.5 * noise + 1e-3


@pytest.mark.parametrize("lengths", [[100, 3], [200, 170]])
def test_bfloat16_is_float32_rounded(lengths):
    """Short segments are computed in float32 on a CPU, long ones in bfloat16: both are float32 but for rounding."""
    g = torch.Generator().manual_seed(4)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, up = (torch.randn(1, heads, int(cu[-1]), 16, generator=g).bfloat16() for heads in (4, 2, 2, 4))

    def run(dtype):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out, _ = packed_sdpa(None, *x, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        assert out.dtype == dtype
        return out.detach(), *torch.autograd.grad(out, x, up.transpose(1, 2).to(dtype))

    for got, want in zip(run(torch.bfloat16), run(torch.float32)):
        assert float((got.float() - want).norm() / want.norm()) < 1e-2


def test_a_prefix_that_is_not_seen_is_noticed():
    """Negative control: without key_rows the responses' attention differs."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8)
    cu, cu_k, rows = torch.tensor([0, 5, 8]), torch.tensor([0, 5, 13]), torch.tensor([*range(5), *range(8)])
    seen, _ = packed_sdpa(None, q, k, v, cu_seq_lens_q=cu, cu_seq_lens_k=cu_k, key_rows=rows)
    one = torch.tensor([0, 8])
    whole, _ = packed_sdpa(None, q, k, v, cu_seq_lens_q=one, cu_seq_lens_k=one)
    apart, _ = packed_sdpa(None, q, k, v, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert torch.allclose(seen, whole, atol=1e-6)
    assert not torch.allclose(apart, whole, atol=1e-2)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_varlen_hands_the_kernel_the_keys_of_a_shared_prompt(window, monkeypatch):
    """The kernel itself needs a GPU: here a loop stands in for it, with its documented mask (the last query sees the
    last key). What is tested is what it is given."""
    def loop(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **others):
        assert others == FEWER_KEY_HEADS and window_size == (-1 if window is None else window - 1, 0)
        assert max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
        out = []
        for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist())):
            heads = []
            for head in range(q.shape[1]):
                prefix = [[0.0] * 8] * (d - c - b + a)                  # queries whose results nobody wants
                parts = (k[c:d, head // 2].tolist(), v[c:d, head // 2].tolist())
                attended = oracles.attention(prefix + q[a:b, head].tolist(), *parts, scale, window, None)
                heads.append(attended[len(prefix) :])
            out.append(torch.tensor(heads, dtype=q.dtype).transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr("common.forward.attention.varlen_attn", loop)
    torch.manual_seed(0)
    batch = Batch.build([[5, 6, 7]] * 3 + [[8, 9]] * 2, [[1, 2], [], [1, 3], [4, 5, 6], [7]])
    shared = batch.shared_prefixes
    q, k, v = (torch.randn(1, heads, len(shared.run), 8, dtype=torch.float64) for heads in (4, 2, 2))
    settings = {"scaling": 0.7, "sliding_window": window, "cu_seq_lens_q": shared.cu_seqlens,
                "cu_seq_lens_k": shared.cu_seqlens_k, "key_rows": shared.key_rows}
    longest = max(batch.host_lengths)
    got, _ = packed_varlen(None, q, k, v, max_length_q=longest, max_length_k=longest, **settings)
    assert torch.allclose(got, packed_sdpa(None, q, k, v, **settings)[0], atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_varlen_shares_prompts():
    """On a GPU: shared prompts through torch's kernels, in bfloat16, against sdpa in float32; also the gradients."""
    batch = Batch.build([[5] * 40] * 3 + [[8, 9]] * 2, [[1, 2], [3] * 9, [3], [4, 5, 6], [7]]).to("cuda")
    results = []
    for name, dtype, share in (("packed_sdpa", torch.float32, False), ("packed_varlen", torch.bfloat16, False),
                               ("packed_varlen", torch.bfloat16, True)):
        policy = Policy(model("llama", name).to("cuda", dtype))
        policy.share_prompt = share
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        results.append([logp.detach(), torch.cat([p.grad.flatten().float() for p in policy.parameters()])])
    for exact, apart, shared in zip(*results):
        assert float((shared - exact).norm()) < 1.5 * float((apart - exact).norm()) + 1e-3 * float(exact.norm())
