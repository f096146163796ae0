"""Contexts for --context of distill.py: what a teacher sees that the policy does not.

A context is a function of yours, (row, responses) -> messages or None. `row` has the prompt's messages ("prompt"),
"data_source", "ground_truth" and "extra_info". `responses` has a dict of each response to the prompt, first that which
is taught: its "text", its "score" (None: it has none), its "index", and what else the reward function returned, such as
feedback. None: the teacher has nothing to say of this response.
"""

from typing import Any

Messages = list[dict[str, Any]]


def answered_before(messages: Messages, answer: str, remark: str = "") -> Messages:
    """The conversation, in which the last question was answered once before, and is asked again."""
    question = messages[-1]
    again = question | {"content": f"{remark}\n\n{question['content']}".strip()}
    return [*messages, {"role": "assistant", "content": answer}, again]


def reference_answer(row: dict[str, Any], responses: list[dict[str, Any]]) -> Messages:
    """The answer in extra_info["answer"], or else the ground truth (SDFT: the demonstration)."""
    answer = row["extra_info"].get("answer", row["ground_truth"])
    return answered_before(row["prompt"], str(answer))


def sibling_success(row: dict[str, Any], responses: list[dict[str, Any]]) -> Messages | None:
    """The first other response to the prompt with a score of at least 1; without one, this response and what the reward
    function returned as "feedback" on it (SDPO)."""
    own, *siblings = responses
    for sibling in siblings:
        if (sibling["score"] or 0) >= 1:
            return answered_before(row["prompt"], sibling["text"])
    if own.get("feedback"):
        return answered_before(row["prompt"], own["text"], own["feedback"])
    return None
