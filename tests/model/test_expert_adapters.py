"""LoRA on the experts of a mixture: a layer against a slow loop over tokens and experts in float64, one set of numbers
for trainer, engine, export and peft, and checkpoints. tests/parallel/test_expert_parallel.py divides them over ranks,
tests/scripts/test_mixtures.py runs a script."""

# ruff: noqa: F811  (fixtures that are imported)

import json
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from common.checkpoint.export import export
from common.checkpoint.state import tensors_of
from common.forward.adapted import adapt, are_experts, merge, names_of
from common.memory.plan import Model
from common.model.loading import Weights, load_policy, read_config
from common.model.lora import LoRAConfig, Reference, adapters_of
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from tests.checkpoint.test_checkpoint import watch  # noqa: F401 (fixture)
from tests.conftest import VOCAB, launch, save_tokenizer
from tests.model import scan_families
from tests.model.families import config_of
from tests.model.families import save as save_family
from tests.model.peft_worker import logits
from tests.model.test_lora import BF16, FLOAT32, SITE, adapted, check_engine_holds, save, train_adapters
from tests.model.test_policy import make_batch
from tests.rank_worker import STATE, checkpoints_of
from tools import checkpoints
from tools.model_source import merge_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK3 = LoRAConfig(rank=3, alpha=6.0, targets=(*ATTENTION, "experts"))
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h")
"""[gate, up] in one tensor [experts, out, in]; transposed, with biases, gate and up alternate; no gate."""


