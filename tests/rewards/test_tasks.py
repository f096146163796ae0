r"""Scores of the single tasks against cases worked by hand: math, math_dapo, countdown, reasoning-gym, format."""

import json
import random
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common.rollout import Sample
from common.rollouts.validation import acc_and_vote, majority
from rewards import (
    TABLE,
    countdown,
    find,
    geo3k,
    ifeval,
    lookup,
    math,
    math_dapo,
    measured,
    multiple_choice,
    reasoning_gym,
    search_qa,
    shapes,
)
from rewards import format as form
from rewards.runtime.pool import RewardPool
from rewards.runtime.replies import reply_of

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(("text", "content"), [
    (r"so \boxed{12}", "12"),
    (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
    (r"\boxed{a\}b}", r"a\}b"),                     # an escaped brace closes nothing
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{12", None),
    (r"\boxed 12", "12"),                           # verl's reader takes what follows, up to $
    (r"$\boxed 5$ is it", "5"),
    (r"\(\boxed 5\) is it", "5"),
    ("so \\boxed x+1.\nDone", "x+1"),
    (r"\boxed {5}", "5"),
    (r"\fbox{5}", "5"),
    (r"\fbox {\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} and \fbox{2}", "2"),
    (r"\fbox{1} and \boxed{2}", "2"),
    (r"\boxed{5} in the \boxed form", "5"),         # what has braces comes first
    (r"write \boxed", None),
    (r"\boxed{", None),
    (r"\fboxes{5}", None),
    ("", None),
    (r"\boxed{}", ""),
])
def test_last_boxed_balances_braces(text, content):
    assert math.last_boxed(text) == content


@pytest.mark.parametrize(("answer", "truth", "same_text", "same"), [
    (r"\frac{1}{2}", r"\dfrac12", True, True),
    ("1,234", "1234", True, True),
    ("12,34", "1234", False, False),
    (r"x = 5", "5", True, True),
    (r"5\text{ cm}", "5", True, True),
    (r"5 \, \mathrm{cm}^2", "5", True, True),
    (r"90^\circ", "90", True, True),
    ("90°", r"90^\circ", True, True),
    (r"90\degree", "90", True, True),
    (r"50\%", "50", True, True),
    (r"\$18.50", "18.5", True, True),
    (".5", "0.50", True, True),
    (r"\left( 1, 2 \right)", "(1,2)", True, True),
    (r"\text{Evelyn}", "Evelyn", True, True),
    (r"\text{(A)}", "(A)", True, True),
    (r"\text{A}", r"\text{B}", False, False),       # words are dropped after a number only
    ("1/2", "0.5", False, True),                    # from here on the library decides
    (r"\frac{2}{4}", r"\frac{1}{2}", False, True),
    (r"2\sqrt{3}", r"\sqrt{12}", False, True),
    ("x^2+2x+1", "(x+1)^2", False, True),
    (r"(1, \infty)", r"(1, 2)", False, False),
    (r"\{2, 1\}", r"\{1, 2\}", False, True),
    ("(2, 1)", "(1, 2)", False, False),
    ("6", "7", False, False),
    ("", "7", False, False),
    ("7" * 600, "7", False, False),
])
def test_math_answers(answer, truth, same_text, same):
    assert (math.normalise(answer) == math.normalise(truth)) == same_text
    assert math.equal(answer, truth) == same


@pytest.mark.parametrize(("answer", "truth", "same"), [
    ("11:30 a.m.", "11:30 p.m.", False),
    (r"11:30\text{ a.m.}", r"11:30\text{ p.m.}", False),
    (r"11\!:\!30\mathrm{ AM}", r"11\!:\!30\mathrm{ PM}", False),
    ("3 pm", r"3\text{ a.m.}", False),
    (r"\text{3 p.m.}", "3 a.m.", False),
    (r"4:30\text{ p.m.}", r"3:30\text{ p.m.}", False),
    ("11:30 AM", r"11:30\text{ a.m.}", True),
    (r"\text{11:30 a.m.}", r"11\!:\!30 \textbf{ a.m.}", True),
    (r"3:00\text{ PM}", r"3\text{ p.m.}", True),
    ("11:30", r"11:30\text{ a.m.}", True),          # which half of the day may be left out, as a unit may
    ("2am", "2pm", False),
    ("10 million dollars", "10^7", True),
    ("10 million dollars", "10", False),
    ("1.2 pm", "12 pm", False),
    (r"10\text{ million}", "10", False),
    ("10", r"10\,\mathrm{million}", False),
    ("10 million", "10", False),
    (r"\$10\text{ million dollars}", r"\$10", False),
    (r"10\text{ million}", r"10\text{ billion}", False),
    (r"2\text{ hundred thousand}", "200", False),
    (r"2\text{ hundred thousand}", "200,000", True),
    (r"10\text{ million}", "10,000,000", True),
    ("10 million", "10^7", True),
    (r"\text{10 Million}", "10^7", True),
    ("10,000,000", r"10\text{ million}", True),
    (r"\$10$ million", r"10\text{ million}", True),
    ("1,000 million", "1 billion", True),
    ("2.5 billion", r"2.5 \times 10^9", True),
    (r"\$10\text{ million dollars}", "10000000", True),
    (r"5\text{ million people}", r"5{,}000{,}000", True),
    (r"1\frac12\text{ million}", "1500000", True),
    (r"\frac{1}{2}\text{ million}", "500{,}000", True),
    (r"\frac{1}{2}\text{ million}", r"\frac12", False),
    (r"3\text{ thousandths}", "3000", False),
    (r"\text{millionaire}", r"\text{million}", False),
    (r"\text{one million}", r"\text{one million}", True),
])
def test_math_words_that_are_no_units(answer, truth, same):
    assert math.equal(answer, truth) == same
    assert math.equal(truth, answer) == same


@pytest.mark.parametrize(("answer", "truth", "same"), [
    ("3+4i", r"3+4\mathrm{i}", True),
    ("7", r"3+4\mathrm{i}", False),                 # the library alone: True, and False for 3+4i
    ("3+4", r"3+4\text{i}", False),
    (r"3-4\mathrm{i}", r"3+4\mathrm{i}", False),
    ("3", r"3\mathrm{ i }", False),
    (r"\pi\mathrm{i}", r"i\pi", True),
    (r"2\mathrm{e}^{2}", "2e^2", True),
    (r"3\mathrm{e}^2", "3", False),
    (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}+5\mathbf{j}", False),
    (r"2\boldsymbol{a}-3\boldsymbol{b}", r"2\boldsymbol{a}+3\boldsymbol{b}", False),
    (r"2\mathbf{a}-3\mathbf{b}", r"-3\mathbf{b}+2\mathbf{a}", True),
    (r"\boldsymbol{15}", "15", True),
    (r"3\text{ m}", "3", True),                     # other upright letters are units behind a number
    ("5", r"5~\text{cm}", True),
    ("240", r"240~\mathrm{cm}^{2}", True),
    ("1~000", "1000", True),
    (r"6~\text{cm}", r"5~\text{cm}", False),
    (r"2\pi~\mathrm{cm}", r"2\pi", True),
])
def test_math_letters_in_a_type_of_their_own_and_fixed_spaces(answer, truth, same):
    assert math.equal(answer, truth) == same
    assert math.equal(truth, answer) == same


@pytest.mark.parametrize("task", [math, geo3k])
def test_one_answer_in_several_notations_is_one_vote(task):
    """Three of five say one half: it is the majority, though the two that are wrong are written alike."""
    truth = r"\frac{1}{2}"
    for written in ([r"\frac12", r"\dfrac{1}{2}", r"x = \frac{1}{2}"], [r"\frac12\text{ cm}", r" \frac {1}{2}", truth]):
        found = [task.compute_score("", rf"\boxed{{{answer}}}", truth) for answer in [*written, "2", "2"]]
        assert [result["acc"] for result in found] == [True] * 3 + [False] * 2
        assert majority([(float(result["acc"]), result["pred"]) for result in found]) == 1
    different = ["3 pm", "3 am", "10", r"10\text{ million}", "12", "1,2", "3+4i", "3+4", "-2", "2", ""]
    votes = [task.compute_score("", rf"\boxed{{{answer}}}", truth)["pred"] for answer in different]
    assert len({*votes}) == len(different)


def test_math_takes_no_time_for_a_hostile_answer():
    start = time.process_time()
    for answer in ("." + "0" * 20_000 + "5", "1" + " " * 200_000, "{" * 200_000, "\\frac" * 50_000,
                   "1 million" * 20_000):
        assert math.compute_score("math", r"\boxed{" + answer + "}", "7")["score"] == 0.0
    assert time.process_time() - start < 0.5


def test_math_score_and_its_extras():
    score = {"data_source": "lighteval/MATH", "ground_truth": r"\boxed{\frac12}", "format_score": 0.1}
    right = {"score": 1.0, "acc": True, "pred": r"\frac{1}{2}", "too_costly": 0.0}
    assert math.compute_score(solution_str=r"\boxed{0.5}", **score) == right
    wrong = {"score": 0.1, "acc": False, "pred": "2", "too_costly": 0.0}
    assert math.compute_score(solution_str=r"\boxed{2}", **score) == wrong
    none = {"score": 0.0, "acc": False, "pred": None, "too_costly": 0.0}
    assert math.compute_score(solution_str=r"\frac12", **score) == none


def test_math_library_stays_unloaded_where_the_text_decides():
    code = (r"import sys; from rewards.math import compute_score as f; print(f('', r'\boxed{7}', '7')['score'], "
            r"'math_verify' in sys.modules, f('', r'\boxed{14/2}', '7')['score'], 'math_verify' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "False", "1.0", "True"]


@pytest.mark.parametrize(("response", "truth", "pred", "correct"), [
    ("Answer: 34", "34", "34", True),
    ("answer : $34$", "34", "34", True),
    ("Answer: 33\nAnswer: 34", "34", "34", True),
    ("Answer: 34\nAnswer: 33", "34", "33", False),
    ("The answer is 34", "34", None, False),
    (r"\boxed{34}", "34", "34", True),                      # no "Answer:" line: the last box, as in verl 0.9.1
    (r"\boxed{33} and \boxed{1,034}.", "1034", "1034", True),
    (r"\boxed{34} Answer: 33", "34", "33", False),
    (r"\boxed{34}" + "." * 100, "34", None, False),  # beyond the last 100 characters
    (r"\boxed{34", "34", None, False),
    ("Answer: 34", ["34"], "34", True),
    ("Answer: 34", ["33", 34.0], "34", True),
    ("Answer: 34", np.array(["34"]), "34", True),
    ("Answer: 34", 34.0, "34", True),
    ("Answer: 34", np.int64(34), "34", True),
    ("Answer: 0.5", 0.5, "0.5", True),
    ("Answer: 34", ["33", "35"], "34", False),
    (r"Answer: \boxed{34}", "34", "34", True),
    ("Answer: 1,234", "1234", "1234", True),
    ("Answer: x = 12", "12", "12", True),
    (r"Answer: \frac12", r"\frac{1}{2}", r"\frac{1}{2}", True),
    (r"Answer: \sqrt3 cm", r"\sqrt{3}", r"\sqrt{3}", True),
    ("Answer: 12 dollars", "12", "12", True),
    (r"Answer: 30^\circ", "30", "30", True),
    (r"Answer: 5\text{ units}", "5", "5", True),
    (r"Answer: $\textbf{\text{5}}$", "5", "5", True),        # verl removes \text first, then \textbf, then \overline
    (r"Answer: $\overline{\text{AB}}$", "AB", "AB", True),
    (r"Answer: $\overline{\textbf{12}}$ units", "12", "12", True),
    ("Answer: 34" + " " * 400, "34", "34", False),          # beyond the last 300 characters
    ("Answer:\n34", "34", "34", True),                      # white space may be a new line
])
def test_math_dapo_minerva_answers(response, truth, pred, correct):
    result = math_dapo.compute_score("math_dapo", response, truth)
    assert result["acc"] == correct
    assert result["score"] == (1.0 if correct else -1.0)
    if len(response) < 300:
        assert result["pred"] == pred


def test_math_dapo_refuses_a_truth_that_it_cannot_compare():
    for truth in ([], None, {"answer": "34"}, True):
        with pytest.raises(ValueError, match="must be a text, a number or a list"):
            math_dapo.compute_score("math_dapo", "Answer: 34", truth)


@pytest.mark.parametrize(("answer", "numbers", "target", "score"), [
    ("(75 - 3) / 8 * 25", [3, 8, 25, 75], 225, 1.0),
    ("1 / 3 * 9", [1, 3, 9], 3, 1.0),                        # exact: floats would give 3.0000000000000004 or so
    ("3 + 4 = 7", [3, 4], 7, 1.0),
    ("-3 + 10", [3, 10], 7, 1.0),
    ("3 + 4", [3, 4, 5], 7, 0.1),                            # one is not used
    ("3 + 4 + 3 - 3", [3, 4], 7, 0.1),                       # one is used thrice
    ("34", [3, 4], 34, 0.1),
    ("7", [3, 4], 7, 0.1),
    ("3 - 3", [3, 3], 1, 0.1),
    ("3 / (4 - 4)", [3, 4, 4], 0, 0.1),
    ("3 ** 4", [3, 4], 81, 0.1),
    ("3 // 2", [3, 2], 1, 0.1),
    ("3 +", [3], 3, 0.1),
    ("(lambda: 7)()", [3, 4], 7, 0.1),
    ("__import__('os')._exit(7)", [3, 4], 7, 0.1),
    ("9*" * 20_000 + "9", [9], 7, 0.1),
    ("(" * 190, [3], 3, 0.1),
    ("3\u0660", [3], 30, 0.1),                               # a digit of another script
    ("3 \u00d7 4", [3, 4], 12, 1.0),                         # the signs of print and of LaTeX
    (r"3 \times 4", [3, 4], 12, 1.0),
    (r"\(3 \cdot 4\)", [3, 4], 12, 1.0),
    ("12\u00f74", [12, 4], 3, 1.0),
    (r"12 \div 4 = 3", [12, 4], 3, 1.0),
    ("$3+4$", [3, 4], 7, 1.0),
    ("+3+4", [3, 4], 7, 1.0),
    ("3 +\n4", [3, 4], 7, 1.0),
    ("7 \u2212 4", [7, 4], 3, 1.0),
    (r"\left(3+4\right) \times 2", [2, 3, 4], 14, 1.0),
    (r"3 \times 4", [3, 4], 7, 0.1),
    ("3\u00d7\u00d74", [3, 4], 81, 0.1),                      # no power
    (r"\frac{12}{4}", [12, 4], 3, 0.1),
    ("3\n4", [3, 4], 34, 0.1),
])
def test_countdown_scores_cases_worked_by_hand(answer, numbers, target, score):
    truth = {"target": target, "numbers": numbers}
    for ground_truth in (truth, json.dumps(truth)):
        result = countdown.compute_score("countdown", f"I think <answer>{answer}</answer>", ground_truth)
        assert (result["score"], result["acc"]) == (score, score == 1.0)


def test_countdown_without_answer_and_with_several():
    truth = {"target": 7, "numbers": [3, 4]}
    assert countdown.compute_score("countdown", "3 + 4", truth)["score"] == 0.0
    assert countdown.compute_score("countdown", "<answer>3 + 4</answer><answer>4 - 3</answer>", truth)["score"] == 0.1
    assert countdown.compute_score("countdown", "<answer>4 - 3</answer><answer>\n3 + 4\n</answer>", truth)["acc"]


def test_countdown_computes_exactly():
    assert countdown.compute("1/3 + 2/(3-1)*-(5)") == (Fraction(1, 3) - 5, [1, 3, 2, 3, 1, 5])


def test_reasoning_gym_uses_the_scorer_of_the_entrys_task():
    """The library's own entries and answers are the oracle; two tasks whose scorers differ."""
    gym = pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "letter_counting"):
        entry = gym.create_dataset(name, size=1, seed=5)[0]
        wrong = str(int(entry["answer"]) + 1)
        for truth, extra in ((json.dumps(entry), None), (entry["answer"], {"metadata": json.dumps(entry["metadata"])}),
                             (entry, None)):
            right = reasoning_gym.compute_score("reasoning_gym", f"hm <answer>{entry['answer']}</answer>", truth, extra)
            assert right == {"score": 1.0, "acc": True, "pred": entry["answer"]}
            assert reasoning_gym.compute_score("reasoning_gym", entry["answer"], truth, extra)["score"] == 1.0
            assert not reasoning_gym.compute_score("reasoning_gym", f"<answer>{wrong}</answer>", truth, extra)["acc"]
    with pytest.raises(ValueError, match="source_dataset"):
        reasoning_gym.compute_score("reasoning_gym", "4", "4")


def test_reasoning_gym_that_is_missing_is_named_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        lookup(["reasoning_gym"])


@pytest.mark.parametrize(("response", "score"), [
    ("<think>a</think><answer>b</answer>", 1.0),
    ("\n<think>a\nb</think>\n\n<answer> b </answer>\n", 1.0),
    ("a</think><answer>b</answer>", 1.0),                    # the template opened it
    ("<think>a</think> so <answer>b</answer>", 0.0),
    ("<think>a</think><answer></answer>", 0.0),
    ("<think>a</think><answer>b", 0.0),
    ("<answer>b</answer><think>a</think>", 0.0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
    ("<think>a<think>b</think></think><answer>b</answer>", 0.0),
    ("hello <think>a</think><answer>b</answer>", 0.0),
    ("", 0.0),
])
def test_format_tags(response, score):
    assert form.tags("any", response, None) == score


def test_format_tags_takes_no_time():
    start = time.process_time()
    for text in ("<think>" * 50_000, "<think>" + " " * 200_000, "<think>a</think>" + "\n" * 200_000 + "x"):
        assert form.tags("any", text, None) == 0.0
    assert time.process_time() - start < 0.5


def test_last_between_is_the_last_match_of_the_pattern():
    draw = random.Random(0)
    texts = ["".join(draw.choices(["<a>", "</a>", "x", "\n", "<", ">"], k=draw.randrange(12))) for _ in range(2000)]
    found = [form.last_between(text, "<a>", "</a>") for text in texts]
    assert found == [(re.findall("<a>(.*?)</a>", text, re.DOTALL) or [None])[-1] for text in texts]
    assert len({*found}) > 50


SOURCES = {
    "openai/gsm8k": "34", "lighteval/MATH": "34", "hiyouga/geometry3k": "34", "math_dapo": "34", "gpqa_diamond": "A",
    "searchR1_nq": "34", "countdown": {"target": 34, "numbers": [33, 1]}, "shapes": "red circle"}


def test_a_degenerate_response_does_not_escape_its_score():
    """What a policy that repeats itself writes, half a million characters of it, within the pool's own deadline: the
    pattern <answer>(.*?)</answer> would take minutes."""
    pieces = ["<answer>", "</answer>", "<think>", "answer:", "Answer: A ", "####", "#### 1", r"\boxed{", r"\boxed 1",
              "{", "}", "$", " ", "\n", "1,", "-", r"\text{", r"\fbox{", "a ", "(", "Answer:\n", "\\", "\\(", "**",
              r"\boxed ", "answer is ", "answer: B or ", r"\boxed{B} "]
    texts = [piece * (500_000 // len(piece)) for piece in pieces]
    with RewardPool(num_workers=2) as pool:
        for index, (source, text) in enumerate((source, text) for source in SOURCES for text in texts):
            pool.submit(index, source, text, SOURCES[source])
        results = pool.results()
    assert results.failures == [None] * len(SOURCES) * len(texts)


def test_format_length():
    def length(n):
        return form.length("any", "x" * n, None, max_chars=100, buffer_chars=40)

    assert [length(n) for n in (0, 60, 80, 100, 1000)] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_every_source_of_the_table_has_its_function():
    """The names of verl's default_compute_score and ours, with patterns filled in."""
    sources = {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math",
               "HuggingFaceH4/MATH-500": "math", "math": "math_dapo", "aime2024": "math_dapo", "aime": "math_dapo",
               "numina_aops_forum": "math", "numina_olympiads": "math", "codecontests": "code", "apps": "code",
               "codeforces": "code", "taco": "code", "mbpp": "code", "countdown": "countdown",
               "reasoning_gym": "reasoning_gym", "reasoning_gym/chain_sum": "reasoning_gym", "word_problems": "gsm8k",
               "searchR1_nq": "search_qa", "searchR1_2wikimultihopqa": "search_qa", "hiyouga/geometry3k": "geo3k",
               "shapes": "shapes", "gpqa_diamond": "multiple_choice", "livecodebench": "code", "ifeval": "ifeval"}
    for source, file in sources.items():
        assert find(source).__module__ == f"rewards.{file}"
    assert set(TABLE.values()) == set(sources.values())
    assert find("my_aime") is None


@pytest.mark.parametrize(("response", "truth", "score", "pred"), [
    (r"<think>2 + 3</think> so \boxed{5}", "5", 1.0, "5"),
    (r"<think>2 + 3</think> so \boxed{\frac{10}{2}}", "5", 1.0, "5"),
    (r"\boxed{5}", "5", 0.9, "5"),                                      # without its reasoning
    (r"<think>\boxed{5}</think>", "5", 0.9, "5"),                       # no answer after it
    (r"<think>?</think> \boxed{6}", "5", 0.1, "6"),
    ("<think>?</think> 5", "5", 0.0, None),
])
def test_geo3k_scores_answer_and_form(response, truth, score, pred):
    found = geo3k.compute_score("hiyouga/geometry3k", response, truth)
    assert found["score"] == pytest.approx(score) and found["pred"] == pred


@pytest.mark.parametrize(("response", "score"), [
    ("red", 1.0), ("The shapes are RED.", 1.0), ("blue", 0.0), ("red or blue", 0.0), ("", 0.0), ("reddish", 0.0),
])
def test_shapes_scores_the_last_word(response, score):
    assert shapes.compute_score("shapes", response, "red") == score


@pytest.mark.parametrize(("response", "truth", "score", "pred"), [
    ("<answer>Paris</answer>", {"target": ["Paris"]}, 1.0, "paris"),
    ("<answer> The  Beatles! </answer>", {"target": ["beatles"]}, 1.0, "beatles"),     # articles, marks, spaces, case
    ("<answer>U.S.A.</answer>", {"target": np.array(["USA", "America"])}, 1.0, "usa"),
    ("<answer>America</answer>", ["USA", "America"], 1.0, "america"),
    ("<answer>an apple a day</answer>", "apple day", 1.0, "apple day"),
    ("<answer>Theodore</answer>", "odore", 0.0, "theodore"),                           # an article is a word
    ("<answer>Paris, France</answer>", {"target": ["Paris"]}, 0.0, "paris france"),    # the whole answer counts
    ("<answer>Rome</answer> no: <answer>Paris</answer>", "Paris", 1.0, "paris"),       # the last one
    ("<answer>Par\nis</answer>", "par is", 1.0, "par is"),
    ("Paris", "Paris", 0.0, None),
    ("<answer>Paris", "Paris", 0.0, None),
    ("<answer>Paris</answer>" * 10, "Paris", 1.0, "paris"),
    ("<answer>Paris</answer>" * 11, "Paris", 0.25, "paris"),
])
def test_search_qa_compares_as_squad_does(response, truth, score, pred):
    result = search_qa.compute_score("searchR1_nq", response, truth)
    assert result == {"score": score, "acc": score > 0, "pred": pred}


def test_search_qa_format_score_and_bad_truths():
    assert search_qa.compute_score("searchR1_nq", "<answer>x</answer>", "y", format_score=0.2)["score"] == 0.2
    for truth in (None, [], {"target": []}, {"answer": "x"}, 3, [3]):
        with pytest.raises(ValueError, match="must be a text or a list of texts"):
            search_qa.compute_score("searchR1_nq", "<answer>x</answer>", truth)


# letter -> forms in which models write it; None: what only looks like it
CHOICES: dict[str | None, list[str]] = {
    "B": [
        "Answer: B", "Answer: (B)", "Answer: B.", "Answer: B)", "Answer: B) 5 eV", "Answer: B. 5 eV", "Answer: B: 5 eV",
        "Answer: B - 5 eV", "Answer: B-5 eV", "Answer: B, since x", "Answer: B because x", "Answer: B\nmixture",
        "answer: b", "answer: b.", "ANSWER : B", "Answer:B", "Answer:\nB", "Answer:\n\n(B)", "Answer: B mixture",
        "**Answer: B**", "**Answer:** B", "**Answer**: **B**", "Answer: __B__", "Answer: _B_", "Answer: *(B)*",
        "Answer: **B) 5 eV**", "Answer: **B. A mixture**", "Answer: B</answer>", "Answer: B ($x = 1$)",
        "Answer: B = 5 eV", "Answer: $B$", "Answer: $(B)$", "Answer: $$B$$", r"Answer: $\text{B}$",
        r"Answer: $\mathrm{(B)}$", r"Answer: \boxed{B}", r"Answer: \boxed{\text{B}}", r"Answer: $\boxed{B}$",
        r"Answer: \boxed{(B)}", r"Answer: \boxed{B. 5 eV}", r"Answer: \boxed{\text{B) A mixture}}", r"Answer: \(B\)",
        r"Answer: \( B \)", r"Answer: \[B\]", "Answer: \\[\nB\n\\]", r"Answer: \(\boxed{B}\)",
        r"Answer: \[\boxed{\text{(B)}}\]", r"Answer: \(\textbf{B}\)", r"Answer: \(B\) because x", r"Answer: (\(B\))",
        "Answer: [B]", "Answer: [ B ]", "Answer: [[B]]", "Answer: [B].", "Answer: [(B)]", "Answer: [B. A mixture]",
        "Answer: **[B]**", "Answer: [**B**]", "Answer: `B`", "Answer: `B`.", "Answer: **`B`**", "Answer: `(B)`",
        "Answer: ```B```", "Answer: `B) 5`", "Answer: `B: 5`", "Answer: \"B\"", "Answer: 'B'", "Answer: {B}",
        "Answer: ${B}$", r"Answer: \textbf{B}", r"Answer: \textbf{(B)}", r"Answer: \textbf{B. A mixture}",
        r"Answer: \mathbf{B}", r"Answer: $\mathbf{B}$", r"Answer: \boxed{\textbf{(B)}\ 5}", r"Answer: \textit{B}",
        r"Answer: \boldsymbol{B}", "Answer: A\nNo. Answer: `B`", "Answer: [B]\nAnswer: a mixture", "answer: `b`",
        r"\boxed{B}", r"So it is $\boxed{\text{B}}$.", r"\boxed {(B)}", "The answer is B", "the answer is (B).",
        "The correct answer is **B**.", r"the answer is $\boxed{B}$", r"\boxed{A} or rather \boxed{B}",
        r"\boxed{C}, so Answer: B", "The answer is: B", r"the answer is \textbf{(B)}",
        "Answer: B and the others are not",
    ],
    "A": [
        "Answer: A", "Answer: a", "answer: a.", "Answer: A because x", "Answer: A is right", "Answer: A, a mixture",
        "Answer: A. Mixture", "Answer: (A) mixture", "Answer: (a) mixture", "Answer: A) mixture",
        "Answer: **A** mixture", "Answer: A\nmixture", "Answer: A (a mixture)", r"Answer: \textbf{A} mixture",
        "Answer: [A] a mixture", "Answer: `A` mixture", r"Answer: \(A\)", "Answer: A as x", "Answer: A - mixture",
        "Answer: A: mixture",
    ],
    None: [
        "Answer: a mixture", "Answer: A mixture", "Answer: A mixture of B and C", "answer: A\tmixture",
        "Answer: **A mixture**", "**Answer:** a mixture", "Answer: A **mixture**", "Answer: (a mixture)",
        r"Answer: \boxed{a mixture}", r"Answer: \text{A mixture}", r"Answer: \textbf{A mixture}", "Answer: [a mixture]",
        "Answer: `a mixture`", "Answer: \"A mixture\"", r"Answer: \(a mixture\)", "Answer:\nA mixture",
        "Answer: I think so", "Answer: I am not sure", "answer: i don't know", "Answer: I'm not sure", "Answer: C'est",
        "Answer: a-helix", "Answer: D-glucose", "Answer: C2H6", "Answer: C_6", "Answer: $C_{6}$", "Answer: B12",
        "Answer: Because", "Answer: [B, C]", "Answer: [A, B]", "Answer: {a, b}", r"Answer: \(B = 3\)",
        r"Answer: \(a + b\)", r"Answer: \(a \times b\)", r"Answer: \[E = mc^2\]", "Answer: `a = 1`", "Answer: `f(a)`",
        r"Answer: \(C_6H_6\)", r"Answer: \(\alpha\)", r"Answer: \textbf{Both}", r"Answer: \textbf{C2}",
        "Answer: [Both]", r"Answer: \[\]", "Answer: []", "Answer: ``", "Answer:", "Answer", "", "B",
        "[B]", "Answer: 5", r"Answer: \frac{A}{B}", "Answer: none. B is wrong", "Answer: I\u2019m lost",
        "Answer: [A mixture] (B)", "Answer: 'a mixture'", r"Answer: \[a\times b\]", "Answer: A _mixture_",
        "Answer: {B = 3}", "Answer: B or C", "Answer: (B) or (C)", "Answer: B and C", "Answer: B/C",
        "Answer: **B** or **C**",
        "The answer is a mixture", "The answer is B or C", r"\boxed{B \text{ or } C}", r"\boxed{5}", r"\boxed{BC}",
        "the answer is 5", "my answer isn't B", "Answer: B & D",
    ],
}


@pytest.mark.parametrize(("text", "pred"), [(text, pred) for pred, texts in CHOICES.items() for text in texts])
def test_the_letter_of_a_multiple_choice_answer(text, pred):
    for said in (text, f"A or C?\n{text}\n"):
        found = multiple_choice.compute_score("gpqa_diamond", said, "B")
        assert found == {"score": float(pred == "B"), "acc": pred == "B", "pred": pred}


@pytest.mark.parametrize(("task", "truths"), [
    (multiple_choice, ["42", "B. A mixture", 1, "", None, ["A", "B"]]), (math, [["42"], {"a": 1}, None]),
    (geo3k, [["42"], None]),
])
def test_a_truth_that_no_answer_equals_is_refused(task, truths):
    for truth in truths:
        with pytest.raises(ValueError, match=r"must be a letter|must be a text or a number"):
            task.compute_score("any", r"Answer: B, \boxed{42}", truth)


def test_a_multiple_choice_answer_takes_no_time():
    start = time.process_time()
    for text in ("answer:" * 30_000, "answer:" + " " * 200_000, "answer:" + "\\(" * 100_000, "answer:[(`$" * 20_000,
                 "answer:" + r"\textbf{" * 30_000, "answer: a " * 20_000, "answer:" + "[" * 200_000 + "B"):
        multiple_choice.compute_score("gpqa_diamond", text, "B")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(("data_source", "truth", "answer"), [
    ("lighteval/MATH", "34", r"\boxed{33}"), ("hiyouga/geometry3k", "34", r"\boxed{33}"),
    ("math_dapo", "34", "Answer: 33"), ("searchR1_nq", "34", "<answer>33</answer>"),
    ("countdown", {"target": 34, "numbers": [33, 1]}, "<answer>33</answer>"), ("gpqa_diamond", "A", "Answer: B"),
])
def test_only_an_answer_has_a_vote(data_source, truth, answer):
    """From the worker's reply to the vote: a response without an answer has none, and never the text "None"."""
    votes = []
    for response in (answer, "I do not know."):
        reply = reply_of(data_source, find(data_source)(data_source, response, truth))
        assert reply["texts"] == {}
        votes.append(acc_and_vote(Sample(0, 0, 0, None, score=reply["score"], extras=reply["extra"])))
    assert votes == [(0.0, "B" if data_source == "gpqa_diamond" else "33"), (0.0, None)]


# --------------------------------------------------------------------------- IFEval, by the package's checkers

def instructions(*pairs: tuple[str, dict]) -> str:
    names, kwargs = zip(*pairs)
    return json.dumps({"key": 1, "prompt": "Say it.", "instruction_id_list": names, "kwargs": kwargs})


NO_COMMA = ("punctuation:no_comma", {})
WORDS = ("length_constraints:number_words", {"num_words": 4, "relation": "at least"})
TEA = ("keywords:existence", {"keywords": ["tea"]})
REPEAT = ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."})


@pytest.fixture
def checkers(monkeypatch):
    """lm_eval's, which would try to download the data for sentences where LOCAL_RANK is 0."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.syspath_prepend(f"{sys.prefix}/lm_eval")                            # of tools/setup.sh extras
    pytest.importorskip("lm_eval")
    yield ifeval.checkers()
    ifeval.checkers.cache_clear()


@pytest.mark.parametrize(("response", "truth", "followed"), [       # followed: strictly and loosely, of how many
    ("I like green tea", [NO_COMMA, WORDS, TEA], (3, 3, 3)),
    ("Well, I like tea", [NO_COMMA, WORDS, TEA], (2, 2, 3)),
    ("Sure, here it is:\nI like green tea", [NO_COMMA, WORDS, TEA], (2, 3, 3)),     # without its first line
    ("I like green tea\nOne, two", [NO_COMMA], (0, 1, 1)),                         # without its last line
    ("**Say it.** tea", [REPEAT], (0, 1, 1)),                                       # without its asterisks
    ("Say it. tea", [REPEAT, NO_COMMA], (2, 2, 2)),
    ("<think>Hm, well, no</think>\n\nI like green tea", [NO_COMMA, WORDS], (2, 2, 2)),
    ("I like", [WORDS], (0, 0, 1)),
    ("", [NO_COMMA], (0, 0, 1)),
    (" \n", [NO_COMMA, TEA], (0, 0, 2)),
])
def test_ifeval_counts_what_is_followed(response, truth, followed, checkers):
    strict, loose, number = followed
    found = ifeval.compute_score("ifeval", response, instructions(*truth))
    assert found == {"score": float(strict == number), "acc": strict == number, "loose": float(loose == number),
                     "num_strict": strict, "num_loose": loose, "num_instructions": number}


def test_ifeval_detects_the_same_language_again(checkers):
    truth = instructions(("language:response_language", {"language": "de"}))
    texts = ("Ich trinke gerne Tee und lese ein Buch.", "I drink tea and read a book.")
    for _ in range(3):
        assert [ifeval.compute_score("ifeval", text, truth)["acc"] for text in texts] == [True, False]


@pytest.mark.parametrize("missing", ["lm_eval", "langdetect", "immutabledict", "nltk"])
def test_ifeval_without_a_package_is_named_before_training(missing, monkeypatch):
    for name in ("lm_eval", "langdetect", "immutabledict", "nltk"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    with pytest.raises(ValueError, match=f"package {missing} is not installed; run `pip install lm_eval"):
        lookup(["ifeval"])


def test_ifeval_without_the_data_for_sentences_is_named_before_training(checkers, monkeypatch, tmp_path):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    with pytest.raises(ValueError, match="punkt_tab, which finds sentences, is not on this machine"):
        lookup(["ifeval"])


# --------------------------------------------------------------------------- a score that is only measured

def test_a_measured_score_is_acc_and_no_reward():
    assert measured.compute_score("word_problems", "#### 5", "5") == {"score": 0.0, "acc": 1.0}
    assert measured.compute_score("word_problems", "#### 6", "5") == {"score": 0.0, "acc": 0.0}
    assert measured.compute_score("word_problems", "it is 5", "5", method="flexible", other=1)["acc"] == 1.0
    assert measured.compute_score("gpqa_diamond", "Answer: B", "B") == {"score": 0.0, "acc": True, "pred": "B"}
    with pytest.raises(ValueError, match="no reward for data_source 'mine'"):
        measured.compute_score("mine", "", "")
