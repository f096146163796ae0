"""Reward functions that get all responses to a prompt in one call: `f(data_source, solution_strs, ground_truth,
extra_info)` returns a list with a score, or a dict with `score`, for each of `solution_strs`."""

import inspect
from collections.abc import Callable
from typing import Any


def is_group_function(function: Callable) -> bool:
    """Its parameters name many responses, and one prompt."""
    parameters = inspect.signature(function).parameters
    return "solution_strs" in parameters and "data_source" in parameters


def of_members(reply: dict, count: int) -> list[dict]:
    """The reply to a group -> one for each of its responses. A failure is that of all."""
    if "group" in reply:
        return reply["group"]
    return [reply] * count


class OpenGroups:
    """The responses that have ended, of groups in which others have not."""

    def __init__(self, submit: Callable[[list[int], list[str], Any], None], size: int):
        """`submit(indices, texts, prompt)` gets the group as soon as all have ended. Response i is of group
        i // size."""
        self.submit = submit
        self.size = size
        self.ended: dict[int, dict[int, str | None]] = {}  # group -> response -> its text

    def add(self, index: int, text: str | None, prompt: Any) -> None:
        """A response has ended. None: it is not to be scored, as an episode gave its score."""
        group = index // self.size
        ended = self.ended.setdefault(group, {})
        ended[index] = text
        if len(ended) < self.size:
            return
        texts = {i: text for i, text in sorted(ended.items()) if text is not None}
        if texts:
            self.submit([*texts], [*texts.values()], prompt)
        del self.ended[group]
