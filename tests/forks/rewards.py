"""Reward functions for the forks of test_forks.py. They do not look at the answer."""

TOKENS = 8  # of each response to `process`: none ends earlier


def by_length(data_source, solution_str, ground_truth, extra_info=None):
    """Odd lengths win; but to some problems all responses are correct, and to some none."""
    return [1.0, 0.0, *[float(len(solution_str) % 2)] * 2][int(ground_truth) % 4]


def process(data_source, solution_str, ground_truth, extra_info=None):
    """Also a number for each token of the response."""
    number = sum(map(ord, solution_str))
    numbers = [0.01 * (number * (t + 3) % 17) for t in range(TOKENS)]
    return {"score": by_length(data_source, solution_str, ground_truth), "process": numbers}


def never(data_source, solution_str, ground_truth, extra_info=None):
    """No response is correct."""
    return 0.0
