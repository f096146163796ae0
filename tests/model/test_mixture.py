"""What the routers of a mixture say: the load balancing loss against transformers' own function and autograd, one
sequence at a time; its metrics; and routers in float32. tests/parallel/test_expert_parallel.py: on several ranks."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.batch import Batch
from common.forward.mixture import Mixture, balanced_routers, count, use_float32_routers
from common.memory.plan import MemoryPlan
from common.metrics import Meter
from common.model.loading import Weights, load_policy
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig, Policy
from common.model.scorer import load_scorer
from common.run import RunArgs
from common.tracking.phase import Phase
from tests.model.families import config_of, make_batch, save

COEF = 2.0
FLOAT32 = ModelConfig(compute_dtype="float32", router_aux_coef=COEF)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def mixture(request, tmp_path_factory) -> str:
    return save(config_of(request.param), tmp_path_factory.mktemp(request.param))


def by_transformers(folder: str, batch: Batch) -> tuple[float, Tensor, dict[str, Tensor], list[Tensor]]:
    """The loss, its share of the gradient, the mean entropy of each sampled token, and each layer's choices."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    layers: list[list[Tensor]] = [[] for _ in range(lm.config.num_hidden_layers)]
    for tokens in batch.tokens.tensor_split(batch.cu_seqlens[1:-1].long()):
        out = lm.model(tokens[None], output_router_logits=True)
        for layer, logits in zip(layers, out.router_logits, strict=True):
            layer.append(logits)
    logits = tuple(torch.cat(layer) for layer in layers)
    predicts = torch.zeros(1, len(batch.tokens))
    predicts[0, batch.sampled - 1] = 1
    function = sys.modules[type(lm).__module__].load_balancing_loss_func
    loss = function(logits, logits[0].shape[1], lm.config.num_experts_per_tok, predicts)
    (COEF * loss).backward()
    rows = [layer[batch.sampled - 1].double() for layer in logits]
    probs = [layer.softmax(-1) for layer in rows]
    entropy = torch.stack([-(p * p.log()).sum(-1) for p in probs]).mean(0)
    chosen = [layer.topk(lm.config.num_experts_per_tok).indices for layer in rows]
    return loss.item(), entropy.detach(), {name: p.grad for name, p in lm.named_parameters()}, chosen


def in_parts(batch: Batch, parts: int) -> list[Batch]:
    return [batch.select(torch.arange(len(batch.sequence_lengths))[part::parts]) for part in range(parts)]


