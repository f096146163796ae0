"""Model folders that hold more than one answer to "which weights?": what is loaded is what `from_pretrained` loads, to
the bit, or one line refuses the folder and names the file."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from common.model.loading import Weights, load_critic, load_policy, read_config, read_tokenizer
from common.model.policy import ModelConfig
from common.source.folder import check_folder
from common.source.stored import fingerprint
from tools.model_source import read_adapter, resolve

FLOAT32 = ModelConfig(compute_dtype="float32")
SIZES = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def save(folder: Path, seed: int = 0, size: str = "1GB", model=LlamaForCausalLM, **config) -> Path:
    torch.manual_seed(seed)
    model(LlamaConfig(**SIZES | {"tie_word_embeddings": False} | config)).save_pretrained(folder, max_shard_size=size)
    return folder


def change_json(file: Path, **entries) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def change_weights(folder: Path, change) -> None:
    """`change` takes the tensors of the single file by name, and returns those to write."""
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE, {"format": "pt"})


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def single_beside_index(folder: Path) -> None:
    save(folder, 1, "8KB")
    save(folder.with_name("other"), 2)
    shutil.copy(folder.with_name("other") / SINGLE, folder)


def shards_of_an_earlier_save(folder: Path) -> None:
    save(folder, 1, "4KB")
    for file in save(folder.with_name("other"), 2, "16KB").iterdir():
        shutil.copy(file, folder)


def beside(name: str):
    """Weights of another seed under another name."""
    def make(folder: Path) -> None:
        save(folder)
        shutil.copy(save(folder.with_name("other"), 3) / SINGLE, folder / name)
    return make


def a_tensor_in_two_shards(folder: Path) -> None:
    save(folder, 0, "8KB")
    first, *_, last = shards_of(folder)
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor + 5}, last, {"format": "pt"})


def index_names_fewer_tensors(folder: Path) -> None:
    index = json.loads((save(folder, 0, "8KB") / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def shards_elsewhere(place: str):
    """The first shard lies in `place`, and the index says so."""
    def make(folder: Path) -> None:
        first = shards_of(save(folder, 0, "8KB"))[0]
        index = json.loads((folder / INDEX).read_text())
        target = Path(os.path.normpath(folder / place))
        target.mkdir()
        first.rename(target / first.name)
        said = f"{target if place.startswith('../abs') else place}/{first.name}"
        index["weight_map"] = {k: said if v == first.name else v for k, v in index["weight_map"].items()}
        (folder / INDEX).write_text(json.dumps(index))
    return make


def links_of_a_cache(folder: Path) -> None:
    blobs = save(folder.with_name("blobs"), 0, "8KB")
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(f"../blobs/{file.name}")


def changed(change, **config):
    """A single file whose tensors went through `change`."""
    def make(folder: Path) -> None:
        save(folder, **config)
        change_weights(folder, change)
    return make


def with_config(**entries):
    def make(folder: Path) -> None:
        change_json(save(folder) / "config.json", **entries)
    return make


def embedding(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["model.embed_tokens.weight"]


def head_alone(tensors):
    return {"lm_head.weight" if name == "model.embed_tokens.weight" else name: x for name, x in tensors.items()}


LOADED = {
    "tied": changed(dict, tie_word_embeddings=True),
    "tied, and the head is stored too": changed(lambda x: x | {"lm_head.weight": embedding(x).clone()},
                                                tie_word_embeddings=True),
    "tied, and only the head is stored": changed(head_alone, tie_word_embeddings=True),
    "a single file beside an index": single_beside_index,
    "shards of an earlier save": shards_of_an_earlier_save,
    "a tensor in two shards": a_tensor_in_two_shards,
    "an index that names fewer tensors": index_names_fewer_tensors,
    "shards in a folder of their own": shards_elsewhere("parts"),
    "links": links_of_a_cache,
    "a variant": beside("model.fp16.safetensors"),
    "Mistral's own file": beside("consolidated.safetensors"),
    "no prefix": changed(lambda x: {name.removeprefix("model."): tensor for name, tensor in x.items()}),
    "with and without prefix": changed(lambda x: x | {"norm.weight": x["model.norm.weight"] + 7}),
    "a value head": changed(lambda x: x | {"v_head.summary.weight": torch.ones(1, 24)}),
    "float16": changed(lambda x: {name: tensor.half() for name, tensor in x.items()}),
    "float64": changed(lambda x: {name: tensor.double() for name, tensor in x.items()}),
    "two dtypes": changed(lambda x: {name: t.bfloat16() if "mlp" in name else t for name, t in x.items()}),
    "more layers than the config": with_config(num_hidden_layers=1),
}


@pytest.mark.parametrize("kind", LOADED)
def test_what_is_loaded_is_what_from_pretrained_loads(kind, world, tmp_path):
    LOADED[kind](tmp_path / "model")
    check_folder(str(tmp_path / "model"), "--model")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    found = dict(load_policy(str(tmp_path / "model"), FLOAT32, world).full_tensors(None))
    if kind.startswith("tied"):                                         # the trainer has it once
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def cut(size: int):
    def make(folder: Path) -> None:
        file = save(folder) / SINGLE
        file.write_bytes(file.read_bytes()[:size])
    return make


def without_a_shard(folder: Path) -> None:
    shards_of(save(folder, 0, "8KB"))[1].unlink()


def without_a_tensor(folder: Path) -> None:
    shard = shards_of(save(folder, 0, "8KB"))[1]
    _, *rest = load_file(shard).items()
    save_file(dict(rest) | {"another": torch.ones(1)}, shard, {"format": "pt"})


def without_index(folder: Path) -> None:
    (save(folder, 0, "8KB") / INDEX).unlink()


def index_is(text: str):
    def make(folder: Path) -> None:
        (save(folder, 0, "8KB") / INDEX).write_text(text)
    return make


def lfs_pointer(folder: Path) -> None:
    (save(folder) / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 269060552\n")


def broken_link(folder: Path) -> None:
    (save(folder) / SINGLE).unlink()
    (folder / SINGLE).symlink_to("../blobs/gone")


def adapters_beside(folder: Path) -> None:
    (save(folder) / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))


EARLY = {                                                               # before torch is imported
    "the index names a parent": (shards_elsewhere("../outside"),
                                 r"index.json names \.\./outside/model-0.*, which must be a file in its own folder"),
    "the index names a path": (shards_elsewhere("../absolute"), r"index.json names /.*, which must be a file in its"),
    "a shard is missing": (without_a_shard, r"model lacks model-00002-of-00007.safetensors, which .*index.json names"),
    "no index": (without_index, r"lacks model.safetensors and .*index.json, and model-00001-.* is not read"),
    "only Mistral's file": (lambda f: (save(f) / SINGLE).rename(f / "consolidated.safetensors"),
                            r"lacks model.safetensors and .*, and consolidated.safetensors is not read"),
    "damaged index": (index_is("{"), r"index.json is damaged, it must be a JSON object"),
    "index of another kind": (index_is('{"weight_map": ["a"]}'), r"index.json has no weight_map of tensors and files"),
    "truncated": (cut(-100), r"model/model.safetensors is no complete safetensors file \(.*\): copy or download"),
    "truncated header": (cut(50), r"model/model.safetensors is no complete safetensors file"),
    "empty file": (cut(0), r"model/model.safetensors is no complete safetensors file"),
    "pointer of git-lfs": (lfs_pointer, r"model/model.safetensors is no complete .*`git lfs pull`"),
    "broken link": (broken_link, r"model lacks model.safetensors"),
    "adapters beside": (adapters_beside, r"model holds a model and adapters \(adapter_config.json\)"),
}
LATE = {                                                                # when the model's own names are known
    "a tensor is missing": (without_a_tensor, r"model lacks weights, model.layers.0.self_attn.k_proj.weight among"),
    "tied, and the head is another": (
        changed(lambda x: x | {"lm_head.weight": embedding(x) + 1}, tie_word_embeddings=True),
        r"model.embed_tokens.weight and lm_head.weight are two tensors, and config.json ties them"),
    "fewer layers than the config": (with_config(num_hidden_layers=3), r"lacks weights, model.layers.2"),
    "another file by the config": (with_config(transformers_weights="x.safetensors"), "names transformers_weights x"),
    "float8": (changed(lambda x: {name: t.to(torch.float8_e4m3fn) for name, t in x.items()}), "the model is quantized"),
    "int8": (changed(lambda x: {name: t.to(torch.int8) for name, t in x.items()}), "int8, so the model is quantized"),
}


@pytest.mark.parametrize("kind", [*EARLY, *LATE])
def test_what_is_refused_is_named(kind, world, tmp_path):
    make, message = (EARLY | LATE)[kind]
    make(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_policy(str(tmp_path / "model"), FLOAT32, world)
    if kind in EARLY:
        for check in (lambda path: check_folder(path, "--model"), resolve):             # resolve: of evaluate.py
            with pytest.raises(ValueError, match=r"--model") as caught:
                check(str(tmp_path / "model"))
            caught.match(message)


def test_a_run_folder_is_told_from_its_model(tmp_path):
    """Both have a config.json."""
    for name in ("model", "checkpoints/step_1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"--model": "x"}')
    save(tmp_path / "model")
    rule = r"no model, its config.json has no model_type: --model must be a Hugging Face model folder or hub name; "
    for check in (check_folder, lambda path, flag: read_config(path, FLOAT32, flag)):
        with pytest.raises(ValueError, match=rf"{rule}{tmp_path}/model is one"):
            check(str(tmp_path), "--model")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"{rule}`python -m tools.checkpoints export {tmp_path} OUT` writes one"):
        check_folder(str(tmp_path), "--model")
    (tmp_path / "checkpoints/step_1/manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step_1 holds no config.json: .*tools.checkpoints export .*step_1 OUT`"):
        check_folder(str(tmp_path / "checkpoints/step_1"), "--critic-model")


def rewrite(name: str, content):
    """Of a tokenizer's folder: write this file. `content`: bytes, or what changes its JSON."""
    def change(folder: Path) -> None:
        file = folder / name
        made = content if isinstance(content, bytes) else json.dumps(content(json.loads(file.read_text()))).encode()
        file.write_bytes(made)
    return change


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


