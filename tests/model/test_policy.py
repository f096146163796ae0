"""Policy and critic on packed tokens against transformers' unpacked forward; what is refused as a model."""

import json
from functools import partial

import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    MistralConfig,
    Qwen2Config,
    T5Config,
)

from common.batch import Batch
from common.memory.plan import Model
from common.model.loading import CAUSAL_LM, FLOAT32_FROZEN, SCORED, Weights, load_critic, load_policy, read_config
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig
from common.optim import OptimConfig, optimizer_step
from tests.conftest import VOCAB
from tests.engine.engine_models import make_model
from tests.model import families

FLOAT32 = ModelConfig(compute_dtype="float32")
TOLERANCE = 5e-6                        # log-probs and entropies of up to 11 in float32; reached: 2e-6
SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
STOP = 2


@pytest.fixture(scope="module")
def policy(tiny_llama, world):
    return load_policy(tiny_llama, FLOAT32, world)


def save_model(config, folder, seed: int = 0) -> str:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def untied(tmp_path) -> str:
    return save_model(LlamaConfig(**SIZES, tie_word_embeddings=False), tmp_path / "untied")


def make_batch(vocab: int, seed: int = 0) -> Batch:
    """Six ragged responses: one token, none, a hole of tool output, the rest ending in the stop token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, vocab, (n,), generator=generator).tolist()

    prompts = [draw(n) for n in (5, 1, 9, 3, 2, 7)]
    responses = [[*draw(8), STOP], [STOP], [], draw(12), [*draw(10), STOP], [*draw(3), STOP]]
    masks = [[True] * len(response) for response in responses]
    masks[4][3:7] = [False] * 4
    return Batch.build(prompts, responses, masks=masks)


def one_by_one(model, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: log-prob and entropy [T] by transformers' own forward of each sequence; logits at t - 1 score token t."""
    logp, entropy = torch.zeros(len(batch.tokens)), torch.zeros(len(batch.tokens))
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        with torch.no_grad():
            logits = model(input_ids=batch.tokens[None, start:end]).logits[0].double() / temperature
        for t in range(start, end):
            if batch.mask[t]:
                row = logits[t - 1 - start].log_softmax(-1)
                logp[t], entropy[t] = row[batch.tokens[t]], -(row.exp() * row).sum()
    return logp, entropy


def assert_close(logp, entropy, want_logp, want_entropy):
    errors = [float((logp - want_logp).abs().max()), float((entropy - want_entropy).abs().max())]
    print(f"worst error of a log-prob {errors[0]:.1e}, of an entropy {errors[1]:.1e}")
    assert max(errors) < TOLERANCE


# --------------------------------------------------------------------------- forward

@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_forward_equals_transformers_one_by_one(policy, tiny_llama, temperature):
    model, batch = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), make_batch(VOCAB)
    with torch.no_grad():
        logp, entropy = policy(batch, temperature)
    want_logp, want_entropy = one_by_one(model, batch, temperature)
    assert_close(logp, entropy, want_logp, want_entropy)
    assert logp.dtype == entropy.dtype == torch.float32
    assert int((logp != 0).sum()) == int(batch.mask.sum()) == 33        # 0 on prompts and tool output, and only there
    assert want_logp[batch.mask].std() > 0.3
    with torch.no_grad():
        other, _ = policy(batch, 2 * temperature)
    assert (other - logp).abs().max() > 0.1


