"""grpo.py as users run it: on the real model with vLLM, on one and two ranks, and what it refuses."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import grpo
import grpo_variants
import rloo
from tests.conftest import FAST_DTYPE, ROOT, TRAIN, VAL, launch, launch_all, make_tiny_llama
from tests.forks.patches import stored

REWARD = ROOT / "tests/scripts/reward_by_length.py"
TINY = ("--data.max-prompt-length", "200", "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
        "--prompts-per-step", "4", "--samples-per-prompt", "3", "--rollout.max-response-length", "6", "--optim.lr",
        "1e-3", "--reward.num-workers", "1", "--total-steps", "2")


@pytest.fixture(scope="session")
def tiny(tiny_llama, small_train) -> list[str]:
    return ["--model", tiny_llama, "--train-data", small_train, *TINY]


@pytest.fixture(scope="session")
def small_val(tmp_path_factory) -> str:
    """The first 4 validation problems: the tests look at the plumbing, not at the accuracy."""
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("val") / "val.parquet"
    pq.write_table(pq.read_table(VAL).slice(0, 4), path)
    return str(path)


@pytest.fixture(scope="session")
def tiny_vllm(tmp_path_factory) -> str:
    """vLLM's attention on CPUs has heads of 32."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_vllm"), 128)


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.engine
@pytest.mark.parametrize(("script", "model", "flags"), [
    ("grpo.py", "smollm", ["--run-zero-advantage", "--policy.share-prompt"]),
    pytest.param("ppo.py", "tiny_vllm", ["--kl-reward-coef", "0.01", "--minibatches-per-step", "2",
                                         "--policy.share-prompt"], marks=pytest.mark.slow),
    pytest.param("dapo.py", "tiny_vllm", ["--max-gen-batches", "2", "--overlong-buffer", "8", "--policy.share-prompt"],
                 marks=pytest.mark.slow),
    pytest.param("rloo.py", "tiny_vllm", ["--baseline", "remax", "--run-zero-advantage"], marks=pytest.mark.slow),
])
def test_two_real_steps_with_vllm(request, small_val, tmp_path, script, model, flags):
    """vLLM and FSDP2: validation, two updates, the exported model loads and has moved. One script on the 135M model. No
    C++ compiler is needed."""
    folder = request.getfixturevalue(model)
    if model != "smollm":                                               # its answers are never right
        flags = [*flags, "--optim.lr", "1e-3", "--reward.function", f"{REWARD}:compute_score"]
    launch(
        script, "--model", folder, "--train-data", str(TRAIN), "--val-data", small_val, "--run-dir", str(tmp_path),
        "--data.max-prompt-length", "200", "--prompts-per-step", "2", "--samples-per-prompt", "4", "--total-steps", "2",
        "--rollout.max-response-length", "24", "--rollout.max-num-seqs", "16", "--rollout.kv-cache-gb", "0.25",
        "--eval-n", "0", "--optim.lr", "1e-5", "--reward.num-workers", "1", "--max-tokens-per-gpu", "2048",
        *FAST_DTYPE, *flags, env={"CXX": "none", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
    )
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "val-core/word_problems/acc/greedy" in rows[0] and "val-core/word_problems/acc/greedy" in rows[2]
    assert not any("sync/probe_prob_diff" in row for row in rows)       # the first sync is that of the validation
    for row in rows[1:]:
        assert 0 < row["training/rollout_probs_diff_mean"] < 0.03      # right weights in the engine, right shift
        assert row["rollout_corr/k3_kl"] < 0.02
        assert row["actor/grad_norm"] > 0
        assert 0 < row["actor/entropy"] < (5 if model == "smollm" else 11) and 0 < row["response_length/mean"] <= 24
        assert row["actor/skipped_steps"] == 0 and row["reward/error_frac"] == 0
        assert row["perf/cpu_memory_peak_gb"] < 8
    old, new = load_file(f"{folder}/model.safetensors"), weights_of(tmp_path)
    assert set(old) == set(new) and all(old[name].shape == new[name].shape for name in old)
    assert any(not torch.equal(old[name].to(new[name].dtype), new[name]) for name in old)


STALE = """
import grpo
from common.engine.hf import HFEngine
from tools.command_line import run_script

load, times = HFEngine._load, []

def load_twice(self, tensors, sent):
    times.append(1)
    return load(self, tensors, sent) if len(times) < 3 else (len(list(tensors)), set())

HFEngine._load = load_twice
run_script(grpo.main, grpo.Args, "")
"""


@pytest.mark.parametrize(("flags", "found"), [
    ([], "on the tokens of this step"), (["--minibatches-per-step", "2"], "on the tokens of this step"),
    (["--reward.function", "constant"], "on the probe"), (["--rollout.max-probe-diff", "0"], ""),
])
def test_wrong_weights_in_the_engine_stop_the_step(tiny, tmp_path, flags, found):
    """The third sync loads nothing, and its checksums do not say so: no update and no log line follow. If all rewards
    are equal, nothing is trained or compared, so each rollout has a probe."""
    script, reward = tmp_path / "stale.py", tmp_path / "constant.py"
    script.write_text(STALE)
    reward.write_text("def compute_score(*arguments, **others):\n    return 1.0\n")
    flags = [f"{reward}:compute_score" if flag == "constant" else flag for flag in flags]
    if "--reward.function" not in flags:
        flags += ["--reward.function", f"{REWARD}:compute_score"]
    done = launch(
        script, *tiny, "--run-dir", tmp_path, "--total-steps", "4", "--optim.lr", "1e-2", "--optim.weight-decay", "10",
        "--save.hf", "never", "--rollout.max-probe-diff", "1e-6", *flags, warm=True, check=False,
    )
    assert (done.returncode != 0) == bool(found), done.stderr
    assert f"{found}, above --rollout.max-probe-diff 1e-06: the engine does not hold" in done.stderr or not found
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == ([1, 2] if found else [1, 2, 3, 4])
    probed = [row["step"] for row in rows if "sync/probe_prob_diff" in row]
    assert probed == ([1, 2] if found == "on the probe" else [1])


@pytest.mark.parametrize("script", [
    ["grpo"], ["grpo_variants", "--loss", "dro", "--loss-numbers", "beta", "2", "--minibatches-per-step", "2"],
])
def test_skipping_constant_groups_changes_nothing(script, tiny, tmp_path):
    """Their advantage is 0: with and without them in the forward pass, the same gradient norms and weights. (The loss
    dro pulls them to the old policy, so they run with it in any case.)"""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(extra_info['index'] % 2 and len(solution_str) % 2)\n"
    )
    command = [*script, *tiny, "--reward.function", f"{reward}:compute_score"]
    launch_all(tmp_path, {"skipped": command, "run": [*command, "--run-zero-advantage"]})
    skipped, run = metrics_of(tmp_path / "skipped"), metrics_of(tmp_path / "run")
    assert 0 < skipped[0]["reward/constant_group_frac"] < 1
    for a, b in zip(skipped, run, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-5) and a["actor/grad_norm"] > 0
    a, b = weights_of(tmp_path / "skipped"), weights_of(tmp_path / "run")
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-3) for name in a)


