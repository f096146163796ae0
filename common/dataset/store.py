"""Keeps the rows of a run, checked and tokenised, in a temporary Arrow file that all ranks of a node map to memory.

A data set may be larger than memory: one process a node streams it once and appends rows and token ids to the file, and
a row is read from there when it is indexed. The file's name is removed as soon as all ranks have it open.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from common.dataset.reading import find_columns, find_files, our_columns, read_batches, rows_of
from common.dataset.template import encode, template_arguments
from common.parallel.ranks import together
from common.prompts import DataConfig, Prompt, TemplateConfig, parse_row

SCHEMA = pa.schema({"tokens": pa.list_(pa.int32())})


@dataclass
class Loaded:
    """What was read, and what was left out of it."""
    files: list[str]
    num_rows: int = 0  # read, good or bad
    num_filtered: int = 0  # longer than max_prompt_length and left out
    num_truncated: int = 0  # longer and cut
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # left out: {file, row, rule}
    num_kept: int = 0  # what is left
    data_sources: set[str] = field(default_factory=set)  # of the prompts that are left
    min_length: int = 0  # of these prompts, in tokens
    max_length: int = 0
    data_hash: str = ""  # of all that is in these prompts, in their order

    def summary(self) -> str:
        return (f"{self.num_kept} prompts from {len(self.files)} file(s), {self.min_length} to {self.max_length} "
                f"tokens; of {self.num_rows} rows {self.num_filtered} filtered (too long), {self.num_truncated} "
                f"truncated, {len(self.bad_rows)} bad")

    def write_skipped(self, path: str | Path) -> None:
        """One JSON line {file, row, rule} for every bad row that was left out, by rank 0; no file if there is none."""
        if self.bad_rows and not (dist.is_initialized() and dist.get_rank()):
            Path(path).write_text("".join(json.dumps(bad) + "\n" for bad in self.bad_rows))


class PromptSet(Sequence):
    """The prompts in file order, read from the stored `batches`; `loaded` says what was left out."""

    def __init__(self, batches: list[pa.RecordBatch], loaded: Loaded, config: DataConfig):
        self.batches = batches
        self.loaded = loaded
        self.config = config
        self.kept = [np.flatnonzero(batch.column("tokens").is_valid()) for batch in batches]  # rows
        self.ends = np.cumsum([len(rows) for rows in self.kept])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # negative ones; IndexError
        number = np.searchsorted(self.ends, index, side="right")
        row = self.batches[number].slice(int(self.kept[number][index - self.ends[number]]), 1)
        prompt = parse_row(rows_of(row, our_columns(self.config))[0], self.config)
        prompt.tokens = row.column("tokens")[0].as_py()
        return prompt


def load_prompts(files: Sequence[str], tokenizer, config: DataConfig, all_columns: bool = False) -> PromptSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). Raises ValueError, naming file, row,
    rule and flag, for what cannot be read, bad rows (unless skipped), and when nothing is left. `all_columns`: keep
    also those that have no meaning here, in `Prompt.row`."""
    if config.max_prompt_length < 1:
        raise ValueError(f"--data.max-prompt-length {config.max_prompt_length} must be at least 1")
    template = template_arguments(tokenizer, config)
    return PromptSet(*load_shared(lambda path: store_rows(
        path, files, config, f"--data.max-prompt-length {config.max_prompt_length}", our_columns(config), SCHEMA,
        choose=lambda file, names: find_columns(file, names, config, all_columns),
        encode=lambda row, loaded: read_prompt(row, tokenizer, template, config, loaded),
    )), config)


def load_shared(store: Callable[[str], Loaded]) -> tuple[list[pa.RecordBatch], Loaded]:
    """The batches that `store(path)` wrote, mapped to memory: what is not indexed is not read. In a process group,
    where all ranks must call this, local rank 0 of each node writes, the others wait and get the same rows or the same
    error."""
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    with ExitStack() as stack:
        def work() -> tuple[str, Loaded]:
            try:
                path = stack.enter_context(tempfile.TemporaryDirectory("-prompts")) + "/rows.arrow"
                return path, store(path)
            except OSError as error:  # those of reading are ValueErrors by now
                raise ValueError(f"cannot store the tokenised prompts: {error}; set TMPDIR to another folder") from None

        results = together(lambda: work() if local_rank == 0 else None, ValueError)
        path, loaded = results[rank - local_rank]  # torchrun: the ranks of a node are consecutive
        batches: list[pa.RecordBatch] = []
        with pa.memory_map(path) as arrow:
            while arrow.tell() < arrow.size():
                batches += pa.ipc.open_stream(arrow)
        if dist.is_initialized():
            dist.barrier()  # the file is open everywhere: its name can go, the mapping stays
    return batches, loaded


