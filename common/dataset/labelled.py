"""Rows with one answer and a label, and their prompts with the answers of other rows (kto.py)."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from common.dataset.conversations import SCHEMA, ConversationSet


def label_of(row: dict[str, Any]) -> bool:
    """Whether the row's answer is desired. Raises ValueError for a label that does not say so."""
    label = row.get("label")
    if label not in (True, False):                                      # 1 and 0 are equal to them
        raise ValueError(f"label is {label!r:.80}; it must be true for an answer that is desired, else false "
                         f"(--data.label-column)")
    return bool(label)


def mismatched(data: ConversationSet, rows: Sequence[int], max_length: int) -> ConversationSet:
    """Each row's prompt with the answer of the row before it in `rows`, the first one's with that of the last: as many
    conversations as rows, in their order. What is longer than `max_length` tokens is cut from its end. The answer
    begins with the first token that is trained on, and keeps the tokens that it has after its own prompt. All ranks
    read all of these rows."""
    if data.has_images:
        raise ValueError("rows with images cannot be used here: an answer is scored after the prompt of another row, "
                         "whose images are others")
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    masks: list[list[bool]] = []
    for number in data.sequences(rows):
        tokens = data.tokens[number].as_py()
        mask = data.mask[number].as_py()
        first = mask.index(True)
        prompts.append(tokens[:first])
        answers.append(tokens[first:])
        masks.append(mask[first:])
    mixed = []
    for i, prompt in enumerate(prompts):
        tokens = prompt + answers[i - 1]                                # -1: the last one
        mask = [False] * len(prompt) + masks[i - 1]
        mixed.append({"tokens": tokens[:max_length], "mask": mask[:max_length]})
    return ConversationSet(pa.Table.from_pylist(mixed, SCHEMA), data.loaded, 1)
