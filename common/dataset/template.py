"""The flags of the chat template, checked once before any prompt is encoded."""

import json
from pathlib import Path
from typing import Any

from common.prompts import DataConfig


def template_arguments(tokenizer, config: DataConfig) -> dict[str, Any] | None:
    """What `apply_chat_template` gets besides the messages; None for --data.template plain. Raises ValueError for
    arguments that are no JSON object, a template file that is not there, and a tokenizer without a template."""
    if config.template == "plain":
        return None
    try:
        arguments = json.loads(config.chat_template_kwargs)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"--data.chat-template-kwargs {config.chat_template_kwargs} must be a JSON object, "
                         f"e.g. '{{\"enable_thinking\": false}}'")
    if config.chat_template_file:
        if not Path(config.chat_template_file).is_file():
            raise ValueError(f"--data.chat-template-file {config.chat_template_file} does not exist")
        arguments["chat_template"] = Path(config.chat_template_file).read_text()
    elif not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template (a base model?); use "
                         f"--data.template plain, or give one with --data.chat-template-file FILE")
    return arguments