def test_advantages_by_hand():
    rewards = torch.tensor([1, 0, 0, 1, 2, 2, 2, 2, 0, 3, torch.nan, 0], dtype=torch.float64)
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
    got = grpo.group_advantages(rewards, group, norm_by_std=True)
    first = 0.5 / (1 / 3**0.5 + 1e-6)                   # mean 1/2, unbiased std sqrt(4 * 0.25 / 3)
    third = 3**0.5 + 1e-6                               # mean 1 of the three that have a reward, std sqrt(6 / 2)
    want = [first, -first, -first, first, *[0.0] * 4, -1 / third, 2 / third, 0.0, -1 / third]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), atol=1e-12)
    plain = grpo.group_advantages(rewards, group, norm_by_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, *[0.0] * 4, -1.0, 2.0, 0.0, -1.0]


def test_passk_advantages_by_hand():
    nan = torch.nan
    rewards = torch.tensor([0.2, 1.0, 0.5, 1, 1, 0, nan, 0, 2, 3, nan, nan], dtype=torch.float64)
    group = torch.arange(4).repeat_interleave(3)
    got = grpo_variants.passk_advantages(rewards, group, norm_by_std=False)
    want = [0, 0.5, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]                       # one scored response has nobody to lead
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64))
    normed = grpo_variants.passk_advantages(rewards, group, norm_by_std=True)
    assert normed[8] == pytest.approx(2 / (2**0.5 + 1e-6)) and normed[1] == pytest.approx(
        0.5 / (float(torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64).std()) + 1e-6))


