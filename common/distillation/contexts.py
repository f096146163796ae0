"""Contexts for --context of distill.py: what a teacher sees that the policy does not.

A context is a function of yours, (row, responses) -> messages or None. `row` has the prompt's messages ("prompt"),
"data_source", "ground_truth" and "extra_info". `responses` has a dict of each response to the prompt, first that which is
taught: its "text", its "score" (None: it has none), its "index", and what else the reward function returned, such as
feedback. None: the teacher has nothing to say of this response.
"""

from typing import Any

Messages = list[dict[str, Any]]


def with_text(messages: Messages, text: str) -> Messages:
    """The messages, with a text at the end of the last."""
    return [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']}\n\n{text}"}]


def reference_answer(row: dict[str, Any], responses: list[dict[str, Any]]) -> Messages:
    """The answer in extra_info["answer"], or else the ground truth (SDFT: the demonstration)."""
    answer = row["extra_info"].get("answer", row["ground_truth"])
    return with_text(row["prompt"], f"This is an example of a correct response:\n{answer}\n\n"
                                    f"Now answer in your own words, with the same result.")


def sibling_success(row: dict[str, Any], responses: list[dict[str, Any]]) -> Messages | None:
    """The first other response to the prompt with a score of at least 1, and what the reward function returned as
    "feedback" on this one (SDPO)."""
    own, *siblings = responses
    successes = [sibling for sibling in siblings if (sibling["score"] or 0) >= 1]
    parts = []
    if successes:
        parts.append(f"A correct response to this question:\n{successes[0]['text']}")
    if own.get("feedback"):
        parts.append(f"Feedback on an earlier attempt of yours:\n{own['feedback']}")
    if not parts:
        return None
    return with_text(row["prompt"], "\n\n".join([*parts, "Now answer the question correctly."]))
