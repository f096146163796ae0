r"""Geometry3K's score, in verl's proportions: nine tenths for the answer in the last \boxed{}, one for the form."""

from rewards.math import check, equal, last_boxed, vote_of

__all__ = ["check", "compute_score"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1) -> dict:
    """`acc`: the answer is equal to the ground truth, as text or by the math-verify library. `format`: the response
    begins with reasoning in <think> tags, and a boxed answer follows it."""
    answer = last_boxed(solution_str)
    acc = answer is not None and equal(answer, str(ground_truth))
    thought, _, rest = solution_str.strip().partition("</think>")
    form = thought.startswith("<think>") and last_boxed(rest) is not None
    return {"score": (1 - format_score) * acc + format_score * form, "acc": acc, "pred": vote_of(answer),
            "format": float(form)}
