"""The scripts as users run them: every variant on tiny models, on one and two ranks, and what they refuse."""

import importlib
import json
import math
import re
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import tyro
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dapo
import grpo
import ppo
import rloo
from common.batch import Batch
from common.correction import CorrectionConfig, resolve_correction
from common.model.flops import microbatch_flops
from tests.conftest import ROOT, launch, launch_all
from tests.scripts.test_grpo import metrics_of, weights_of
from tools import try_script

BASE = ["--data.max-prompt-length", "200", "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
        "--prompts-per-step", "4", "--samples-per-prompt", "3", "--rollout.max-response-length", "6",
        "--optim.lr", "1e-3", "--reward.num-workers", "1", "--total-steps", "1", "--save.hf", "never",
        "--reward.function", f"{ROOT / 'tests/scripts/reward_by_length.py'}:compute_score"]
TWO_UPDATES = ["--minibatches-per-step", "2"]
BYPASS = ["--correction.bypass", "True"]
ALL_RECORDED = ["--total-steps", "2", "--log.rollouts-every", "1", "--run-zero-advantage"]
LOSSES = ["grpo", "dr_grpo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "reinforce"]
LOST = ["--reward.function", f"{ROOT / 'tests/scripts/reward_that_is_lost.py'}:compute_score",
        "--reward.max-error-frac", "1", *TWO_UPDATES]
BASELINES = ["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo", "gpg", "otb"]
VARIANTS = {
    **{f"grpo_variants {loss}": ["--loss", loss, *TWO_UPDATES] for loss in LOSSES},
    "grpo": [],
    **{f"grpo_variants {name}": ["--aggregation", name] for name in
       ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")},
    **{f"grpo kl {name}": ["--kl-loss-coef", "0.1", "--kl-estimator", name, *TWO_UPDATES]
       for name in ("k1", "k3", "k3+")},
    "grpo exported": ["--run-zero-advantage", "--kl-loss-coef", "0.1", "--entropy-coef", "0.1", "--total-steps", "2",
                      "--max-tokens-per-gpu", "300", "--save.hf", "end", *TWO_UPDATES],
    "grpo lora": ["--lora.rank", "4", "--kl-loss-coef", "0.1", "--total-steps", "2", "--save.hf", "end", *TWO_UPDATES],
    "grpo groups of ranks": ["--policy.sequence-parallel", "RANKS", "--policy.replicas", "RANKS", "--kl-loss-coef",
                             "0.1", "--policy.share-prompt", "--total-steps", "2", *TWO_UPDATES],
    "ppo groups of ranks": ["--policy.sequence-parallel", "RANKS", "--minibatches-per-step", "2", "--total-steps", "2",
                            "--max-tokens-per-gpu", "300"],
    "ppo lora": ["--lora.rank", "2", "--lora.targets", "v_proj"],
    "grpo_variants passk": ["--advantage", "passk"],
    "grpo_variants dro": ["--loss", "dro", "--loss-numbers", "beta", "0.5", *TWO_UPDATES],
    "grpo_variants kl reward": ["--kl-reward-coef", "0.1", *ALL_RECORDED],
    "rloo remax kl": ["--baseline", "remax", "--kl-reward-coef", "0.1", *ALL_RECORDED],
    "dapo kl": ["--kl-loss-coef", "0.1", "--max-gen-batches", "2", "--aggregation", "seq-mean-token-mean",
                "--no-norm-by-std", *TWO_UPDATES],
    "grpo_variants both kl": ["--loss", "kl_cov", "--kl-loss-coef", "0.1", "--kl-reward-coef", "0.1", *TWO_UPDATES],
    "grpo_variants gspo kl": ["--loss", "gspo", "--kl-loss-coef", "0.1", *TWO_UPDATES],
    "rloo kl loss": ["--loss", "ppo", "--kl-loss-coef", "0.1", *TWO_UPDATES],
    "grpo no std": ["--no-norm-by-std"],
    "grpo entropy": ["--entropy-coef", "10"],
    "grpo epochs": ["--epochs-per-step", "2", "--optim.schedule", "cosine", "--optim.warmup-steps", "1"],
    "grpo checkpointing": ["--policy.gradient-checkpointing", "True"],
    "grpo share prompt": ["--policy.share-prompt", "--max-tokens-per-gpu", "300"],
    "grpo share prompt whole": ["--policy.share-prompt"],               # one micro-batch
    "grpo reward model": ["--reward-model.path", "RM", "--reward-model.weight", "0.5"],
    "grpo reward model alone": ["--reward-model.path", "RM", "--reward-model.alone"],
    "grpo_variants rejection": ["--correction.preset", "decoupled-k3-rs-token-tis",
                                "--correction.rejected-leave-group"],
    "ppo correction": ["--correction.weights", "sequence", "--correction.batch-normalise", "--kl-reward-coef", "0.1"],
    "dapo bypass": ["--correction.preset", "bypass-ppo-clip-k3-rs", *TWO_UPDATES],
    "rloo bypass": ["--correction.preset", "bypass-pg-geo-rs-token-tis", "--correction.reject-above", "9"],
    "ppo": ["--minibatches-per-step", "1"],
    "ppo critic from a reward model": ["--minibatches-per-step", "2", "--critic-model", "RM"],
    "ppo kl": ["--kl-reward-coef", "0.1", "--kl-controller", "adaptive", "--kl-target", "0.001", "--total-steps", "3",
               "--save.every", "1",
               "--minibatches-per-step", "2"],
    "ppo kl loss": ["--kl-loss-coef", "0.1", "--minibatches-per-step", "2", "--epochs-per-step", "2"],
    "ppo gae": ["--gamma", "0.99", "--lam", "0.95", "--value-clip", "0.2", "--critic-optim.lr", "1e-2",
                "--total-epochs", "0.25", "--policy.share-prompt"],
    "ppo warmup": ["--critic-warmup-steps", "1", "--total-steps", "2", "--minibatches-per-step", "2",
                   "--optim.warmup-steps", "2"],
    "dapo": ["--total-steps", "3"],
    "dapo overlong": ["--overlong-buffer", "3", *TWO_UPDATES],
    "dapo mask truncated": ["--mask-truncated"],
    "dapo surplus": ["--keep-surplus", "--total-steps", "3"],
    "dapo one batch": ["--max-gen-batches", "1"],
    **{f"rloo {name}": ["--baseline", name] for name in BASELINES},
    **{f"rloo {name} kl clip": ["--baseline", name, "--kl-reward-coef", "0.1", "--loss", "ppo", "--gamma", "0.9",
                                "--clip-low", "0.2", "--clip-high", "0.2", *TWO_UPDATES] for name in BASELINES},
    "grpo_variants gdpo": ["--advantage", "gdpo", "--reward-components", "length", "1", "parity", "0.5",
                           "--reward.function", f"{ROOT / 'tests/scripts/reward_parts.py'}:compute_score"],
    "grpo lost": ["--run-zero-advantage", *LOST],
    "rloo lost": ["--run-zero-advantage", *LOST],
    "rloo remax lost": [*LOST, "--baseline", "remax"],
    "ppo lost": [*LOST, "--total-steps", "2", "--kl-reward-coef", "0.1", "--kl-controller", "adaptive"],
    "dapo lost": LOST,
}
# What these change is a formula of a token, of a response or of a group, and groups are known on every rank. That
# aggregations do not depend on ranks is in test_layout.py.
ON_ONE_RANK = {
    *(f"grpo_variants {name}" for name in (
        "dr_grpo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "reinforce", "token-sum", "seq-mean-token-sum",
        "seq-mean-token-sum-norm")),
    *(f"grpo {name}" for name in ("kl k1", "kl k3", "no std", "entropy", "checkpointing", "reward model alone")),
    "ppo lora", "rloo remax lost", "grpo share prompt whole",
    *(f"rloo {name}" for name in ("opo", "gpg", "reinforce++-baseline")), "dapo one batch", "dapo overlong",
}
ON_TWO_RANKS = [name for name in VARIANTS if name not in ON_ONE_RANK]
EXPORTED = "grpo exported"
# One of each kind of numbers that ranks share: of a token, a group, the step, a critic, what is left out.
ALWAYS = {
    EXPORTED, "grpo lora", "grpo groups of ranks", "ppo groups of ranks", "grpo epochs", "grpo share prompt", "ppo gae",
    "grpo_variants kl_cov", "grpo_variants seq-mean-token-mean", "grpo_variants passk", "grpo_variants both kl",
    "grpo_variants gdpo", "grpo_variants rejection", "ppo correction", "ppo lost", "dapo surplus", "dapo lost",
    "rloo reinforce++ kl clip", "rloo otb kl clip", "rloo remax kl",
}


@pytest.fixture(scope="module")
def reward_model(tiny_llama, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("reward_model"))
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(tiny_llama, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def names(request) -> dict[int, list[str]]:
    """ranks -> the variants that run on them: on two ranks those that a test asks for."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {EXPORTED, *(values["on_two_ranks"] for values in params if "on_two_ranks" in values)}
    return {1: [*VARIANTS], 2: [name for name in ON_TWO_RANKS if name in asked]}


@pytest.fixture(scope="module")
def folders(names, tiny_llama, small_train, reward_model, tmp_path_factory) -> dict[int, Path]:
    """ranks -> a folder with a run folder for each variant."""
    found = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, folder in found.items():
        own = ["--model", tiny_llama, "--train-data", small_train]
        values = {"RM": reward_model, "RANKS": str(ranks)}
        launch_all(folder, {
            name: [name.split()[0], *(values.get(flag, flag) for flag in [
                *own, *(BASE[:-2] if "--reward-model.alone" in VARIANTS[name] else BASE), *VARIANTS[name]])]
            for name in names[ranks]
        }, ranks)
    return found


@pytest.fixture(scope="module")
def runs(names, folders) -> dict[int, dict[str, list[dict]]]:
    """ranks -> variant -> its metrics, a row a step."""
    return {ranks: {name: metrics_of(folder / name) for name in names[ranks]} for ranks, folder in folders.items()}


@pytest.mark.parametrize("on_two_ranks", [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.sweep) for name in ON_TWO_RANKS
])
def test_a_variant_is_the_same_on_one_and_two_ranks(runs, on_two_ranks):
    name = on_two_ranks
    one, two = runs[1][name], runs[2][name]
    timing = re.compile(r"timing|perf|tokens_per_s|probe|global_seqlen|_max|_min|max$|min$")
    assert len(one) == len(two) >= 1
    for a, b in zip(one, two, strict=True):
        assert a["actor/skipped_steps"] == 0 if "actor/skipped_steps" in a else "warmup" in name
        for key in a:
            if not timing.search(key):
                assert a[key] == pytest.approx(b[key], rel=2e-3, abs=2e-5), key
    all_masked = name == "dapo mask truncated"                  # random models never stop: every response is cut
    assert (one[-1]["actor/grad_norm"] == 0) == all_masked and one[-1]["actor/grad_norm"] < 1e4


def test_adapters_are_trained_against_the_model_below_them(runs, folders, tiny_llama):
    """The KL is 0 before the first update and not after it; matrices in blocks change, and nothing else does."""
    first, second = runs[1]["grpo lora"]
    assert first["rollout_corr/k3_kl"] < 1e-6 > second["rollout_corr/k3_kl"]        # the engine has the merged weights
    assert second["actor/kl_loss"] > first["actor/kl_loss"] > 0                     # of the second mini-batch
    before, after = load_file(Path(tiny_llama) / "model.safetensors"), weights_of(folders[1] / "grpo lora")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if "_proj" in name} and len(changed) == 14


def test_the_exported_weights_are_the_same_on_one_and_two_ranks(runs, folders):
    """Per-response seeds: the same tokens are sampled, and the same updates made."""
    rows = runs[1][EXPORTED]
    assert rows[0]["actor/entropy"] > 1 and rows[0]["actor/kl_loss"] >= 0 and rows[1]["actor/kl_loss"] > 0
    a, b = (weights_of(folders[ranks] / EXPORTED) for ranks in (1, 2))
    assert a and all(torch.allclose(a[name].float(), b[name].float(), atol=1e-3) for name in a)


def first(runs, name, key):
    return runs[1][name][0][key]


def test_variants_differ_where_their_formulas_do(runs):
    """Guard: a flag that reached nothing would leave the gradient of the plain run."""
    norms = {name: first(runs, name, "actor/grad_norm") for name in VARIANTS if name.startswith("grpo")}
    same = {name for name in norms if norms[name] == pytest.approx(norms["grpo"], rel=1e-6)}
    assert {"grpo", "grpo checkpointing", "grpo_variants token-mean"} <= same and len(same) < len(norms) / 2
    # every response has the 6 tokens that are allowed, and there are 12
    for name, factor in (("token-sum", 72), ("seq-mean-token-sum", 6), ("seq-mean-token-sum-norm", 1)):
        assert norms[f"grpo_variants {name}"] == pytest.approx(factor * norms["grpo"], rel=1e-4), name
    for name in ("grpo_variants passk", "grpo no std", "grpo entropy"):
        assert norms[name] != pytest.approx(norms["grpo"], rel=1e-3), name
    losses = [norms[f"grpo_variants {loss}"] for loss in LOSSES]
    assert len({round(norm, 5) for norm in losses}) >= 7
    assert norms["grpo share prompt"] == pytest.approx(norms["grpo"], rel=1e-4)


def test_rloo_is_grpo_without_std_times_n_over_n_minus_1(runs):
    """On policy the two losses have the same gradient but for the factor 3 / 2 of groups of 3."""
    grpo, rloo_ = (first(runs, name, "actor/grad_norm") for name in ("grpo no std", "rloo rloo"))
    assert rloo_ == pytest.approx(1.5 * grpo, rel=1e-4)


def test_ppo_with_a_critic_of_zeros_is_reinforce_plus_plus(runs):
    """gamma = lam = 1 and V = 0: the whitened return-to-go, which is what reinforce++ uses."""
    ppo, other = (first(runs, name, "actor/grad_norm") for name in ("ppo", "rloo reinforce++"))
    assert ppo == pytest.approx(other, rel=1e-4)
    row = runs[1]["ppo"][0]
    assert row["critic/values/mean"] == 0 and row["critic/vf_loss"] == pytest.approx(row["critic/rewards/mean"] / 2)
    assert row["critic/vf_explained_var"] == 0 and row["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)


def test_the_reward_models_score_is_added_or_alone(runs):
    plain, both, alone = (runs[1][name][0] for name in ("grpo", "grpo reward model", "grpo reward model alone"))
    assert abs(both["reward/model"]) > 1e-3
    assert both["reward/model"] == pytest.approx(alone["reward/model"], abs=1e-5)       # the same responses
    assert alone["critic/rewards/mean"] == pytest.approx(alone["reward/model"], abs=1e-6)
    want = plain["critic/rewards/mean"] + both["reward/model"] / 2
    assert both["critic/rewards/mean"] == pytest.approx(want, abs=1e-6)


def test_critic_learns_and_warmup_leaves_the_policy(runs):
    rows = runs[1]["ppo gae"]
    assert rows[0]["critic/values/mean"] == 0 != rows[1]["critic/values/mean"]
    warm = runs[1]["ppo warmup"]
    assert "actor/grad_norm" not in warm[0] and warm[0]["critic/grad_norm"] > 0 and warm[1]["actor/grad_norm"] > 0


def test_the_critics_warmup_does_not_use_up_that_of_the_actor(runs):
    """The actor's first update, in step 2, has the first rate of its two warm-up steps."""
    warm = runs[1]["ppo warmup"]
    assert "actor/lr" not in warm[0] and warm[1]["actor/lr"] == pytest.approx(runs[1]["ppo"][0]["actor/lr"] / 2)


def test_truncated_responses_that_are_masked_run_nowhere(runs):
    """Every response is truncated: only the dummy of two tokens runs."""
    row = runs[1]["dapo mask truncated"][0]
    assert row["rollout/truncated_frac"] == 1 and row["global_seqlen/balanced_max"] == 2


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo", "dapo"])
def test_responses_without_a_reward_run_nowhere(folders, runs, script):
    """All others do: no number of the trainer is recorded of a lost one, and no other token ran."""
    rows = pq.read_table(folders[1] / f"{script} lost/rollouts/step_000001.parquet").to_pylist()
    lost = [math.isnan(row["score"]) for row in rows]
    assert True in lost and False in lost
    assert [row["entropy"] is None for row in rows] == lost
    num_tokens = sum(row["prompt_length"] + row["response_length"] for row in rows if not math.isnan(row["score"]))
    assert first(runs, f"{script} lost", "global_seqlen/balanced_max") == num_tokens
    assert first(runs, f"{script} lost", "reward/error_frac") > 0


@pytest.mark.parametrize(("name", "num_epochs"), [("grpo", 1), ("grpo share prompt whole", 1), ("grpo epochs", 2)])
def test_the_flops_are_those_of_what_ran(folders, runs, tiny_llama, name, num_epochs):
    """A backward costs two forwards. Summed over the ranks. Where beginnings are shared, each runs once: a group's
    prompt, and the beginning of the chat template."""
    rows = pq.read_table(folders[1] / f"{name}/rollouts/step_000001.parquet").to_pylist()
    ran = [row for row in rows if row["entropy"] is not None]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    config = LlamaConfig.from_pretrained(tiny_llama)
    prompts = [tokenizer(row["prompt"], add_special_tokens=False).input_ids for row in ran]
    batch = Batch.build(prompts, [row["tokens"] for row in ran])
    alone, together = (microbatch_flops(batch, config, share_prompt=shared) for shared in (False, True))
    assert together < 0.9 * alone
    want = 3 * num_epochs * (together if "share prompt" in name else alone)
    for ranks in (1, 2):
        if name in runs[ranks]:
            row = runs[ranks][name][0]
            found = 1e12 * row["perf/update_tflops"] * row["timing_s/update_actor"] * ranks
            assert found == pytest.approx(want, rel=1e-9)


def recorded(folders, name: str) -> list[tuple[dict, list[float]]]:
    """The second step's responses, and the KL (k1) of each of their tokens."""
    rows = pq.read_table(folders[1] / f"{name}/rollouts/step_000002.parquet").to_pylist()
    return [(row, [old - ref for old, ref in zip(row["old_logp"], row["ref_logp"])]) for row in rows]


def test_the_kl_in_the_reward_of_a_group(folders):
    """A_i = (R_i - mean) / std with R_i = score - 0.1 * the KL of all its tokens."""
    rows = recorded(folders, "grpo_variants kl reward")
    rewards = torch.tensor([row["score"] - 0.1 * math.fsum(kl) for row, kl in rows], dtype=torch.float64).view(4, 3)
    assert max(abs(math.fsum(kl)) for _, kl in rows) > 0.01
    want = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    for (row, _), reward, advantage in zip(rows, rewards.flatten().tolist(), want.flatten().tolist()):
        assert row["reward"] == pytest.approx(reward, abs=1e-5)
        assert row["token_advantage"] == pytest.approx([advantage] * 6, rel=1e-4, abs=1e-4)


def test_the_kl_in_the_reward_of_remax_counts_from_each_token_on(folders):
    """A_t = score - baseline - 0.1 * the KL of this token and all after it; the baseline is the same for a prompt."""
    for group in range(4):
        baselines = []
        for row, kl in recorded(folders, "rloo remax kl"):
            if row["group"] == group:
                to_go = [math.fsum(kl[t:]) for t in range(6)]
                assert abs(to_go[0] - to_go[5]) > 1e-5
                baselines += [row["score"] - 0.1 * x - a for x, a in zip(to_go, row["token_advantage"])]
        assert len(baselines) == 18 and max(baselines) - min(baselines) < 1e-5
        assert min(abs(baselines[0] - score) for score in (0, 1)) < 1e-5


def test_adaptive_controller_moves_the_coefficient(runs):
    """Step 1 has KL 0, below the target: coef * (1 - 0.2 * 12 / 10000). Then the KL is far above: * (1 + ...)."""
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in runs[1]["ppo kl"]]
    kls = [row["actor/reward_kl_penalty"] for row in runs[1]["ppo kl"]]
    assert coefs[0] == 0.1 and coefs[1] == pytest.approx(0.1 * (1 - 0.2 * 12 / 10000)) and kls[1] > 0.0012
    assert coefs[2] == pytest.approx(coefs[1] * (1 + 0.2 * 12 / 10000))


def test_the_coefficient_in_the_reward_is_not_called_that_of_the_loss(runs):
    """In verl `actor/kl_coef` is --kl-loss-coef (dp_actor.py), and apply_kl_penalty in ray_trainer.py has the names
    below."""
    for row in runs[1]["ppo kl"]:
        assert {"actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"} <= row.keys() and "actor/kl_coef" not in row


def test_the_controller_counts_the_responses_that_have_a_reward(runs):
    """Those that were lost have no KL: with all of them lost, the coefficient stays."""
    first, second = runs[1]["ppo lost"]
    num_scored = round(12 * (1 - first["reward/error_frac"]))
    assert 0 < num_scored < 12 and first["actor/reward_kl_penalty"] == 0
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1 * (1 - 0.2 * num_scored / 10000), rel=1e-12)


def test_greedy_responses_without_a_score_are_counted(runs):
    """remax: the responses to their prompts have no baseline, and no advantage; here those of all prompts."""
    row = runs[1]["rloo remax lost"][0]
    assert row["reward/greedy_error_frac"] == 1 and row["reward/error_frac"] < 0.5 and row["actor/grad_norm"] == 0
    assert runs[1]["rloo remax"][0]["reward/greedy_error_frac"] == 0


def test_the_phases_of_a_step_add_up(runs):
    """No second counts twice: the phases of a step are parts of it, also the save of the step before."""
    for name, rows in runs[1].items():
        for row in rows:
            phases = {key: s for key, s in row.items() if key.startswith("timing_s/") and key.count("/") == 1}
            step_s = phases.pop("timing_s/step", None)          # the validation before training is no step
            assert step_s is None or 0 < sum(phases.values()) <= step_s, (name, row["step"], phases)
    assert ["timing_s/save_checkpoint" in row for row in runs[1]["ppo kl"]] == [False, True, True]


@pytest.mark.sweep
def test_the_seconds_of_sampling_are_those_of_the_slowest_engine(tiny_llama, small_train, tmp_path):
    """The second of two ranks takes 0.1 s a token; it has two blocks of six tokens in a step."""
    flags = ["--model", tiny_llama, "--train-data", small_train, *BASE, "--run-dir", str(tmp_path)]
    launch("tests/checkpoint/faulty.py", "rollout:1:1:slow:0.1", "grpo.py", *flags, ranks=2)
    (row,) = metrics_of(tmp_path)
    assert 1.2 <= row["timing_s/gen"] <= row["timing_s/step"]
    assert row["rollout/tokens_per_s"] == pytest.approx(72 / row["timing_s/gen"], rel=1e-9)


def test_dapo_samples_until_enough_groups_differ(runs):
    rows = [row for row in runs[1]["dapo"] if row["rollout/gen_batches"] > 1]
    assert rows and all(0 < row["reward/constant_group_frac"] < 1 for row in rows)
    for row in runs[1]["dapo"]:                                 # of all rollouts: 12 responses of 6 tokens in each
        num_tokens = row["rollout/tokens_per_s"] * row["timing_s/gen"]
        assert num_tokens == pytest.approx(72 * row["rollout/gen_batches"], rel=1e-9)
    assert max(row["rollout/surplus_groups"] for row in runs[1]["dapo surplus"]) > 0
    one = runs[1]["dapo one batch"][0]
    assert one["rollout/gen_batches"] == 1 and one["rollout/surplus_groups"] == 0
    assert runs[1]["dapo overlong"][0]["reward/overlong_penalty"] < 0


def test_make_try_counts_no_tokens_of_tools_as_sampled(tiny_llama, small_train, tmp_path):
    """Episodes of three replies of at most six tokens, with two messages between them; all replies are trained."""
    flags = ["--model", tiny_llama, "--train-data", small_train, *BASE, "--run-zero-advantage", "--log.rollouts-max",
             "100", "--rollout.episode", f"{ROOT / 'tests/engine/episodes_of_tests.py'}:three_turns",
             "--rollout.max-response-length", "80"]
    launch("grpo.py", *flags, "--run-dir", tmp_path, warm=True)
    (row,) = metrics_of(tmp_path)
    sampled = round(12 * row["response_length/mean"])
    assert 12 * 3 <= sampled <= 12 * 3 * 6
    answer = next(line for line in try_script.describe(tmp_path).splitlines() if line.startswith("tokens with a"))
    assert answer.split(maxsplit=4)[4] == f"{sampled}, of {sampled} sampled on all ranks"


def test_groups_that_dapo_keeps_count_in_the_step_that_sampled_them(tiny_llama, small_train, tmp_path):
    """Of a step's new groups those are not constant that it trains or keeps and that the step before did not keep."""
    flags = ["--model", tiny_llama, "--train-data", small_train, *BASE, "--keep-surplus", "--total-steps", "5",
             "--samples-per-prompt", "2", "--on-few-groups", "stop"]
    launch("dapo.py", *flags, "--run-dir", tmp_path, warm=True)
    rows, kept, found = metrics_of(tmp_path), 0, []
    for row in rows:
        num_new = 4 * row["rollout/gen_batches"]
        unequal = 4 + row["rollout/surplus_groups"] - kept
        assert row["reward/constant_group_frac"] == pytest.approx(1 - unequal / num_new, abs=1e-12), row["step"]
        assert row["rollout/score_all_groups"] * 2 * num_new == pytest.approx(round(
            row["rollout/score_all_groups"] * 2 * num_new), abs=1e-9)       # scores are 0 or 1
        found.append(kept)
        kept = row["rollout/surplus_groups"]
    assert max(found) > 0


# --------------------------------------------------------------------------- formulas by hand

NAN = torch.nan


def baseline(name, rewards, lengths=None, greedy=None):
    """`rewards`: a list a group. The advantages, flat."""
    group = torch.tensor([number for number, members in enumerate(rewards) for _ in members])
    num_prompts = len(rewards)
    rewards = torch.tensor(list(chain(*rewards)), dtype=torch.float64)
    lengths = torch.ones_like(rewards) if lengths is None else torch.tensor(lengths, dtype=torch.float64)
    greedy = torch.tensor([0] * num_prompts if greedy is None else greedy, dtype=torch.float64)
    got = rloo.BASELINES[name].function(rewards, group, lengths, greedy).nan_to_num()
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(0))     # a group is no position
    moved = rloo.BASELINES[name].function(rewards[order], group[order], lengths[order], greedy).nan_to_num()
    assert torch.allclose(moved, got[order], atol=1e-12)
    return got


