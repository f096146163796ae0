def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Odd lengths win; a third of all texts has no reward."""
    if len(solution_str) % 3 == 0:
        raise ValueError("no reward")
    return float(len(solution_str) % 2)
