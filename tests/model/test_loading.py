"""Each rank reads its own shards, to the bit what `from_pretrained` gives, of every family; all of them write a folder.
"""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    Qwen3MoeConfig,
)

from common.model.loading import load_frozen, load_policy
from common.model.policy import ModelConfig
from common.run import RunArgs
from common.source import stored
from common.source.stored import Experts
from tests.conftest import launch

FLOAT32 = ModelConfig(compute_dtype="float32")
SIZES = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "tied": LlamaConfig(**SIZES | {"intermediate_size": 9}, tie_word_embeddings=True),     # 9 rows: none on rank 3 of 4
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8),                                        # a buffer beside a weight
    "renamed head": GPTNeoXConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=12),
    "three experts": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),    # cut into rows
    "glm4_moe": Glm4MoeConfig(**SIZES, **EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
                              n_group=1, topk_group=1),
}


def make(config, folder) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:
        nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder, max_shard_size="8KB")                 # several files and an index
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("families")
    found = [make(config, root / name.replace(" ", "_")) for name, config in FAMILIES.items()]
    scored = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    nn.init.normal_(scored.score.weight)
    scored.save_pretrained(root / "scored")
    return [*found, str(root / "scored")]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shards_are_those_of_the_whole_model(num_ranks, folders, tmp_path):
    """On 4 ranks also as two copies (HSDP); policy, the copy of it that is a reference, adapters' base, critic, reward
    model; rows that no number of ranks divides, experts in rows and in columns. Then each folder is written again."""
    done = launch("tests/model/loading_worker.py", tmp_path / "found", *folders, ranks=num_ranks, warm=True)
    found = torch.load(tmp_path / "found")
    assert found["wrong"] == [[]] * num_ranks
    assert found["dims"] == ({0} if num_ranks == 1 else {0, 1})         # three experts are cut into rows
    for folder in folders[:-1]:
        assert re.search(rf"read   {folder}: \S+ GiB, at most \S+ a rank", done.stdout)
        want, again = (files_of(path) for path in (folder, f"{folder}/again_{num_ranks}"))
        assert want.keys() == again.keys() and all(torch.equal(want[name], again[name]) for name in want)


def files_of(folder) -> dict[str, torch.Tensor]:
    """By the index alone, which names every tensor of every file and no other."""
    folder = Path(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(folder / file)[name] for name, file in index.items()}
    assert len(found) == sum(len(load_file(file)) for file in folder.glob("*.safetensors"))
    assert len(set(index.values())) > 3
    return found


def test_ranks_read_no_more_than_their_shards(tmp_path):
    """In GiB as the line at the start says it: a model of 64 MiB is read once, a half on each of two ranks."""
    sizes = SIZES | {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 8, "num_hidden_layers": 1}
    folder = make(LlamaConfig(**sizes, tie_word_embeddings=False), tmp_path / "wide")
    done = launch("tests/model/loading_worker.py", tmp_path / "found", folder, ranks=2, warm=True)
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**30
    policy, *_ = re.findall(r"read .*: (\S+) GiB, at most (\S+) a rank", done.stdout)
    assert [float(x) for x in policy] == pytest.approx([size, size / 2], abs=2e-3) and size > 0.06


def test_any_part_of_experts_is_that_of_the_joined_tensor():
    gate, up = torch.randn(2, 3, 4, 5)
    experts = Experts([[*gate], [*up]])
    whole = torch.cat([gate, up], dim=1)
    assert experts.shape == whole.shape == (3, 8, 5)
    ranges = [[slice(i, j) for i in range(size) for j in range(i + 1, size + 1)] for size in whole.shape]
    for index in itertools.product(*ranges):
        assert torch.equal(experts[index], whole[index])


def test_the_reference_is_copied_from_a_policy_as_it_was_loaded(tiny_llama, world, tmp_path):
    """No file is needed for it then; the reference of a policy that has changed is read."""
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    args = RunArgs(model=str(folder), train_data=(), policy=FLOAT32)
    policy = load_policy(str(folder), FLOAT32, world)
    (folder / "model.safetensors").rename(folder / "moved")
    reference = load_frozen(str(folder), args, policy, world)
    wanted = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).state_dict()
    for weights in (reference.full_tensors(None), policy.full_tensors(None)):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights)
    assert not any(p.requires_grad for p in reference.parameters())
    policy.version += 1
    with pytest.raises(ValueError, match=r"model lacks model.safetensors: weights must be safetensors"):
        load_frozen(str(folder), args, policy, world)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    (folder / "moved").rename(folder / "model.safetensors")
    reference = load_frozen(str(folder), args, policy, world)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in reference.full_tensors(None))


def test_a_hub_name_reads_the_weights_of_its_snapshot_alone(folders, world, tmp_path, monkeypatch):
    """Offline, from a cache laid out as huggingface_hub does it: names are links to files that are called by their
    hashes. Other weights in the snapshot, as models on the hub have them, are broken here, and would not be downloaded;
    a file that is missing is named."""
    wanted = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    others = dict.fromkeys(("pytorch_model.bin", "consolidated.safetensors", "adapter_model.safetensors"), b"broken")
    contents = {path.name: path.read_bytes() for path in Path(folders[0]).iterdir() if path.is_file()} | others
    repository = tmp_path / "hub/models--someone--tiny"
    snapshot, commit = repository / "snapshots/0123abcd", "0123abcd"
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    for number, (name, content) in enumerate(contents.items()):
        (repository / f"blobs/{number:040x}").write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    opened, asked = [], []
    monkeypatch.setattr(stored, "snapshot_download", lambda *args, **options: asked.append(options) or
                        snapshot_download(*args, **options))
    monkeypatch.setattr(stored, "load_file", lambda path: opened.append(path.name) or load_file(path))
    policy = load_policy("someone/tiny", FLOAT32, world)
    assert opened == sorted(name for name in contents if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name))
    assert len(opened) > 3
    assert sorted(filter_repo_objects(contents, **asked[0])) == sorted([*opened, "model.safetensors.index.json"])
    names = [name for name, _ in wanted.named_parameters()]
    assert all(torch.equal(tensor, wanted.get_parameter(name)) for name, tensor in policy.full_tensors(None))
    assert [name for name, _ in policy.full_tensors(None)] == names
    (snapshot / opened[1]).unlink()
    with pytest.raises(ValueError, match=f"someone/tiny lacks {opened[1]}, which .*index.json names: copy or download"):
        stored.open_folder("someone/tiny")


def test_pickles_are_not_read(tiny_llama, world, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pickled lacks model.safetensors: .* pytorch_model.bin can run code"):
        load_policy(str(folder), FLOAT32, world)


def test_weights_of_another_user(tiny_llama, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)                 # the tests may run as root, who reads all
    with pytest.raises(ValueError, match=r"/model\.safetensors cannot be read by this user: ask its owner"):
        stored.open_folder(tiny_llama)


def test_a_quantized_model_is_refused(tiny_llama, world, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized is quantized, and what is trained is not"):
        load_policy(str(folder), FLOAT32, world)


def test_a_weight_of_another_shape_is_refused(tiny_llama, world, tmp_path):
    """Of a larger one, ranks would find their slices and go on."""
    folder = shutil.copytree(tiny_llama, tmp_path / "wide")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(40)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"wide: model.norm.weight is \[40\], must be \[32\] by config.json"):
        load_policy(str(folder), FLOAT32, world)
