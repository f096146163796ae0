"""Keeps the rows of a run, checked and tokenised, in a temporary Arrow file that all ranks of a node map to memory.

A data set may be larger than memory: one process a node streams it once and appends token ids and rows (as JSON) to the
file, and a row is read from there when it is indexed. The file's name is removed as soon as all ranks have it open.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

from common.dataset.reading import BATCH_ROWS, Choose, find_columns, find_files, read_rows, row_of
from common.dataset.template import encode, template_arguments
from common.parallel.ranks import together
from common.prompts import DataConfig, Prompt, TemplateConfig, parse_row

SCHEMA = pa.schema({"tokens": pa.list_(pa.int32()), "row": pa.large_string()})


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
    """The prompts in file order, read from the stored `table`; `loaded` says what was left out."""

    def __init__(self, table: pa.Table, loaded: Loaded, config: DataConfig):
        self.table = table
        self.loaded = loaded
        self.config = config

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        tokens, row = (column[index].as_py() for column in self.table.columns)
        prompt = parse_row(json.loads(row), self.config)
        prompt.tokens = tokens
        return prompt


def load_prompts(files: Sequence[str], tokenizer, config: DataConfig, all_columns: bool = False) -> PromptSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). Raises ValueError, naming file, row,
    rule and flag, for what cannot be read, bad rows (unless skipped), and when nothing is left. `all_columns`: keep
    also those that have no meaning here, in `Prompt.row`."""
    if config.max_prompt_length < 1:
        raise ValueError(f"--data.max-prompt-length {config.max_prompt_length} must be at least 1")
    template = template_arguments(tokenizer, config)
    return PromptSet(*load_shared(lambda path: store_rows(
        path, files, config, f"--data.max-prompt-length {config.max_prompt_length}", SCHEMA,
        choose=lambda file, names: find_columns(file, names, config, all_columns),
        encode=lambda row, loaded: read_prompt(row, tokenizer, template, config, loaded),
    )), config)


def load_shared(store: Callable[[str], Loaded]) -> tuple[pa.Table, Loaded]:
    """The table that `store(path)` wrote, mapped to memory: what is not indexed is not read. In a process group,
    where all ranks must call this, the first one on each node writes, the others wait and get the same rows or the
    same error."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = max(rank - int(os.environ.get("LOCAL_RANK", "0")), 0)  # torchrun: the ranks of a node are consecutive
    with tempfile.TemporaryDirectory("-prompts") as folder:  # it stays empty where another rank writes
        def work() -> tuple[str, Loaded]:
            try:
                return f"{folder}/rows.arrow", store(f"{folder}/rows.arrow")
            except OSError as error:  # those of reading are ValueErrors by now
                raise ValueError(f"cannot store the tokenised prompts: {error}; set TMPDIR to another folder") from None

        results = together(lambda: work() if rank == first else None, ValueError)
        path, loaded = results[first]
        with pa.memory_map(path) as arrow:
            table = pa.ipc.open_stream(arrow).read_all()
        if dist.is_initialized():
            dist.barrier()  # the file is open everywhere: its name can go, the mapping stays
    return table, loaded


def store_rows(path: str, files: Sequence[str], config: TemplateConfig, limit: str, schema: pa.Schema, choose: Choose,
               encode: Callable[[dict[str, Any], Loaded], dict[str, Any] | None]) -> Loaded:
    """Stream `files` into the Arrow file `path`: of each row what `encode` makes of it, in the columns of `schema`. A
    row is left out if that is None or, if the row breaks a rule, raises ValueError. Raises ValueError if no row is
    left, and for a bad row that is not to be skipped. `limit`: the flag of the longest length, and its value."""
    found = find_files(files)
    loaded = Loaded([str(file) for file in found])
    data_hash = hashlib.sha256()
    with open(path, "wb") as arrow, pa.ipc.new_stream(arrow, schema) as stream:
        for file in found:
            rows = enumerate(read_rows(file, choose))
            while batch := list(islice(rows, BATCH_ROWS)):
                encoded: list[dict[str, Any] | None] = []
                for number, row in batch:
                    try:
                        encoded.append(encode(row_of(row, file, choose), loaded))
                    except ValueError as error:
                        if config.on_bad_row == "error":
                            raise ValueError(f"{file}, row {number} (counted from 0): {error}; --data.on-bad-row skip "
                                             f"leaves such rows out") from None
                        loaded.bad_rows.append({"file": str(file), "row": number, "rule": str(error)})
                kept = [row for row in encoded if row is not None]
                loaded.num_rows += len(batch)
                loaded.num_kept += len(kept)
                data_hash.update(repr(kept).encode())
                stream.write_batch(pa.RecordBatch.from_pylist(kept, schema))
    bad = loaded.bad_rows
    if not loaded.num_kept:
        shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}" if bad else ""
        raise ValueError(f"{', '.join(loaded.files)}: none of {loaded.num_rows} rows is left: {loaded.num_filtered} "
                         f"have more than {limit} tokens, {len(bad)} are bad{shown}")
    loaded.data_hash = data_hash.hexdigest()
    return loaded


def read_prompt(row: dict[str, Any], tokenizer, template: dict[str, Any] | None, config: DataConfig,
                loaded: Loaded) -> dict[str, Any] | None:
    """A row, checked, and the tokens of its prompt, cut to the limit if the flags say so; None if it is left out.
    Counts in `loaded` what was done. Raises ValueError if the row breaks a rule."""
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
    return {"tokens": tokens, "row": json.dumps(row, default=str)}
