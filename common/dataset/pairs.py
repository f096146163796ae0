"""Preference rows: their two conversations, and which of the row's images each of these shows."""

from typing import Any

from common.dataset.messages import check_turns, parse_messages


def parse_pair(row: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The chosen and the rejected conversation of a preference row, each with the messages of its `prompt`. Raises
    ValueError for a bad row."""
    prompt: list[dict[str, Any]] = []
    if row.get("prompt") is not None:
        prompt = parse_messages(row["prompt"], "prompt")
    chosen = parse_messages(row.get("chosen"), "chosen", "assistant")
    rejected = parse_messages(row.get("rejected"), "rejected", "assistant")
    check_turns(prompt, chosen)
    check_turns(prompt, rejected)
    conversations = []
    for messages in (chosen, rejected):
        if messages[: len(prompt)] == prompt:
            conversations.append(messages)
        else:
            conversations.append([*prompt, *messages])
    return conversations


def images_of_pair(row: dict[str, Any]) -> list[list[Any]]:
    """The images of the chosen and of the rejected conversation of a preference row. Each shows all images of the row;
    or, if they stood inside of the messages and so each column has its own, those of the prompt and of its column."""
    images = row["images"]
    inside = {}                                                         # column -> its own
    first = 0
    for column in ("prompt", "chosen", "rejected"):
        end = first + num_places(row.get(column))
        inside[column] = images[first:end]
        first = end
    if first != len(images):                                            # the last `end`: as many as all places
        return [images, images]
    found = []
    for column, messages in zip(("chosen", "rejected"), parse_pair(row)):
        own = inside[column]
        if num_places(messages) != len(own):                            # the column's conversation has no prompt
            own = [*inside["prompt"], *own]
        found.append(own)
    return found


def num_places(messages: Any) -> int:
    """The number of `<image>` in messages, or in a text."""
    if isinstance(messages, str):
        return messages.count("<image>")
    return sum(num_places(message["content"]) for message in messages or ())
