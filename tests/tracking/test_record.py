"""What is kept of a step, its metrics and its responses: by hand, on one rank and from two."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from common.rollouts.record import Recorder, token_texts, write_step, write_validation
from common.tracking.logger import LogConfig
from tests.conftest import launch
from tests.tracking import log_worker
from tests.tracking.log_worker import (
    PROMPTS,
    RESPONSES,
    TURNS,
    episode,
    microbatch,
    record,
    samples,
    scored,
    tokenizer,
    tokens,
)

# --------------------------------------------------------------------------- metrics

def test_step_metrics_by_hand(two_ranks):
    """Lengths 3 + 2, 3 + 4, 8 + 10, 8 + 1; differences .1 .3, .2, .0 .4 .2 and none; on two ranks the same numbers but
    for those that are per rank."""
    per_rank = {1: {
        "global_seqlen/min": 39, "global_seqlen/max": 39, "global_seqlen/minmax_diff": 0, "global_seqlen/mean": 39,
        "global_seqlen/balanced_min": 39, "global_seqlen/balanced_max": 39, "perf/mfu/actor": 8 / 4 / 5,
        "perf/update_tflops": 0.002,
    }, 2: {                                                             # 5 + 7 and 18 + 9; trained 5 + 9 and 7 + 18
        "global_seqlen/min": 12, "global_seqlen/max": 27, "global_seqlen/minmax_diff": 15, "global_seqlen/mean": 19.5,
        "global_seqlen/balanced_min": 14, "global_seqlen/balanced_max": 25, "perf/mfu/actor": 8 / 4 / 5 / 2,
        "perf/update_tflops": 0.001,
    }}
    for size in (1, 2):
        found = [log_worker.metrics(0, 1)] if size == 1 else [
            json.loads((two_ranks / f"metrics_{rank}.json").read_text()) for rank in range(2)]
        for metrics in found:
            seconds = metrics.pop("timing_s/step")
            assert metrics.pop("perf/time_per_step") == seconds > 0
            assert metrics.pop("perf/throughput") == pytest.approx(39 / seconds / size)
            assert 0.05 < metrics.pop("perf/cpu_memory_peak_gb") < 100
            assert metrics == pytest.approx({
                "training/rollout_probs_diff_mean": 0.2,
                "training/rollout_probs_diff_max": 0.4, "critic/values/mean": -0.84, "critic/values/max": -0.7,
                "critic/values/min": -1.0, "actor/pg_loss": 0.6,
                "prompt_length/mean": 5.5, "prompt_length/max": 8, "prompt_length/min": 3,
                "prompt_length/clip_ratio": 0.5, "response_length/mean": 4.25, "response_length/max": 10,
                "response_length/min": 1, "response_length/clip_ratio": 0.25, "rollout/truncated_frac": 0.25,
                "reward/constant_group_frac": 0.5,
                "rollout/tokens_per_s": 8.5, "perf/total_num_tokens": 39, "timing_s/gen": 2.0, "timing_s/reward": 0.5,
                "timing_s/update_actor": 4.0, "timing_s/adv": 0.1, "timing_per_token_ms/gen": 2000 / 17,
                "timing_per_token_ms/update_actor": 4000 / 39, "timing_per_token_ms/adv": 100 / 39, **per_rank[size],
            }, rel=1e-9)


# --------------------------------------------------------------------------- responses

@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("run")
    record(folder, [0, 1, 2, 3], [2, 0, 1], LogConfig())
    assert [path.name for path in (folder / "rollouts").iterdir()] == ["step_000001.parquet"]
    return pq.read_table(folder / "rollouts/step_000001.parquet").to_pylist()


def test_responses_by_hand(rows):
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert [row["group"] for row in rows] == [0, 0, 1, 1]
    assert [row["prompt"] for row in rows] == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert [row["response"] for row in rows] == RESPONSES
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.5, 0.0]
    assert [row["reward"] for row in rows] == [1.25, 0.0, 0.5, -0.5]     # what the advantages were made from
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "stop", "length"]
    assert json.loads(rows[2]["reward_parts"]) == {"acc": 0.5, "pred": "<i>2"}
    assert [row["ground_truth"] for row in rows] == ["5", "5", "6", "6"]
    assert [row["advantage"] for row in rows] == [0.0, 1.0, 2.0, None]
    assert {row["step"] for row in rows} == {1} and {row["data_source"] for row in rows} == {"sums"}


def test_long_lists_of_a_reward_dict_are_only_named(tmp_path):
    (sample,) = samples(tokenizer(), [0])
    sample.extras = {"short": [0.5] * 1000, "long": [0.5] * 1001, "longest": [0.5] * 40_000, "acc": 1.0}
    write_validation(Recorder(LogConfig(), tmp_path, tokenizer()), 3, [sample])
    (row,) = pq.read_table(tmp_path / "rollouts/val_000003.parquet").to_pylist()
    assert json.loads(row["reward_parts"]) == {
        "short": [0.5] * 1000, "long": "a list of 1001 numbers", "longest": "a list of 40000 numbers", "acc": 1.0,
    }
    assert len(sample.extras["longest"]) == 40_000                      # the script's own are whole


def test_numbers_of_tokens_by_hand(rows):
    prompts, responses = tokens(tokenizer())
    for i, row in enumerate(rows):
        length = len(responses[i])
        assert length > (0 if i == 0 else 3)
        assert row["tokens"] == responses[i] and row["response_length"] == length
        assert row["prompt_length"] == len(prompts[i])
        assert row["rollout_logp"] == pytest.approx([-(t + 1) / (i + 1) for t in range(length)])
        if i == 3:                                                      # sampled, scored, not trained
            assert row["old_logp"] is row["entropy"] is row["ratio"] is row["clipped"] is row["trained"] is None
            continue
        assert row["old_logp"] == pytest.approx([-(i + t / 100) for t in range(length)])
        assert row["entropy"] == list(range(length))
        assert row["ratio"] == pytest.approx([1 + i / 10] * length)
        assert row["clipped"] == [t == 1 for t in range(length)]
        assert row["token_advantage"] == [i] * length and row["trained"] == [True] * length
        assert row["ref_logp"] is row["value"] is row["returns"] is None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    launch("tests/tracking/log_worker.py", folder, ranks=2, warm=True)
    return folder


def test_two_ranks_write_the_same_file(rows, two_ranks):
    """Rank 0 scored 0 and 1 and trains on 2, rank 1 scored 2 and 3 and trains on 0 and 1."""
    assert pq.read_table(two_ranks / "rollouts/step_000001.parquet").to_pylist() == rows


def test_whole_groups_up_to_the_limit(tmp_path):
    for limit, expected in ((1, [0, 1]), (2, [0, 1]), (3, [0, 1]), (4, [0, 1, 2, 3]), (64, [0, 1, 2, 3])):
        record(tmp_path, [0, 1, 2, 3], [2, 0, 1], LogConfig(rollouts_max=limit))
        found = pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist()
        assert [row["index"] for row in found] == expected, limit
        assert [row["index"] for row in found if row["entropy"]] == [i for i in expected if i != 3]


def test_a_validations_responses(rows, tmp_path, two_ranks):
    """What a step's file says of a response, without what an update adds; two ranks write the same."""
    tok = tokenizer()
    write_validation(Recorder(LogConfig(), tmp_path, tok), 20, samples(tok, [3, 0, 2, 1]))
    found = pq.read_table(tmp_path / "rollouts/val_000020.parquet").to_pylist()
    for row, trained in zip(found, rows, strict=True):
        of_step = {name: None if isinstance(value, list) else value for name, value in trained.items()}
        assert row == of_step | {"step": 20, "reward": row["score"], "advantage": None}
    assert pq.read_table(two_ranks / "rollouts/val_000020.parquet").to_pylist() == found
    write_validation(Recorder(LogConfig(rollouts_max=3), tmp_path, tok), 30, samples(tok, [3, 0, 2, 1]))
    assert pq.read_table(tmp_path / "rollouts/val_000030.parquet")["index"].to_pylist() == [0, 1, 2]
    write_validation(Recorder(LogConfig(rollouts_every=0), tmp_path, tok), 40, samples(tok, [0]))
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_an_episode_has_its_turns(rows, tmp_path):
    """Files of a step and of a validation; a response that is no episode has none of it."""
    sample = episode(tokenizer())
    recorder = Recorder(LogConfig(), tmp_path, tokenizer())
    write_step(recorder, 1, scored(torch.zeros(1), [sample]), [], torch.tensor([1.0]))
    write_validation(recorder, 1, [sample])
    of_step, of_validation = (
        pq.read_table(tmp_path / f"rollouts/{kind}_000001.parquet").to_pylist()[0] for kind in ("step", "val"))
    texts = "".join(text for text, sampled in zip(of_step["token_texts"], of_step["mask"]) if sampled)
    assert texts == TURNS[0][1] + TURNS[2][1] and "".join(of_step["token_texts"]) == "".join(text for _, text in TURNS)
    assert of_validation["mask"] is None
    for row in (of_step, of_validation):
        assert (row["num_turns"], row["end_reason"]) == (2, "done")
        assert json.loads(row["messages"]) == sample.response.messages
    assert all(row[name] is None for row in rows for name in ("mask", "num_turns", "end_reason", "messages"))