FAMILIES = {
    "llama untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mistral, window 4": MistralConfig(**SIZES, sliding_window=4),
    "gemma2: soft-caps, tied": Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=4,
                                            final_logit_softcapping=2.0, attn_logit_softcapping=3.0),
    "cohere: logit_scale": CohereConfig(**SIZES, logit_scale=0.25),
    "granite: logits_scaling": GraniteConfig(**SIZES, logits_scaling=4.0),
    "hyperclovax: a factor of the same name": transformers.HyperCLOVAXConfig(**SIZES, logits_scaling=0.25),
    "minicpm3: a property": transformers.MiniCPM3Config(**SIZES | families.LATENT, dim_model_base=6),
    "falcon_h1: lm_head_multiplier": transformers.FalconH1Config(
        **SIZES, lm_head_multiplier=0.25, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=16,
        mamba_n_groups=1, mamba_chunk_size=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_do_to_logits_is_done(family, world, tmp_path):
    folder = save_model(FAMILIES[family], tmp_path / "model")
    policy, batch = load_policy(folder, FLOAT32, world), make_batch(53)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logp, entropy = policy(batch, 0.8)
    want_logp, want_entropy = one_by_one(model, batch, 0.8)
    assert_close(logp, entropy, want_logp, want_entropy)
    assert want_logp[batch.mask].std() > 0.05


def test_sequences_do_not_see_each_other(policy):
    batch = make_batch(VOCAB)
    with torch.no_grad():
        before, _ = policy(batch, 1.0)
        others = batch.sequence_ids != 3
        batch.tokens = torch.where(others & (batch.tokens != STOP), batch.tokens // 2 + 7, batch.tokens)
        after, _ = policy(batch, 1.0)
    assert torch.equal(before[~others], after[~others])
    assert not torch.equal(before[others], after[others])


def test_the_stop_token_is_trained(policy):
    """The last token of a response has a log-prob and a gradient: mask and shift include it."""
    batch = make_batch(VOCAB)
    last = int(batch.cu_seqlens[1]) - 1
    assert (int(batch.tokens[last]), bool(batch.mask[last])) == (STOP, True)
    logp, _ = policy(batch, 1.0)
    logp[last].backward()
    row = policy.lm.get_output_embeddings().weight.grad.full_tensor()[STOP]
    assert row.abs().max() > 1e-3
    policy.zero_grad(set_to_none=True)


def test_the_entropy_has_a_gradient(policy):
    """A fork's bonus must not be a constant."""
    batch = make_batch(VOCAB)
    _, entropy = policy(batch, 1.0)
    entropy.sum().backward()
    assert policy.lm.model.layers[0].mlp.up_proj.weight.grad.full_tensor().abs().max() > 1e-3
    policy.zero_grad(set_to_none=True)


@pytest.mark.parametrize("load", [load_policy, load_critic])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_layers_change_no_bit_of_a_gradient(load, dtype, tiny_llama, world):
    """None of them, half, and all: in float32 and in bfloat16, of a policy and of a critic."""
    found = []
    for share in (False, 0.5, True):
        model = load(tiny_llama, ModelConfig(compute_dtype=dtype, gradient_checkpointing=share), world)
        passes = []
        layers = (model.lm.model if load is load_policy else model.backbone).layers
        for number, layer in enumerate(layers):
            layer.self_attn.register_forward_pre_hook(lambda *_, number=number, seen=passes: seen.append(number))
        if load is load_critic:
            model.head.weight.detach().to_local().fill_(0.01)           # of zeros the backbone would have no gradient
        batch = make_batch(VOCAB)
        outputs = model(batch, 1.0) if load is load_policy else [model(batch)]
        (outputs[0] * batch.mask).mean().backward()
        assert sorted(passes) == sorted([0, 1, *range(int(2 * share))])         # the first ones run twice
        assert (model.num_recomputed, model.num_blocks) == (2 * share, 2)
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for gradients in zip(*found):
        assert gradients[0].abs().max() > 0
        assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_bfloat16_compute_keeps_float32_masters(tiny_llama, world, policy):
    """Close to float32, not equal; gradients arrive in float32."""
    half, batch = load_policy(tiny_llama, ModelConfig(), world), make_batch(VOCAB)
    logp, _ = half(batch, 1.0)
    want = policy.score(batch, 1.0)
    assert 1e-4 < (logp.detach() - want).abs().max() < 0.1
    logp.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in half.parameters())


def test_a_moving_average_is_held_in_float32(tiny_llama, world):
    """It runs in bfloat16 as the policy does, and keeps a step that bfloat16 would lose."""
    config = ModelConfig(compute_dtype="bfloat16")
    policy, teacher = load_policy(tiny_llama, config, world), load_policy(tiny_llama, config, world, FLOAT32_FROZEN)
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in teacher.parameters())
    batch = make_batch(VOCAB)
    assert torch.equal(policy.score(batch, 1.0), teacher.score(batch, 1.0))
    with torch.no_grad():
        for ours, theirs in zip(policy.parameters(), teacher.parameters()):
            ours.mul_(1.5)
            theirs.lerp_(ours, 1e-3)
    moved = [(theirs.to_local() / ours.to_local() * 1.5).nan_to_num(1.0)
             for ours, theirs in zip(policy.parameters(), teacher.parameters())]
    assert all(torch.allclose(x[x != 1], torch.tensor(1.0005), rtol=1e-6) for x in moved)


