"""Prompts: parquet in verl's columns (or JSON lines) -> token ids through the chat template; an order that resumes."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PARQUET, JSON_LINES = (".parquet", ".pq"), (".jsonl", ".ndjson", ".json")


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


@dataclass
class Prompt:
    tokens: list[int]  # what the engine gets, generation prompt included
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]]


@dataclass
class PromptSet(Sequence):
    """The prompts in file order, and what was left out of them."""
    files: list[Path]
    prompts: list[Prompt] = field(default_factory=list)
    num_rows: int = 0  # read, good or bad
    num_filtered: int = 0  # longer than max_prompt_length and left out
    num_truncated: int = 0  # longer and cut
    bad_rows: list[str] = field(default_factory=list)  # one message per row that was skipped

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @property
    def data_sources(self) -> list[str]:
        return sorted({prompt.data_source for prompt in self.prompts})

    def summary(self) -> str:
        name = str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"
        lengths = [len(prompt.tokens) for prompt in self.prompts]
        return (f"{len(self)} prompts from {name}, {min(lengths)} to {max(lengths)} tokens; of {self.num_rows} rows "
                f"{self.num_filtered} filtered (too long), {self.num_truncated} truncated, {len(self.bad_rows)} bad")


def load_prompts(files: Sequence[str], tokenizer, config: DataConfig) -> PromptSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). Raises ValueError, naming file, row,
    rule and flag, for what cannot be read, bad rows (unless skipped), and when nothing is left."""
    render = make_renderer(tokenizer, config)
    prompts = PromptSet(files=find_files(files))
    for file in prompts.files:
        for number, row in enumerate(read_rows(file, config)):
            prompts.num_rows += 1
            try:
                prompt = parse_row(row, render, config)
            except ValueError as error:
                message = f"{file}, row {number} (counted from 0): {error}"
                if config.on_bad_row == "error":
                    raise ValueError(f"{message}; --data.on-bad-row skip leaves such rows out") from None
                prompts.bad_rows.append(message)
                continue
            length, limit = len(prompt.tokens), config.max_prompt_length
            if length > limit:
                if config.on_long_prompt == "error":
                    raise ValueError(f"{file}, row {number} (counted from 0): the prompt has {length} tokens, more "
                                     f"than --data.max-prompt-length {limit}; raise it or set --data.on-long-prompt")
                if config.on_long_prompt == "filter":
                    prompts.num_filtered += 1
                    continue
                head = 0 if config.on_long_prompt == "truncate-left" else limit // 2
                prompt.tokens = prompt.tokens[:head] + prompt.tokens[length - (limit - head):]
                prompts.num_truncated += 1
            prompts.prompts.append(prompt)
    if not prompts.prompts:
        first = f"; the first bad row: {prompts.bad_rows[0]}" if prompts.bad_rows else ""
        raise ValueError(f"{', '.join(map(str, files))}: none of {prompts.num_rows} rows is left: "
                         f"{prompts.num_filtered} have more than --data.max-prompt-length {config.max_prompt_length} "
                         f"tokens, {len(prompts.bad_rows)} are bad{first}")
    return prompts


def find_files(entries: Sequence[str]) -> list[Path]:
    """Files, folders (all data files below, sorted) and globs (sorted) -> files."""
    if not entries:
        raise ValueError("no data files given; name parquet or JSON lines files, folders or globs")
    files: list[Path] = []
    for entry in entries:
        path = Path(entry)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in PARQUET + JSON_LINES and file.is_file())
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.glob(entry, recursive=True))
        if not found:
            raise ValueError(f"data file {entry} does not exist, or the folder or glob matches no "
                             f"{'/'.join(PARQUET + JSON_LINES)} file")
        for file in found:
            if file.suffix not in PARQUET + JSON_LINES:
                raise ValueError(f"data file {file} must end in one of {', '.join(PARQUET + JSON_LINES)}")
        files += found
    return files


def read_rows(file: Path, config: DataConfig) -> Iterator[dict[str, Any] | ValueError]:
    """The rows of one file as dicts with our column names, streamed. A JSON line that cannot be parsed is yielded
    as the error, which counts as a bad row; an unreadable parquet file is raised."""
    columns = {"prompt": config.prompt_column, "data_source": config.data_source_column,
               "reward_model": config.reward_model_column, "extra_info": config.extra_info_column}
    if file.suffix in JSON_LINES:
        with open(file, "rb") as lines:
            for line in lines:
                if line.strip():
                    yield parse_json_row(line, columns)
        return
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a readable parquet file (truncated?): {error}") from None
    with parquet:
        known = parquet.schema_arrow.names
        missing = [name for key, name in columns.items() if name not in known and key != "extra_info"]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(known)}; verl's columns "
                             f"are needed, and other names can be given, e.g. --data.prompt-column NAME")
        batches = parquet.iter_batches(batch_size=1024, columns=[name for name in columns.values() if name in known])
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{file} is damaged: {error}") from None
            if batch is None:
                return
            for row in batch.to_pylist():
                yield {key: row[name] for key, name in columns.items() if name in row}


def parse_json_row(line: bytes, columns: dict[str, str]) -> dict[str, Any] | ValueError:
    try:
        row = json.loads(line)
    except ValueError as error:
        return ValueError(f"the line must be a JSON object ({error})")
    if not isinstance(row, dict):
        return ValueError(f"the line must be a JSON object, not {type(row).__name__}")
    return {key: row[name] for key, name in columns.items() if name in row}


def parse_row(row: dict[str, Any] | ValueError, render, config: DataConfig) -> Prompt:
    """Check one row and tokenise its prompt; ValueError says which rule it breaks."""
    if isinstance(row, ValueError):
        raise row
    prompt = row.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{config.prompt_column} is {prompt!r:.80}; must be a string or a list of {{role, content}}")
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
    return Prompt(render(messages), row["data_source"], reward_model["ground_truth"], extra_info or {}, messages)


def make_renderer(tokenizer, config: DataConfig):
    """A function from messages to token ids, its settings checked once."""
    if config.max_prompt_length < 1:
        raise ValueError(f"--data.max-prompt-length {config.max_prompt_length} must be at least 1")
    if config.template == "plain":
        return lambda messages: list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
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

    def render(messages: list[dict[str, str]]) -> list[int]:
        try:
            # return_dict on purpose: the default return type differs between transformers 4 and 5
            encoded = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True,
                                                    return_dict=True, **kwargs)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        return list(encoded["input_ids"])

    return render


class PromptSampler:
    """Indices of prompts, shuffled by (seed, epoch). The last incomplete batch of an epoch is filled from the next one;
    (epoch, position) is the whole state. Every rank that asks gets the same."""

    def __init__(self, num_prompts: int, seed: int):
        if num_prompts < 1:
            raise ValueError(f"{num_prompts} prompts: there must be at least 1")
        self.num_prompts, self.seed = num_prompts, seed
        self.epoch, self.position = 0, 0

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_prompts)
            chunk = order[self.position : self.position + n - len(taken)].tolist()
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