def store_rows(
    path: str, files: Sequence[str], config: TemplateConfig, limit: str, columns: dict[str, str], schema: pa.Schema,
    choose: Callable[[Path, list[str]], dict[str, str]],
    encode: Callable[[dict[str, Any], Loaded], dict[str, Any] | None],
) -> Loaded:
    """Stream `files` into the Arrow file `path`: every batch as an Arrow stream of its own, as files differ in columns,
    with the further columns of `schema`. These are null for a row that is left out: one for which `encode` returns None
    or, if it breaks a rule, raises ValueError. Raises ValueError if no row is left, and for a bad row that is not to be
    skipped. `limit`: the flag of the longest length, and its value."""
    found = find_files(files)
    loaded = Loaded([str(file) for file in found])
    data_hash = hashlib.sha256()
    with open(path, "wb") as arrow:
        for file in found:
            first_row = loaded.num_rows
            for batch in read_batches(file, choose):
                encoded: list[dict[str, Any]] = []
                for row in rows_of(batch, columns):
                    number = loaded.num_rows - first_row
                    loaded.num_rows += 1
                    try:
                        if isinstance(row, ValueError):
                            raise row
                        encoded.append(encode(row, loaded) or {})
                    except ValueError as error:
                        if config.on_bad_row == "error":
                            raise ValueError(f"{file}, row {number} (counted from 0): {error}; --data.on-bad-row skip "
                                             f"leaves such rows out") from None
                        encoded.append({})
                        loaded.bad_rows.append({"file": str(file), "row": number, "rule": str(error)})
                    if encoded[-1]:
                        loaded.num_kept += 1
                        data_hash.update(repr(encoded[-1]).encode())
                for name in schema.names:
                    values = pa.array([of_row.get(name) for of_row in encoded], schema.field(name).type)
                    batch = batch.append_column(name, values)
                with pa.ipc.new_stream(arrow, batch.schema) as stream:
                    stream.write_batch(batch)
    bad = loaded.bad_rows
    if not loaded.num_kept:
        shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}" if bad else ""
        raise ValueError(f"{', '.join(loaded.files)}: none of {loaded.num_rows} rows is left: {loaded.num_filtered} "
                         f"have more than {limit} tokens, {len(bad)} are bad{shown}")
    loaded.data_hash = data_hash.hexdigest()
    return loaded


def read_prompt(row: dict[str, Any], tokenizer, template: dict[str, Any] | None, config: DataConfig,
                loaded: Loaded) -> dict[str, Any] | None:
    """What is in a row's prompt, checked and tokenised, its tokens cut to the limit if the flags say so; None if it is
    left out. Counts in `loaded` what was done. Raises ValueError if the row breaks a rule."""
    prompt = parse_row(row, config)
    tokens = encode(prompt.messages, tokenizer, template)
    if not tokens:
        raise ValueError("the chat template renders nothing; --data.chat-template-file FILE names another")
    limit = config.max_prompt_length
    if len(tokens) > limit:
        if config.on_long_prompt == "error":
            raise ValueError(f"the prompt has {len(tokens)} tokens, more than --data.max-prompt-length {limit}; raise "
                             f"it or set --data.on-long-prompt")
        if config.on_long_prompt == "filter":
            loaded.num_filtered += 1
            return None
        head = 0 if config.on_long_prompt == "truncate-left" else limit // 2
        tail = limit - head
        tokens = tokens[:head] + tokens[len(tokens) - tail:]
        loaded.num_truncated += 1
    loaded.min_length = min(len(tokens), loaded.min_length or len(tokens))
    loaded.max_length = max(len(tokens), loaded.max_length)
    loaded.data_sources.add(prompt.data_source)
    return vars(prompt) | {"tokens": tokens}