def test_steps_that_have_a_file(tmp_path):
    for every, steps in ((0, []), (1, [1, 2, 3, 4]), (2, [1, 2, 4]), (10, [1])):
        for step in (1, 2, 3, 4):
            nothing = scored(torch.zeros(0), [])
            recorder = Recorder(LogConfig(rollouts_every=every), tmp_path / str(every), None)
            write_step(recorder, step, nothing, [], torch.zeros(0))
        files = sorted((tmp_path / str(every)).rglob("*.parquet"))
        assert [path.name for path in files] == [f"step_{step:06d}.parquet" for step in steps]


def test_a_step_whose_policy_was_not_updated(tmp_path):
    """--critic-warmup: the file has the responses, and null where the update would have said something."""
    tok = tokenizer()
    batch = microbatch(tok, [0, 1])
    batch.last_pass = {}
    rollout = scored(torch.zeros(2), samples(tok, [0, 1]))
    write_step(Recorder(LogConfig(), tmp_path, tok), 1, rollout, [[batch]], torch.ones(2))
    rows = pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist()
    assert [row["response"] for row in rows] == RESPONSES[:2]
    assert all(row["entropy"] is row["trained"] is row["advantage"] is None for row in rows)


def test_the_last_sequence_of_an_episode_is_recorded(tmp_path):
    """Response 0 has two sequences, numbers 1 and 0 in this order, and its row is of number 1."""
    tok = tokenizer()
    batch = microbatch(tok, [1, 0])
    batch.index, batch.number = torch.tensor([-1, 0, 0]), torch.tensor([-1, 1, 0])
    rollout = scored(torch.zeros(1), samples(tok, [1]))
    rollout.samples[0].index, rollout.num_sequences[0] = 0, 2
    write_step(Recorder(LogConfig(), tmp_path, tok), 1, rollout, [[batch]], torch.ones(1))
    (row,) = pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist()
    assert row["entropy"] == list(range(len(tokens(tok)[1][1]))) and row["advantage"] == 1.0


# --------------------------------------------------------------------------- texts of tokens

@pytest.mark.parametrize("text", [*RESPONSES, " naïve  🍎🍏 日本語\n\n\t x", "<|im_start|>user", ""])
def test_token_texts_join_to_the_text(text):
    tok = tokenizer()
    ids = tok(text)["input_ids"]
    texts = token_texts(tok, tok("before")["input_ids"], ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_of_several_tokens_is_shown_once():
    tok = tokenizer()
    ids = tok("🍎!")["input_ids"]
    assert len(ids) > 2
    assert token_texts(tok, [5], ids) == [""] * (len(ids) - 2) + ["🍎", "!"]
    assert token_texts(tok, [5], ids[:1]) == [""]                       # cut in the middle of it


def test_a_first_tokens_space_is_kept():
    """Tokenizers of the sentencepiece kind drop the space of the first token they decode."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    tok = PreTrainedTokenizerFast(tokenizer_object=made)
    assert tok.decode([1]) == "two"
    assert token_texts(tok, [0], [1, 2, 0]) == [" two", "s", " one"]