def make_model(family: str, folder: Path) -> str:
    config = config_of(family)
    config.vocab_size = VOCAB
    save_tokenizer(folder)
    return save_family(config, folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, smollm) -> str:
    return make_model("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def transposed(tmp_path_factory, smollm) -> str:
    return make_model("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


# --------------------------------------------------------------------------- one layer

def experts_of(family: str) -> nn.Module:
    """The experts of a family's layer, with random numbers."""
    torch.manual_seed(0)
    config = config_of(family)
    if family == "nemotron_h":
        sizes = {"n_routed_experts": 6, "moe_intermediate_size": 32, "hidden_size": 64, "moe_latent_size": None}
        for name, size in sizes.items():
            setattr(config, name, size)
        config._experts_implementation = "grouped_mm"
        found = NemotronHExperts(config)
    else:
        found = next(module for module in AutoModelForCausalLM.from_config(config).modules() if are_experts(module))
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found.requires_grad_(False)


def by_a_loop(layer: nn.Module, first: Tensor, second: Tensor, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Token by token and expert by expert. `first`, `second`: [experts, out, in]."""
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for expert, weight in zip(chosen[t].tolist(), weights[t]):
            inner = first[expert] @ x[t]
            if layer.has_bias:
                inner = inner + layer.gate_up_proj_bias[expert].double()
            inner = layer._apply_gate(inner[None])[0] if layer.has_gate else layer.act_fn(inner)
            outer = second[expert] @ inner
            if layer.has_bias:
                outer = outer + layer.down_proj_bias[expert].double()
            row = row + weight * outer
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layers_value_and_gradients_are_those_of_a_loop_in_float64(family):
    """An expert that no token chose has no gradient; rounding is transformers' own with the merged weights."""
    layer, plain = experts_of(family), experts_of(family)
    adapt(layer, rank=3, scale=0.5, dtype=torch.float32)
    for name, parameter in [*layer.named_parameters()]:
        if "lora" in name:
            setattr(layer, name, nn.Parameter(0.3 * torch.randn(parameter.shape)))
    x = torch.randn(17, layer.down_proj.shape[2 if layer.is_transposed else 1]).requires_grad_()
    chosen = torch.stack([torch.randperm(layer.num_experts - 1)[:2] for _ in range(17)])
    weights = torch.rand(17, 2).requires_grad_()
    out = layer(x, chosen, weights)
    grad = torch.randn_like(out)
    out.backward(grad)

    leaves = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters() if "lora" in name}
    leaves |= {"x": x.detach().double().requires_grad_(), "weights": weights.detach().double().requires_grad_()}
    full = []
    for name in names_of(layer):
        weight = getattr(layer, name).double()
        low = [leaves[f"{name}_lora_B"][e] @ leaves[f"{name}_lora_A"][e] for e in range(layer.num_experts)]
        full.append((weight.mT if layer.is_transposed else weight) + 0.5 * torch.stack(low))
    want = by_a_loop(layer, *full, leaves["x"], chosen, leaves["weights"])
    want.backward(grad.double())
    found = dict(layer.named_parameters()) | {"x": x, "weights": weights}
    assert want.abs().max() > 1 and (out - want).abs().max() < 1e-5 * want.abs().max()
    for name, leaf in leaves.items():
        assert leaf.grad.abs().max() > 0.1
        assert (found[name].grad - leaf.grad).abs().max() < 2e-6 * leaf.grad.abs().max(), name
    assert not layer.down_proj_lora_A.grad[-1].any()
    for name, adapter in adapters_of(nn.ModuleDict({"layer": layer})).items():
        own_name = name.removeprefix("layer.")
        factors = adapter.a.detach(), adapter.b.detach()
        merged = merge(getattr(layer, own_name), *factors, adapter.scale, adapter.is_transposed)
        assert not torch.equal(merged, getattr(plain, own_name))
        getattr(plain, own_name).copy_(merged)
    assert torch.equal(plain(x, chosen, weights), out)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_merging_in_parts_is_merging_at_once(is_transposed, monkeypatch):
    weight, a, b = torch.randn(5, 6, 4), torch.randn(5, 2, 4), torch.randn(5, 6, 2)
    if is_transposed:
        weight = weight.mT.contiguous()
    want = weight.double() + 0.5 * (b.double() @ a.double()).permute(0, *([2, 1] if is_transposed else [1, 2]))
    whole = merge(weight, a, b, 0.5, is_transposed)
    monkeypatch.setattr("common.forward.adapted.PART", 48)                # two experts
    assert torch.equal(merge(weight, a, b, 0.5, is_transposed), whole)
    assert (whole - want).abs().max() < 1e-6


# --------------------------------------------------------------------------- a policy

@pytest.mark.parametrize("recompute", [False, True])
def test_at_the_start_it_is_the_model_itself(mixture, world, recompute):
    """And then the adapters of attention and experts alone have gradients, the same where layers are recomputed."""
    config = ModelConfig(gradient_checkpointing=recompute)
    policy, batch = load_policy(mixture, config, world, Weights(lora=RANK3)), make_batch(VOCAB)
    frozen = load_policy(mixture, config, world, Weights(frozen=True))
    assert torch.equal(policy.score(batch, 0.7), frozen.score(batch, 0.7))
    trained = {name: p for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (4 + 2) * 2 and all("lora_" in name for name in trained)
    first = trained["model.layers.0.mlp.experts.down_proj_lora_A"]
    assert first.shape == (6, 3, 32) and first.dtype == torch.float32
    assert 0.9 * 32**-0.5 < first.full_tensor().abs().max() <= 32**-0.5
    policy(batch, 0.7)[0].sum().backward()
    for name, parameter in trained.items():
        assert parameter.grad.full_tensor().abs().max() > 0 or name.endswith("lora_A"), name


def test_recomputing_layers_changes_no_gradient(mixture, world):
    found = []
    for recompute in (False, True):
        config = ModelConfig(compute_dtype="float32", gradient_checkpointing=recompute)
        policy = adapted(mixture, world, config, RANK3)
        policy(make_batch(VOCAB), 0.7)[0].sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in policy.lm.named_parameters() if p.requires_grad})
    assert all(found[0][name].abs().max() > 0 and torch.equal(found[0][name], x) for name, x in found[1].items())


@pytest.mark.parametrize("config", [BF16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mixture", "transposed"])
def test_trainer_engine_and_export_have_the_same_numbers(kind, config, world, tmp_path, request):
    """To the bit: the log-probs of the adapted policy are those of the exported model, loaded as any other."""
    model = request.getfixturevalue(kind)
    policy, batch = adapted(model, world, config, RANK3), make_batch(VOCAB)
    export(policy, config_file(policy, config), tmp_path / "model", world)
    merged = load_policy(str(tmp_path / "model"), config, world, Weights(frozen=True))
    ours, theirs = policy.score(batch, 0.7), merged.score(batch, 0.7)
    assert torch.equal(ours, theirs)
    before = Reference(policy).score(batch, 0.7)
    assert torch.equal(before, load_policy(model, config, world, Weights(frozen=True)).score(batch, 0.7))
    assert (ours - before).abs().max() > 0.05                           # adapters matter
    if kind == "mixture":
        check_engine_holds(tmp_path / "model", model, policy, config, world)


def config_file(policy, config: ModelConfig) -> dict[str, bytes]:
    content = policy.lm.config.to_dict() | {"dtype": config.compute_dtype}
    return {"config.json": json.dumps(content, default=str).encode()}


def test_a_target_is_in_the_model_and_the_default_names_what_it_leaves_out(mixture, tiny_llama, world, capsys):
    policy = load_policy(mixture, FLOAT32, world, Weights(lora=LoRAConfig(rank=2)))
    assert not any("experts" in name for name, p in policy.lm.named_parameters() if p.requires_grad)
    assert f"the experts of {mixture} have no adapters: --lora.targets all-linear experts" in capsys.readouterr().out
    both = load_policy(mixture, FLOAT32, world, Weights(lora=LoRAConfig(rank=2, targets=("all-linear", "experts"))))
    assert sum(p.requires_grad for p in both.lm.parameters()) == 2 * (4 + 2) * 2
    only = load_policy(mixture, FLOAT32, world, Weights(lora=LoRAConfig(rank=2, targets=("experts",))))
    assert all("experts" in name for name, p in only.lm.named_parameters() if p.requires_grad)
    assert "no adapters" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--lora\.targets experts must be a linear layer of attention .*here one of"):
        load_policy(tiny_llama, FLOAT32, world, Weights(lora=LoRAConfig(rank=2, targets=("experts",))))


def test_what_stays_by_hand_and_what_is_merged_at_a_time(mixture):
    """2 layers of 6 experts [2 * 32, 64] and [64, 32]; attention has 4 heads of 32, two of keys and values."""
    config = read_config(mixture, BF16)
    attention = (64 + 128) + 2 * (64 + 64) + (128 + 64)
    experts = 6 * ((64 + 64) + (32 + 64))
    adapters = replace(RANK3, rank=4)
    plans = {n: Model(config, ModelConfig(expert_parallel=n), 2, lora=adapters) for n in (1, 2)}
    for n, plan in plans.items():
        assert plan.trained_shard == 2 * 4 * (attention + experts) / 2
        assert plan.merged == 6 * 64 * 64 // n
    without = Model(config, BF16, 1, lora=LoRAConfig(rank=3))
    assert without.trained_shard == 2 * 3 * attention and without.merged == 64 * 64
    balanced = Model(config, ModelConfig(router_aux_coef=0.1, gradient_checkpointing=True), 1)
    plain = Model(config, ModelConfig(gradient_checkpointing=True), 1)
    assert balanced.update(10_000, 1.0)["activations"] - plain.update(10_000, 1.0)["activations"] == 10_000 * 2 * 8 * 6


# --------------------------------------------------------------------------- checkpoints and exports

def test_a_checkpoint_holds_adapters_alone_and_continues(mixture, world, watch, tmp_path):
    policy = adapted(mixture, world, FLOAT32, RANK3)
    optimizer = make_optimizer(policy, OptimConfig())
    train_adapters(policy, optimizer)
    run = checkpoints_of(tmp_path, world, policy, optimizer, watch)
    run.after_step(STATE)
    run.wait()
    again = load_policy(mixture, FLOAT32, world, Weights(lora=RANK3))
    other = make_optimizer(again, OptimConfig())
    assert checkpoints_of(tmp_path, world, again, other, watch).resume() == STATE
    want, found = (tensors_of({"policy": x}) for x in ((policy, optimizer), (again, other)))
    assert want.keys() == found.keys() and sum("exp_avg_sq" in name for name in want) == 2 * (4 + 2) * 2
    assert all(torch.equal(*(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (want[name], found[name])))
               for name in want)
    batch = make_batch(VOCAB)
    assert torch.equal(policy.score(batch, 1.0), again.score(batch, 1.0))


@pytest.mark.parametrize("kind", ["mixture", "transposed"])
def test_a_checkpoint_becomes_the_folder_that_its_run_would_write(kind, world, watch, tmp_path, request):
    model = request.getfixturevalue(kind)
    policy = adapted(model, world, BF16, RANK3)
    files = config_file(policy, BF16)
    save(policy, model, files, world, watch, tmp_path, RANK3)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "by_tool")
    export(policy, files, tmp_path / "by_run", world)
    by_tool, by_run = (load_file(tmp_path / name / "model.safetensors") for name in ("by_tool", "by_run"))
    assert by_tool.keys() == by_run.keys() and all(torch.equal(by_tool[name], x) for name, x in by_run.items())


KINDS = ["mixture", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("transposed", "experts alone"))]


@pytest.fixture(params=["mixture", "transposed", "experts alone"])
def in_peft(request, world, watch, tmp_path):
    """A model, adapters written for peft, and the folder of the model with them merged, in float32."""
    kind, targets = request.param, RANK3.targets
    if kind == "experts alone":
        kind, targets = "mixture", ("experts",)
    model, adapters = request.getfixturevalue(kind), LoRAConfig(rank=3, alpha=6.0, targets=targets)
    policy = adapted(model, world, FLOAT32, adapters)
    files = config_file(policy, FLOAT32)
    export(policy, files, tmp_path / "merged", world)
    save(policy, model, files, world, watch, tmp_path, adapters)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "adapter", adapter=True)
    return model, tmp_path / "adapter", tmp_path / "merged"


