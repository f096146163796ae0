r"""MATH's score: the last \boxed{} against the ground truth, equal as normalised text or by value (math_values.py).

For lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500 and numina_*.
"""

import re
from collections import deque
from fractions import Fraction
from numbers import Real

from rewards.math_text import (
    NAME,
    NUMBER,
    Verdict,
    in_digits,
    is_word,
    normalise,
    text_of_time,
    time_of_day,
    unstyled,
    written_out,
)

BRACED = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s{}$\\][^\n$]*?)[ \t]*(?=\$|\\[)\]]|\n|$)")
MAX_PARSED = 500  # characters given to the library: an answer is short, and its parser is not fast


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds, its braces balanced; None if it does not close. Without any, what
    follows \boxed in its line or formula: \boxed 5."""
    braced = deque(BRACED.finditer(text), maxlen=1)
    if braced:
        return inside_braces(text, braced[0].end() - 1)
    bare = deque(BARE.finditer(text), maxlen=1)
    return bare[0][1].strip().removesuffix(".") if bare else None


def inside_braces(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it; None if none does."""
    depth = 0
    for i in range(start, len(text)):
        escaped = text[i - 1] == "\\"
        depth += 0 if escaped else (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1:i]
    return None


def judge(answer: str, truth: str) -> Verdict:
    """The one equality of scores and votes. Raises ValueError for a truth that is too large to be computed."""
    if len(answer) > max(MAX_PARSED, 2 * len(truth)):  # the patterns take a time quadratic in the length
        return Verdict(False, answer)
    answer, truth = written_out(answer), written_out(truth)
    clock = time_of_day(answer)
    if clock and (expected_clock := time_of_day(truth)):
        return Verdict(clock == expected_clock, text_of_time(clock))
    answer, truth = in_digits(unstyled(answer)), in_digits(unstyled(truth))
    text, expected = normalise(answer), normalise(truth)
    names = {found[1] for found in (NAME.match(answer), NAME.match(truth)) if found}
    if text == expected:
        return Verdict(len(names) < 2, expected)  # x = 5 is 5, and not y = 5
    if len(answer) > MAX_PARSED:
        return Verdict(False, text)
    if text.isalpha() and expected.isalpha() and text.lower() == expected.lower():
        return Verdict(True, expected)
    if is_word(answer, text) or is_word(truth, expected):
        return Verdict(False, text)
    if NUMBER.fullmatch(text) and NUMBER.fullmatch(expected) and "%" not in answer + truth:
        return Verdict(Fraction(text) == Fraction(expected), str(Fraction(text)))
    from rewards.math_values import compare  # 0.3 s and 60 MB: only where the texts differ

    found = compare(answer, truth)
    vote = expected if found.same else text_of_time(clock) if clock else found.vote or text
    return Verdict(found.same, vote, found.too_costly)


def equal(answer: str, truth: str) -> bool:
    return judge(answer, truth).same


def text_of_truth(ground_truth: object) -> str:
    """Raises ValueError for a list or an object: its text in Python is no answer, and every response would be wrong."""
    if not isinstance(ground_truth, str | Real):
        raise ValueError(f"ground_truth {ground_truth!r:.100} must be a text or a number")
    return str(ground_truth)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, score=1.0, format_score=0.0) -> dict:
    r"""`score` if the last \boxed{} equals ground_truth (boxed or not), `format_score` if not, 0 without a box.
    A response without a box has no vote in maj@N. `too_costly` counts answers that are not computed, and are wrong."""
    answer = last_boxed(solution_str)
    truth = text_of_truth(ground_truth)
    truth = last_boxed(truth) or truth
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": None, "too_costly": 0.0}
    found = judge(answer, truth)
    return {"score": score if found.same else format_score, "acc": found.same, "pred": found.vote,
            "too_costly": float(found.too_costly)}


def check(**_) -> None:
    """Before training: the library must be there."""
    try:
        import math_verify  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"package {error.name} is not installed; run `pip install 'math-verify[antlr4-13-2]==0.9.0' "
                         f"latex2sympy2_extended==1.11.0`") from None