TOKENIZERS = {
    "none": without_tokenizer,
    "no file of tokens": lambda folder: (folder / "tokenizer.json").unlink(),
    "cut": lambda folder: os.truncate(folder / "tokenizer.json", 1000),
    "empty": rewrite("tokenizer.json", b""),
    "another object": rewrite("tokenizer.json", b"{}"),
    "a list": rewrite("tokenizer.json", b"[]"),
    "bytes": rewrite("tokenizer.json", b"\xff\xfe\x00"),
    "pointer of git-lfs": rewrite("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"),
    "another kind": rewrite("tokenizer.json", lambda x: x | {"model": x["model"] | {"type": "Nope"}}),
    "damaged config": rewrite("tokenizer_config.json", b"{"),
    "a list as config": rewrite("tokenizer_config.json", b"[]"),
    "code of its own": rewrite("tokenizer_config.json", lambda x: x | {
        "auto_map": {"AutoTokenizer": ["x.Y", None]}, "tokenizer_class": "Y"}),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_read_is_one_line(kind, tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    TOKENIZERS[kind](folder)
    rule = r"no tokenizer can be read \(.*\): copy"
    if kind == "code of its own":
        rule = "its tokenizer comes with code, which is not run unless you trust it: --policy.trust-remote-code"
    with pytest.raises(ValueError, match=rf"^--teacher .*/model: {rule}") as caught:
        read_tokenizer(str(folder), FLOAT32, "--teacher")
    assert "\n" not in str(caught.value)


ADAPTERS = {
    "no base": (lambda folder: change_json(folder / "adapter_config.json", base_model_name_or_path=None),
                "adapter_config.json has no base_model_name_or_path: merge"),
    "no rank": (lambda folder: change_json(folder / "adapter_config.json", r=0), "adapter_config.json has no r: "),
    "cut": (lambda folder: os.truncate(folder / "adapter_model.safetensors", 90),
            "adapter_model.safetensors is no complete safetensors file"),
    "pickle": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "lacks adapter_model.safetensors: a"),
    "damaged": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is damaged"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_cannot_be_read_are_one_line(kind, tmp_path):
    settings = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB"]
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "adapter_model.safetensors")
    assert len(read_adapter(tmp_path)[1]) == 2
    change, message = ADAPTERS[kind]
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path)