def assert_equal(got, want):
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), atol=1e-12), got


def test_baselines_by_hand():
    assert_equal(baseline("rloo", [[1, 0, 0], [2, NAN, 4], [5, NAN, NAN]]), [1, -0.5, -0.5, -2, 0, 2, 0, 0, 0])
    assert_equal(baseline("rloo", [[1, 0], [3, 0, 0, 0]]), [1, -1, 3, -1, -1, -1])
    assert_equal(baseline("reinforce++", [[1, 0, NAN]]), [1, 0, 0])
    assert_equal(baseline("reinforce++-baseline", [[1, 0, 0.5], [4, NAN, 2]]), [0.5, -0.5, 0, 1, 0, -1])
    assert_equal(baseline("remax", [[1, 0], [3, NAN]], greedy=[0.25, 1]), [0.75, -0.25, 2, 0])
    # lengths 1, 3 with rewards 4, 0: the weighted mean is 1; the lost response of length 9 has no weight
    assert_equal(baseline("opo", [[4, 0, NAN]], lengths=[1, 3, 9]), [3, -1, 0])
    # 2 of 5 scored responses are in a group with unequal rewards: alpha 2.5
    assert_equal(baseline("gpg", [[1, 0], [2, 2], [7, NAN]]), [1.25, -1.25, 0, 0, 0, 0])
    assert_equal(baseline("gpg", [[2, 2], [0, 0]]), [0, 0, 0, 0])


