"""The plan of a run's memory: numbers by hand, what autograd really keeps, the budget that follows."""

import contextlib
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import ppo
import sft
from common.engine.base import RolloutConfig
from common.flags.record import LogConfig
from common.forward import states
from common.forward.states import separate_states
from common.memory import plan as memory_plan
from common.memory import sizes
from common.memory.offload import OffloadConfig
from common.memory.plan import GIB, MemoryPlan, Model
from common.model.flops import context_length
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModelConfig
from common.model.sharding import shard_dim
from common.optim import OptimConfig
from common.run import RunArgs
from tests.conftest import save_tokenizer
from tests.model import families
from tests.model.families import restore
from tests.model.kept import kept_bytes

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 208, "num_attention_heads": 8,
         "num_key_value_heads": 2, "max_position_embeddings": 128}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),                           # heads are normalised
    "mixture": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                 "moe_intermediate_size": 48, "mlp_only_layers": [], "decoder_sparse_step": 1}),
}


def plan_of(config, ranks=1, longest=96, **flags) -> MemoryPlan:
    names = ("frozen", "critic")
    others = {name: flags.pop(name) for name in names if name in flags}
    flags = {"rollout": RolloutConfig(max_response_length=32)} | flags
    args = ppo.Args if "critic" in others else RunArgs
    return MemoryPlan(args(model="policy", train_data=(), **flags), config, ranks, longest, **others)


# --------------------------------------------------------------------------- what autograd keeps

@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_kept_by_a_block_are_those_that_autograd_keeps(family):
    build, others = FAMILIES[family]
    shallow, deep = (kept_bytes(build(**SIZES, **others, num_hidden_layers=n)) for n in (2, 4))
    model = Model(build(**SIZES, **others, num_hidden_layers=2), ModelConfig(liger=False), 1)
    assert model.kept_by_block(keys=0) == pytest.approx((deep - shallow) / 2, rel=0.02)


STATES = {
    "qwen3_5_text": {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
                     "linear_value_head_dim": 128, "layer_types": None},
    "granitemoehybrid": {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
                         "layer_types": None},
    "lfm2": {"layer_types": None},
}
WIDE = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "shared_intermediate_size": 3584}


def with_states(family: str, num_layers: int):
    """So many layers with a state, and one with attention, of widths as in models below 1B."""
    config = families.config_of(family).to_dict() | WIDE | STATES[family]
    kind = "conv" if family == "lfm2" else "linear_attention"
    config |= {"layer_types": [*[kind] * num_layers, "full_attention"], "num_hidden_layers": num_layers + 1}
    return type(families.config_of(family)).from_dict(config)


@pytest.mark.parametrize("family", STATES)
def test_bytes_kept_by_a_layer_with_a_state_are_those_that_autograd_keeps(family, monkeypatch):
    """In torch, without an empty place in a chunk. Without these bytes the plan would be of 20 to 30% of them."""
    monkeypatch.setattr(sizes, "CHUNK_PADDING", 1.0)
    restore(monkeypatch, with_states(family, 1))
    fewer, more = (kept_bytes(with_states(family, n), lambda model: separate_states(model.get_decoder()), (128, 64, 64))
                   for n in (1, 2))
    model = Model(with_states(family, 1), ModelConfig(liger=False), 1)
    (beside,) = model.kept_beside_blocks()
    assert model.kept_by_block(keys=0) + beside == pytest.approx(more - fewer, rel=0.08)
    tokens = 1000
    with_one, with_two = (Model(with_states(family, n), ModelConfig(liger=False), 2).update(tokens, 0)["activations"]
                          for n in (1, 2))
    assert with_two - with_one == pytest.approx(tokens * (model.kept_by_block(keys=0) + beside), rel=0.05)


def test_with_the_kernels_a_delta_net_keeps_less(monkeypatch):
    """138 KB a token and block: what autograd kept of flash-linear-attention's kernels, run by Triton's interpreter."""
    monkeypatch.setattr(states, "is_installed", lambda kernel: True)
    model = Model(with_states("qwen3_5_text", 1), ModelConfig(liger=False), 1)
    assert model.kept_by_block(keys=0) + max(model.kept_beside_blocks()) == pytest.approx(138e3, rel=0.06)


# --------------------------------------------------------------------------- by hand

