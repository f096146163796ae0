"""Router replay: log-probs and gradients where a token's experts are given, against routers computed by hand.

The oracle is transformers' model on one sequence at a time, whose routers are replaced by functions of this file that
take the experts from a table and weigh them by the formulas of the families' papers.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from common.batch import Batch
from common.memory.plan import MemoryPlan
from common.model.loading import Weights, load_policy
from common.model.lora import LoRAConfig, Reference
from common.model.policy import ModelConfig
from common.run import RunArgs
from tests.model.test_policy import SIZES, make_batch, save_model

EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=6, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
                                shared_expert_intermediate_size=16, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3),
    # choice in two of three groups of experts, with a bias; the first layer is dense
    "glm4_moe": Glm4MoeConfig(**SIZES, **EXPERTS, n_routed_experts=6, n_shared_experts=1, first_k_dense_replace=1,
                              n_group=3, topk_group=2, norm_topk_prob=True),
    "granitemoe": GraniteMoeConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=4),
}
TOLERANCE = 2e-6


def softmax_then_choose(module, logits, chosen):
    weights = logits.softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else weights


def choose_then_softmax(module, logits, chosen):
    return logits.gather(1, chosen).softmax(-1)


def sigmoid_then_choose(module, logits, chosen):
    weights = logits.sigmoid().gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor


FORMULAS = {"glm4_moe": sigmoid_then_choose, "granitemoe": choose_then_softmax,
            "gpt_oss": choose_then_softmax}


def by_hand(folder: str, formula, batch: Batch, table: torch.Tensor, weights: dict[str, torch.Tensor] | None = None,
            ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """logp [T] and the gradient of their weighted sum, sequence by sequence. `table` [T, layers, k]: the experts.
    `weights`: others than those of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights or {}, strict=False)
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == table.shape[1]
    span = slice(0)
    for layer, module in enumerate(routers):
        def forward(hidden, module=module, layer=layer):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), module.weight, getattr(module, "bias", None))
            chosen = table[span, layer]
            found = logits, formula(module, logits, chosen), chosen
            return found[::-1] if "Granite" in type(module).__name__ else found
        module.forward = forward
    logp = torch.zeros(len(batch.tokens))
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        span = slice(start, end)
        rows = model(input_ids=batch.tokens[None, span]).logits[0].log_softmax(-1)
        of_next = rows[:-1].gather(1, batch.tokens[start + 1 : end, None])[:, 0] * batch.mask[start + 1 : end]
        logp[start + 1 : end] = of_next.detach()
        (of_next * weights_of(batch)[start + 1 : end]).sum().backward()
    return logp, {name: p.grad for name, p in model.named_parameters()}


def weights_of(batch: Batch) -> torch.Tensor:
    return torch.linspace(-1, 2, len(batch.tokens))