def test_the_optimal_baseline_goes_with_groups_that_rejected_responses_leave(tiny_llama):
    flags = ["--baseline", "otb", "--correction.preset", "decoupled-k3-rs", "--correction.rejected-leave-group"]
    rloo.check(tyro.cli(rloo.Args, args=["--model", tiny_llama, "--train-data", "x", *flags]))
    with pytest.raises(ValueError, match=r"--baseline otb needs .*: leave out --correction.bypass"):
        rloo.check(tyro.cli(rloo.Args, args=["--model", tiny_llama, "--train-data", "x", *flags, *BYPASS]))


@pytest.mark.parametrize("value", [0.1, -0.7, 1e9 / 3])
def test_groups_of_equal_rewards_have_no_advantage(value):
    """Not even one of rounding, with which they would run through the model. Groups of 1 to 16, the last one lost."""
    group = torch.arange(17).repeat_interleave(torch.arange(1, 18))
    rewards, lengths = torch.full((len(group),), value, dtype=torch.float64), torch.arange(len(group)).double() + 1
    rewards[-17:] = NAN
    for norm_by_std in (True, False):
        assert not grpo.group_advantages(rewards, group, norm_by_std).any()
    for name in ("rloo", "reinforce++-baseline", "opo", "gpg"):
        found = rloo.BASELINES[name].function(rewards, group, lengths, lengths)
        assert not found.nan_to_num().any(), name


