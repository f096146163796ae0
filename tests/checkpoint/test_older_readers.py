"""What a reader of transformers 4 finds in an exported folder; and that transformers 5 reads the same.

The oracle is each family's config.json as it was published for transformers 4, whose keys are read by hand.
"""

import json
import math
import shutil

import pytest
from transformers import AutoConfig, AutoTokenizer

from common.checkpoint import older_readers
from common.checkpoint.export import hf_files, model_of
from tests.conftest import MODEL
from tests.model import families

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "bos_token_id": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 2,
         "pad_token_id": 0, "torch_dtype": "float16"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024, "type": "yarn"}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 1024,
          "rope_type": "llama3"}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MROPE = {"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"}
LINEAR = {"factor": 8.0, "rope_type": "linear"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
PUBLISHED = {
    "llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "linear": {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": {"factor": 2.0, "type": "linear"}},
    "dynamic": {"model_type": "llama", "rope_theta": 30000.0, "rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "yarn": {"model_type": "qwen2", "rope_theta": 1000000.0, "rope_scaling": YARN},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen3_moe": {"model_type": "qwen3_moe", "rope_theta": 5000000, "rope_scaling": None, "head_dim": 16} | EXPERTS,
    "phi3": {"model_type": "phi3", "rope_theta": 250000.0, "partial_rotary_factor": 0.75},
    "phi3 long": {"model_type": "phi3", "rope_theta": 10000.0, "rope_scaling": LONG,
                  "original_max_position_embeddings": 1024},
    "gemma3": {"model_type": "gemma3_text", "rope_theta": 2000000, "rope_local_base_freq": 20000, "head_dim": 16,
               "rope_scaling": LINEAR},
    "mistral": {"model_type": "mistral", "rope_theta": 1000000.0, "sliding_window": None},
    "gpt_oss": {"model_type": "gpt_oss", "rope_theta": 150000, "head_dim": 16, "num_local_experts": 4, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 1024,
        "rope_type": "yarn", "truncate": False}},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": VISION, "tie_word_embeddings": True,
                 "text_config": SIZES | {"model_type": "qwen3_vl_text", "rope_theta": 5000000, "rope_scaling": MROPE,
                                         "head_dim": 16}},
}
OLD = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "num_experts", "torch_dtype",
       "original_max_position_embeddings")


def old_keys_of(config: dict) -> dict:
    """The old keys that are not None, of a part of the model too; `type` under its later name, as transformers 4 reads
    it."""
    found = {key: config[key] for key in OLD if config.get(key) is not None}
    if "rope_scaling" in found:
        rope = dict(found["rope_scaling"])
        found["rope_scaling"] = rope | {"rope_type": rope.pop("type", rope.get("rope_type"))}
        found["rope_scaling"].pop("type", None)
    return found | ({"text": old_keys_of(config["text_config"])} if "text_config" in config else {})


def read(folder) -> dict:
    """What transformers 5 takes from a folder, without dtypes."""
    found = older_readers.without_type(AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""})
    for part in (found, *(part for part in found.values() if isinstance(part, dict))):
        part.pop("dtype", None)
    return found


@pytest.fixture
def published(tmp_path):
    """Writes a family's folder as it was published."""
    def write(content: dict):
        folder = tmp_path / "published"
        folder.mkdir()
        content = content if "text_config" in content else SIZES | content
        (folder / "config.json").write_text(json.dumps(content))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(f"{MODEL}/{name}", folder)
        return folder, content

    return write