# --------------------------------------------------------------------------- weights

@pytest.mark.parametrize("tied", [True, False])
def test_full_tensors_are_the_loaded_weights(tied, world, tmp_path):
    """Under the folder's names, a tied head once. On more ranks: test_layout.py."""
    folder = save_model(LlamaConfig(**SIZES, tie_word_embeddings=tied), tmp_path / "model")
    policy = load_policy(folder, FLOAT32, world)
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert torch.equal(want["lm_head.weight"], want["model.embed_tokens.weight"]) == tied
    if tied:
        del want["lm_head.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        found = list(policy.full_tensors(dtype))
        assert sorted(name for name, _ in found) == sorted(want)
        assert all(torch.equal(tensor, want[name].to(dtype)) for name, tensor in found)


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_embedding_is_a_group_of_its_own(tied, world, tmp_path):
    """Embedding and head of a large model do not fit beside each other, unsharded; tied ones are one weight."""
    folder = save_model(LlamaConfig(**SIZES, tie_word_embeddings=tied), tmp_path / "model")
    lm = load_policy(folder, FLOAT32, world).lm
    assert isinstance(lm.get_input_embeddings(), FSDPModule) is not tied
    assert all(isinstance(layer, FSDPModule) for layer in lm.model.layers)
    assert isinstance(load_critic(folder, FLOAT32, world).backbone.get_input_embeddings(), FSDPModule)


def test_full_tensors_have_the_buffers_of_a_checkpoint(world, tmp_path):
    """The routers' biases of GLM-4.5, uncast; not the rotary frequencies."""
    folder = make_model("glm4_moe", False, tmp_path)
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = load_policy(folder, FLOAT32, world)
    found = dict(policy.full_tensors(torch.bfloat16))
    assert found.keys() == want.state_dict().keys() and "model.rotary_emb.inv_freq" not in found
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert bias not in dict(want.named_parameters()) and float(want.get_buffer(bias).abs().min()) > 0
    assert torch.equal(found[bias], want.get_buffer(bias)) and found[bias].dtype == torch.float32


def test_routers_biases_stay_float32_where_weights_are_not(world, tmp_path):
    """As from_pretrained keeps them; DeepSeek-V3's have no data type of their own. In bfloat16 they choose others."""
    folder = families.save(families.config_of("deepseek_v3"), tmp_path)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).get_buffer(bias)
    for weights in (Weights(frozen=True), Weights(lora=LoRAConfig(rank=2)), Weights(dtype=torch.bfloat16)):
        found = load_policy(folder, ModelConfig(), world, weights).lm.get_buffer(bias)
        assert found.dtype == want.dtype == torch.float32 and torch.equal(found, want)
        assert not torch.equal(found, found.bfloat16().float())


def test_loading_restores_buffers_that_no_checkpoint_has(policy, tiny_llama):
    want = dict(AutoModelForCausalLM.from_pretrained(tiny_llama).named_buffers())
    found = dict(policy.lm.named_buffers())
    assert "model.rotary_emb.inv_freq" in want
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_frozen_has_no_gradient_and_no_masters(tiny_llama, world, policy):
    frozen, batch = load_policy(tiny_llama, ModelConfig(), world, Weights(frozen=True)), make_batch(VOCAB)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in frozen.parameters())
    assert (frozen.score(batch, 1.0) - policy.score(batch, 1.0)).abs().max() < 0.1
    exact = load_policy(tiny_llama, FLOAT32, world, Weights(frozen=True))
    assert torch.equal(exact.score(batch, 1.0), policy.score(batch, 1.0))


