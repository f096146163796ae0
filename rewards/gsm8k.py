"""GSM8K's score, the behaviour of verl's utils/reward_score/gsm8k.py: the answer after `####`, compared as a number."""

import re
from decimal import Decimal, InvalidOperation

NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
METHODS = {
    "strict": re.compile(r"####\s*((?:[-+$]\s?){0,3})" + NUMBER),
    "flexible": re.compile(r"([-+$]{0,3})" + NUMBER),
}
TAIL = 300  # characters searched: an answer stands at the end, and a runaway response must not cost time


def extract_answer(solution_str: str, method: str = "strict") -> Decimal | None:
    """The last `#### number` (strict) or the last number (flexible); a sign, commas and $ are allowed."""
    found = METHODS[method].findall(solution_str[-TAIL:])
    if not found:
        return None
    prefix, digits = found[-1]
    number = Decimal(digits.replace(",", ""))
    return -number if "-" in prefix else number


def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict", score=1.0,
                  format_score=0.0) -> float:
    """`score` for the right answer, `format_score` for another number, 0 without one. ground_truth is a number, or a
    solution that ends in `#### number`, as in the data set's own answer column."""
    try:
        truth = Decimal(str(ground_truth).rpartition("####")[2].replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        truth = Decimal("nan")
    if not truth.is_finite():  # "nan" is what pandas writes for a missing text
        raise ValueError(f"ground_truth {ground_truth!r} of data_source {data_source!r} must be a number")
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == truth else format_score
