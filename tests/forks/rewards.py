"""Reward functions for the forks of test_forks.py. They do not look at the answer."""

from tools.try_script import compute_score_of_some

TOKENS = 8  # of each response to `process`: none ends earlier


def process(data_source, solution_str, ground_truth, extra_info=None):
    """The same, and a number for each token of the response."""
    number = sum(map(ord, solution_str))
    numbers = [0.01 * (number * (t + 3) % 17) for t in range(TOKENS)]
    return {"score": compute_score_of_some(data_source, solution_str, ground_truth), "process": numbers}


def never(data_source, solution_str, ground_truth, extra_info=None):
    """No response is correct."""
    return 0.0
