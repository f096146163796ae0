"""--optim.kind muon: steps of torch.optim.Muon on whole matrices, on any number of ranks; checkpoints; bytes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from common.checkpoint.state import load_parts, tensors_of
from common.memory.offload import Offload, OffloadConfig
from common.memory.plan import Model
from common.model.optimizers import make_optimizer, uses_muon
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from tests.checkpoint import shards
from tests.conftest import launch
from tests.model.adamw_oracle import bytes_of_moments
from tests.model.muon_oracle import CASES, DECAY, LAYOUTS, LR, MODELS, gradient, start, train, trained, whole
from tests.model.test_bf16_adamw import MIXTURE


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """The models: tiny_llama, whose embedding is its head, and a mixture of 6 experts, whose embedding is not."""
    folder = tmp_path_factory.mktemp("muon")
    (folder / "llama").symlink_to(tiny_llama)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE).save_pretrained(folder / "mixture")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch_on_whole_matrices(name, folder, world):
    model, optimizer = start(name, folder, world)
    before = {key: p.detach().full_tensor().clone() for key, p in trained(model).items()}
    train(model, optimizer, range(4))
    for key, p in trained(model).items():
        is_matrix = "layers." in key and p.ndim > 1
        parts = before[key].flatten(0, -3) if p.ndim == 3 else before[key][None]
        parts = [torch.nn.Parameter(part.clone()) for part in (parts if is_matrix else before[key][None])]
        flags = {"lr": LR, "weight_decay": DECAY if p.ndim > 1 else 0.0}
        if is_matrix:
            other = torch.optim.Muon(parts, adjust_lr_fn="match_rms_adamw", **flags)
        else:
            other = torch.optim.AdamW(parts, fused=True, **flags)
        for step in range(4):
            full = gradient(key, p.shape, step)
            for part, grad in zip(parts, full if p.ndim == 3 else full[None]):
                part.grad = grad.clone()
            other.step()
        want = torch.stack([part.detach() for part in parts]).view(p.shape)
        assert torch.equal(p.detach().full_tensor(), want), key


@pytest.fixture(scope="module")
def one(folder, world):
    """What one rank has saved after two steps, and has after three more."""
    found = {}
    for name in MODELS:
        model, optimizer = start(name, folder, world)
        train(model, optimizer, range(2))
        shards.save(tensors_of({"policy": (model, optimizer)}), folder / f"{name} saved")
        saved = whole(model, optimizer)
        train(model, optimizer, range(2, 5))
        found[name] = {"saved": saved, "trained": whole(model, optimizer)}
    return found


@pytest.fixture(scope="module")
def many(one, folder) -> dict[int, list[dict]]:
    """Number of ranks -> what each found (muon_worker.py)."""
    for ranks in LAYOUTS:
        launch("tests/model/muon_worker.py", folder, ranks=ranks, warm=True)
    return {ranks: [torch.load(folder / f"{ranks} {rank}.pt") for rank in range(ranks)] for ranks in LAYOUTS}


def plan_of(name: str, folder: Path, ranks: int, **layout: int) -> Model:
    of, _, weights = MODELS[name]
    family = AutoModel if name == "critic" else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder / of)
    return Model(config, ModelConfig(**layout), ranks // layout.get("replicas", 1), family, weights.lora, "muon")


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_other_ranks_go_on_as_one_would(ranks, layout, name, one, many, folder, world):
    """They load all bytes that one rank has saved, have its matrices and their momentum three steps later, bit by bit,
    on every rank, and one rank loads what they save. The three steps have changed every weight."""
    for of_rank in many[ranks]:
        found = of_rank[0][name, layout]
        for stage, want in one[name].items():
            assert found[stage].keys() == want.keys()
            of_muon = {key.removesuffix(".momentum_buffer") for key in want if key.endswith(".momentum_buffer")}
            for key, x in want.items():
                name_of = key.replace(".model.", ".optim.", 1).removesuffix(".momentum_buffer")
                # AdamW's kernel rounds the last numbers of a shard, fewer than a register has, in another way
                is_exact = stage == "saved" or name_of in of_muon
                rtol, atol = (0, 0) if is_exact else (1e-5, 1e-7)
                torch.testing.assert_close(found[stage][key], x, rtol=rtol, atol=atol, msg=f"{stage} {key}")
    sizes = [of_rank[1][name, layout] for of_rank in many[ranks]]
    head = 8 * 32 if name == "critic" else 0                            # the plan leaves it out
    assert max(sizes) == plan_of(name, folder, ranks, **LAYOUTS[ranks][layout]).moment_bytes + head
    model, optimizer = start(name, folder, world)
    load_parts({"policy": (model, optimizer)}, folder / f"{name} {layout} trained")
    for key, x in whole(model, optimizer).items():
        assert torch.equal(found["trained"][key], x) and not torch.equal(one[name]["saved"][key], x), key


def test_a_resumed_run_goes_on_as_if_never_stopped(folder, one, world):
    """Moments are offloaded meanwhile; bit by bit, AdamW's weights too."""
    for name in MODELS:
        model, optimizer = start(name, folder, world)
        Offload(OffloadConfig(optimizer=True), [model], [optimizer])
        load_parts({"policy": (model, optimizer)}, folder / f"{name} saved")
        train(model, optimizer, range(2, 5))
        moments = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
        assert moments and not any(x.to_local().untyped_storage().nbytes() for x in moments)
        found, want = whole(model, optimizer), one[name]["trained"]
        assert found.keys() == want.keys() and all(torch.equal(found[key], x) for key, x in want.items())