def test_the_adapters_of_pefts_format_by_hand(in_peft):
    """W + alpha / r B A in float64, expert by expert, read from the files by peft's rules for names and shapes."""
    model, adapter, merged = in_peft
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert set(config["target_modules"]) in (set(ATTENTION), set())
    tensors = load_file(adapter / "adapter_model.safetensors")
    found, want, before = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        for folder in (model, merged, model)
    )
    with torch.no_grad():
        for name in tensors:
            layer, _, rest = name.removeprefix("base_model.model.").partition(".lora_A")
            if not rest:
                continue
            a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
            if "experts" not in layer:
                found.get_submodule(layer).weight += 6 / 3 * b @ a
                continue
            experts = found.get_submodule(layer.removesuffix(".base_layer"))
            weight = experts.gate_up_proj if layer.endswith(".base_layer") else experts.down_proj
            for e in range(experts.num_experts):
                of_expert = a[3 * e : 3 * e + 3], b[:, e :: experts.num_experts]
                product = 6 / 3 * of_expert[1] @ of_expert[0]
                weight[e] += product.T if experts.is_transposed else product
    assert (logits(found) - logits(want)).abs().max() < 1e-4
    assert (logits(before) - logits(want)).abs().max() > 0.05


@pytest.mark.parametrize("in_peft", KINDS, indirect=True)
def test_peft_loads_the_adapters(in_peft, tmp_path):
    version = {found.name: found.version for found in distributions(path=[str(SITE)])}.get("peft", "")
    if tuple(map(int, version.split(".")[:2] or [0])) < (0, 19):
        pytest.skip(f"peft of {SITE} is {version or 'missing'}, must be 0.19: tools/setup.sh extras")
    model, adapter, merged = in_peft
    launch("-m", "tests.model.peft_worker", model, adapter, tmp_path / "logits.pt", env={"PYTHONPATH": str(SITE)})
    want, before = (logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
                    for folder in (merged, model))
    assert (torch.load(tmp_path / "logits.pt") - want).abs().max() < 1e-4 < 0.05 < (before - want).abs().max()


