r"""Geometry3K's score, in verl's proportions: nine tenths for the answer in the last \boxed{}, one for the form."""

from rewards.math import check, judge, last_boxed, text_of_truth
from rewards.math_text import Verdict

__all__ = ["check", "compute_score"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1) -> dict:
    """`acc`: the answer is equal to the ground truth, as text or by the math-verify library. `format`: the response
    begins with reasoning in <think> tags, and a boxed answer follows it."""
    truth = text_of_truth(ground_truth)
    answer = last_boxed(solution_str)
    found = Verdict(False, None) if answer is None else judge(answer, truth)
    thought, _, rest = solution_str.strip().partition("</think>")
    form = thought.startswith("<think>") and last_boxed(rest) is not None
    return {"score": (1 - format_score) * found.same + format_score * form, "acc": found.same, "pred": found.vote,
            "too_costly": float(found.too_costly), "format": float(form)}