@pytest.fixture
def llama():
    """53 x 64 embedding and head, three layers of 64 x (64 + 16 + 16 + 64) + 3 x 64 x 208 + 128, a norm of 64."""
    return LlamaConfig(**SIZES | {"vocab_size": 53}, num_hidden_layers=3, tie_word_embeddings=False)


LAYER = 64 * (64 + 16 + 16 + 64) + 3 * 64 * 208 + 2 * 64
ALL = 2 * 53 * 64 + 3 * LAYER + 64


def test_what_stays_by_hand(llama):
    alone = plan_of(llama).resident()
    assert alone == {"weights": 4 * ALL / GIB, "moments": 8 * ALL / GIB, "frozen models": 0}
    reference = plan_of(llama, frozen="policy").resident()
    assert reference["frozen models"] == 2 * ALL / GIB
    shard = plan_of(llama, ranks=8).resident()["weights"] * GIB / 4     # 53 rows: 7 on the first of 8 ranks
    assert shard == 2 * 7 * 64 + (3 * LAYER + 64) / 8
    assert plan_of(llama).policy.block == LAYER and plan_of(llama).policy.head == 53 * 64 + 64


@pytest.mark.parametrize(("ranks", "dims"), [(32, (0, 0)), (48, (1, 2)), (40, (0, 0))], ids=lambda x: str(x))
def test_experts_that_the_ranks_do_not_divide_are_cut_along_another_dimension(ranks, dims):
    """128 experts, [2 x 48, 64] and [64, 48] each: 48 ranks would have three each and the last ones none."""
    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, head_dim=16, num_experts=128, num_experts_per_tok=2,
                            moe_intermediate_size=48, mlp_only_layers=[], decoder_sparse_step=1)
    with torch.device("meta"):
        shapes = [p.shape for p in AutoModelForCausalLM.from_config(config).parameters()]
    experts = [torch.Size((128, 96, 64)), torch.Size((128, 64, 48))]
    assert tuple(shard_dim(shape, ranks) for shape in experts) == dims and sorted(experts) == sorted(
        shape for shape in shapes if len(shape) == 3)
    others = sum(-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes if len(shape) < 3)
    of_experts = {32: 128 * 9216 / 32, 48: 128 * 9216 / 48, 40: 4 * 9216}[ranks]     # none of 96, 64 and 48 by 40
    assert Model(config, ModelConfig(), ranks).trained_shard == others + of_experts


@pytest.mark.parametrize(("ranks", "replicas", "same"), [(40, 1, 5), (56, 1, 7), (40, 5, 5), (24, 1, 3), (64, 1, 8)])
def test_experts_that_ranks_with_the_same_ones_cannot_divide_are_refused(ranks, replicas, same):
    """128 experts, [96, 64] and [64, 48] each; FSDP2 divides no side but the first into unequal parts. Of another model
    the experts are [64, 64] and [64, 32], and its convolutions, [64, 1, 3], are divided as all weights are."""
    mixture = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, head_dim=16, num_experts=128, num_experts_per_tok=2,
                             moe_intermediate_size=48, mlp_only_layers=[], decoder_sparse_step=1)
    policy = ModelConfig(expert_parallel=8, replicas=replicas)
    if same in (5, 7):
        with pytest.raises(ValueError, match=rf"expert-parallel 8: {same} ranks would divide .*\(\[96, 64\]\) is a mu"):
            plan_of(mixture, ranks, policy=policy)
        return
    assert plan_of(mixture, ranks, policy=policy).policy.trained_shard > 0
    if same == 8:
        with_convolutions = Lfm2MoeConfig(**SIZES, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
                                          moe_intermediate_size=32, num_dense_layers=0, conv_L_cache=3,
                                          layer_types=["conv", "full_attention"])
        assert plan_of(with_convolutions, ranks, policy=policy).policy.trained_shard > 0


def test_each_copy_of_the_model_is_sharded_over_its_own_ranks(llama):
    def plan(ranks, replicas=1):
        return plan_of(llama, ranks, policy=ModelConfig(replicas=replicas))

    assert plan(8, replicas=4).update(96) == plan(2).update(96) != plan(8).update(96)
    assert plan(8, replicas=8).resident() == plan(1).resident()         # the whole model on each rank
    with pytest.raises(ValueError, match=r"--policy\.replicas 3 must be at least 1 and divide the 8 ranks evenly"):
        plan(8, replicas=3)


