"""The package flash-attn, where it is installed: transformers calls it with our packed sequences. A stand-in has its
name, arguments and definition; the choice, transformers' checks and its call are the real ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

import common.forward.attention  # noqa: F401  makes packed_sdpa known to transformers
from common.batch import Batch
from common.model.policy import Policy
from tests.conftest import launch
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.step_worker import RESPONSES

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
SIZES = {"vocab_size": 53, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
         "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=3),
    "soft-cap": Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=16),
    "wide heads": LlamaConfig(**SIZES | {"head_dim": 264}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> dict[str, dict]:
    site = tmp_path_factory.mktemp("site")
    (site / "flash_attn").mkdir()
    shutil.copy(Path(__file__).parent / "flash_package.py", site / "flash_attn/__init__.py")
    (site / "flash_attn/bert_padding.py").write_text("from flash_attn import pad_input, unpad_input\n")
    info = site / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    done = launch("-m", "tests.cuda.flash_worker", models, *CONFIGS, env={"PYTHONPATH": str(site)})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_the_cpu(name, models, found):
    """The oracle is a policy in float32 on the CPU, with sdpa for each sequence."""
    lm = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32, attn_implementation="packed_sdpa")
    logp, entropy = Policy(lm)(Batch.build(*RESPONSES), 1.0)
    (logp.sum() + entropy.sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
    ours = found[name]
    assert torch.tensor(ours["logp"]).sub(logp.detach()).abs().mean() < 0.02 < logp.detach().std()
    assert ours["norm"] == pytest.approx(float(norm), rel=0.03)


def test_what_the_package_is_given(found):
    lengths = Batch.build(*RESPONSES).cu_seqlens.diff().tolist()
    windows = {"llama": [[-1, -1], [-1, -1]], "window": [[2, 2], [2, 2]], "soft-cap": [[3, 3], [-1, -1]]}
    for name, wanted in windows.items():
        assert found[name]["attention"] == "flash_attention_2"
        assert [call["window"] for call in found[name]["calls"]] == wanted
        for call in found[name]["calls"]:
            assert call["lengths"] == lengths and call["causal"] and min(call["max"]) >= max(lengths)
            assert call["softcap"] == (0.5 if name == "soft-cap" else 0.0)


def test_heads_too_wide_for_the_package_get_another_attention(found):
    assert found["wide heads"]["attention"] == "packed_sdpa" and not found["wide heads"]["calls"]
