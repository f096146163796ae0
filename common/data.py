"""Prompts: parquet in verl's columns (or JSON lines) -> token ids through the chat template; an order that resumes.

A data set may be larger than memory: one process a node streams it once and appends rows and token ids to a temporary
Arrow file, which all ranks of the node map into memory. A prompt is read from there when it is asked for.
"""

import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

PARQUET, JSON_LINES = (".parquet", ".pq"), (".jsonl", ".ndjson", ".json")
BATCH_ROWS = 512  # read, tokenised and stored together


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


@dataclass
class Loaded:
    """What was read, and what was left out of it."""
    files: list[str]
    num_rows: int = 0  # read, good or bad
    num_filtered: int = 0  # longer than max_prompt_length and left out
    num_truncated: int = 0  # longer and cut
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # left out: {file, row, rule}
    data_sources: list[str] = field(default_factory=list)  # of the prompts that are left, sorted
    min_length: int = 0  # of these prompts, in tokens
    max_length: int = 0
    batches: list[tuple[int, int]] = field(default_factory=list)  # (prompts, bytes) of each in the Arrow file


class PromptSet(Sequence):
    """The prompts in file order, read from the files that `tokenise_files` wrote; `loaded` says what was left out."""

    def __init__(self, folder: str, config: DataConfig):
        self.loaded = Loaded(**json.loads(Path(folder, "loaded.json").read_text()))
        self.config = config
        ends = np.cumsum([(0, 0), *self.loaded.batches], axis=0)
        self.first_prompts, self.offsets = ends[:, 0], ends[:, 1]
        self.arrow = pa.memory_map(f"{folder}/prompts.arrow").read_buffer()

    def __len__(self) -> int:
        return int(self.first_prompts[-1])

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # negative ones; IndexError
        k = np.searchsorted(self.first_prompts, index, side="right") - 1
        batch = pa.ipc.open_stream(self.arrow[self.offsets[k] : self.offsets[k + 1]]).read_next_batch()
        kept = np.flatnonzero(batch.column("tokens").is_valid().to_numpy(zero_copy_only=False))
        row = int(kept[index - self.first_prompts[k]])
        prompt = parse_row(rows_of(batch.slice(row, 1), self.config)[0], self.config)
        prompt.tokens = batch.column("tokens")[row].as_py()
        return prompt

    @property
    def data_sources(self) -> list[str]:
        return self.loaded.data_sources

    def summary(self) -> str:
        loaded, more = self.loaded, len(self.loaded.files) - 3
        names = ", ".join(loaded.files[:3]) + (f" and {more} more" if more > 0 else "")
        return (f"{len(self)} prompts from {names}, {loaded.min_length} to {loaded.max_length} tokens; of "
                f"{loaded.num_rows} rows {loaded.num_filtered} filtered (too long), {loaded.num_truncated} truncated, "
                f"{len(loaded.bad_rows)} bad")

    def write_skipped(self, path: str | Path) -> None:
        """One JSON line {file, row, rule} for every bad row that was left out, by rank 0; no file if there is none."""
        if self.loaded.bad_rows and not (dist.is_initialized() and dist.get_rank()):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("".join(json.dumps(bad) + "\n" for bad in self.loaded.bad_rows))


