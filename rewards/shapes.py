"""The score of data/shapes.py: is the last word of the response the answer?"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    words = re.findall(r"[a-z]+", solution_str[-100:].lower())
    return float(words[-1:] == [ground_truth])
