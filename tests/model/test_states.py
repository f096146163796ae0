"""Layers with a state on packed rows, against transformers' own layers on one sequence at a time and against loops over
tokens."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, JambaConfig

import common.forward.attention  # noqa: F401 - transformers knows packed_sdpa then
from common.batch import Batch
from common.forward import states
from common.forward.scans import convolve, gated_delta_rule, make_chunks, state_space
from common.forward.sequence_parallel import make_row
from common.forward.states import separate_states
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from tests.model.families import WITH_STATE, Float64, config_of, largest, one_by_one, relative, restore, save

FAMILIES = sorted(WITH_STATE)
LENGTHS = [1, 64, 2, 210, 3, 65, 1, 4, 130]                             # 3: a convolution's width less 1; 64: a chunk
LOGP = {torch.float64: 1e-9, torch.float32: 2e-5}                       # reached: 2e-13, 1e-5
GRADIENT = {torch.float64: 1e-9, torch.float32: 2e-5}                   # reached: 4e-13, 9e-6; one by one up to 1e-4


def build(family: str) -> nn.Module:
    """A random model in which norms, biases and rates are not all 0 or 1."""
    torch.manual_seed(0)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32, **kinds).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def logp_of(model: nn.Module, tokens: Tensor, targets: Tensor, upstream: Tensor, **layout) -> Tensor:
    """Log-probs [T] of `targets`; the gradient of their sum, weighed by `upstream`, is added to that of the weights."""
    logits = model(input_ids=tokens[None], use_cache=False, **layout).logits[0]
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (logp * upstream).sum().backward()
    return logp.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def draw(n: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, 512, (n,), generator=generator).tolist()


def layout_of(batch: Batch) -> dict:
    return make_row(batch, False, None).layout | {"position_ids": batch.sequence_positions[None]}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_one_sequence_at_a_time(family, monkeypatch):
    """The oracle is transformers' own code in float64, where nothing is cast to float32."""
    generator = torch.Generator().manual_seed(1)
    batch = Batch.build([[5]] * len(LENGTHS), [draw(n - 1, generator) for n in LENGTHS])
    targets = torch.randint(3, 512, batch.tokens.shape, generator=generator)
    upstream = torch.randn(len(targets), generator=generator)
    restore(monkeypatch, config_of(family))
    model = build(family)
    model.double()
    with Float64():
        parts = zip(batch.tokens.split(LENGTHS), targets.split(LENGTHS), upstream.double().split(LENGTHS))
        want_logp = torch.cat([logp_of(model, *part) for part in parts])
    want = gradients(model)
    assert want_logp.std() > 0.3
    assert separate_states(model.get_decoder())
    model.set_attn_implementation("packed_sdpa")
    with Float64():
        logp = logp_of(model, batch.tokens, targets, upstream.double(), **layout_of(batch))
    assert largest(logp, want_logp) < LOGP[torch.float64]
    assert relative(gradients(model), want) < GRADIENT[torch.float64]
    logp = logp_of(model.float(), batch.tokens, targets, upstream, **layout_of(batch))
    assert largest(logp, want_logp) < LOGP[torch.float32]
    assert relative(gradients(model), want) < GRADIENT[torch.float32]


SHARED = {1: (1, 70, 2), 2: (3, 5), 3: (210, 1), 64: (64, 2), 65: (1, 0), 130: (65, 3, 64)}
"""Lengths of prompts -> of the responses to each. 3 is a convolution's width less 1, 64 a chunk."""


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_go_on_from_the_state_of_what_they_share(family, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    prompts, responses = [], []
    for length, others in SHARED.items():
        prompts += [draw(length, generator)] * len(others)
        responses += [draw(n, generator) for n in others]
    for taken in (1, 64, 69):                                           # later turns branch off, and off from these
        prompts.append([*prompts[1], *responses[1][:taken]])
        responses.append(draw(3, generator))
        prompts.append([*prompts[-1], *responses[-1][:2]])
        responses.append(draw(4, generator))
    order = torch.randperm(len(prompts), generator=generator).tolist()
    batch = Batch.build([prompts[i] for i in order], [responses[i] for i in order]).to("cpu", True)
    upstream = torch.randn(len(batch.tokens), generator=generator).double()
    restore(monkeypatch, config_of(family))
    model = build(family)
    model.double()
    with Float64():
        want_logp, want = one_by_one(model, batch, upstream)
    want = gradients(model)
    assert separate_states(model.get_decoder())
    model.set_attn_implementation("packed_sdpa")
    row = make_row(batch, True, None, has_states=True)
    assert len(row.run) < 0.8 * len(batch.tokens)
    told = row.layout | {"position_ids": batch.sequence_positions[None, row.run], "use_cache": False}
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        with Float64() if dtype == torch.float64 else nullcontext():
            logits = model(input_ids=batch.tokens[None, row.run], **told).logits[0, row.before]
            logp = logits.log_softmax(-1).gather(1, batch.tokens[row.sampled][:, None])[:, 0]
            (logp * upstream[row.sampled]).sum().backward()
        assert largest(logp.detach(), want_logp[row.sampled]) < LOGP[dtype]
        assert relative(gradients(model), want) < GRADIENT[dtype]


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_without_packed_rows_transformers_own_functions_run(family, monkeypatch):
    """As in generation: with a cache, token by token, and in batches."""
    restore(monkeypatch, config_of(family))
    model = build(family)
    tokens = torch.randint(3, 512, (2, 9), generator=torch.Generator().manual_seed(1))
    want = model.generate(tokens, max_new_tokens=6, do_sample=False), model(tokens).logits
    separate_states(model.get_decoder())
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), want[0])
    assert torch.equal(model(tokens).logits, want[1])


