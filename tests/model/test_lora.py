"""LoRA: gradients against autograd's in float64, one set of numbers for trainer, engine, export and peft, a reference
without a second model, checkpoints of adapters alone. tests/parallel/test_layout.py: ranks change no gradient."""

# ruff: noqa: F811  (fixtures that are imported)

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2Config, Qwen3MoeConfig

from common.checkpoint.export import export, hf_files
from common.checkpoint.manager import Checkpoints
from common.checkpoint.state import FILE, tensors_of
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.memory.plan import GIB, Model
from common.model.loading import Weights, load_critic, load_frozen, load_policy, read_config
from common.model.lora import LoRAConfig, LoRALinear, Reference, add_adapters
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig
from common.run import RunArgs
from tests.checkpoint.test_checkpoint import watch  # noqa: F401 (fixture)
from tests.conftest import VOCAB, launch
from tests.model import scan_families
from tests.model.peft_worker import logits
from tests.model.test_memory_plan import ALL, llama, plan_of  # noqa: F401 (fixture)
from tests.model.test_policy import make_batch, save_model
from tests.rank_worker import STATE, checkpoints_of
from tools import checkpoints

SITE = Path(f"{sys.prefix}/peft")                                       # of tools/setup.sh extras
BF16, FLOAT32 = ModelConfig(), ModelConfig(compute_dtype="float32")
RANK4 = LoRAConfig(rank=4, alpha=8.0)
MOE = Qwen3MoeConfig(
    vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    max_position_embeddings=64, pad_token_id=0, decoder_sparse_step=1, mlp_only_layers=[],
)


def adapted(model: str, world, config: ModelConfig, adapters: LoRAConfig = RANK4):
    """A policy whose adapters are trained a little: neither A nor B is 0."""
    policy = load_policy(model, config, world, Weights(lora=adapters))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("lora_B"):
                parameter.to_local().copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


# --------------------------------------------------------------------------- one layer

@pytest.mark.parametrize("bias", [True, False])
def test_a_layers_value_and_gradients_are_those_of_autograd_in_float64(bias):
    torch.manual_seed(0)
    weight, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 5), (3, 5), (7, 3)))
    offset = torch.randn(7, dtype=torch.float64) if bias else None
    x, grad = (torch.randn(2, 11, n, dtype=torch.float64) for n in (5, 7))
    layer = LoRALinear(nn.Linear(5, 7, bias=bias), rank=3, scale=0.5)
    for name, value in {"weight": weight, "bias": offset, "lora_A": a, "lora_B": b}.items():
        if value is not None:
            setattr(layer, name, nn.Parameter(value.clone(), requires_grad="lora" in name))
    ours, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(ours).backward(grad)
    a, b = a.requires_grad_(), b.requires_grad_()
    by_autograd = want @ weight.T + 0.5 * ((want @ a.T) @ b.T) + (0 if offset is None else offset)
    by_autograd.backward(grad)
    assert torch.allclose(layer(x), by_autograd, rtol=0, atol=1e-13)
    for found, wanted in ((ours.grad, want.grad), (layer.lora_A.grad, a.grad), (layer.lora_B.grad, b.grad)):
        assert wanted.abs().max() > 0.1 and torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert layer.weight.grad is None


# --------------------------------------------------------------------------- a policy

def test_at_the_start_it_is_the_model_itself(tiny_llama, world):
    """B is 0 and A is not; and all linear layers of blocks have adapters, which alone are trained."""
    policy, batch = load_policy(tiny_llama, BF16, world, Weights(lora=RANK4)), make_batch(VOCAB)
    frozen = load_policy(tiny_llama, BF16, world, Weights(frozen=True))
    assert torch.equal(policy.score(batch, 0.7), frozen.score(batch, 0.7))
    trained = {name: p for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for name, p in policy.lm.named_parameters() if name not in trained)
    first = policy.lm.model.layers[0].self_attn.q_proj.lora_A.full_tensor()
    assert 0.9 * 32**-0.5 < first.abs().max() <= 32**-0.5 and first.unique().numel() > 100


