"""The folders for Hugging Face and vLLM that runs and checkpoints become."""

# ruff: noqa: F811  (fixtures that are imported)

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Glm4MoeConfig,
    Qwen3MoeConfig,
)

from common.batch import Batch
from common.checkpoint import export
from common.checkpoint.files import crc32, write_manifest
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine, stop_tokens
from common.model.loading import load_policy, read_config
from common.model.lora import LoRAConfig
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from common.run import RunArgs
from tests.checkpoint.test_checkpoint import assert_same, model, trained, watch  # noqa: F401 (fixtures)
from tests.generate import generate
from tests.rank_worker import STATE, checkpoints_of, start, train
from tools import checkpoints


@pytest.fixture(scope="module")
def exported(tiny_llama, world, tmp_path_factory):
    """The tiny Llama, with a second end token, after two steps, as a folder."""
    folder = tmp_path_factory.mktemp("run")
    source, out = shutil.copytree(tiny_llama, folder / "source"), folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    GenerationConfig(eos_token_id=[2, 7], bos_token_id=1, pad_token_id=2).save_pretrained(source)
    policy, optimizer = start(str(source), world)
    train(policy, optimizer, range(2))
    files = export.hf_files(str(source), policy.lm.config, tokenizer, "bfloat16")
    export.export(policy, files | {"old.safetensors": b"of an earlier run"}, out, world)
    export.export(policy, files, out, world)
    return policy, tokenizer, out


def test_export_has_the_trained_weights_in_bfloat16(exported, tiny_llama):
    policy, _, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    want = {name: tensor.bfloat16() for name, tensor in policy.full_tensors(torch.float32)}
    assert_same({name: parameter.detach() for name, parameter in model.named_parameters()}, want)
    source = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    assert not torch.equal(source.lm_head.weight, model.lm_head.weight)
    assert model.config.tie_word_embeddings
    assert "packed" not in (out / "config.json").read_text()            # nothing of this machine's attention
    (out.parent / "any").touch()
    assert {path.stat().st_mode for path in out.iterdir()} == {(out.parent / "any").stat().st_mode}    # others may read
    assert not list(out.glob("old*"))
    assert not list(out.parent.glob(".*"))


def test_export_gives_the_policys_logits(exported, world):
    """The folder in transformers against the folder as a policy, in float32; and in bfloat16, roughly."""
    _, tokenizer, out = exported
    prompt, response = tokenizer("What is 7 + 5?").input_ids, tokenizer(" 12 apples, I think").input_ids
    batch = Batch.build([prompt], [response])
    for dtype, tolerance in (("float32", 5e-6), ("bfloat16", 0.1)):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
        with torch.no_grad():
            rows = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        want = rows.gather(1, torch.tensor(response)[:, None])[:, 0]
        found = load_policy(str(out), ModelConfig(compute_dtype=dtype), world).score(batch, 1.0)[batch.mask]
        assert (found - want).abs().max() < tolerance
        trained = exported[0].score(batch, 1.0)[batch.mask]             # its masters are not rounded yet
        assert (found - trained).abs().max() < 0.1
    assert want.std() > 0.3


def test_export_samples_the_same_greedy_tokens(exported, world):
    policy, tokenizer, out = exported
    stops = stop_tokens(str(out), tokenizer)
    assert stops == [2, 7]
    prompts = [tokenizer(text).input_ids for text in ("What is 7 + 5?", "Anna has 3 apples.")]
    config, rollout = ModelConfig(), RolloutConfig(engine="hf")
    setup = EngineSetup(str(out), read_config(str(out), config), rollout, config, world, prompts, stops, 64, 0)
    engine = make_engine(setup)
    engine.wake(policy)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    responses = [response.tokens for response in generate(engine, prompts, [0, 0], SamplingConfig(0.0, 16))]
    for prompt, response in zip(prompts, responses):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert response == want.tolist()
    assert responses[0] != responses[1]


def test_export_brings_tokenizer_and_chat_template(exported):
    _, tokenizer, out = exported
    again = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    assert tokenizer.chat_template
    assert again.chat_template == tokenizer.chat_template
    assert again.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert again("Grüße, 17!").input_ids == tokenizer("Grüße, 17!").input_ids
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 7]