def test_score_after_a_step_sees_the_new_weights(untied, world):
    """FSDP2 keeps unsharded weights after a forward that no backward follows: `score` must free them."""
    policy, batch = load_policy(untied, FLOAT32, world), make_batch(53)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = policy.score(batch, 1.0)
    for parameter in policy.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer_step(policy, optimizer, 1.0, OptimConfig(max_grad_norm=1e9))
    after = policy.score(batch, 1.0)
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    model.load_state_dict(dict(policy.full_tensors(torch.float32)))
    want, _ = one_by_one(model, batch, 1.0)
    assert (before - want).abs().max() > 0.1
    assert (after - want).abs().max() < TOLERANCE


# --------------------------------------------------------------------------- what is refused

def write_config(config, tmp_path) -> str:
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def changed_config(tmp_path, **sizes) -> str:
    """A Llama's config with these in its JSON."""
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**SIZES).to_dict() | sizes))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: str(tmp / "missing"), r"missing holds no config.json: --model must be"),
        (lambda tmp: str(tmp), r"holds no config.json"),
        (lambda tmp: "no/such-model", r"cannot read a model config from no/such-model \(--model\)"),
        (lambda tmp: (tmp / "config.json").write_text("{broken") and str(tmp), r"cannot read .*not a valid JSON"),
        (lambda tmp: (tmp / "config.json").write_text(json.dumps({"hidden_size": 3})) and str(tmp), r"model_type"),
        (lambda tmp: write_config(T5Config(), tmp), r"holds a t5 model, which is no causal LM"),
        (lambda tmp: write_config(BertConfig(architectures=["BertForMaskedLM"]), tmp),
         r"holds a BertForMaskedLM, must be a \*ForCausalLM"),
        (lambda tmp: write_config(LlamaConfig(**SIZES, architectures=["LlamaForSequenceClassification"]), tmp),
         r"holds a LlamaForSequenceClassification, must be a \*ForCausalLM"),
        (lambda tmp: write_config(LlavaConfig(), tmp), r"holds a llava model"),
        *((partial(changed_config, **sizes), message) for sizes, message in (
            ({"hidden_size": 64.5}, "hidden_size' expected int, got float"),
            ({"hidden_size": "64"}, "hidden_size' expected int, got str"),
            ({"hidden_size": None}, "hidden_size' expected int, got NoneType"),
            ({"num_attention_heads": 0}, r"cannot read .*modulo by zero"),
        )),
        (lambda tmp: (tmp / "config.json").write_text('{"a":' * 100_000) and str(tmp), "cannot read .*recursion"),
    ],
)
def test_read_config_refuses_what_is_no_causal_lm(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(make(tmp_path), ModelConfig())


def test_weights_that_are_missing_are_refused(world, tmp_path):
    """transformers would fill them with random numbers and go on."""
    config = LlamaConfig(**SIZES, num_labels=1, tie_word_embeddings=False)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"lacks weights, lm_head.weight among them: choose a complete model"):
        load_policy(str(tmp_path), FLOAT32, world)


def test_a_head_with_bias_is_refused(world, tmp_path):
    config = BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=4, is_decoder=True)
    folder = write_config(config, tmp_path)
    with pytest.raises(ValueError, match="the output head must be one matrix without bias"):
        load_policy(folder, FLOAT32, world)


def test_code_that_comes_with_the_model_runs_only_if_trusted(world, tmp_path):
    """A folder with its own Llama under a name that transformers does not know: read, counted, loaded and scored."""
    folder = save_model(LlamaConfig(**SIZES, tie_word_embeddings=False), tmp_path / "own")
    (tmp_path / "own/own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
        "class OwnModel(LlamaModel):\n    config_class = OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    raw = json.loads((tmp_path / "own/config.json").read_text())
    raw |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (tmp_path / "own/config.json").write_text(json.dumps(raw))
    trusting = ModelConfig(compute_dtype="float32", trust_remote_code=True)
    config = read_config(folder, trusting)
    llama = LlamaConfig(**SIZES, tie_word_embeddings=False)
    assert Model(config, trusting, 1).all == Model(llama, FLOAT32, 1).all > 0
    batch = make_batch(53)
    reference = load_policy(save_model(llama, tmp_path / "llama"), FLOAT32, world)
    assert torch.equal(load_policy(folder, trusting, world).score(batch, 1.0), reference.score(batch, 1.0))
    load_critic(folder, trusting, world)
    with pytest.raises(ValueError, match=r"cannot read a model config from .*own \(--model\)"):
        read_config(folder, FLOAT32)


def test_tiny_llama_is_what_it_says(tiny_llama):
    """Guard of the fixture that these tests stand on."""
    config = read_config(tiny_llama, ModelConfig())
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (2, True)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tiny_llama), LlamaForCausalLM)


