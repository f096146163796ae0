"""Prompts: parquet in verl's columns (or JSON lines) -> token ids through the chat template; an order that resumes.

A data set may be larger than memory: one process a node streams it once and appends rows and token ids to a temporary
Arrow file, which all ranks of the node map into memory. A prompt is read from there when it is asked for.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np


@dataclass
class DataConfig:
    max_prompt_length: int = 1024
    """Longest prompt, in tokens, chat template included."""
    on_long_prompt: Literal["filter", "error", "truncate-left", "truncate-middle"] = "filter"
    """A longer prompt: leave it out, stop, or cut tokens from its start or its middle."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that breaks a rule (wrong type, empty prompt, no ground truth): stop, or leave it out and count it."""
    template: Literal["chat", "plain"] = "chat"
    """plain: message contents joined by blank lines, without a chat template (base models)."""
    chat_template_file: str = ""
    """A Jinja file to use instead of the tokenizer's chat template."""
    chat_template_kwargs: str = "{}"
    """Further arguments of the chat template, as a JSON object, e.g. '{"enable_thinking": false}'."""
    prompt_column: str = "prompt"
    """Column with the prompt: a list of {role, content}, or a string (one user message)."""
    data_source_column: str = "data_source"
    """Column with the name that picks the reward."""
    reward_model_column: str = "reward_model"
    """Column with {style, ground_truth}; ground_truth goes to the reward."""
    extra_info_column: str = "extra_info"
    """Column (may be absent) that goes to the reward as it is."""
    cache_dir: str = ""
    """Existing folder, best on a local disk, for the tokenised prompts while the run lasts: about as large as the
    unpacked data. Default: the system's temporary folder."""


@dataclass
class Prompt:
    tokens: list[int]  # what the engine gets, generation prompt included
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]]


def parse_row(row: dict[str, Any] | ValueError, config: DataConfig) -> Prompt:
    """Check one row; its tokens are still to come. ValueError says which rule it breaks."""
    if isinstance(row, ValueError):
        raise row
    prompt = row.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{config.prompt_column} is {prompt!r:.80}; must be a string or a list of {{role, content}}")
    # parquet gives every message the keys of all; templates ask whether a key is there
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in messages:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{config.prompt_column} has a message whose {key} is {message.get(key)!r:.80}; "
                                 f"it must be a string")
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{config.prompt_column} is empty; there must be at least one message, and text in the last")
    if not isinstance(row.get("data_source"), str) or not row["data_source"]:
        raise ValueError(f"{config.data_source_column} is {row.get('data_source')!r:.80}; it must be a name")
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise ValueError(f"{config.reward_model_column} is {reward_model!r:.80}; it must have a ground_truth")
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict | None):
        raise ValueError(f"{config.extra_info_column} is {extra_info!r:.80}; it must be a struct or absent")
    return Prompt([], row["data_source"], reward_model["ground_truth"], extra_info or {}, messages)


def make_encoder(tokenizer, config: DataConfig) -> Callable:
    """A function from a list of prompts (each a list of messages) to their token ids, its settings checked once. A
    prompt that the chat template refuses gives a ValueError in its place."""
    if config.max_prompt_length < 1:
        raise ValueError(f"--data.max-prompt-length {config.max_prompt_length} must be at least 1")
    if config.template == "plain":
        return lambda prompts: tokenizer(
            ["\n\n".join(message["content"] for message in messages) for messages in prompts])["input_ids"]
    try:
        kwargs = json.loads(config.chat_template_kwargs)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--data.chat-template-kwargs {config.chat_template_kwargs} must be a JSON object, "
                         f"e.g. '{{\"enable_thinking\": false}}'")
    if config.chat_template_file:
        if not Path(config.chat_template_file).is_file():
            raise ValueError(f"--data.chat-template-file {config.chat_template_file} does not exist")
        kwargs["chat_template"] = Path(config.chat_template_file).read_text()
    elif not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template (a base model?); use "
                         f"--data.template plain, or give one with --data.chat-template-file FILE")

    def encode(prompts: list[list[dict[str, str]]]) -> list[list[int] | ValueError]:
        try:
            # return_dict on purpose: the default return type differs between transformers 4 and 5
            return tokenizer.apply_chat_template(prompts, tokenize=True, add_generation_prompt=True, return_dict=True,
                                                 **kwargs)["input_ids"]
        except jinja2.TemplateError as error:
            if len(prompts) == 1:
                return [ValueError(f"the chat template refuses it: {error}")]
            return [tokens for messages in prompts for tokens in encode([messages])]

    return encode


class PromptSampler:
    """Indices of prompts, shuffled by (seed, epoch). The last incomplete batch of an epoch is filled from the next one;
    (epoch, position) is the whole state. Every rank that asks gets the same."""

    def __init__(self, num_prompts: int, seed: int):
        if num_prompts < 1:
            raise ValueError(f"{num_prompts} prompts: there must be at least 1")
        self.num_prompts, self.seed = num_prompts, seed
        self.epoch, self.position = 0, 0
        self.order, self.order_epoch = np.array([], dtype=np.int64), -1

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
            if self.order_epoch != self.epoch:
                self.order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_prompts)
                self.order_epoch = self.epoch
            chunk = self.order[self.position : self.position + n - len(taken)].tolist()
            self.position += len(chunk)
            taken += chunk
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not 0 <= state["position"] <= self.num_prompts:
            raise ValueError(f"the saved run was at prompt {state['position']} of its epoch, but there are only "
                             f"{self.num_prompts} prompts now; --train-data and --data.* must stay as they were")
        self.epoch, self.position = state["epoch"], state["position"]