def test_a_checkpoint_becomes_a_folder_for_hugging_face(trained, exported, model, world, watch, tmp_path, capsys):
    """And what `list` shows of it."""
    hf_files = export.hf_files(model, trained[0].lm.config, exported[1], "bfloat16")
    run = checkpoints_of(tmp_path, world, *trained, watch, hf_files, async_=True)
    run.after_step(STATE)
    run.wait()
    folder = tmp_path / "checkpoints/step_000002"
    checkpoints.list_checkpoints(str(tmp_path))
    assert capsys.readouterr().out.split() == ["step_000002", "0.00", "GiB", "1", "rank(s)", "complete"]
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    want = {name: tensor.bfloat16() for name, tensor in trained[0].full_tensors(torch.float32)}
    assert_same({name: parameter.detach() for name, parameter in loaded.named_parameters()}, want)
    names = sorted(path.name for path in (folder / "hf").iterdir())
    found = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert found == sorted([*names, "model.safetensors", "plainrl.json"])
    assert all((tmp_path / "again" / n).read_bytes() == (folder / "hf" / n).read_bytes() for n in names)
    (folder / "__0_0.safetensors").write_bytes(bytes(folder.joinpath("__0_0.safetensors").stat().st_size))
    with pytest.raises(ValueError, match=r"step_000002 is damaged: __0_0.safetensors is missing or has another"):
        checkpoints.export_checkpoint(str(folder), tmp_path / "again")


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_model_with_code_of_its_own_keeps_its_names(tmp_path):
    weights = {"model.experts.0.weight": torch.randn(3, 4).bfloat16(), "bias": torch.randn(5)}
    files = {"config.json": b'{"model_type": "own_llama"}'}
    export.replace_hf(tmp_path / "model", {name: x.to("meta") for name, x in weights.items()}, weights.items(), files)
    assert_same(weights_of(tmp_path / "model"), weights)


def make_own_llama(source: str, folder: Path) -> str:
    """A Llama whose config and model come with code, in a file each."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    content |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n")
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n")
    return str(folder)


def test_a_models_code_is_exported_beside_it(tiny_llama, exported, world, watch, tmp_path):
    """By the run and from its checkpoint; who trusts it loads the folder alone. What needs the code is refused."""
    source = make_own_llama(tiny_llama, tmp_path / "source")
    trusting = ModelConfig(compute_dtype="float32", trust_remote_code=True)
    policy = load_policy(source, trusting, world)
    files = export.hf_files(source, policy.lm.config, exported[1], "float32")
    export.export(policy, files, tmp_path / "model", world)
    run = checkpoints_of(tmp_path / "run", world, policy, make_optimizer(policy, OptimConfig()), watch, files)
    run.after_step(STATE)
    run.wait()
    checkpoints.export_checkpoint(str(tmp_path / "run"), tmp_path / "again")
    shutil.rmtree(source)
    want = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    tokens = torch.tensor([[5, 6, 7, 300]])
    for folder in (tmp_path / "model", tmp_path / "again"):
        own = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(own).__name__ == "OwnForCausalLM" and own.config.model_type == "own_llama"
        assert torch.equal(own(tokens).logits, want(tokens).logits)
    args = RunArgs(model=source, train_data=(), lora=LoRAConfig(rank=4), run_dir=str(tmp_path / "lora"))
    optimizer = make_optimizer(policy, OptimConfig())
    run = checkpoints_of(tmp_path / "lora", world, policy, optimizer, watch, files, args=args)
    run.after_step(STATE)
    run.wait()
    with pytest.raises(ValueError, match=r"step_000002: the code of .*source comes with it, and is not run here"):
        checkpoints.export_checkpoint(str(tmp_path / "lora"), tmp_path / "merged")


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_mixture_is_exported_as_it_was_published(kind, exported, world, watch, tmp_path):
    """One matrix an expert, not transformers' fused ones; routers' biases too; from the run and from its checkpoint."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }
    if kind == "qwen3_moe":
        source = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    else:
        source = AutoModelForCausalLM.from_config(
            Glm4MoeConfig(**sizes, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, topk_group=1))
        bias = source.model.layers[1].mlp.gate.e_score_correction_bias
        nn.init.normal_(bias)
    source.save_pretrained(tmp_path / "source")
    want = weights_of(tmp_path / "source")                              # transformers writes published names
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in want
    policy, optimizer = start(str(tmp_path / "source"), world)
    hf_files = export.hf_files(str(tmp_path / "source"), policy.lm.config, exported[1], "float32")
    export.export(policy, hf_files, tmp_path / "model", world)
    assert_same(weights_of(tmp_path / "model"), want)
    run = checkpoints_of(tmp_path / "run", world, policy, optimizer, watch, hf_files)
    run.after_step(STATE)
    run.wait()
    checkpoints.export_checkpoint(str(tmp_path / "run"), tmp_path / "again")
    assert_same(weights_of(tmp_path / "again"), want)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto", output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(dict(loaded.state_dict()), dict(source.state_dict()))


