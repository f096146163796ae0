"""Score of a multiple-choice answer: the letter after the last "Answer:" of a response, for gpqa*.

The letter may stand in brackets, in bold, in dollar signs or in \\boxed{}. A response without one scores 0 and has no
vote in maj@N.
"""

import re

LETTER = re.compile(r"answer[*_]*\s?:[\s*_$(]*(?:\\(?:boxed|text|mathrm)\{\s*)*\(?([A-Z])(?![A-Za-z])", re.IGNORECASE)


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    found = LETTER.findall(solution_str)
    pred = found[-1].upper() if found else None
    acc = pred == str(ground_truth).strip().upper()
    return {"score": float(acc), "acc": acc, "pred": pred}
