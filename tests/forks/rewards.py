"""Reward functions for the forks of test_forks.py. They do not look at the answer."""

import re

from tools.try_script import compute_score_of_some

TOKENS = 8  # of each response to `process`: none ends earlier


def process(data_source, solution_str, ground_truth, extra_info=None):
    """The same, and a number for each token of the response."""
    number = sum(map(ord, solution_str))
    numbers = [0.01 * (number * (t + 3) % 17) for t in range(TOKENS)]
    return {"score": compute_score_of_some(data_source, solution_str, ground_truth), "process": numbers}


def words(data_source, solution_str, ground_truth, extra_info=None):
    """The same, and a score for each word, with the character at which it ends."""
    ends = [match.end() for match in re.finditer(r"\S+", solution_str)]
    return {"score": compute_score_of_some(data_source, solution_str, ground_truth),
            "step_scores": [float(end * 7 % 3 == 0) for end in ends], "step_ends": ends}


def never(data_source, solution_str, ground_truth, extra_info=None):
    """No response is correct."""
    return 0.0