def test_a_checksum_of_weights_is_that_of_any_copy(tmp_path):
    """And of no other weights: a tensor of 100 KB that differs in a part, a small one in any bit, a name, a shape."""
    sizes = {"vocab_size": 1024, "initializer_range": 0.5}
    folder = save(tmp_path / "model", **sizes)
    copy, sharded = save(tmp_path / "elsewhere/copy", **sizes), save(tmp_path / "sharded", 0, "20KB", **sizes)
    assert fingerprint(str(folder)) == fingerprint(str(copy)) == fingerprint(str(sharded))
    assert len(shards_of(sharded)) > 3

    def at(name: str, index: int):
        def change(tensors):
            tensors[name].view(torch.int32).flatten()[index] ^= 1
            return tensors
        return change

    def renamed(tensors):
        return {name.replace("norm", "form"): tensor for name, tensor in tensors.items()}

    changes = [renamed, lambda x: {name: tensor.double() for name, tensor in x.items()},
               lambda x: {name: tensor.flatten() for name, tensor in x.items()},
               lambda x: {name: tensor * (1 + 2**-20) for name, tensor in x.items()},
               lambda x: x | {"another": torch.ones(1)},
               *(at("model.embed_tokens.weight", index) for index in (0, 1000, -1)),
               *(at("model.layers.1.mlp.down_proj.weight", index) for index in (0, 500, 959))]
    found = {fingerprint(str(folder))}
    for change in changes:
        save(tmp_path / "changed", **sizes)
        change_weights(tmp_path / "changed", change)
        found.add(fingerprint(str(tmp_path / "changed")))
    assert len(found) == 1 + len(changes)


