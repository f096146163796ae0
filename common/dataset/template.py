"""The flags of the chat template, checked once before any prompt is encoded."""

import signal
from pathlib import Path
from typing import Any

import jinja2

from common.prompts import TemplateConfig
from rewards import json_object

RENDER_S = 2.0  # CPU seconds for a prompt of one short message: usual templates need a few ms

def template_arguments(tokenizer, config: TemplateConfig) -> dict[str, Any] | None:
    """What `apply_chat_template` gets besides the messages; None for --data.template plain. Raises ValueError for
    arguments that are no JSON object, a template file that is not there, a tokenizer without a template, and a template
    that does not end. Must be called in the main thread, which gets the signal of the timer."""
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
    check_that_it_ends(tokenizer, arguments, config)
    return arguments


def template_name(tokenizer, config: TemplateConfig) -> str:
    if config.chat_template_file:
        return f"the chat template --data.chat-template-file {config.chat_template_file}"
    return f"the chat template of {tokenizer.name_or_path} (--data.chat-template-file FILE names another)"


def check_that_it_ends(tokenizer, arguments: dict[str, Any], config: TemplateConfig) -> None:
    """Render one short message under a timer of CPU seconds. A template that refuses it may still accept the rows."""
    def stop(*_) -> None:
        raise ValueError(f"{template_name(tokenizer, config)} has not ended after {RENDER_S:.0f} s for one message")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False, **arguments)
    except RecursionError as error:
        raise ValueError(f"{template_name(tokenizer, config)} calls itself without end ({error})") from None
    except jinja2.TemplateError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def encode(messages: list[dict], tokenizer, template: dict[str, Any] | None) -> list[int]:
    """Token ids of a prompt, through the chat template with the arguments `template`, or without one if that is None.
    Raises ValueError for a prompt that the chat template refuses."""
    if template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    try:
        # return_dict on purpose: the default return type differs between transformers 4 and 5
        return tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, **template)["input_ids"]
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None