def export_of(folder, out, dtype: str = "bfloat16", template_file: str = "") -> dict:
    """config.json of what a run with this model exports."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    out.mkdir()
    for name, content in hf_files(str(folder), AutoConfig.from_pretrained(folder), tokenizer, dtype,
                                  template_file).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    return json.loads((out / "config.json").read_bytes())


@pytest.mark.sweep
@pytest.mark.parametrize("family", PUBLISHED)
def test_old_keys_stand_beside_the_new_ones(family, published, tmp_path):
    """Those of the folder; and where that has the new ones alone, those that follow from them."""
    folder, content = published(PUBLISHED[family])
    with_dtype = content | {"torch_dtype": "bfloat16"}
    if "text_config" in content:
        with_dtype["text_config"] = content["text_config"] | {"torch_dtype": "bfloat16"}
    want = old_keys_of(with_dtype)
    if family == "qwen3_moe":
        assert want.pop("num_experts") == 4 == export_of(folder, tmp_path / "experts")["num_experts"]
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "five")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "five")
    if family != "qwen3_vl":
        assert "rope_theta" not in json.loads((tmp_path / "five/config.json").read_text())      # else nothing is shown
    for number, source in enumerate((folder, tmp_path / "five")):
        found = old_keys_of(export_of(source, tmp_path / f"out{number}"))
        assert {key: found.get(key) for key in want} == want
        assert read(tmp_path / f"out{number}") == read(folder)


def test_old_keys_that_say_something_else_are_left_out():
    """A run has changed the rope of its model."""
    kind = type(AutoConfig.for_model("qwen2"))
    source = SIZES | PUBLISHED["yarn"] | {"unknown": 1}
    made = kind(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).to_dict()
    found = older_readers.with_old_keys(made, source, kind)
    assert {key: found[key] for key in found.keys() - made.keys()} == {
        "torch_dtype": "float16", "rope_theta": 5e5, "rope_scaling": None}


def test_a_limit_of_infinity_is_read_and_stays():
    """Of Mamba-2's time steps. JSON has no such number, and transformers 5 writes an object."""
    config = families.config_of("granitemoehybrid")
    made = json.loads(config.to_json_string(use_diff=False))
    assert made["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    found = older_readers.with_old_keys(made, made, type(config))
    assert found["time_step_limit"] == made["time_step_limit"]
    lm = model_of({"config.json": json.dumps(found).encode()})
    assert tuple(lm.config.time_step_limit) == (0.0, math.inf)


def test_files_of_the_tokenizer_stay_as_they_are(published, tmp_path):
    """A slow tokenizer's too. transformers 5 would write the class TokenizersBackend, which transformers 4 lacks."""
    folder, _ = published(PUBLISHED["qwen2"])
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}",
              "additional_special_tokens": ["<|im_start|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").unlink()
    export_of(folder, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_tokenizer_that_was_changed_is_written_anew(published):
    folder, _ = published(PUBLISHED["qwen2"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert older_readers.tokenizer_files(tokenizer)
    for change in (lambda it: it.add_tokens(["<extra>"]), lambda it: setattr(it, "chat_template", "{{ 1 }}"),
                   lambda it: setattr(it, "pad_token", "<|im_start|>")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        change(tokenizer)
        assert older_readers.tokenizer_files(tokenizer) == {}
    files = hf_files(str(folder), AutoConfig.from_pretrained(folder), tokenizer, "bfloat16")
    assert b"<|im_start|>" in files["tokenizer_config.json"]


@pytest.mark.parametrize("places", ["file", "key", "named", "processor", "none"])
def test_the_exported_chat_template_is_the_trained_one(places, published, tmp_path):
    """Wherever the source has its own: the readers of each place find the same."""
    folder, _ = published(PUBLISHED["qwen2"])
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    if places != "file":
        (folder / "chat_template.jinja").unlink()
    if places == "key":
        config["chat_template"] = "{{ 1 }}"
    elif places == "named":
        config["chat_template"] = [{"name": name, "template": "{{ 1 }}"} for name in ("default", "tool_use")]
    elif places == "processor":
        (folder / "chat_template.json").write_text('{"chat_template": "{{ 1 }}"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.jinja").write_text("Ü{{ messages[0].content }}{{ bos_token }}")
    export_of(folder, tmp_path / "out", template_file=str(tmp_path / "own.jinja"))
    want = (tmp_path / "own.jinja").read_text()
    assert (tmp_path / "out/chat_template.jinja").read_text() == want
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_bytes()) == config | {"chat_template": want}
    assert not (tmp_path / "out/additional_chat_templates").exists()
    if places == "processor":
        assert json.loads((tmp_path / "out/chat_template.json").read_bytes()) == {"chat_template": want}
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        assert again.apply_chat_template([{"role": "user", "content": "q"}], tools, tokenize=False) == "Üq"


def test_what_no_file_can_hold_is_said():
    flag = "--data.chat-template-kwargs"
    assert older_readers.left_out({}) == older_readers.left_out({flag: "{}"}) == ""
    assert f'no {flag} {{"a": 1}}: give them' in older_readers.left_out({flag: '{"a": 1}'})