# --------------------------------------------------------------------------- the scans, token by token

ROWS = {"mixed": [1, 64, 2, 200, 3, 65], "50 of one token": [1] * 50, "one": [129]}
DECAYS = {"none": lambda x: 0 * x, "usual": lambda x: -x.abs(), "strong": lambda x: -60 * x.abs()}


def delta_by_tokens(q, k, v, g, beta, lengths):
    out = []
    for part in zip(*(x.split(lengths) for x in (q, k, v, g, beta))):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for q_t, k_t, v_t, g_t, beta_t in zip(*part):
            state = state * g_t.exp().view(len(g_t), -1, 1)
            predicted = torch.einsum("hkv,hk->hv", state, k_t)
            state = state + torch.einsum("hk,hv->hkv", k_t, (v_t - predicted) * beta_t[:, None])
            out.append(torch.einsum("hkv,hk->hv", state, q_t))
    return torch.stack(out)


def space_by_tokens(x, log_decay, b, c, lengths):
    repeats = x.shape[1] // b.shape[1]
    out = []
    for part in zip(*(y.split(lengths) for y in (x, log_decay, b, c))):
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2])
        for x_t, a_t, b_t, c_t in zip(*part):
            written = torch.einsum("hn,hp->hnp", b_t.repeat_interleave(repeats, 0), x_t)
            state = state * a_t.exp()[:, None, None] + written
            out.append(torch.einsum("hnp,hn->hp", state, c_t.repeat_interleave(repeats, 0)))
    return torch.stack(out)


def compare(function, oracle, inputs, lengths) -> None:
    """The outputs, and the gradients with regard to all inputs."""
    found = []
    for run, told in ((function, make_chunks(tuple(lengths), states.CHUNK, torch.device("cpu"))), (oracle, lengths)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves, told)
        upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
        found.append([out, *torch.autograd.grad((out * upstream).sum(), leaves)])
    for got, want in zip(*found):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
    assert found[0][0].abs().mean() > 0.01


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", ["delta", "delta, by channel", "state space"])
def test_chunks_are_the_recurrence(kind, decay, row):
    lengths = ROWS[row]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64)

    if kind == "state space":
        inputs = [random(4, 5), DECAYS[decay](random(4)), random(2, 6), random(2, 6)]
        compare(state_space, space_by_tokens, inputs, lengths)
        return
    shape = (2, 6) if kind == "delta, by channel" else (2,)
    q, k = (F.normalize(random(2, 6), dim=-1) for _ in range(2))
    inputs = [q, k, random(2, 5), DECAYS[decay](random(*shape)), random(2).sigmoid()]
    compare(gated_delta_rule, delta_by_tokens, inputs, lengths)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_begins_with_zeros(width):
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 2, 3, 1]
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, 6, 12), (6, width), (6,)))
    parts = [F.pad(part, (width - 1, 0)) for part in x.split(lengths, dim=2)]
    want = torch.cat([F.conv1d(part, weight[:, None], bias, groups=6) for part in parts], dim=2)
    assert torch.allclose(convolve(x, weight, bias, tuple(lengths)), want, atol=1e-6)


# --------------------------------------------------------------------------- layers that are not known

def test_a_layer_of_unknown_functions_runs_one_sequence_at_a_time(monkeypatch):
    restore(monkeypatch, config_of("lfm2"))
    model = build("lfm2")
    generator = torch.Generator().manual_seed(1)
    batch = Batch.build([[5]] * 3, [draw(n, generator) for n in (4, 1, 9)])
    model.set_attn_implementation("packed_sdpa")
    inputs = {"input_ids": batch.tokens[None], "use_cache": False, **layout_of(batch)}
    leaking = model(**inputs).logits
    monkeypatch.setattr(states, "FUNCTIONS", {})
    assert separate_states(model.get_decoder())
    want = torch.cat([model(input_ids=part[None], seq_idx=torch.zeros(1, len(part)).int(), position_ids=torch.arange(
        len(part))[None], cu_seq_lens_q=torch.tensor([0, len(part)]), cu_seq_lens_k=torch.tensor([0, len(part)]),
        use_cache=False).logits for part in batch.tokens.split(batch.host_lengths)], dim=1)
    assert torch.allclose(model(**inputs).logits, want, atol=1e-5)
    assert not torch.allclose(leaking, want, atol=1e-2)
    batch = batch.to("cpu", True)
    with pytest.raises(ValueError, match=r"is not known here, omit --policy\.share-prompt"):
        model(input_ids=batch.tokens[None], **make_row(batch, True, None, has_states=True).layout)


def test_mamba_1_is_refused_in_words(tmp_path, world):
    config = JambaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_experts=2,
                         num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
                         num_experts_per_tok=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)
    folder = save(config, tmp_path)
    with pytest.raises(ValueError, match=r"holds a jamba model, .*its layers are Mamba-1, which are not told where"):
        load_policy(folder, ModelConfig(compute_dtype="float32"), world)