def test_what_stays_beside_the_engine_by_hand(llama):
    def beside(ranks=1, frozen="", **offload):
        plan = plan_of(llama, ranks, offload=OffloadConfig(**offload), frozen=frozen)
        return sum(plan.beside_engine().values()) * GIB

    assert beside() == pytest.approx(ALL * 12)
    assert beside(frozen="policy") == pytest.approx(ALL * 14)
    assert beside(optimizer=True) == pytest.approx(ALL * 4)
    assert beside(params=True, frozen="policy") == pytest.approx(ALL * 8)
    assert beside(params=True, optimizer=True, frozen="policy") == 0


def test_a_tied_embedding_and_a_critic(llama, tmp_path):
    """A tied embedding is the head; a critic has no head, and its embedding is gathered by itself."""
    tied = Model(LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=True), ModelConfig(), 1)
    assert (tied.embedding, tied.head) == (0, 64 * 64 + 64)
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(tmp_path)
    alone, both = plan_of(llama), plan_of(llama, critic=str(tmp_path))
    critic = both.trained[1]
    assert (critic.embedding, critic.head, critic.all) == (53 * 64, 64, ALL - 53 * 64)
    assert sum(both.resident().values()) == pytest.approx((ALL + critic.all) * 12 / GIB)
    half = plan_of(llama, critic=str(tmp_path), critic_optim=OptimConfig(kind="adamw-bf16"))
    assert sum(half.resident().values()) == pytest.approx((12 * ALL + 6 * critic.all) / GIB)
    half = plan_of(llama, optim=OptimConfig(kind="adamw-bf16"))
    assert half.resident()["weights"] + half.resident()["moments"] == pytest.approx(6 * ALL / GIB)
    assert half.update(96)["gradients"] == pytest.approx(2 * ALL / GIB)
    assert sum(both.update(96).values()) > sum(alone.update(96).values()) + critic.all * 12 / GIB * 0.99
    both.decide_share(0.0, 0)                                           # nothing fits: all of both are recomputed
    assert both.share == 1 and [model.num_recomputed for model in both.trained] == [3, 3]


def test_what_the_plan_does_not_know_is_recomputed_as_before(llama):
    """Layers with a state and vision towers: all of a model above 1B weights, none of a smaller one."""
    vision = Qwen2_5_VLConfig(text_config=SIZES | {"num_hidden_layers": 2}, vision_config={
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64})
    states = Lfm2Config(**SIZES, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    for config in (vision, states):
        plan = plan_of(config)
        plan.decide_share(0.0, 0)
        assert plan.share is None and plan.policy.num_recomputed == 0
    plan = plan_of(llama)
    plan.decide_share(0.0, 0)
    assert plan.share == 1


def with_context(folder: Path, length: int, name: str = "LlamaForCausalLM", **config) -> str:
    sizes = SIZES | {"max_position_embeddings": length}
    if name.endswith("ForSequenceClassification"):                      # it embeds each token of the tokenizer
        sizes |= {"vocab_size": 49152}
    config = LlamaConfig(**sizes, num_hidden_layers=1, architectures=[name], **config)
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0,
             "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
OTHER_MODELS = {
    "--critic-model": lambda path: {"critic": path},
    "--teacher": lambda path: {"frozen": path},
    "--teacher of several": lambda path: {"frozen": ("policy", path)},
    "--reward-model.path": lambda path: {"reward_model": RewardModelConfig(path=path)},
}


@pytest.mark.sweep
@pytest.mark.parametrize(("length", "config", "limit"), [
    (64, {}, 64), (95, {}, 95), (256, {"rope_parameters": LONG_ROPE}, 64), (96, {}, None),
    (256, {"sliding_window": 16}, None), (96, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4,
                                               "factor": 2.0, "original_max_position_embeddings": 48}}, None),
])
@pytest.mark.parametrize("which", OTHER_MODELS)
def test_each_model_has_a_context_for_the_longest_sequence(which, length, config, limit, llama, smollm, tmp_path,
                                                           monkeypatch):
    """Of 96 tokens: what a model of a shorter context says beyond it is nothing that it has learned."""
    flag = which.split()[0]
    name = "LlamaForSequenceClassification" if flag == "--reward-model.path" else "LlamaForCausalLM"
    path = with_context(tmp_path / "other", length, name, num_labels=1, **config)
    monkeypatch.chdir(tmp_path)
    with_context(tmp_path / "policy", 128)
    said = rf"^{flag} {path} has a context of {limit} tokens, and a sequence of this run .* may have 96: choose"
    with pytest.raises(ValueError, match=said) if limit else contextlib.nullcontext():
        plan_of(llama, longest=96, **OTHER_MODELS[which](path))