@pytest.mark.parametrize("config", [BF16, FLOAT32], ids=["bfloat16", "float32"])
def test_trainer_engine_and_export_have_the_same_numbers(config, tiny_llama, world, tmp_path):
    """To the bit: the log-probs of the adapted policy are those of the exported model, loaded as any other."""
    policy, batch = adapted(tiny_llama, world, config), make_batch(VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    files = hf_files(tiny_llama, policy.lm.config, tokenizer, config.compute_dtype)
    export(policy, files, tmp_path / "model", world)
    merged = load_policy(str(tmp_path / "model"), config, world, Weights(frozen=True))
    ours, theirs = policy.score(batch, 0.7), merged.score(batch, 0.7)
    assert torch.equal(ours, theirs)
    assert (ours - load_policy(tiny_llama, config, world).score(batch, 0.7)).abs().max() > 0.1      # adapters matter
    check_engine_holds(tmp_path / "model", tiny_llama, policy, config, world)


def check_engine_holds(exported: Path, base: str, policy: Policy, config: ModelConfig, world) -> None:
    """An engine of the base that the policy is sent to has the weights that were exported, to the bit."""
    rollout = RolloutConfig(engine="hf", max_response_length=8)
    setup = EngineSetup(base, read_config(base, config), rollout, config, world, [[5, 6, 7], [9, 10, 11]], [2], 32, 0)
    engine = make_engine(setup)
    engine.wake(policy)
    engine.sleep()                                                      # raises if its log-probs were others
    held = engine.model.state_dict()
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype="auto").state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())


def test_the_reference_is_the_policy_without_adapters(tiny_llama, world, tmp_path):
    args = RunArgs(model=tiny_llama, train_data=(), policy=BF16, lora=RANK4)
    policy, batch = adapted(tiny_llama, world, BF16), make_batch(VOCAB)
    reference = load_frozen(tiny_llama, args, policy, world)
    before = policy.score(batch, 0.7)
    frozen = load_policy(tiny_llama, BF16, world, Weights(frozen=True)).score(batch, 0.7)
    assert torch.equal(reference.score(batch, 0.7), frozen)
    assert torch.equal(policy.score(batch, 0.7), before) and (before - frozen).abs().max() > 0.1
    assert isinstance(reference, Reference) and reference.policy is policy      # no second model
    other = str(shutil.copytree(tiny_llama, tmp_path / "teacher"))
    teacher = load_frozen(other, args, policy, world)
    assert isinstance(teacher, Policy) and not any(p.requires_grad for p in teacher.parameters())
    assert torch.equal(teacher.score(batch, 0.7), frozen)


def test_a_critic_with_adapters_trains_them_and_its_head(tiny_llama, world):
    critic = load_critic(tiny_llama, FLOAT32, world, Weights(lora=LoRAConfig(rank=2, targets=("v_proj",))))
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 + 1 and "head.weight" in trained
    nn.init.ones_(critic.head.weight)
    critic(make_batch(VOCAB)).sum().backward()
    grads = {name: p.grad for name, p in critic.named_parameters() if p.requires_grad}
    assert all(grads[name] is not None for name in trained)
    assert grads["backbone.layers.1.self_attn.v_proj.lora_B"].full_tensor().abs().max() > 0
    stored = tensors_of({"critic": (critic, make_optimizer(critic, OptimConfig()))})
    assert {name.removeprefix("critic.model.") for name in stored} == set(trained)


# --------------------------------------------------------------------------- checkpoints and exports

def test_a_checkpoint_holds_adapters_alone_and_continues(tiny_llama, world, watch, tmp_path):
    policy = adapted(tiny_llama, world, FLOAT32)
    optimizer = make_optimizer(policy, OptimConfig())
    train_adapters(policy, optimizer)
    run = checkpoints_of(tmp_path, world, policy, optimizer, watch)
    run.after_step(STATE)
    run.wait()
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*.safetensors"))
    assert size < 0.2 * 12 * sum(p.numel() for p in policy.parameters())
    again = load_policy(tiny_llama, FLOAT32, world, Weights(lora=RANK4))
    other = make_optimizer(again, OptimConfig())
    assert checkpoints_of(tmp_path, world, again, other, watch).resume() == STATE
    want, found = (tensors_of({"policy": x}) for x in ((policy, optimizer), (again, other)))
    assert want.keys() == found.keys() and sum("exp_avg_sq" in name for name in want) == 2 * 7 * 2
    assert all(torch.equal(*(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (want[name], found[name])))
               for name in want)
    batch = make_batch(VOCAB)
    assert torch.equal(policy.score(batch, 1.0), again.score(batch, 1.0))