def test_groups_to_train_by_hand():
    rewards = torch.tensor([1, 1, 1, 0, 1, 0, NAN, 1, 1, NAN, 0, 1, NAN, NAN, 2, *[NAN] * 3])
    group = torch.arange(6).repeat_interleave(3)
    assert dapo.groups_to_train(rewards, group) == [1, 3]
    assert dapo.groups_to_train(rewards[[5, 9, 0, 4, 10, 2, 11]], group[[5, 9, 0, 4, 10, 2, 11]]) == [1, 3]


def test_a_warm_up_of_the_critic_ends_before_the_run(tiny_llama, small_train, tmp_path):
    """The run's steps are those of --total-epochs, where it is given."""
    flags = ["--model", tiny_llama, "--train-data", small_train, *BASE, "--run-dir", tmp_path, "--total-steps", "9"]
    flags += ["--total-epochs", "0.1", "--critic-warmup-steps", "1"]
    done = launch("ppo.py", *flags, warm=True, check=False)
    assert done.returncode == 2 and "--critic-warmup-steps 1 must be from 0 to below the 1 steps of" in done.stderr


# --------------------------------------------------------------------------- bad flags

@pytest.mark.parametrize(("script", "flags", "message"), [
    ("grpo", ["--clip-low", "0.3", "--clip-high", "0.2"], "--clip-high 0.2 must be at least --clip-low 0.3"),
    ("grpo", ["--clip-low", "1.5"], r"--clip-low 1.5 must be in \[0, 1\]"),
    ("grpo", ["--clip-dual", "0.5"], "--clip-dual 0.5 must be above 1"),
    ("grpo_variants", ["--loss", "sapo", "--clip-low", "0.2"], "--clip-low 0.2: the loss sapo has no such bound"),
    ("grpo_variants", ["--clip-low", "0.3", "--clip-high", "0.2"], "--clip-high 0.2 must be at least --clip-low 0.3"),
    ("grpo_variants", ["--loss", "gspo", "--clip-dual", "3"], "--clip-dual 3.0: the loss gspo has no such bound"),
    ("ppo", ["--lam", "1.5"], r"--lam 1.5 must be in \[0, 1\]"),
    ("ppo", ["--gamma", "-0.1"], r"--gamma -0.1 must be in \[0, 1\]"),
    ("ppo", ["--minibatches-per-step", "5"], r"12 responses a step .* must be a multiple of --minibatches-per-step 5"),
    ("grpo", ["--minibatches-per-step", "5"], r"12 responses a step .* must be a multiple of --minibatches-per-step 5"),
    ("grpo", ["--total-steps", "0"], "--total-steps 0 must be at least 1"),
    ("rloo", ["--samples-per-prompt", "1"], "--samples-per-prompt 1 must be at least 2: a group of one"),
    *((script, ["--advantage-per-step"], "--advantage-per-step needs --rollout.episode: only an episode has turns")
      for script in ("grpo_variants", "ppo")),
    ("rloo", ["--loss", "ppo", "--clip-low", "1.5"], r"--clip-low 1.5 must be in \[0, 1\]"),
    ("rloo", ["--prompts-per-step", "0"], "--prompts-per-step 0 must be at least 1"),
    ("dapo", ["--overlong-buffer", "7"], "--overlong-buffer 7 must be from 0 to --rollout.max-response-length 6"),
    ("dapo", ["--keep-surplus", "--policy.router-replay", "rollout"], "--keep-surplus with --policy.router-replay"),
    ("dapo", ["--max-gen-batches", "0"], "--max-gen-batches 0 must be at least 1"),
])
def test_bad_flags_are_refused_before_a_model_is_loaded(tiny_llama, script, flags, message):
    """`check` is the first line of `main` and sees nothing but flags."""
    module = importlib.import_module(script)
    args = tyro.cli(module.Args, args=["--model", tiny_llama, "--train-data", "/no/such.parquet", *BASE, *flags])
    with pytest.raises(ValueError, match=message):
        module.check(args)