HEADS = {
    "plain": (lambda x: x, ""),
    "no prefix": (lambda x: {name.removeprefix("model."): tensor for name, tensor in x.items()}, ""),
    "bfloat16": (lambda x: {name: tensor.bfloat16() for name, tensor in x.items()}, ""),
    "output head beside": (lambda x: x | {"lm_head.weight": torch.ones(53, 24)}, ""),
    "two rows": (lambda x: x | {"score.weight": torch.ones(2, 24)}, r"score.weight is \[2, 24\], must be \[1, 24\]"),
    "too wide": (lambda x: x | {"score.weight": torch.ones(1, 30)}, r"score.weight is \[1, 30\], must be \[1, 24\]"),
    "value head": (lambda x: {"v_head.weight" if name == "score.weight" else name: t for name, t in x.items()},
                   "lacks the head score.weight"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_reward_models(kind, world, tmp_path):
    change, message = HEADS[kind]
    save(tmp_path / "model", model=LlamaForSequenceClassification, num_labels=1)
    change_weights(tmp_path / "model", change)
    if message:
        with pytest.raises(ValueError, match=message):
            load_critic(str(tmp_path / "model"), FLOAT32, world, Weights(frozen=True))
        return
    wanted = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    critic = load_critic(str(tmp_path / "model"), FLOAT32, world, Weights(frozen=True))
    found = {f"model.{name}": tensor.full_tensor() for name, tensor in critic.backbone.state_dict().items()}
    found["score.weight"] = critic.head.weight.full_tensor()
    assert found.keys() == wanted.keys() and wanted["score.weight"].abs().sum() > 0
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