@pytest.mark.parametrize("config", [Mamba2Config(), BloomConfig(), MptConfig(alibi=True)])
def test_families_without_positions_have_no_limit(config):
    assert context_length(config) == float("inf")


# --------------------------------------------------------------------------- the budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A function that sets the memory that CUDA reports, in GiB."""
    return lambda gb: monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, int(gb * GIB)))


def test_a_budget_that_is_given_is_taken(llama, gpu):
    gpu(6)
    plan = plan_of(llama)
    assert plan.choose_budget(123, CPU) == (123, "micro-batches of 123 tokens (nothing is calculated for CPUs)")
    tokens, why = plan.choose_budget(123, CUDA)
    assert tokens == 123 and "123 tokens (--max-tokens-per-gpu)" in why and "of 6.0 GiB" in why
    tokens, why = plan.choose_budget(0, CPU)
    assert tokens == 16384 and "16,384" in why


def test_the_budget_is_the_largest_that_fits(llama, gpu):
    gpu(5.6)                                                            # 5.5 of these are reserved
    plan = plan_of(llama)
    budget, why = plan.choose_budget(0, CUDA)
    assert budget % 1024 == 0 and 1024 < budget < memory_plan.MAX_TOKENS
    assert plan.update_gb(budget) <= 5.6 < plan.update_gb(budget + 1024)
    assert f"{budget:,} tokens (the most that fit)" in why and "and 0.0 stay between updates" in why
    gpu(80)
    assert plan.choose_budget(0, CUDA)[0] == memory_plan.MAX_TOKENS
    assert plan_of(llama, longest=50_000).choose_budget(0, CUDA)[0] == 50_000  # a longest sequence always runs


def test_the_smallest_gpu_decides_for_all_ranks(llama, gpu, monkeypatch):
    """Another rank has half of this one's memory; with another number of tokens each would run another number of
    micro-batches."""
    gpu(80)
    monkeypatch.setattr(memory_plan, "all_max", lambda mine: torch.tensor([max(mine[0], mine[0] / 2)]))
    assert "of 40.0 GiB" in plan_of(llama).choose_budget(0, CUDA)[1]


def test_a_longest_sequence_that_does_not_fit_is_refused(llama, gpu):
    gpu(5)
    with pytest.raises(ValueError, match=r"96 tokens, needs 5\.\d GiB, by calculation, and a GPU has 5\.0: use more"):
        plan_of(llama).choose_budget(0, CUDA)


def test_supervised_training_is_planned_without_an_engine(llama, gpu):
    """The same update, without CUDA graphs and without what follows from rollouts."""
    sampled = plan_of(llama, frozen="policy")
    plan = MemoryPlan(sft.Args(model="", train_data=()), llama, 1, 96)
    assert plan.resident() == plan_of(llama).resident() != sampled.resident()
    assert plan.update_gb(500) == pytest.approx(plan_of(llama).update_gb(500) - 1.5) and plan.reserved_gb == 4
    gpu(4.1)
    budget, why = plan.choose_budget(0, CUDA)
    assert 1024 <= budget < memory_plan.MAX_TOKENS and plan.update_gb(budget) <= 4.1 < plan.update_gb(budget + 1024)
    assert "of 4.1 GiB, and" in why and plan.choose_budget(0, CPU)[0] == 16384
    gpu(3)
    with pytest.raises(ValueError, match=r"96 tokens, needs 4\.\d GiB, .* dpo\.py: --data\.max-length"):
        plan.choose_budget(0, CUDA)


def test_a_measured_update_has_a_second_gradient_of_the_policy():
    """That of one term, beside the gradient so far (--log.signal)."""
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    plain, measured = (plan_of(config, log=LogConfig(signal=signal)).update(64)["gradients"]
                       for signal in (0, 5))
    assert measured == pytest.approx(2 * plain) and plain > 0