def test_a_critic_that_is_no_model_is_refused(tiny_llama):
    """At the beginning of `main`: its config is read by transformers."""
    args = ppo.Args(model=tiny_llama, train_data=("x",), critic_model="/no/critic")
    with pytest.raises(ValueError, match=r"^/no/critic holds no config.json: --critic-model must be"):
        ppo.main(args)


@pytest.mark.parametrize("script", ["grpo", "dapo", "ppo", "online_dpo"])
def test_a_correction_without_effect_is_refused(script):
    """Advantages are computed before the rejection, so that a rejected response cannot leave its group."""
    leave = CorrectionConfig(reject=("k3",), reject_above=(1.0,), rejected_leave_group=True)
    with pytest.raises(ValueError, match=r"--correction.rejected-leave-group: .* grpo_variants.py and rloo.py do"):
        resolve_correction(leave)
    assert "resolve_correction(args.correction)" in (ROOT / f"{script}.py").read_text()


def test_too_few_groups_stop_with_a_clear_message(tiny_llama, small_train, tmp_path):
    reward = tmp_path / "one.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    done = launch(
        "dapo.py", "--model", tiny_llama, "--train-data", small_train, *BASE[:-2], "--reward.function", f"{reward}",
        "--max-gen-batches", "2", "--run-dir", str(tmp_path / "run"), warm=True, check=False,
    )
    assert done.returncode != 0
    assert "step 1: 0 of 8 groups have unequal rewards after --max-gen-batches 2" in done.stderr


def test_a_run_that_was_killed_keeps_the_surplus(tiny_llama, small_train, tmp_path):
    """dapo.py --keep-surplus: 3 steps in one go equal 1 step, a new process, and 2 more."""
    common = ["--model", tiny_llama, "--train-data", small_train, *BASE, "--keep-surplus", "--save.every", "1"]
    launch("dapo.py", *common, "--total-steps", "4", "--run-dir", str(tmp_path / "whole"), warm=True)
    surplus = [json.loads(line)["rollout/surplus_groups"] for line in
               (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    cut = next(step for step, groups in enumerate(surplus[:-1], start=1) if groups)
    for steps in (cut, 4):
        launch("dapo.py", *common, "--total-steps", str(steps), "--run-dir", str(tmp_path / "cut"), warm=True)
    timing = re.compile(r"timing|perf|tokens_per_s|save|sync/")
    rows = [[{k: v for k, v in json.loads(line).items() if not timing.search(k)}
             for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "cut")]
    assert rows[0] == rows[1]