@pytest.mark.parametrize("rewards", [[0, 1, 0, 1], [0.3, 2, -1, 2], [1, 2, 3, 4]])
def test_passk_and_leave_one_out_are_unbiased(rewards):
    """Over all groups of three that a policy of four words can sample, the mean of sum_i A_i grad log p(y_i) is the
    gradient of the expected best reward of three, and for RLOO three times that of the expected reward."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    best = passk = leave_one_out = 0
    for words in itertools.product(range(4), repeat=3):
        found, chance = rewards[list(words)], logp[list(words)].sum().exp()
        best = best + chance * found.max()
        group, score = torch.zeros(3, dtype=torch.int64), chance.detach() * logp[list(words)]
        passk = passk + (score * grpo_variants.passk_advantages(found, group, norm_by_std=False)).sum()
        leave_one_out = leave_one_out + (score * rloo.leave_one_out(found, group, group, group)).sum()
    mean = 3 * (logp.exp() * rewards).sum()
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (best, passk, mean, leave_one_out)]
    assert torch.allclose(grads[0], grads[1], atol=1e-12) and torch.allclose(grads[2], grads[3], atol=1e-12)
    assert min(float(grad.abs().max()) for grad in grads) > 0.01


@pytest.mark.parametrize("name", grpo_variants.ADVANTAGES)
def test_a_group_is_its_number_and_not_a_position(name):
    """Groups of 2, 3 and 4 responses, in any order: each group as if it were alone."""
    torch.manual_seed(0)
    group = torch.tensor([2, 0, 1, 2, 1, 0, 1, 2, 2])
    rewards = torch.rand(9, dtype=torch.float64)
    got = grpo_variants.ADVANTAGES[name](rewards, group, True)
    assert (got != 0).sum() >= 3
    for number in range(3):
        members = group == number
        one_group = torch.zeros(int(members.sum()), dtype=torch.int64)
        alone = grpo_variants.ADVANTAGES[name](rewards[members], one_group, True)
        assert torch.allclose(got[members], alone, atol=1e-12)


def test_soft_overlong_piecewise():
    """DAPO's own numbers: 16,384 expected tokens, a buffer of 4,096, so the longest response is 20,480."""
    from rewards.format import soft_overlong

    values = [soft_overlong(n, 20_480, 4_096) for n in (1, 16_384, 17_408, 18_432, 20_480, 30_000)]
    assert values == [0, 0, -0.25, -0.5, -1, -1]
    assert soft_overlong(18_432, 20_480, 4_096, factor=0.5) == -0.25
    assert [soft_overlong(n, 10, 0) for n in (1, 10, 11)] == [0, 0, 0]                   # no buffer, no penalty
    with pytest.raises(ValueError, match="overlong buffer 11 must be from 0 to 10, the longest response"):
        soft_overlong(1, 10, 11)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples-per-prompt", "1"), "--samples-per-prompt 1 must be at least 2: a group of one has no baseline"),
        (("--rollout.max-response-length", "2000"), r"exceed the model's context of 1024 tokens"),
        (("--train-data", "no/such.parquet"), r"no/such.parquet"),
        (("--model", "no/such/folder"), r"no/such/folder"),
        (("--data.max-prompt-length", "20"), r"none of 32 rows is left.*--data.max-prompt-length 20"),
        (("--reward.function", "nowhere.py:f"), r"--reward.function nowhere.py:f: .* does not exist"),
        (("--reward-model.path", "MODEL"), r"must be a \*ForSequenceClassification: choose another --reward-"),
    ],
)
def test_bad_flags_are_refused_in_one_line(tiny, tiny_llama, tmp_path, flags, message):
    flags = [tiny_llama if flag == "MODEL" else flag for flag in flags]
    done = launch("grpo.py", *tiny, "--run-dir", tmp_path, *flags, warm=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.search(f"^error: .*{message}", done.stderr, re.M | re.S), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_prompts_must_divide_over_engines(tiny, tmp_path):
    """Every rank refuses before it joins the others, so one is enough to see it."""
    command = ("grpo.py", *tiny, "--prompts-per-step", "3", "--run-dir", tmp_path)
    done = launch(*command, warm=True, env={"RANK": "1", "WORLD_SIZE": "2"}, check=False)
    assert done.returncode == 2
    assert "--prompts-per-step 3 must be a multiple of the 2 engines (world size 2 / --rollout.tp 1)" in done.stderr


def test_broken_gradients_are_skipped_counted_and_stop_the_run(tiny, tmp_path):
    """An entropy bonus that overflows: the first step changes nothing and is counted, the second ends the run."""
    flags = (*tiny, "--run-dir", str(tmp_path), "--optim.max-skipped-steps", "2", "--entropy-coef", "1e38")
    done = launch("grpo.py", *flags, "--total-steps", "4", warm=True, check=False)
    assert done.returncode not in (0, 2)
    assert "the gradient norm was not finite 2 times in a row (--optim.max-skipped-steps)" in done.stderr
    assert [row["actor/skipped_steps"] for row in metrics_of(tmp_path)] == [1]


def test_broken_weights_are_refused_with_the_sample(tiny, tmp_path):
    """A learning rate above float32 makes the weights NaN: the next rollout is refused before it is trained on."""
    flags = (*tiny, "--run-dir", str(tmp_path), "--optim.lr", "1e39", "--run-zero-advantage")
    flags += ("--reward.function", f"{REWARD}:compute_score")
    done = launch("grpo.py", *flags, warm=True, check=False)
    assert done.returncode == 2
    assert re.search(r"error: the engine's log-prob is nan for response \d+ at its token \d+: check", done.stderr)
    assert len(metrics_of(tmp_path)) == 1


def test_the_readmes_fork_is_one_that_is_tested():
    (change,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert f"+{change}" in stored()["by_length"]
