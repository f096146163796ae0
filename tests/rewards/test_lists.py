"""Lists of numbers that a reward function returns beside its score, such as one a token: all of them, or a failure."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.metrics import Meter
from common.prompts import Prompt
from common.rollout import Sample
from common.rollouts.scoring import PendingRollout
from envs.runtime.response import Response
from rewards.runtime.pool import RewardConfig, RewardPool, Scores

PER_TOKEN = str(Path(__file__).with_name("per_token.py"))
MISBEHAVE = str(Path(__file__).with_name("misbehave.py"))
LENGTHS = (5000, 0, 1, 1000, 1001, 32_768)


def texts() -> list[str]:
    chance = random.Random(7)
    return ["".join(map(chr, chance.choices(range(32, 1000), k=length))) for length in LENGTHS]


def by_hand(text: str) -> list[float]:
    """What per_token.py computes, written once more."""
    codes = text.encode("utf-32-le")
    found = []
    for place in range(1, len(text) + 1):
        code = int.from_bytes(codes[4 * place - 4 : 4 * place], "little")
        found.append(math.sin(code * place) * 10.0 ** (code % 40 - 20))
    return found


def score(function: str | tuple[str, ...], responses: list[str], num_workers: int = 1, **settings) -> Scores:
    with RewardPool(function, num_workers=num_workers, **settings) as pool:
        for index, response in enumerate(responses):
            pool.submit(index, "any", response, "1")
        return pool.results()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "form", ["as_list", "as_tuple", "as_array", "as_scalars", "as_tensor", "as_coroutine", "as_batch"]
)
def test_a_number_for_each_token_arrives_to_the_last_digit(form, num_workers):
    timeout_s = 120.0 if form == "as_tensor" else 10.0                  # its first sample imports torch
    results = score(f"{PER_TOKEN}:{form}", texts(), num_workers, timeout_s=timeout_s)
    assert results.failures == [None] * len(LENGTHS)
    for text, extra in zip(texts(), results.extras, strict=True):
        assert type(extra["per_token"]) is list and {*map(type, extra["per_token"])} <= {float}
        assert extra["per_token"] == by_hand(text)


def test_each_of_several_functions_keeps_its_list():
    results = score((f"{PER_TOKEN}:as_list", f"{PER_TOKEN}:as_tuple"), texts())
    assert [extra["per_token.as_list/per_token"] for extra in results.extras] == [*map(by_hand, texts())]
    assert [extra["per_token.as_tuple/per_token"] for extra in results.extras] == [*map(by_hand, texts())]


def test_whole_numbers_signs_and_the_smallest_numbers():
    numbers = [0, -3, True, 2**53, -0.0, 5e-324, 1e100, -1e100, 0.1]
    results = score(f"{MISBEHAVE}:score", [f"return {{'score': 1, 'found': {numbers} * 200}}"])
    assert results.extras[0]["found"] == [float(number) for number in numbers] * 200
    assert math.copysign(1.0, results.extras[0]["found"][4]) == -1.0


def test_a_million_numbers_are_the_most():
    """Of all lists of one dict together."""
    many = "return {'score': 1, 'given': [0.5] * 400_000, 'more': [0.25] * %d}"
    results = score(f"{MISBEHAVE}:score", [many % 600_000, many % 600_001, "fine"])
    assert results.failures == [None, "invalid", None]
    assert results.extras[0] == {"given": [0.5] * 400_000, "more": [0.25] * 600_000}
    assert results.extras[1] == {} and math.isnan(results.scores[1])
    assert "'more', a list of 600001 numbers; the rule is at most 1000000 " in results.first_failure


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("number", ["float('nan')", "float('inf')", "-float('inf')", "2e100", "-10**400"])
def test_a_number_that_is_not_finite_is_a_failure(number, num_workers, caplog):
    wrong = f"return {{'score': 1, 'fine': [0.5], 'per_token': [0.0] * 1500 + [{number}]}}"
    results = score(f"{MISBEHAVE}:score", ["fine", wrong], num_workers)
    assert results.failures == [None, "invalid"] and results.num_errors == 1
    found = "-inf" if "**" in number else eval(number)                  # no float is as large as the int
    assert f"score returned 'per_token', a list of 1501 numbers with {found} at place 1500;" in caplog.text


def test_a_failed_list_is_counted_and_no_metric(world):
    """As the script sees them: the list of each sample, the share of errors, and the means of numbers alone."""
    responses = ["return {'score': 1, 'per_token': [0.5] * 2000, 'depth': 3}",
                 "return {'score': 1, 'per_token': [1e999]}"]
    samples = [
        Sample(i, i, i, Prompt([1], "any", "1", {}, []), Response([7], [-0.5], "stop"), text)
        for i, text in enumerate(responses)
    ]
    meter = Meter()
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        for i, text in enumerate(responses):
            pool.submit(i, "any", text, "1")
        scoring = SimpleNamespace(pool=pool, model=None, episodes=None, config=RewardConfig())
        rollout = PendingRollout(None, scoring, samples, None).collect(meter)
    assert rollout.samples[0].extras == {"per_token": [0.5] * 2000, "depth": 3.0}
    assert rollout.has_score.tolist() == [True, False]
    assert meter.reduce() == {
        "reward/error_frac": 0.5, "reward/timeout_frac": 0.0, "reward/form_frac": 0.0, "reward/depth": 3.0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_values_are_texts_and_the_log_names_them(num_workers, caplog):
    values = {
        "nested": [[1.0, 2.0], [3.0]], "mixed": [1.0, None], "words": ["a"] * 3000, "object": {"a": [1]},
        "long": "x" * 20_000, "short": "x", "number": 2.0, "huge": 1e200,
    }
    response = f"return {{'score': 1, **{values}}}"
    results = score(f"{MISBEHAVE}:score", [response] * 3, num_workers)
    assert results.failures == [None] * 3
    expected = {name: value if name == "number" else str(value)[:10_000] for name, value in values.items()}
    assert results.extras == [expected] * 3
    for name, kind in {"nested": "list", "mixed": "list", "words": "list", "object": "dict", "long": "str",
                       "huge": "float"}.items():
        told = f"key '{name}' of a reward dict is kept as text, at most 10000 characters (type: {kind};"
        assert caplog.text.count(told) == 1, name
    assert caplog.text.count("is kept as text") == 6


def test_an_array_of_several_dimensions_is_text():
    results = score(f"{MISBEHAVE}:score", ["return {'score': 1, 'grid': __import__('numpy').zeros((2, 2))}",
                                           "return {'score': 1, 'names': __import__('numpy').array(['a', 'b'])}",
                                           "return {'score': 1, 'scalar': __import__('numpy').float32(0.5)}"])
    assert results.extras == [{"grid": "[[0. 0.]\n [0. 0.]]"}, {"names": "['a' 'b']"}, {"scalar": 0.5}]


def test_a_large_reply_does_not_stretch_the_deadline():
    """Making the list counts as the function's time; the worker is replaced, and the next sample is scored."""
    slow = "return {'score': 1, 'per_token': [__import__('time').sleep(0.001) or 0.5 for _ in range(900_000)]}"
    results = score(f"{MISBEHAVE}:score", [slow, "fine"], timeout_s=4.0)
    assert results.failures == ["timeout", None]
