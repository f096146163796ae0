"""Scripts with --rollout.episode: the flag is all that changes in their commands."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.conftest import STOPS, launch_all
from tests.engine.episode_runs import FILE, runs_of
from tests.scripts.test_supervised import metrics_of

SCRIPTS = {
    "grpo": [], "grpo_variants": ["--aggregation", "seq-mean-token-mean", "--advantage-per-step"],
    "dapo": ["--max-gen-batches", "4", "--overlong-buffer", "10"],
    "rloo": ["--baseline", "reinforce++", "--kl-reward-coef", "0.1"],
    "ppo": ["--advantage-per-step", "--gamma", "0.5"], "online_dpo": [],
}


@pytest.fixture(scope="module")
def runs(tiny_llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    data = folder / "games.jsonl"
    rows = [{"prompt": f"Game {i}.", "data_source": "games", "reward_model": {"ground_truth": ""}, "max_sleep_s": 0.01}
            for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--model", tiny_llama, "--train-data", str(data), "--val-data", str(data), "--total-steps", "2",
        "--prompts-per-step", "2", "--samples-per-prompt", "4", "--eval-every", "0", "--eval-n", "2",
        "--data.max-prompt-length", "100", "--rollout.max-response-length", "90", "--rollout.engine", "hf",
        "--rollout.episode", f"{FILE}:three_turns", "--policy.compute-dtype", "float32", "--policy.share-prompt",
        "--reward.num-workers", "1", "--log.rollouts-every", "1", *STOPS,
    ]
    launch_all(folder, {script: [script, *flags, *more] for script, more in SCRIPTS.items()})
    return folder


@pytest.mark.sweep
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_trains_on_episodes(runs, script):
    first, *steps = metrics_of(runs / script)
    assert {"val-core/games/acc/greedy", "val-core/games/acc/mean@2", "val-aux/num_turns/mean"} <= first.keys()
    assert len(steps) == 2
    for row in steps:
        assert row["num_turns/mean"] == 3 and row["episode/done_frac"] == 1
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/grad_norm"])
        assert 3 <= row["response_length/mean"] <= 18  # three replies of at most 6 tokens
        assert row["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.parametrize("script", SCRIPTS)
def test_only_the_models_tokens_are_trained(runs, script):
    """The recorded rollouts: the loss mask, advantages and values of the tokens of users and tools."""
    rows = [row for row in pq.read_table(runs / script / "rollouts/step_000002.parquet").to_pylist() if row["trained"]]
    assert len(rows) >= 2
    for row in rows:
        pieces = runs_of(row["trained"])
        assert [value for value, _, _ in pieces] == [True, False, True, False, True]
        for value, start, end in pieces:
            if not value:
                said = "".join(row["token_texts"][start:end])
                assert "<|im_start|>user" in said and said.endswith("<|im_start|>assistant\n")
                assert not any(row["token_advantage"][start:end]) and not any(row["rollout_logp"][start:end])
                assert script != "ppo" or not any(row["returns"][start:end])
        num_trained = sum(row["trained"])
        assert num_trained == sum(logp != 0 for logp in row["rollout_logp"])


def test_turns_have_advantages_of_their_own(runs):
    """grpo_variants.py --advantage-per-step: by loops, from the recorded rewards of turns."""
    rows = pq.read_table(runs / "grpo_variants/rollouts/step_000002.parquet").to_pylist()
    penalty = {row["index"]: row["reward"] - row["score"] for row in rows}
    scores = {row["index"]: json.loads(row["reward_parts"])["turn_scores"] for row in rows}
    groups = {row["index"]: row["group"] for row in rows}
    found = set()
    for row in rows:
        turns = [(start, end) for value, start, end in runs_of(row["mask"]) if value]
        for turn, (start, end) in enumerate(turns):
            rewards = [scores[i][turn] + penalty[i] for i in scores if groups[i] == row["group"]]
            mean, mine = sum(rewards) / len(rewards), scores[row["index"]][turn] + penalty[row["index"]]
            std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
            advantage = (mine - mean) / (std + 1e-6)
            assert row["token_advantage"][start:end] == pytest.approx([advantage] * (end - start), abs=1e-5)
            found.add(round(advantage, 4))
    assert len(rows) >= 4 and len(found) > 6


def test_ppo_gets_the_reward_of_each_turn(runs):
    """Returns (before whitening): the value at a turn's last token is short of its return by its reward, discounted."""
    for row in pq.read_table(runs / "ppo/rollouts/step_000002.parquet").to_pylist():
        scores = json.loads(row["reward_parts"])["turn_scores"]
        ends = [end for value, _, end in runs_of(row["mask"]) if value]
        sampled = [t for t, value in enumerate(row["mask"]) if value]
        rewards = {end - 1: score for end, score in zip(ends, scores, strict=True)}
        carried, want = 0.0, {}
        for t in reversed(sampled):
            carried = rewards.get(t, 0.0) + 0.5 * carried  # lambda 1: the discounted return-to-go, whatever the values
            want[t] = carried
        assert [row["returns"][t] for t in sampled] == pytest.approx([want[t] for t in sampled], abs=1e-4)