@pytest.mark.parametrize("targets", [(), pytest.param(("all-linear", "experts"), marks=pytest.mark.sweep)])
def test_peft_loads_adapters_of_dense_layers_and_shared_experts(targets, world, watch, tmp_path):
    """Which have the names that peft takes for experts: GLM-4.5 has a dense layer, then one with shared experts."""
    model = make_model("glm4_moe", tmp_path / "source")
    adapters = LoRAConfig(rank=3, alpha=6.0, targets=targets)
    policy = adapted(model, world, FLOAT32, adapters)
    files = config_file(policy, FLOAT32)
    export(policy, files, tmp_path / "merged", world)
    save(policy, model, files, world, watch, tmp_path, adapters)
    checkpoints.export_checkpoint(str(tmp_path), tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert set(config["target_modules"]) == set(ATTENTION)
    assert {"mlp.up_proj.weight", "shared_experts.up_proj.weight"} < set(config["target_parameters"])
    test_peft_loads_the_adapters((model, tmp_path / "adapter", tmp_path / "merged"), tmp_path)


def test_adapters_that_peft_would_give_to_other_layers_are_refused():
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(scan_families.config_of("laguna"))
    layer = "model.layers.1.mlp"
    checkpoints.check_names(lm, ["model.layers.0.self_attn.q_proj.lora_A", f"{layer}.experts.down_proj_lora_A"])
    with pytest.raises(ValueError, match=rf"peft would read the adapter of {layer}.shared_experts.up_proj as"):
        checkpoints.check_names(lm, [f"{layer}.shared_experts.up_proj.lora_B"])


def test_evaluate_reads_adapters_of_experts(in_peft, tmp_path):
    _, adapter, merged = in_peft
    merge_adapter(adapter, tmp_path / "read", FLOAT32)
    want, found = (load_file(folder / "model.safetensors") for folder in (merged, tmp_path / "read"))
    assert want.keys() == found.keys() and all(torch.equal(found[name], x) for name, x in want.items())