def train_adapters(policy, optimizer) -> None:
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_fits_no_other_adapters(tiny_llama, world, watch, tmp_path):
    def needs(model=tiny_llama, **flags):
        args = RunArgs(model=model, train_data=(), run_dir=str(tmp_path), lora=LoRAConfig(**flags))
        return Checkpoints(args, world, {}, {"config.json": b"{}"}, watch, {}).model

    assert needs() == {"trained parts": [], "checkpoint format": FILE}
    assert needs(rank=4) == needs(f"/moved/{tiny_llama.rpartition('/')[2]}", rank=4)
    for other in (needs(), needs(rank=8), needs(rank=4, alpha=1.0), needs(rank=4, targets=("q_proj",)),
                  needs("another", rank=4)):
        assert other != needs(rank=4)


def save(policy, model: str, files: dict[str, bytes], world, watch, folder, adapters: LoRAConfig = RANK4) -> None:
    """A checkpoint of a run in `folder`."""
    args = RunArgs(model=model, train_data=(), lora=adapters, run_dir=str(folder))
    run = checkpoints_of(folder, world, policy, make_optimizer(policy, OptimConfig()), watch, files, args=args)
    run.after_step(STATE | {"step": 1, "total_steps": 1})
    run.wait()


@pytest.fixture
def in_peft(tiny_llama, world, watch, tmp_path):
    """Adapters written for peft, and the folder of the model with them merged, in float32."""
    policy = adapted(tiny_llama, world, FLOAT32)
    files = hf_files(tiny_llama, policy.lm.config, AutoTokenizer.from_pretrained(tiny_llama), "float32")
    export(policy, files, tmp_path / "merged", world)
    save(policy, tiny_llama, files, world, watch, tmp_path)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "adapter", adapter=True)
    return tmp_path / "adapter", tmp_path / "merged"


def test_the_adapters_of_pefts_format_by_hand(in_peft, tiny_llama):
    """W + alpha / r B A in float64, read from the files by peft's rules for names."""
    adapter, merged = in_peft
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert set(config["target_modules"]) == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    assert config["base_model_name_or_path"] == tiny_llama
    names = ["adapter_config.json", "adapter_model.safetensors", "plainrl.json"]
    assert sorted(path.name for path in adapter.iterdir()) == names
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    pattern = re.compile(r"base_model\.model\.(model\.layers\.\d\.\w+\.\w+)\.lora_([AB])\.weight")
    assert len(tensors) == 28 and all(pattern.fullmatch(name) for name in tensors)
    with torch.no_grad():
        for name in tensors:
            layer, kind = pattern.fullmatch(name).groups()
            if kind == "A":
                b = tensors[name.replace("lora_A", "lora_B")].double()
                model.get_submodule(layer).weight += 8 / 4 * b @ tensors[name].double()
    want = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64))
    assert (logits(model) - want).abs().max() < 1e-5
    assert (logits(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)) - want).abs().max() > 0.1


def test_peft_loads_the_adapters(in_peft, tiny_llama, tmp_path):
    if not (SITE / "peft").is_dir():
        pytest.skip(f"peft is not in {SITE}: tools/setup.sh extras")
    adapter, merged = in_peft
    launch("-m", "tests.model.peft_worker", tiny_llama, adapter, tmp_path / "logits.pt", env={"PYTHONPATH": str(SITE)})
    want = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert (torch.load(tmp_path / "logits.pt") - want).abs().max() < 1e-4
    assert (logits(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)) - want).abs().max() > 0.1


def test_a_checkpoint_becomes_the_folder_that_its_run_would_write(tiny_llama, world, watch, tmp_path):
    policy = adapted(tiny_llama, world, BF16)
    files = hf_files(tiny_llama, policy.lm.config, AutoTokenizer.from_pretrained(tiny_llama), "bfloat16")
    save(policy, tiny_llama, files, world, watch, tmp_path)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "by_tool")
    export(policy, files, tmp_path / "by_run", world)
    by_tool, by_run = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in
                       ("by_tool", "by_run"))
    assert by_tool == by_run and any("safetensors" in name for name in by_run)