def load_prompts(files: Sequence[str], tokenizer, config: DataConfig) -> PromptSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). Raises ValueError, naming file, row,
    rule and flag, for what cannot be read, bad rows (unless skipped), and when nothing is left.

    In a process group all ranks must call this: local rank 0 of each node does the work, the others wait and get the
    same prompts or the same error."""
    local_rank = int(os.environ["LOCAL_RANK"]) if dist.is_initialized() else 0
    folder = problem = None
    with ExitStack() as stack:
        if local_rank == 0:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory("-prompts", dir=config.cache_dir or None))
                tokenise_files(find_files(files), tokenizer, config, folder)
            except ValueError as error:
                problem = str(error)
            except OSError as error:  # those of reading are ValueErrors by now
                problem = f"cannot store the tokenised prompts: {error}; --data.cache-dir names another folder"
        if dist.is_initialized():
            said = [None] * dist.get_world_size()
            dist.all_gather_object(said, (folder, problem))
            folder = said[dist.get_rank() - local_rank][0]  # torchrun: the ranks of a node are consecutive
            problem = next((problem for _, problem in said if problem), None)
        if problem:
            raise ValueError(problem)
        prompts = PromptSet(folder, config)
        if dist.is_initialized():
            dist.barrier()  # the file is open everywhere: its name can go, the mapping stays
    return prompts


def tokenise_files(files: Sequence[Path], tokenizer, config: DataConfig, folder: str) -> None:
    """Stream `files` into folder/prompts.arrow (every batch an Arrow stream of its own, with the further column
    `tokens`: null for a row that is left out) and folder/loaded.json."""
    encode = make_encoder(tokenizer, config)
    loaded, limit = Loaded([str(file) for file in files]), config.max_prompt_length
    lengths, sources = set(), set()
    with open(f"{folder}/prompts.arrow", "wb") as arrow:
        for file in files:
            first = 0
            for batch in read_batches(file, config):
                tokens: list[list[int] | None] = [None] * batch.num_rows  # None: left out
                for i, prompt in enumerate(parse_batch(batch, encode, config)):
                    where = f"{file}, row {first + i} (counted from 0)"
                    if isinstance(prompt, ValueError):
                        if config.on_bad_row == "error":
                            raise ValueError(f"{where}: {prompt}; --data.on-bad-row skip leaves such rows out")
                        loaded.bad_rows.append({"file": str(file), "row": first + i, "rule": str(prompt)})
                        continue
                    length = len(prompt.tokens)
                    if length > limit:
                        if config.on_long_prompt == "error":
                            raise ValueError(f"{where}: the prompt has {length} tokens, more than "
                                             f"--data.max-prompt-length {limit}; raise it or set --data.on-long-prompt")
                        if config.on_long_prompt == "filter":
                            loaded.num_filtered += 1
                            continue
                        head = 0 if config.on_long_prompt == "truncate-left" else limit // 2
                        prompt.tokens = prompt.tokens[:head] + prompt.tokens[length - (limit - head):]
                        loaded.num_truncated += 1
                    tokens[i] = prompt.tokens
                    lengths.add(len(prompt.tokens))
                    sources.add(prompt.data_source)
                batch = batch.append_column("tokens", pa.array(tokens, pa.list_(pa.int32())))
                start = arrow.tell()
                with pa.ipc.new_stream(arrow, batch.schema) as stream:
                    stream.write_batch(batch)
                loaded.batches.append((batch.num_rows - batch.column("tokens").null_count, arrow.tell() - start))
                first += batch.num_rows
            loaded.num_rows += first
    if not lengths:
        bad = loaded.bad_rows
        shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}" if bad else ""
        raise ValueError(f"{', '.join(loaded.files)}: none of {loaded.num_rows} rows is left: {loaded.num_filtered} "
                         f"have more than --data.max-prompt-length {limit} tokens, {len(bad)} are bad{shown}")
    loaded.data_sources, loaded.min_length, loaded.max_length = sorted(sources), min(lengths), max(lengths)
    Path(folder, "loaded.json").write_text(json.dumps(asdict(loaded)))


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


def read_batches(file: Path, config: DataConfig) -> Iterator[pa.RecordBatch]:
    """The rows of one file in batches, streamed: JSON lines as they are in one column `json`; of parquet the columns
    that are needed, under our names. Raises ValueError for a file that is unreadable or lacks a column."""
    if file.suffix in JSON_LINES:
        try:
            with open(file, "rb") as text:
                lines = (line for line in text if line.strip())
                while rows := list(islice(lines, BATCH_ROWS)):
                    yield pa.record_batch([pa.array(rows, pa.binary())], names=["json"])
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        return
    try:
        parquet = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)  # the defaults hold the file in memory
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a readable parquet file (truncated?): {error}") from None
    with parquet:
        known, columns = parquet.schema_arrow.names, our_columns(config)
        missing = [name for key, name in columns.items() if name not in known and key != "extra_info"]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(known)}; verl's columns "
                             f"are needed, and other names can be given, e.g. --data.prompt-column NAME")
        columns = {key: name for key, name in columns.items() if name in known}
        for name in columns.values():
            if known.count(name) > 1:
                raise ValueError(f"{file} has {known.count(name)} columns named {name}; names must be unique")
        batches, first = parquet.iter_batches(BATCH_ROWS, columns=list(columns.values())), 0
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{file} is damaged after row {first} (counted from 0): {error}") from None
            if batch is None:
                return
            yield pa.record_batch([batch.column(name) for name in columns.values()], names=list(columns))
            first += batch.num_rows


def our_columns(config: DataConfig) -> dict[str, str]:
    return {"prompt": config.prompt_column, "data_source": config.data_source_column,
            "reward_model": config.reward_model_column, "extra_info": config.extra_info_column}


def rows_of(batch: pa.RecordBatch, config: DataConfig) -> list[dict[str, Any] | ValueError]:
    """As Python values; a row that has none (broken JSON, bytes that are not UTF-8) becomes the error."""
    if "json" in batch.schema.names:
        return [parse_json(line, config) for line in batch.column("json").to_pylist()]
    try:
        return batch.to_pylist()
    except ValueError as error:
        if len(batch) == 1:
            return [ValueError(f"a value cannot be read: {error}")]
        return [row for i in range(len(batch)) for row in rows_of(batch.slice(i, 1), config)]


def parse_json(line: bytes, config: DataConfig) -> dict[str, Any] | ValueError:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate (\ud800) is no text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the line must be a JSON object ({error})")
    if not isinstance(row, dict):
        return ValueError(f"the line must be a JSON object, not {type(row).__name__}")
    return {key: row[name] for key, name in our_columns(config).items() if name in row}


def parse_batch(batch: pa.RecordBatch, encode: Callable, config: DataConfig) -> list[Prompt | ValueError]:
    """Its rows, checked and tokenised; a row that breaks a rule becomes the error."""
    prompts: list[Prompt | ValueError] = []
    for row in rows_of(batch, config):
        try:
            prompts.append(parse_row(row, config))
        except ValueError as error:
            prompts.append(error)
    good = [i for i, prompt in enumerate(prompts) if isinstance(prompt, Prompt)]
    for i, tokens in zip(good, encode([prompts[i].messages for i in good]) if good else []):
        if isinstance(tokens, ValueError):
            prompts[i] = tokens
        else:
            prompts[i].tokens = tokens
    return prompts


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
