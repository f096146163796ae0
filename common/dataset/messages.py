"""The columns of one row of data -> its prompt, or a ValueError with the rule that the row breaks.

Messages come as lists of {role, content}, or as one text. The chat template sees what this file returns.
"""

from typing import Any

from common.prompts import DataConfig, Prompt


def parse_row(row: dict[str, Any], config: DataConfig) -> Prompt:
    """The prompt of one row, before it is tokenised. Raises ValueError with the rule that the row breaks."""
    messages = parse_messages(row.get("prompt"), config.prompt_column)
    data_source = config.data_source or row.get("data_source")
    if not isinstance(data_source, str) or not data_source:
        raise ValueError(f"{config.data_source_column} is {data_source!r:.80}; it must be a name (--data.data-source)")
    column, truth = config.reward_model_column, row.get("reward_model")
    if config.ground_truth_column:
        column, truth = config.ground_truth_column, {"ground_truth": row.get("ground_truth")}
    if not isinstance(truth, dict) or truth.get("ground_truth") is None:
        raise ValueError(f"{column} is {truth!r:.80}; it must have a ground_truth (--data.ground-truth-column)")
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict | None):
        raise ValueError(f"{config.extra_info_column} is {extra_info!r:.80}; it must be a struct or absent")
    return Prompt([], data_source, truth["ground_truth"], extra_info or {}, messages, row)


def parse_messages(prompt: Any, column: str, role: str = "user") -> list[dict[str, str]]:
    """The chat messages of a prompt, which may be one message of `role` as a string."""
    messages = [{"role": role, "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{column} is {prompt!r:.80}; it must name a column of strings or lists of {{role, content}}")
    # parquet gives every message the keys of all; templates ask whether a key is there
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in messages:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{column} has a message whose {key} is {message.get(key)!r:.80}; it must be a string")
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{column} is empty; there must be at least one message, and text in the last")
    return messages
