"""Which families may be packed is proven when they are loaded, on tiny random models; dropout is off in all of them."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconConfig,
    FalconH1Config,
    Gemma3nTextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    NemotronConfig,
    NemotronHConfig,
    OPTConfig,
    RecurrentGemmaConfig,
    SeedOssConfig,
    StableLmConfig,
)

from common.batch import Batch
from common.forward import states
from common.model.loading import load_critic, load_policy
from common.model.policy import ModelConfig
from tests.conftest import launch
from tests.model import families
from tests.model.families import restore

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
HYBRID = {
    "bamba": BambaConfig(**SIZES, **MAMBA, mamba_expand=2, attn_layer_indices=[1]),
    "falcon_h1": FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64, head_dim=8),
    "jamba": JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1,
                         mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    "nemotron_h": NemotronHConfig(**SIZES, layers_block_type=["mamba", "attention"], mamba_num_heads=8,
                                  mamba_head_dim=8, ssm_state_size=8, n_groups=1, head_dim=8, chunk_size=8),
}
DROPOUT = {
    "llama": LlamaConfig(**SIZES, attention_dropout=0.5),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=8, residual_dropout=0.5),
    "opt": OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=64, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.2,
                     dropout=0.5, layerdrop=0.5),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, intermediate_size=128,
                       initializer_range=0.2, embd_pdrop=0.5),
}
UNSUPPORTED = {
    "recurrent_gemma": RecurrentGemmaConfig(**SIZES, lru_width=32, head_dim=8, attention_window_size=16,
                                            block_types=["recurrent", "attention"]),    # gates of three dimensions
    "stablelm": StableLmConfig(**SIZES),
    "nemotron": NemotronConfig(**SIZES),
    "falcon": FalconConfig(vocab_size=96, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=4),
}


def save(config, folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", HYBRID)
def test_a_model_whose_packed_sequences_see_each_other_is_refused(family, dtype, tmp_path, world, monkeypatch):
    monkeypatch.setattr("common.model.loading.separate_states", lambda decoder: False)
    restore(monkeypatch, HYBRID[family])
    folder = save(HYBRID[family], tmp_path)
    with pytest.raises(ValueError, match=f"holds a {family} model in which packed sequences see each other"):
        load_policy(folder, ModelConfig(compute_dtype=dtype), world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "function"), [
    ("qwen3_5_text", "torch_chunk_gated_delta_rule"), ("kimi_linear", "chunk_kimi_delta_attention"),
    ("granitemoehybrid", "mamba2_chunk_scan"), ("nemotron_h", "mamba2_chunk_scan"), ("falcon_h1", "mamba2_chunk_scan"),
    ("falcon_h1", "causal_conv1d_fn"),
])
def test_a_function_that_leaks_behind_others_that_do_not_is_refused(family, function, dtype, tmp_path, world,
                                                                    monkeypatch):
    """As a kernel would that is told nothing. The gradient finds the state of Mamba-2, where numbers differ by less
    than bfloat16 rounds."""
    restore(monkeypatch, families.config_of(family))
    folder = families.save(families.config_of(family), tmp_path)
    monkeypatch.delitem(states.FUNCTIONS, function)
    with pytest.raises(ValueError, match="packed sequences see each other") as error:
        load_policy(folder, ModelConfig(compute_dtype=dtype), world)
    if function == "mamba2_chunk_scan" and dtype == "bfloat16":
        assert "the gradient of a sequence with regard to another one's embeddings" in str(error.value)


def test_a_critic_that_leaks_is_refused(tmp_path, world, monkeypatch):
    monkeypatch.setattr("common.model.loading.separate_states", lambda decoder: False)
    restore(monkeypatch, HYBRID["bamba"])
    folder = save(HYBRID["bamba"], tmp_path)
    with pytest.raises(ValueError, match="holds a bamba model in which packed sequences see each other"):
        load_critic(folder, ModelConfig(compute_dtype="float32"), world)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_family_that_cannot_be_packed_is_refused_in_words(family, tmp_path, world):
    folder = save(UNSUPPORTED[family], tmp_path)
    with pytest.raises(ValueError, match=f"holds a {family} model, which cannot be trained on packed sequences"):
        load_policy(folder, ModelConfig(compute_dtype="float32"), world)


def test_widths_that_cannot_be_counted_are_refused_in_words(tmp_path, world):
    Gemma3nTextConfig(**SIZES | {"intermediate_size": [64, 64]}, head_dim=8, layer_types=["full_attention"] * 2,
                      architectures=["Gemma3nForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gemma3n_text model, which cannot be trained on packed"):
        load_policy(str(tmp_path), ModelConfig(compute_dtype="float32"), world)


@pytest.mark.parametrize("share_prompt", [False, True])
@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_is_off_whatever_its_name(family, share_prompt, tmp_path, world):
    folder = save(DROPOUT[family], tmp_path)
    config = ModelConfig(compute_dtype="float32", share_prompt=share_prompt, gradient_checkpointing=share_prompt)
    policy = load_policy(folder, config, world)
    batch = Batch.build([[5, 6]], [[7, 8, 9]])
    assert torch.equal(policy(batch, 1.0)[0], policy(batch, 1.0)[0])


def test_the_check_changes_nothing(tmp_path, world):
    """No gradient, no unsharded weight and no head of the check is left, and the random state is untouched."""
    folder = save(LlamaConfig(**SIZES), tmp_path)
    state = torch.get_rng_state()
    policy = load_policy(folder, ModelConfig(compute_dtype="float32"), world)
    critic = load_critic(folder, ModelConfig(compute_dtype="float32"), world)
    assert not critic.head.weight.to_local().any()
    assert all(p.grad is None for model in (policy, critic) for p in model.parameters())
    assert policy.version == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_reward_model_is_checked_before_it_gets_its_head(tmp_path, world, monkeypatch):
    seen = []
    monkeypatch.setattr("common.model.loading.check_packing", lambda model, forward, *_: seen.append(
        forward(Batch.build([[3]], [[4, 5, 6]]))))
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path)
    critic = load_critic(str(tmp_path), ModelConfig(compute_dtype="float32"), world)
    assert seen[0].abs().max() > 0.1 and not torch.equal(seen[0], critic.score(Batch.build([[3]], [[4, 5, 6]])))


def test_all_ranks_refuse_together(tmp_path):
    """Under FSDP2 on two ranks: each of them raises, none waits for the other."""
    folder = save(HYBRID["bamba"], tmp_path / "bamba")
    (tmp_path / "load.py").write_text(f"""
from common.model import loading
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.parallel import ranks
loading.separate_states = lambda decoder: False
world = ranks.init()
try:
    load_policy({folder!r}, ModelConfig(compute_dtype="float32"), world)
except ValueError as error:
    open({str(tmp_path)!r} + f"/refused_{{world.rank}}", "w").write(str(error))
ranks.shutdown()
""")
    launch(tmp_path / "load.py", ranks=2, warm=True)
    texts = [(tmp_path / f"refused_{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1] and "see each other" in texts[0]