# --------------------------------------------------------------------------- critic

def test_critic_starts_at_zero_and_learns_what_transformers_computes(tiny_llama, world):
    """value[t] is the head on the hidden state before t; gradients against autograd without FSDP."""
    critic, batch = load_critic(tiny_llama, FLOAT32, world), make_batch(VOCAB)
    assert float(critic(batch).abs().max()) == 0
    torch.manual_seed(1)
    head = torch.randn(1, 32) / 5
    with torch.no_grad():
        critic.head.weight.to_local().copy_(head)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).model
    want, up = torch.zeros(len(batch.tokens)), torch.randn(len(batch.tokens))
    weight, total = head.clone().requires_grad_(), 0.0
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        hidden = model(input_ids=batch.tokens[None, start:end]).last_hidden_state[0]
        for t in range(start, end):
            if batch.mask[t]:
                value = (hidden[t - 1 - start] * weight[0]).sum()
                want[t] = value.detach()
                total = total + up[t] * value
    total.backward()
    value = critic(batch)
    assert torch.allclose(value, want, atol=2e-6) and want.abs().max() > 0.1
    (value * up).sum().backward()
    assert torch.allclose(critic.head.weight.grad.full_tensor(), weight.grad, atol=1e-5)
    for name in ("layers.0.mlp.up_proj.weight", "embed_tokens.weight"):
        got = dict(critic.backbone.named_parameters())[name].grad.full_tensor()
        expected = dict(model.named_parameters())[name].grad
        assert torch.allclose(got, expected, atol=1e-5) and expected.abs().max() > 1e-3
    assert torch.equal(critic.score(batch), value.detach())


def test_critic_from_a_reward_model_has_its_head(tmp_path, world):
    torch.manual_seed(3)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).float()
    model.save_pretrained(tmp_path / "rm")
    critic, batch = load_critic(str(tmp_path / "rm"), FLOAT32, world), make_batch(53)
    values = critic.score(batch)
    checked = 0
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        if batch.mask[end - 1]:
            with torch.no_grad():
                score = model(input_ids=batch.tokens[None, start : end - 1]).logits[0, 0]
            assert float(values[end - 1]) == pytest.approx(float(score), abs=2e-6)
            checked += abs(float(score)) > 0.01
    assert checked >= 3
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2)).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"two has 2 labels, must have 1: choose another --critic-model"):
        load_critic(str(tmp_path / "two"), FLOAT32, world)
    with pytest.raises(ValueError, match=r"must be a \*ForCausalLM: choose another --model"):
        read_config(str(tmp_path / "rm"), FLOAT32)
    assert read_config(str(tmp_path / "rm"), FLOAT32, "--critic-model", CAUSAL_LM + SCORED).num_labels == 1


def test_critic_shares_prompts(tiny_llama, world):
    """The same values with each prompt computed once."""
    shared = load_critic(tiny_llama, ModelConfig(compute_dtype="float32", share_prompt=True), world)
    plain = load_critic(tiny_llama, FLOAT32, world)
    prompt = [5, 6, 7, 8]
    batch = Batch.build([prompt, prompt, [9, 4]], [[3, 4, 2], [8, 2], [7]])
    with torch.no_grad():
        for critic in (shared, plain):
            critic.head.weight.to_local().copy_(torch.linspace(-1, 1, 32)[None])
    assert torch.allclose(shared.score(batch), plain.score(batch), atol=2e-6)
    assert plain.score(batch)[batch.mask].abs().min() > 1e-3