def test_a_checkpoint_without_adapters_has_none_to_export(tiny_llama, world, watch, tmp_path):
    policy = load_policy(tiny_llama, FLOAT32, world)
    files = hf_files(tiny_llama, policy.lm.config, AutoTokenizer.from_pretrained(tiny_llama), "float32")
    save(policy, tiny_llama, files, world, watch, tmp_path, LoRAConfig())
    with pytest.raises(ValueError, match=r"step_000001 has no adapters: --adapter is for runs with --lora\.rank"):
        checkpoints.export_checkpoint(str(tmp_path), tmp_path / "out", adapter=True)


# --------------------------------------------------------------------------- targets and mistakes

def test_routers_and_experts_have_no_adapters_by_default(world, tmp_path):
    folder = save_model(MOE, tmp_path)
    policy = load_policy(folder, FLOAT32, world, Weights(lora=RANK4))
    layers = {name.rpartition(".")[2] for name, module in policy.lm.named_modules() if isinstance(module, LoRALinear)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    names = [name for name, _ in policy.full_tensors(None)]
    assert sorted(names) == sorted(name for name, _ in load_policy(folder, FLOAT32, world).full_tensors(None))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "gate", "down_proj", "norm"])
def test_wrong_targets_are_refused(target, world, tmp_path):
    rule = (f"--lora.targets {target} must be a linear layer of attention or of an MLP, here one of all-linear experts "
            "k_proj o_proj q_proj v_proj: an embedding .* and `experts` are all of a mixture")
    adapters = LoRAConfig(rank=2, targets=("q_proj", target))
    with pytest.raises(ValueError, match=rule):
        load_policy(save_model(MOE, tmp_path), FLOAT32, world, Weights(lora=adapters))


def test_a_model_in_which_nothing_would_be_trained_is_refused(world, tmp_path):
    """GPT-2 has no nn.Linear in its blocks, and of LongCat's router none is adapted: it would have no gradient."""
    gpt2 = GPT2Config(vocab_size=53, n_embd=24, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(ValueError, match=r"--lora\.rank 4: a gpt2 has no linear layers in its blocks"):
        load_policy(save_model(gpt2, tmp_path), FLOAT32, world, Weights(lora=RANK4))
    with torch.device("meta"):
        longcat = AutoModelForCausalLM.from_config(scan_families.config_of("longcat_flash"))
    add_adapters(longcat, RANK4)
    adapted_layers = [name for name, layer in longcat.named_modules() if isinstance(layer, LoRALinear)]
    assert len(adapted_layers) > 10 and not any("router" in name for name in adapted_layers)


@pytest.mark.parametrize(("flags", "rule"), [
    ({"rank": -1}, "--lora.rank -1 must be at least 0"), ({"rank": 4, "alpha": 0.0}, "--lora.alpha 0 above 0"),
    ({"targets": ("q_proj",)}, "set --lora.rank"),
])
def test_wrong_flags_are_refused(flags, rule):
    with pytest.raises(ValueError, match=rule):
        LoRAConfig(**flags)


# --------------------------------------------------------------------------- memory

def test_what_stays_by_hand(llama):
    """Weights in bfloat16, adapters in float32 with their moments and gradients; no memory for the reference."""
    adapters = 3 * 4 * (2 * (64 + 64) + 2 * (64 + 16) + 3 * (64 + 208))             # A and B: 4 (in + out)
    plan = plan_of(llama, lora=RANK4, frozen="policy")
    want = {"weights": (2 * ALL + 4 * adapters) / GIB, "moments": 8 * adapters / GIB, "frozen models": 0}
    assert plan.resident() == pytest.approx(want)
    update = plan.update(96)
    assert update["gradients"] == 4 * adapters / GIB
    assert sum(update.values()) < sum(plan_of(llama).update(96).values())
    critics = [Model(llama, ModelConfig(), 1, AutoModel, lora=config) for config in (RANK4, LoRAConfig())]
    assert critics[0].trained_shard == adapters and critics[1].trained_shard == ALL - 53 * 64
