"""The score of gsm8k against cases worked by hand."""

import time

import pytest

from rewards import gsm8k


@pytest.mark.parametrize(("response", "truth", "strict", "flexible"), [
    ("7 + 5 = 12\n#### 12", "12", 1.0, 1.0),
    ("#### 12 apples.", "12", 1.0, 1.0),
    ("####12", "12", 1.0, 1.0),
    ("#### 7\n#### 12", "12", 1.0, 1.0),        # the last one counts
    ("#### 12\n#### 7", "12", 0.0, 0.0),
    ("#### 1,234", "1234", 1.0, 1.0),
    ("#### 1234", "1,234", 1.0, 1.0),
    ("#### $18.00", "18", 1.0, 1.0),
    ("#### -5", "-5", 1.0, 1.0),
    ("#### -$5", "-5", 1.0, 1.0),
    ("#### $-5", "-5", 1.0, 1.0),
    ("#### 5", "-5", 0.0, 0.0),
    ("#### 0.5", ".5", 1.0, 1.0),
    ("#### 12.", "12", 1.0, 1.0),
    ("the answer is 12", "12", 0.0, 1.0),
    ("12 ####", "12", 0.0, 1.0),
    ("#### 7 + 5 = 12", "12", 0.0, 1.0),        # strict reads the number right after the mark
    ("#### twelve", "12", 0.0, 0.0),
    ("", "12", 0.0, 0.0),
    ("#### 12" + "\n" * 400, "12", 0.0, 0.0),   # only the last 300 characters are read
    ("#### 1e2", "100", 0.0, 0.0),
])
def test_gsm8k_scores_cases_worked_by_hand(response, truth, strict, flexible):
    assert gsm8k.compute_score("openai/gsm8k", response, truth) == strict
    assert gsm8k.compute_score("openai/gsm8k", response, truth, method="flexible") == flexible


def test_gsm8k_scores_are_settable():
    score = {"data_source": "openai/gsm8k", "ground_truth": "12", "score": 2.0, "format_score": 0.1}
    assert gsm8k.compute_score(solution_str="#### 12", **score) == 2.0
    assert gsm8k.compute_score(solution_str="#### 13", **score) == 0.1
    assert gsm8k.compute_score(solution_str="12", **score) == 0.0


def test_gsm8k_never_evaluates_and_takes_no_time():
    assert gsm8k.compute_score("openai/gsm8k", "#### __import__('os')._exit(1)", "1") == 0.0
    start = time.process_time()
    for filler in (" ", "-", "$", "#", "1", ",", "- ", "####"):
        gsm8k.compute_score("openai/gsm8k", "####" + filler * 100_000, "12")
    assert time.process_time() - start < 0.5


def test_gsm8k_takes_the_data_sets_own_answer_column():
    truth = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 1,072"
    assert gsm8k.compute_score("openai/gsm8k", "#### 1072", truth) == 1.0
    assert gsm8k.compute_score("openai/gsm8k", "#### 24", truth) == 0.0


def test_gsm8k_refuses_a_truth_that_is_no_number():
    for truth in ("twelve", "nan", float("nan"), "inf"):
        said = f"ground_truth '?{truth}'? of data_source 'openai/gsm8k' must be a number"
        with pytest.raises(ValueError, match=said):
            gsm8k.compute_score("openai/gsm8k", "#### 12", truth)
