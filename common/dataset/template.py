"""The flags of the chat template, checked once before any prompt is encoded."""

from pathlib import Path
from typing import Any

import jinja2

from common.prompts import TemplateConfig
from rewards import json_object


def template_arguments(tokenizer, config: TemplateConfig) -> dict[str, Any] | None:
    """What `apply_chat_template` gets besides the messages; None for --data.template plain. Raises ValueError for
    arguments that are no JSON object, a template file that is not there, and a tokenizer without a template."""
    if config.template == "plain":
        return None
    arguments = json_object("--data.chat-template-kwargs", config.chat_template_kwargs)
    if config.chat_template_file:
        if not Path(config.chat_template_file).is_file():
            raise ValueError(f"--data.chat-template-file {config.chat_template_file} does not exist")
        arguments["chat_template"] = Path(config.chat_template_file).read_text()
    elif not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template (a base model?); use "
                         f"--data.template plain, or give one with --data.chat-template-file FILE")
    return arguments


def render(messages: list[dict[str, str]], tokenizer, template: dict[str, Any] | None) -> str:
    """The text of a prompt, through the chat template with the arguments `template`, or without one if that is None.
    Raises ValueError for a prompt that the chat template refuses."""
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template refuses it: {error}") from None