def update(policy: Policy, minibatch: list[Batch]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients, where the loss of the script is 0; the reported loss and entropy of the sampled tokens."""
    policy.count_choices(minibatch)
    losses, entropies = [], []
    for microbatch in minibatch:
        logp, _ = policy(microbatch, 1.0)
        (0 * logp.sum()).backward()
        assert not policy.mixture.logits                                # recomputed layers are not heard
        losses.append(policy.reported["router_aux_loss"][microbatch.mask])
        entropies.append(policy.reported["router_entropy"][microbatch.mask])
    grads = {name: p.grad.full_tensor().clone() for name, p in policy.lm.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return grads, torch.cat(losses), torch.cat(entropies)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", [{}, {"share_prompt": True, "gradient_checkpointing": True}], ids=["plain", "shared"])
def test_the_loss_and_its_gradient_are_those_of_transformers_however_cut(mixture, world, kind, parts):
    batch = make_batch()
    want, entropy, grads, chosen = by_transformers(mixture, batch)
    policy = load_policy(mixture, replace(FLOAT32, **kind), world)
    minibatch = [microbatch.to("cpu", "share_prompt" in kind) for microbatch in in_parts(batch, parts)]
    found, losses, entropies = update(policy, minibatch)
    assert losses.mean().item() == pytest.approx(want, rel=1e-5)
    assert entropies.mean().item() == pytest.approx(entropy.mean().item(), rel=1e-5) and entropies.std() > 1e-3
    total = torch.stack([x.norm() for x in grads.values() if x is not None]).norm()
    assert total > 0.05
    for name, gradient in grads.items():
        ours = found.get(name)
        if gradient is None:
            assert ours is None or not ours.any(), name
        else:
            assert (ours - gradient).norm() < 2e-5 * total, name
    num_experts = len(grads["model.layers.0.mlp.experts.down_proj"])
    counts = torch.stack([count(layer, num_experts) for layer in chosen])
    largest = (counts.amax(1) / counts.mean(1)).mean().item()
    assert policy.mixture.load() == {"actor/expert_load_max": pytest.approx(largest)} and largest > 1.2
    assert policy.mixture.load() == {}


def test_counting_in_each_micro_batch_would_be_another_loss(mixture, world):
    """The oracle sees it."""
    policy, batch = load_policy(mixture, FLOAT32, world), make_batch()
    whole = update(policy, in_parts(batch, 3))
    each = [update(policy, [microbatch]) for microbatch in in_parts(batch, 3)]
    mean = torch.cat([losses for _, losses, _ in each]).mean()
    assert abs(mean - whole[1].mean()) > 1e-4


def test_the_gradient_is_added_to_that_of_the_script(mixture, world):
    policy, batch = load_policy(mixture, FLOAT32, world), make_batch()
    found = {}
    for name, coef in {"both": 1.0, "script": 0.0}.items():
        policy.mixture.coef = COEF * coef
        policy.count_choices([batch])
        policy(batch, 1.0)[0].sum().backward()
        found[name] = {key: p.grad.full_tensor().clone() for key, p in policy.lm.named_parameters()}
        policy.zero_grad()
    policy.mixture.coef = COEF
    alone, *_ = update(policy, [batch])
    for name, both in found["both"].items():
        assert torch.allclose(both - found["script"][name], alone[name], atol=1e-4), name
    policy.mixture.frequencies = None
    policy(batch, 1.0)
    assert "router_aux_loss" not in policy.reported                     # the phase ends the step


def test_a_second_pass_with_a_gradient_is_refused(mixture, world):
    """Each would add the loss. Passes without a gradient add none, and an update may go over the same tokens again."""
    policy, minibatch = load_policy(mixture, FLOAT32, world), in_parts(make_batch(), 2)
    for _ in range(2):
        update(policy, minibatch)
    policy.count_choices(minibatch)
    first, last = minibatch
    policy(first, 1.0)
    policy.score(first, 1.0)
    policy(last, 1.0)
    with pytest.raises(ValueError, match=r"--policy\.router-aux-coef 2: a micro-batch had two forward passes with a "):
        policy(first, 1.0)
    policy.mixture.load()
    policy(first, 1.0)                                                  # no update, no loss


def test_a_phase_counts_before_each_update_and_says_if_a_script_does_not(mixture, world):
    policy, batch = load_policy(mixture, FLOAT32, world), make_batch()
    minibatches = [in_parts(batch, 2), in_parts(batch, 3)]
    run = SimpleNamespace(args=RunArgs(model=mixture, train_data=(), policy=FLOAT32), policy=policy, meter=Meter(),
                          metrics={}, checkpoints=SimpleNamespace(check=lambda: None))

    def updates(given) -> list[float]:
        found = []
        for minibatch in given:
            for microbatch in minibatch:
                logp, _ = policy(microbatch, 1.0)
                logp.sum().backward()
                phase.done(microbatch, logp)
            found.append(policy.mixture.num_tokens)
        return found

    phase = Phase(run, "update_actor", minibatches)
    phase.advance = lambda: None
    with pytest.raises(RuntimeError, match="iterate over the `minibatches` of the phase"):
        updates(minibatches)                                            # not phase.minibatches
    phase = Phase(run, "update_actor", minibatches)
    phase.advance = lambda: None
    assert updates(phase.minibatches) == [int(batch.mask.sum())] * 2
    single = minibatches[:1]
    phase = Phase(run, "update_actor", single)
    phase.advance = lambda: None
    assert updates(single) == [int(batch.mask.sum())]                   # as sft.py does
    phase.outputs = []
    phase.check_complete()
    assert run.metrics["actor/expert_load_max"] > 1


def test_adapters_are_trained_by_it_and_frozen_routers_are_not(world, tmp_path):
    folder = save(config_of("qwen3_moe"), tmp_path)
    policy = load_policy(folder, FLOAT32, world, Weights(lora=LoRAConfig(rank=2, targets=("o_proj", "experts"))))
    grads, *_ = update(policy, [make_batch()])
    assert grads["model.layers.0.mlp.experts.down_proj_lora_B"].abs().max() > 0
    assert not any("gate.weight" in name for name in grads)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_families_without_the_loss_are_refused(family, world, tmp_path):
    folder = save(config_of(family), tmp_path)
    rule = r"--policy\.router-aux-coef 2: transformers has no load balancing loss for the experts of a "
    with pytest.raises(ValueError, match=rule):
        load_policy(folder, FLOAT32, world)
    with pytest.raises(ValueError, match=rule):                         # before an engine starts
        MemoryPlan(RunArgs(model=folder, train_data=(), policy=FLOAT32), config_of(family), 1, longest=100)
    policy = load_policy(folder, replace(FLOAT32, router_aux_coef=0.0), world)
    policy(make_batch(), 1.0)
    assert policy.reported == {} and bool(policy.mixture.load()) == (family == "deepseek_v3")


def test_flags_that_cannot_work_are_refused(world, tmp_path):
    with pytest.raises(ValueError, match=r"--policy\.router-aux-coef -1 must be at least 0"):
        ModelConfig(router_aux_coef=-1.0)
    folder = save(config_of("qwen3_moe"), tmp_path)
    with pytest.raises(ValueError, match=r"--policy\.router-aux-coef 2: a reward model has no such loss"):
        load_scorer(folder, FLOAT32, world)
    args = RunArgs(model=folder, train_data=(), policy=ModelConfig(router_float32=True))
    with pytest.raises(ValueError, match=r"--policy\.router-float32: a llama has no routers, leave it out"):
        MemoryPlan(args, config_of("llama"), 1, longest=100)


# --------------------------------------------------------------------------- precision

@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next", "glm4_moe"])
def test_routers_in_float32_do_not_round_their_logits(family):
    """Of weights and hidden states in bfloat16: the product in float64, rounded to float32 alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hidden = torch.randn(40, 64, dtype=torch.bfloat16)
    before = [router(hidden)[0] for router in routers]
    assert use_float32_routers(model) == len(routers) > 0
    for router, rounded in zip(routers, before, strict=True):
        logits, weights, chosen = router(hidden)
        bias = router.bias.double() if hasattr(router, "bias") else None
        want = F.linear(hidden.double(), router.weight.double(), bias)
        assert logits.dtype == weights.dtype == torch.float32
        assert (logits - want).abs().max() < 1e-6
        if family in ("qwen3_moe", "gpt_oss"):
            assert (rounded - want).abs().max() > 1e-4
            assert torch.equal(chosen.sort(-1).values, want.topk(chosen.shape[1]).indices.sort(-1).values)


def test_a_policy_in_float32_is_the_same_with_float32_routers(world, tmp_path):
    """And in bfloat16 another one, whose experts' weights are not rounded."""
    folder, batch = save(config_of("qwen3_moe"), tmp_path), make_batch()
    for dtype, is_same in (("float32", True), ("bfloat16", False)):
        config = ModelConfig(compute_dtype=dtype)
        found = [load_policy(folder, replace(config, router_float32=on), world).score(batch, 1.0) for on in (0, 1)]
        assert torch.equal(*found) == is_same


def test_each_layer_with_experts_has_one_router_that_is_heard():
    for family in ("qwen3_moe", "gpt_oss", "qwen3_next"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(family))
        assert len(balanced_routers(model)) == 2
        Mixture(model, 1.0, 1)