@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_a_checkpoint_of_another_kind_is_refused(kind, folder, one, world, tmp_path):
    model, optimizer = start("llama", folder, world)
    other = make_optimizer(model, OptimConfig(kind=kind))
    message = r" and this run have other moments, policy\.optim\.\S+ for example: --optim\.kind \(and --critic-optim"
    with pytest.raises(ValueError, match="saved" + message):
        load_parts({"policy": (model, other)}, folder / "llama saved")
    shards.save(tensors_of({"policy": (model, other)}), tmp_path / "others")
    with pytest.raises(ValueError, match="others" + message):
        load_parts({"policy": (model, optimizer)}, tmp_path / "others")


def test_which_weights_are_matrices():
    """Of families with other names, too: GPT-2's layers, biases of experts, convolutions, a gate with one row."""
    matrices = {"lm.model.layers.0.self_attn.q_proj.weight": (32, 16), "lm.transformer.h.3.attn.c_attn.weight": (8, 24),
                "backbone.layers.1.mlp.experts.down_proj": (6, 32, 24), "lm.model.layers.0.mlp.up_proj.lora_A": (4, 32),
                "lm.model.visual.blocks.11.mlp.fc1.weight": (8, 4)}
    others = {"lm.model.embed_tokens.weight": (53, 32), "lm.lm_head.weight": (53, 32), "head.weight": (1, 32),
              "lm.model.layers.0.input_layernorm.weight": (32,),
              "lm.model.layers.0.mlp.experts.down_proj_bias": (6, 32),
              "lm.model.layers.0.linear_attn.conv1d.weight": (64, 1, 4),
              "lm.model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
              "lm.model.layers.0.mlp.shared_expert_gate.weight": (1, 32)}
    for name, shape in (matrices | others).items():
        assert uses_muon("muon", name, torch.Size(shape)) == (name in matrices), name
        assert not uses_muon("adamw", name, torch.Size(shape))


@pytest.mark.parametrize("name", MODELS)
def test_bytes_by_hand_and_measured(name, folder, world):
    """4 bytes of momentum for each number of a matrix, 8 of moments for each other number."""
    model, optimizer = start(name, folder, world)
    train(model, optimizer, range(1))
    sizes = {key: p.numel() for key, p in trained(model).items()}
    in_matrices = sum(n for key, n in sizes.items() if ".layers." in key and "norm" not in key)
    assert 0 < in_matrices <= sum(sizes.values())
    assert bytes_of_moments(optimizer) == 8 * sum(sizes.values()) - 4 * in_matrices
    plan = plan_of(name, folder, 1)
    head = 32 if name == "critic" else 0                                # the plan leaves it out
    assert plan.moment_bytes == bytes_of_moments(optimizer) - 8 * head
    copies = {"llama": 16 * 64 * 32, "critic": 16 * 64 * 32, "adapters": 16 * 64 * 4, "mixture": (12 + 4 * 6) * 48 * 32}
    assert plan.step_bytes == copies[name]
