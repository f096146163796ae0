def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Two parts, one with a factor, and a rest."""
    odd = float(len(solution_str) % 2)
    vowels = float(sum(map(solution_str.count, "aeiou")))
    return {"score": odd + 0.1 * vowels + 0.5 * (len(solution_str) % 3), "odd": odd, "vowels": vowels, "pred": "text"}