def test_export_is_in_the_dtype_that_the_run_computes_in(trained, exported, model, world, watch, tmp_path):
    """float32 training gives float32 weights, every bit of them, also from a checkpoint."""
    hf_files = export.hf_files(model, trained[0].lm.config, exported[1], "float32")
    export.export(trained[0], hf_files, tmp_path / "model", world)
    run = checkpoints_of(tmp_path / "run", world, *trained, watch, hf_files)
    run.after_step(STATE)
    run.wait()
    checkpoints.export_checkpoint(str(tmp_path / "run"), tmp_path / "again")
    for folder in (tmp_path / "model", tmp_path / "again"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert loaded.dtype == torch.float32
        assert_same(dict(loaded.named_parameters()), dict(trained[0].full_tensors(torch.float32)))


def test_a_link_in_an_untrusted_checkpoint_is_not_followed(trained, world, watch, tmp_path):
    (tmp_path / "secret").write_text("of another user")
    run = checkpoints_of(tmp_path / "run", world, *trained, watch)
    run.after_step(STATE)
    run.wait()
    folder = tmp_path / "run/checkpoints/step_000002"
    (folder / "hf/notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"hf/notes.txt is a symbolic link"):
        checkpoints.export_checkpoint(str(folder), tmp_path / "out")
    (folder / "hf/notes.txt").unlink()
    (folder / "hf").rename(tmp_path / "elsewhere")
    (folder / "hf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"step_000002/hf is a symbolic link"):
        checkpoints.export_checkpoint(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


TINY = {"config.json": b'{"dtype": "float32", "model_type": "of its own"}'}


def write(out, value: float) -> None:
    tensors = {"weight": torch.full((3,), value)}
    export.replace_hf(out, {"weight": tensors["weight"].to("meta")}, tensors.items(), TINY)


def value_in(folder) -> float:
    return load_file(folder / "model.safetensors")["weight"][0].item()


def test_whatever_ends_an_export_loses_no_folder(tmp_path, monkeypatch):
    """Before each of its renames the old folder is whole; between them the new one is too."""
    out, rename, found = tmp_path / "model", Path.rename, []

    def look(path: Path, target: Path) -> Path:
        found.append({folder.name: value_in(folder) for folder in tmp_path.iterdir()})
        return rename(path, target)

    write(out, 1.0)
    monkeypatch.setattr(Path, "rename", look)
    write(out, 2.0)
    assert found == [{"model": 1.0, ".model.partial": 2.0}, {".model.old": 1.0, ".model.partial": 2.0}]
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"] and value_in(out) == 2.0
    out.rename(tmp_path / ".model.old")                                 # killed between the two
    monkeypatch.undo()
    write(out, 3.0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"] and value_in(out) == 3.0


FOREIGN = {
    "link": lambda out: (out.rename(out.with_name("moved")), out.symlink_to("moved")),
    "file": lambda out: (shutil.rmtree(out), out.touch()),
    "notes": lambda out: (out / "notes.md").touch(),
    "results": lambda out: (out / "eval_results.json").touch(),
    "folder": lambda out: ((out / "onnx").mkdir(), (out / "onnx/model.onnx").touch()),
    "hidden": lambda out: (out / ".gitattributes").touch(),
    "linked": lambda out: (out / "tokenizer.model").symlink_to("/none"),
    "weights": lambda out: save_file({"weight": torch.zeros(3)}, out / "model.safetensors"),    # of the same size
    "config": lambda out: (out / "config.json").write_bytes(TINY["config.json"].replace(b"own", b"OWN")),
    "another model": lambda out: (out / "plainrl.json").unlink(),       # or one of an earlier version
    "damaged mark": lambda out: (out / "plainrl.json").write_text('{"crc32": 1, "manifest": {"files": {}}}'),
    "beside": lambda out: (out.parent / ".model.partial").mkdir() or (out.parent / ".model.partial/mine").touch(),
    "old": lambda out: (out.parent / ".model.old").touch(),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_an_export_replaces_nothing_that_no_export_wrote(change, tmp_path):
    write(tmp_path / "model", 1.0)
    FOREIGN[change](tmp_path / "model")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=f"^{tmp_path}/.*: move it away|^{tmp_path}.*move it away, or delete it"):
        write(tmp_path / "model", 2.0)
    found = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert {path: found.get(path) for path in before} == before
    assert {path.relative_to(tmp_path).parts[0] for path in found.keys() - before.keys()} <= {".model.partial"}


def test_a_copy_of_an_export_is_one_and_an_empty_folder_is_nothing(tmp_path):
    write(tmp_path / "model", 1.0)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    (tmp_path / "empty/folders").mkdir(parents=True)
    for name in ("copy", "empty"):
        write(tmp_path / name, 2.0)
        assert value_in(tmp_path / name) == 2.0


@pytest.mark.parametrize("names", [[], ["plainrl.json"], ["plainrl.json", "config.json"]])
def test_what_a_killed_export_left_is_in_nobodys_way(names, tmp_path):
    (tmp_path / ".model.partial").mkdir()
    for name in names:
        (tmp_path / ".model.partial" / name).touch()
    write(tmp_path / "model", 1.0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a crash of the machine leaves a finished run with empty files."""
    synced = []
    monkeypatch.setattr(export, "sync", lambda path: synced.append(path.relative_to(tmp_path).as_posix()))
    write(tmp_path / "model", 1.0)
    files_of_it = [f".model.partial{name}" for name in ("", "/config.json", "/model.safetensors", "/plainrl.json")]
    assert sorted(synced[:-1]) == files_of_it and synced[-1] == "."


def write_checkpoint(run, **manifest):
    """A complete checkpoint as `list` and `export` see it, with one file."""
    folder = run / "checkpoints/step_000001"
    (folder / "hf").mkdir(parents=True)
    (folder / "a").write_text("a")
    files = {"a": {"size": 1, "crc32": crc32(folder / "a")}}
    content = {"files": files, "world_size": 1, "state": {"step": 1}, "flags": {"--model": str(run / "base"),
                                                                                 "--teacher": ["a=exported"]}}
    write_manifest(folder, content | manifest)
    return folder


@pytest.mark.parametrize(("out", "rule"), [
    ("run", r"run would be replaced, and has no plainrl.json, .*base/config.json is there"),
    ("run/checkpoints", "step_000001/a is there"), ("run/checkpoints/step_000001", "a is there"),
    (".", "exported/config.json is there"), ("file", "file is a file"), ("link", "link is a symbolic link"),
    ("run/base", "config.json is there"), ("notes", "mine.txt is there"), ("model", "config.json is there"),
    ("exported", "exported is the run's --teacher, which would be replaced"),
    (".exported.old/../exported", "exported is the run's --teacher"),
])
def test_an_export_replaces_nothing_but_an_export(out, rule, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "run")
    for name in ("run/base/config.json", "notes/mine.txt", "file", "model/eval_results.json", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    write(tmp_path / "exported", 1.0)
    (tmp_path / "link").symlink_to("notes")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rule):
        checkpoints.export_checkpoint(str(tmp_path / "run"), Path(out))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_list_of_links_files_and_damage(tmp_path, capsys):
    """Loops, dangling links, names with escapes, a damaged best.json: each is a line, and nothing is changed."""
    folder = write_checkpoint(tmp_path)
    for name, target in (("step_000002", "step_000001"), ("step_000003", "step_000003"), ("step_000004", "/none")):
        (folder.parent / name).symlink_to(target)
    (folder.parent / "step_000005").write_text("a file")
    (folder.parent / "step_000006").mkdir()
    (folder.parent / "step_000006/manifest.json").write_text('{"a":' * 100_000)
    (folder.parent / "damaged_step_\x1b[31m").mkdir()
    (tmp_path / "best.json").write_text("{half")
    before = sorted(folder.parent.iterdir())
    checkpoints.list_checkpoints(str(tmp_path))
    first, damaged, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("best.json is damaged") and damaged.startswith(r"damaged_step_\x1b[31m  0.00 GiB")
    assert [line.split("rank(s)  ")[1] for line in lines] == [
        "complete", "damaged: it is the checkpoint of step 1 under another name",
        *4 * ["damaged: manifest.json is missing or damaged"]]
    assert sorted(folder.parent.iterdir()) == before
    with pytest.raises(ValueError, match="nowhere holds no checkpoints/step_N"):
        checkpoints.list_checkpoints(str(tmp_path / "nowhere"))


def test_a_hub_model_may_have_no_generation_config(trained, exported, monkeypatch, tmp_path):
    """As the hub's cache has it after a look: a marker that the file does not exist."""
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text("{}")
    (repository / ".no_exist/abc").mkdir(parents=True)
    (repository / ".no_exist/abc/generation_config.json").touch()
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hf_files = export.hf_files("someone/model", trained[0].lm.config, exported[1], "bfloat16")
    assert "config.json" in hf_files and "generation_config.json" not in hf_files
