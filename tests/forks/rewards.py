"""Reward functions for the forks of test_forks.py."""

TOKENS = 8  # of each response there: no token ends one early


def process(data_source, solution_str, ground_truth, extra_info=None):
    """Odd lengths win; and a number for each token of the response."""
    number = sum(map(ord, solution_str))
    return {"score": float(len(solution_str) % 2), "process": [0.01 * (number * (t + 3) % 17) for t in range(TOKENS)]}


def never(data_source, solution_str, ground_truth, extra_info=None):
    """No response is correct."""
    return 0.0
