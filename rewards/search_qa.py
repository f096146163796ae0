"""Search-R1's score (Jin et al. 2025, arXiv 2503.09516): the last <answer>...</answer> equals a truth, in SQuAD's form.

ground_truth: {"target": text or list of texts}, or those alone. Episodes with a search tool: envs/search.py. Without
it, questions are answered from memory, or from passages that stand in the prompt.
"""

import re
import string
from typing import Any

from rewards.format import last_between

MAX_TAGS = 10  # a response with more opening or closing tags gets a quarter of the score, as in verl


def normalise(text: str) -> str:
    """SQuAD's normal form (Rajpurkar et al. 2016): lower case, no punctuation, no articles, single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def truths_of(ground_truth: Any) -> list[str]:
    target = ground_truth["target"] if isinstance(ground_truth, dict) and "target" in ground_truth else ground_truth
    target = target.tolist() if hasattr(target, "tolist") else target
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets or not all(isinstance(text, str) for text in targets):
        raise ValueError(f"ground_truth {ground_truth!r:.100} must be a text or a list of texts, or a struct whose "
                         f"target is that")
    return [normalise(text) for text in targets]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, score=1.0, format_score=0.0) -> dict:
    """`score` for a right answer, `format_score` for another one, 0 without <answer>...</answer>. A response without
    one has no vote in maj@N."""
    truths = truths_of(ground_truth)
    answer = last_between(solution_str, "<answer>", "</answer>")
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": None}
    pred = normalise(answer)
    acc = pred in truths
    if acc and max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MAX_TAGS:
        score = score / 4
    return {"score": score if acc else format_score, "acc": acc, "pred": pred}
