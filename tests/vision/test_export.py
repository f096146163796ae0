"""What is written of a model that reads images: names, shapes and orientation of published checkpoints, by transformers
and by vLLM; its adapters merged by a run, from its checkpoint and by evaluate.py; its reward model."""

# ruff: noqa: F811  (fixtures that are imported)

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from common.checkpoint.export import export, hf_files, model_of
from common.model.loading import load_critic, load_policy
from common.model.lora import LoRAConfig
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.model.scorer import load_scorer
from common.optim import OptimConfig
from common.run import RunArgs
from tests.checkpoint.test_checkpoint import assert_same, watch  # noqa: F401 (fixture)
from tests.conftest import launch
from tests.model.peft_worker import logits
from tests.model.test_lora import SITE, adapted
from tests.rank_worker import STATE, checkpoints_of
from tests.vision.tiny_models import make_vision_model
from tools import checkpoints
from tools.model_source import write_model

FLOAT32 = ModelConfig(compute_dtype="float32")
FAMILIES = ["qwen3_vl_moe", *(pytest.param(name, marks=pytest.mark.sweep) for name in (
    "qwen2_5_vl", "qwen3_vl", "internvl"))]
TOKENS = [5, 17, 300, 41, 7, 7, 90, 23, 51, 8, 400, 3]


def made_by(path: str, policy) -> dict[str, bytes]:
    return hf_files(path, policy.lm.config, AutoTokenizer.from_pretrained(path), "float32")


def tensors_in(folder: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def published_by_hand(family: str, path: str) -> dict[str, torch.Tensor]:
    """What transformers has written in the folder, with the experts of Qwen3-VL-MoE [experts, in, out], as Qwen
    published them: transformers reads both, and writes [experts, out, in]."""
    found = tensors_in(path)
    if family == "qwen3_vl_moe":
        for layer in range(2):
            for name in ("gate_up_proj", "down_proj"):
                key = f"model.language_model.layers.{layer}.mlp.experts.{name}"
                found[key] = found[key].transpose(1, 2)
        assert found[key].shape == (4, 32, 128)                         # of 4 experts from 32 to 128
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", FAMILIES[0], *FAMILIES[2:]])
def test_an_export_is_as_published(family, world, tmp_path):
    path = make_vision_model(family, tmp_path / "source")
    policy = load_policy(path, FLOAT32, world)
    export(policy, made_by(path, policy), tmp_path / "model", world)
    assert_same(tensors_in(tmp_path / "model"), published_by_hand(family, path))
    theirs, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(dict(theirs.named_parameters()), dict(policy.full_tensors(None)))


def test_square_experts_have_no_orientation(world, tmp_path):
    """transformers reads such weights as they are, and vLLM transposed: no folder is the same model for both."""
    path = make_vision_model("qwen3_vl_moe", tmp_path / "source", moe_intermediate_size=64)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is \[4, 128, 128\], and vLLM and transformers take"):
        load_policy(path, FLOAT32, world)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_reads_an_export(family, world, tmp_path):
    """Its log-probs of a text are those of transformers with the source's weights."""
    path = make_vision_model(family, tmp_path / "source")
    policy = load_policy(path, FLOAT32, world)
    export(policy, made_by(path, policy), tmp_path / "model", world)
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        rows = theirs(input_ids=torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    want = rows.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    launch("-m", "tests.vision.vllm_reads", tmp_path / "model", tmp_path / "logp.pt", *map(str, TOKENS), env=env)
    assert (torch.load(tmp_path / "logp.pt") - want).abs().max() < 2e-5 < want.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_merged_alike_by_all_that_write_them(family, world, watch, tmp_path):
    """The run, `tools.checkpoints export`, and evaluate.py, which reads peft's format; those of experts too."""
    path = make_vision_model(family, tmp_path / "source")
    targets = ("all-linear", "experts") if family == "qwen3_vl_moe" else ()
    lora = LoRAConfig(rank=4, alpha=8.0, targets=targets)
    policy = adapted(path, world, FLOAT32, lora)
    files = made_by(path, policy)
    export(policy, files, tmp_path / "by_run", world)
    args = RunArgs(model=path, train_data=(), lora=lora, policy=FLOAT32, run_dir=str(tmp_path / "run"))
    optimizer = make_optimizer(policy, OptimConfig())
    run = checkpoints_of(tmp_path / "run", world, policy, optimizer, watch, files, args=args)
    run.after_step(STATE | {"step": 1, "total_steps": 1})
    run.wait()
    checkpoints.export_checkpoint(str(tmp_path / "run"), tmp_path / "by_tool")
    checkpoints.export_checkpoint(str(tmp_path / "run"), tmp_path / "adapter", adapter=True)
    write_model(str(tmp_path / "adapter"), tmp_path / "by_evaluate", FLOAT32)
    want = tensors_in(tmp_path / "by_run")
    assert_same(tensors_in(tmp_path / "by_tool"), want)
    assert_same(tensors_in(tmp_path / "by_evaluate"), want)
    changed = [name for name, tensor in published_by_hand(family, path).items() if not torch.equal(tensor, want[name])]
    num_layers = 2 * (6 if family == "qwen3_vl_moe" else 7)             # q, k, v, o, and three or two of an MLP
    assert len(changed) == num_layers and not any("vis" in name for name in changed)
    if (SITE / "peft").is_dir():                                        # tools/setup.sh extras
        flags = [path, tmp_path / "adapter", tmp_path / "logits.pt"]
        launch("-m", "tests.model.peft_worker", *flags, env={"PYTHONPATH": str(SITE)})
        theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "by_run", dtype=torch.float32)
        assert (torch.load(tmp_path / "logits.pt") - logits(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_is_written_and_read(family, world, tmp_path):
    path = make_vision_model(family, tmp_path / "source")
    scorer = load_scorer(path, FLOAT32, world)
    export(scorer, made_by(path, scorer), tmp_path / "model", world)
    found = tensors_in(tmp_path / "model")
    assert torch.equal(found.pop("score.weight"), scorer.critic.head.weight.full_tensor())
    assert_same(found, published_by_hand(family, path))                 # the head is tied, and no part of it
    again = load_critic(str(tmp_path / "model"), FLOAT32, world)
    assert_same({name: p.full_tensor() for name, p in again.named_parameters()},
                {name: p.full_tensor() for name, p in scorer.critic.named_parameters()})


def test_a_config_with_too_many_layers_ends_at_once(tmp_path):
    config = json.loads((Path(make_vision_model("qwen3_vl", tmp_path)) / "config.json").read_text())
    for part, name in (("text_config", "num_hidden_layers"), ("vision_config", "depth")):
        changed = config | {part: config[part] | {name: 10**7}}
        with pytest.raises(ValueError, match=r"config.json names 10,000,000 layers, more than the 1,000 of any model"):
            model_of({"config.json": json.dumps(changed).encode()})
