def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A reward that random text gets too: odd lengths win."""
    return float(len(solution_str) % 2)
