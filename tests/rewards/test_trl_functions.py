"""TRL's reward functions through rewards/trl_functions.py: TRL's own trainer calls them the same way."""

import asyncio
import json
from pathlib import Path

import pytest

from rewards.runtime.pool import RewardPool
from rewards.trl_functions import compute_score

OURS = str(Path(__file__).parents[2] / "rewards/trl_functions.py")
THEIRS = '''
def exact(completions, solution, **kwargs):
    return [float(completion[0]["content"] == answer) for completion, answer in zip(completions, solution)]

async def level(prompts, completions, difficulty, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    return [None if known is None else float(known) for known in difficulty]

def length(completions, **kwargs):
    return [len(text) for text in completions]

def ids(completions, completion_ids, **kwargs):
    return [0.0 for _ in completions]

def score(completions, **kwargs):
    return [None if completion[0]["content"] == "?" else 10 for completion in completions]

def nothing(completions, **kwargs):
    return [None for _ in completions]
'''
PROMPT = [{"role": "user", "content": "?"}]


@pytest.fixture
def score(tmp_path):
    """Scores of texts whose answer is "yes", through real workers."""
    file = tmp_path / "theirs.py"
    file.write_text(THEIRS)

    def run(texts, infos, num_workers=1, **kwargs):
        kwargs["functions"] = [f"{file}:{name}" if ":" not in name else name for name in kwargs["functions"]]
        pool = RewardPool(OURS, kwargs=json.dumps(kwargs), num_workers=num_workers, max_error_frac=1.0)
        try:
            for i, (text, info) in enumerate(zip(texts, infos)):
                pool.submit(i, "data", text, "yes", info)
            return pool.results()
        finally:
            pool.close()

    return run


@pytest.mark.parametrize("num_workers", [0, 2])
def test_functions_are_summed_by_weight_and_none_is_left_out(score, num_workers):
    infos = [{"difficulty": difficulty, "prompt": PROMPT} for difficulty in (3, None, 5)]
    got = score(["yes", "yes", "no"], infos, num_workers, functions=["exact", "level"], weights=[1.0, 0.5])
    assert got.scores == [1 + 0.5 * 3, 1, 0.5 * 5]
    assert got.extras == [{"exact": 1.0, "level": 3.0}, {"exact": 1.0}, {"exact": 0.0, "level": 5.0}]


@pytest.mark.parametrize("functions", [["score", "exact"], ["exact", "score"]], ids="-".join)
def test_a_function_named_score_is_a_part_of_the_sum(score, functions):
    got = score(["yes", "no", "?"], [{}] * 3, functions=functions, weights=[0.5, 0.5])
    assert got.scores == [0.5 + 5, 5, 0]
    assert got.extras == [{"exact": 1, "score_1": 10}, {"exact": 0, "score_1": 10}, {"exact": 0}]


def test_a_column_of_the_data_is_before_the_ground_truth(score):
    assert score(["no", "yes"], [{"solution": "no"}, {"solution": "no"}], functions=["exact"]).scores == [1, 0]
    assert score(["no", "yes"], [{}, {}], functions=["exact"]).scores == [0, 1]


def test_texts_instead_of_messages(score):
    assert score(["four"], [None], functions=["length"], conversational=False).scores == [4]


def test_trl_s_own_function(score):
    texts = ["<think>\na\n</think>\nb", "b"]
    assert score(texts, [{}, {}], functions=["trl.rewards:think_format_reward"]).scores == [1, 0]


def test_what_no_function_scores_has_no_reward(score):
    got = score(["a", "b"], [{}, {}], functions=["nothing"])
    assert got.failures == ["invalid", "invalid"]


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"functions": ["ids"]}, "asks for completion_ids, which exists in TRL's trainer only"),
    ({"functions": ["absent"]}, "no function absent"),
    ({"functions": ["trl.rewards:absent"]}, "the form is file.py:name or package.module:name"),
    ({"functions": ["exact"], "weights": [1, 2]}, "2 weights and 1 functions"),
    ({"functions": ["exact", "exact"]}, "two are called exact, and their numbers could not be told apart"),
])
def test_mistakes_are_found_before_training(score, kwargs, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        score(["a"], [{}], **kwargs)


def test_a_wrong_number_of_rewards_is_named(tmp_path):
    (tmp_path / "few.py").write_text("def few(completions, **kwargs):\n    return [1.0]\n")
    called = compute_score(["d", "d"], ["a", "b"], ["", ""], [None, None], functions=[f"{tmp_path / 'few.py'}:few"])
    with pytest.raises(ValueError, match="few returned 1 numbers for 2 completions"):
        asyncio.run(called)
