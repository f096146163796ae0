"""The calls of a reward function before the start: which functions end the run, and with which words."""

from types import SimpleNamespace

import pytest

from common.rollouts.trial import try_function
from rewards.runtime.pool import RewardPool

FUNCTIONS = '''
import json, os, re
from pathlib import Path
HERE = Path(__file__).parent
def raises(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["nope"]
async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return json.loads("{")
def as_text(data_source, solution_str, ground_truth, extra_info=None): return "1.0"
def as_tuple(data_source, solution_str, ground_truth, extra_info=None): return 1.0, "x"
def nan(data_source, solution_str, ground_truth, extra_info=None): return float("nan")
def no_score(data_source, solution_str, ground_truth, extra_info=None): return {"reward": 1.0}
def lists(data_sources, solution_strs, ground_truths, extra_infos): return [1.0, 2.0]
def ends(data_source, solution_str, ground_truth, extra_info=None): os._exit(3)
def counts(data_source, solution_str, ground_truth, extra_info=None):
    with open(HERE / "calls", "a") as file:
        print(data_source, ground_truth in solution_str, file=file)
    return {"score": 0.5, "per_token": [0.0] * len(solution_str)}
def boxed(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.search(r"boxed{(.*?)}", solution_str)[1] == ground_truth)
def of_a(data_source, solution_str, ground_truth, extra_info=None):
    return {"a": 1.0}[data_source]
def bad_row(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1 / extra_info["i"]}
def slow(data_source, solution_str, ground_truth, extra_info=None):
    while True: pass
'''


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    prompts = [SimpleNamespace(data_source=source, ground_truth=str(40 + i), extra_info={"i": i})
               for source in "ab" for i in range(5)]

    def run(name, may_fail=False, **flags):
        with RewardPool(f"{tmp_path}/mine.py:{name}", **{"num_workers": 1, **flags}) as pool:
            try_function(pool, [prompts, prompts[:2]], may_fail)
            pool.submit(0, "a", "boxed{41}", "41", {"i": 1, "nope": 2}) if pool.num_attempts else None
            return pool.results().index

    return run


@pytest.mark.parametrize(("name", "said"), [
    ("raises", r"mine.py, line 6: KeyError: 'nope'\. "), ("waits", r"mine.py, line 8: JSONDecodeError: "),
    ("as_text", r"mine.as_text returned '1.0'; the rule is a finite number"), ("as_tuple", r"returned \(1.0, 'x'\)"),
    ("nan", "returned nan"), ("no_score", r"returned \{'reward': 1.0\}.*'score'"), ("lists", "2 scores for 1 samples"),
    ("ends", "ended with exit code 3"),
])
def test_a_function_that_cannot_score_ends_the_start(attempt, caplog, name, said):
    rule = f"^--reward.function gave no score .*{said}.*--reward.max-error-frac 1"
    with pytest.raises(ValueError, match=rule) as error:
        attempt(name)
    assert "\n" not in str(error.value)
    if name == "raises":
        with pytest.raises(ValueError, match=said):
            attempt(name, num_workers=0)
        attempt(name, may_fail=True)
        attempt(name, max_error_frac=1.0)
        assert caplog.text.count("line 6: KeyError: 'nope'") == 4       # two sources, twice


@pytest.mark.parametrize("name", ["counts", "boxed", "of_a", "bad_row"])
def test_a_function_that_scores_some_texts_or_rows_goes_on(attempt, tmp_path, caplog, name):
    assert attempt(name) == [0]                                         # the calls before are in no result
    assert ("data_source 'b'" in caplog.text) == (name == "of_a") and "'a'" not in caplog.text
    if name == "counts":                                                # once a source, with the truth in the text
        assert (tmp_path / "calls").read_text().splitlines() == ["a True", "b True", "a True"]
        assert attempt(name, num_workers=0) == []


def test_a_slow_function_is_not_judged(attempt, caplog, monkeypatch):
    monkeypatch.setattr("common.rollouts.trial.WAIT_S", 0.5)
    for num_workers in (0, 1):
        attempt("slow", num_workers=num_workers, timeout_s=1.0)
    assert caplog.text.count("no score within 0.5 s in a call before the start; --reward.timeout-s is 1") == 2