EPISODE = """async def episode(chat, row):
    text = await chat.reply(max_tokens=6)
    for n in range(4):
        text = await chat.reply({"role": "user", "content": f"Turn {n}."}, max_tokens=6)
    other = chat.begin("critic")
    judged = await other.reply({"role": "user", "content": "Game 0. Is it right?"}, max_tokens=4)
    return (sum(map(ord, text)) + len(judged)) % 7
"""


def test_shared_histories_change_no_metric(tiny_llama, tmp_path):
    """grpo.py --policy.share-prompt on episodes whose template shortens earlier replies, so that each turn but the
    first two is a sequence of its own, and of a second conversation: the metrics are those of a run without it."""
    data = tmp_path / "games.jsonl"
    rows = [{"prompt": f"Game {i}.", "data_source": "games", "reward_model": {"ground_truth": ""}} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "turns.py").write_text(EPISODE)
    template = AutoTokenizer.from_pretrained(tiny_llama).chat_template.replace(
        "message['content'] + '<|im_end|>'",
        "(message['content'][:1] if message.role == 'assistant' and loop.index0 < messages | length - 2 "
        "else message['content']) + '<|im_end|>'",
    )
    (tmp_path / "short.jinja").write_text(template)
    flags = [
        "grpo", "--model", tiny_llama, "--train-data", str(data), "--total-steps", "3", "--prompts-per-step", "2",
        "--samples-per-prompt", "4", "--minibatches-per-step", "2", "--max-tokens-per-gpu", "700", "--optim.lr", "1e-3",
        "--data.max-prompt-length", "100", "--data.chat-template-file", str(tmp_path / "short.jinja"),
        "--rollout.max-response-length", "300", "--rollout.engine", "hf", "--rollout.max-turns", "8",
        "--rollout.episode", f"{tmp_path / 'turns.py'}:episode", "--policy.compute-dtype", "float32",
        "--kl-loss-coef", "0.1", "--reward.num-workers", "1", *STOPS,
    ]
    launch_all(tmp_path, {"apart": flags, "shared": [*flags, "--policy.share-prompt"]})
    apart, shared = (metrics_of(tmp_path / name) for name in ("apart", "shared"))
    assert len(apart) == len(shared) == 3
    for row, other in zip(apart, shared, strict=True):
        assert other.pop("perf/shared_tokens_frac") > 0.5
        assert row.keys() == other.keys()
        assert row["episode/num_sequences"] > 4
        assert row["actor/grad_norm"] > 0.01
        for name, value in row.items():
            if not name.startswith(("timing", "perf/", "global_seqlen/balanced")) and "tokens_per_s" not in name:
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