def gradient(policy, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad(set_to_none=True)
    logp, _ = policy(batch, 1.0)
    (logp * weights_of(batch)).sum().backward()
    return logp.detach(), {name: p.grad.full_tensor().clone() for name, p in policy.lm.named_parameters()
                           if p.grad is not None}


def draw_table(batch: Batch, num_layers: int, k: int, num_experts: int = 6) -> torch.Tensor:
    """Different experts for each token and layer: [T, layers, k]."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(len(batch.tokens), num_layers, num_experts, generator=generator).argsort(-1)[..., :k]


def make(family: str, tmp_path, world, replay: str = "old-logp", **flags):
    config = copy.deepcopy(FAMILIES[family])
    folder = save_model(config, tmp_path / family)
    return folder, load_policy(folder, ModelConfig(compute_dtype="float32", router_replay=replay, **flags), world)


def assert_same(found: dict, want: dict) -> None:
    worst = max(float((found[name] - want[name]).norm() / (want[name].norm() + 1e-3)) for name in want)
    print(f"worst relative error of a gradient {worst:.1e}")
    assert found.keys() == want.keys() and worst < 20 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_experts_give_what_they_give_by_hand(family, world, tmp_path):
    """Of other experts than the routers would choose, and of experts that the routers with other weights chose."""
    folder, policy = make(family, tmp_path, world)
    batch, layers = make_batch(53), len(policy.routers)
    table = draw_table(batch, layers, FAMILIES[family].num_experts_per_tok)
    batch.routing = table.short()
    logp, found = gradient(policy, batch)
    want_logp, want = by_hand(folder, FORMULAS.get(family, softmax_then_choose), batch, table)
    assert (logp - want_logp).abs().max() < 5 * TOLERANCE
    assert_same(found, want)
    of_routers = [name for name in want if name.endswith((".gate.weight", ".router.weight"))]
    assert len(of_routers) == layers and all(want[name].norm() > 1e-3 for name in of_routers)
    batch.routing = None
    assert (policy.score(batch, 1.0) - logp).abs().max() > 0.01         # the guard: experts matter here


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_ones_own_experts_changes_no_bit(family, world, tmp_path):
    _, policy = make(family, tmp_path, world)
    batch = make_batch(53)
    logp, want = gradient(policy, batch)
    assert policy.router_changed is None
    assert torch.equal(policy.score(batch, 1.0), logp)
    shape = len(batch.tokens), len(policy.routers), FAMILIES[family].num_experts_per_tok
    assert batch.routing.shape == shape and batch.routing.dtype == torch.int16
    again, found = gradient(policy, batch)
    assert torch.equal(again, logp) and all(torch.equal(found[name], want[name]) for name in want)
    assert policy.router_changed.abs().max() == 0
    batch.routing[::2] = -1                                             # of these tokens the routers choose themselves
    assert torch.equal(gradient(policy, batch)[0], logp) and policy.router_changed.abs().max() == 0


def test_what_was_recorded_is_replayed_after_a_step(world, tmp_path):
    """The routers' weights change between the two passes: experts are those of before, all else is of today."""
    folder, policy = make("glm4_moe", tmp_path, world, gradient_checkpointing=True)
    batch = make_batch(53)
    policy.score(batch, 1.0)
    recorded = batch.routing.clone()
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            local = parameter.to_local()
            local.add_(0.05 * torch.randn(local.shape, generator=torch.Generator().manual_seed(len(name))))
    policy.version += 1
    logp, found = gradient(policy, batch)
    changed = policy.router_changed[batch.mask]
    table, weights = recorded.long(), dict(policy.full_tensors(torch.float32))
    want_logp, want = by_hand(folder, sigmoid_then_choose, batch, table, weights)
    assert (logp - want_logp).abs().max() < 5 * TOLERANCE
    assert_same(found, want)
    assert torch.equal(policy.score(batch, 1.0), logp)                  # a pass in between records nothing new
    assert torch.equal(batch.routing, recorded)
    fresh = make_batch(53)                                              # layer 1 is the first with experts: it sees the
    policy.score(fresh, 1.0)                                            # same hidden states in both passes
    sets = [[set(row) for row in rows[:, 0].tolist()] for rows in (fresh.routing, recorded)]
    want = torch.tensor([new != old for new, old in zip(*sets)]).float()
    assert torch.equal(changed, want[batch.sampled - 1])                # of the row that predicts a token
    assert 0 < changed.mean() < 1


def test_shared_prefixes_and_dummies(world, tmp_path):
    """What has the same experts runs once, and all responses get what was recorded."""
    folder, policy = make("qwen3_moe", tmp_path, world, share_prompt=True)
    prompts, answers = [[5, 6, 7, 8]] * 3 + [[9, 10]], [[11, 12, 13], [14, 15], [16, 17, 18, 19], [20, 21, 22]]
    batch = Batch.build(prompts, answers)
    table = draw_table(batch, 2, 2)
    table[7:11] = table[:4]                                             # two of the three equal prompts
    table[13:17] = table[:4]
    table[16] = (table[3] + 1) % 4                                      # the third one but for its last token
    batch.routing = table.short()
    assert len(batch.shared_prefixes.run) == len(batch.tokens) - 4 - 3
    logp, found = gradient(policy, batch)
    want_logp, want = by_hand(folder, softmax_then_choose, batch, table)
    assert (logp - want_logp).abs().max() < 5 * TOLERANCE
    assert_same(found, want)
    batch = replace(batch, routing=None, cache={})
    logp = policy.score(batch, 1.0)
    assert torch.equal(batch.routing[7:11], batch.routing[:4]) and torch.equal(batch.routing[13:17], batch.routing[:4])
    assert torch.equal(policy.score(batch, 1.0), logp)
    assert policy.router_changed.abs().max() == 0
    for dummy in (batch.dummy(), replace(batch, routing=None, cache={}).dummy()):
        policy.score(dummy, 1.0)
        policy(dummy, 1.0)[0].sum().backward()
        assert dummy.routing.shape == (2, 2, 2) and not policy.router_changed.any()


def test_the_reference_of_adapters_has_its_own_experts(world, tmp_path):
    _, policy = make("qwen3_moe", tmp_path, world)
    folder = str(tmp_path / "qwen3_moe")
    config = ModelConfig(compute_dtype="float32", router_replay="old-logp")
    adapted = load_policy(folder, config, world, Weights(lora=LoRAConfig(rank=2)))
    with torch.no_grad():
        for name, parameter in adapted.lm.named_parameters():
            if name.endswith("lora_B"):
                parameter.add_(0.5)
    batch = make_batch(53)
    want = policy.score(make_batch(53), 1.0)
    logp = adapted.score(batch, 1.0)
    recorded = batch.routing.clone()
    assert (logp - want).abs().max() > 0.05
    assert torch.equal(Reference(adapted).score(batch, 1.0), want)
    assert torch.equal(batch.routing, recorded)
    assert torch.equal(adapted.score(batch, 1.0), logp)


@pytest.mark.parametrize(("config", "reason"), [
    (LlamaConfig(**SIZES), "LlamaDecoderLayer has no routers"),
    (PhimoeConfig(**SIZES, num_local_experts=4), "PhimoeDecoderLayer has PhimoeTopKRouter"),    # its choice is no top-k
    (DogeConfig(**SIZES, is_moe=True, num_experts=16), "DogeDecoderLayer has no routers"),      # it chooses keys
])
def test_what_cannot_be_replayed_is_refused_before_the_engine_starts(config, reason):
    """By the plan of memory, which knows the model's modules."""
    args = RunArgs(model="", train_data=(), policy=ModelConfig(router_replay="old-logp"))
    with pytest.raises(ValueError, match=f"--policy.router-replay: {reason}, of which the choice of experts cannot be"):
        MemoryPlan(args, config, 1, longest=32)
    MemoryPlan(args, FAMILIES["mixtral"], 1, longest=32)


def test_a_dense_teacher_is_not_refused(tiny_llama, world):
    load_policy(tiny_llama, ModelConfig(router_replay="old-logp"), world, Weights(frozen=True))


def test_a_mixture_without_a_router_is_refused(world, tmp_path):
    config = copy.deepcopy(FAMILIES["qwen3_moe"])
    config.mlp_only_layers = [0, 1]
    folder = save_model(config, tmp_path)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no routers, of which"):
        load_policy(folder, ModelConfig(compute_dtype="float32", router_replay="old-logp"), world)
