"""Keeps the prompts of a run, checked and tokenised, in a temporary Arrow file that all ranks of a node map to memory.

A data set may be larger than memory: one process a node streams it once and appends rows and token ids to the file, and
a prompt is read from there when it is indexed. The file's name is removed as soon as all ranks have it open.
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
from common.dataset.template import encode, template_arguments, template_name
from common.parallel.ranks import together
from common.prompts import DataConfig, Prompt, TemplateConfig, parse_row


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
    data_hash: str = ""  # of all that is in these prompts, in their order

    @property
    def num_kept(self) -> int:
        return self.num_rows - self.num_filtered - len(self.bad_rows)

    def leave_out(self, error: ValueError, file: Path, row: int, config: TemplateConfig) -> None:
        """Count a bad row, or raise ValueError where the flags make it an error."""
        if config.on_bad_row == "error":
            where = f"{file}, row {row} (counted from 0)"
            raise ValueError(f"{where}: {error}; --data.on-bad-row skip leaves such rows out")
        self.bad_rows.append({"file": str(file), "row": row, "rule": str(error)})

    def check_that_some_are_left(self, limit: str) -> None:
        """Raises ValueError if there is no row left. `limit`: the flag of the longest length, and its value."""
        bad = self.bad_rows
        shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}" if bad else ""
        if not self.num_kept:
            raise ValueError(f"{', '.join(self.files)}: none of {self.num_rows} rows is left: {self.num_filtered} have "
                             f"more than {limit} tokens, {len(bad)} are bad{shown}")

    def summary(self) -> str:
        return (f"{self.num_kept} prompts from {len(self.files)} file(s), {self.min_length} to {self.max_length} "
                f"tokens; of {self.num_rows} rows {self.num_filtered} filtered (too long), {self.num_truncated} "
                f"truncated, {len(self.bad_rows)} bad")

    def write_skipped(self, path: str | Path) -> None:
        """One JSON line {file, row, rule} for every bad row that was left out, by rank 0; no file if there is none."""
        if self.bad_rows and not (dist.is_initialized() and dist.get_rank()):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("".join(json.dumps(bad) + "\n" for bad in self.bad_rows))


class PromptSet(Sequence):
    """The prompts in file order, read from the file that `tokenise_files` wrote; `loaded` says what was left out."""

    def __init__(self, folder: str, loaded: Loaded, config: DataConfig):
        self.loaded = loaded
        self.config = config
        self.batches: list[pa.RecordBatch] = []  # mapped to memory: what is not indexed is not read
        with pa.memory_map(f"{folder}/prompts.arrow") as arrow:
            while arrow.tell() < arrow.size():
                self.batches += pa.ipc.open_stream(arrow)
        self.kept = [np.flatnonzero(batch.column("tokens").is_valid()) for batch in self.batches]  # rows
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
    return load_shared(
        lambda folder: tokenise_files(find_files(files), tokenizer, config, folder, all_columns),
        lambda folder, loaded: PromptSet(folder, loaded, config),
    )


def load_shared(write: Callable[[str], Loaded], read: Callable[[str, Loaded], Any]) -> Any:
    """What `read` makes of the folder that `write` filled: in a process group, where all ranks must call this, local
    rank 0 of each node writes, the others wait and get the same rows or the same error."""
    rank, local_rank = 0, 0
    if dist.is_initialized():
        rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    with ExitStack() as stack:
        def work() -> tuple[str, Loaded]:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory("-prompts"))
                return folder, write(folder)
            except OSError as error:  # those of reading are ValueErrors by now
                raise ValueError(f"cannot store the tokenised prompts: {error}; set TMPDIR to another folder") from None

        results = together(lambda: work() if local_rank == 0 else None, ValueError)
        rows = read(*results[rank - local_rank])  # torchrun: the ranks of a node are consecutive
        if dist.is_initialized():
            dist.barrier()  # the file is open everywhere: its name can go, the mapping stays
    return rows


def tokenise_files(files: Sequence[Path], tokenizer, config: DataConfig, folder: str,
                   all_columns: bool = False) -> Loaded:
    """Stream `files` into folder/prompts.arrow: every batch as an Arrow stream of its own, as files differ in columns,
    with the further column `tokens`, which is null for a row that is left out."""
    if config.max_prompt_length < 1:
        raise ValueError(f"--data.max-prompt-length {config.max_prompt_length} must be at least 1")
    template = template_arguments(tokenizer, config)
    loaded = Loaded([str(file) for file in files])
    data_hash = hashlib.sha256()
    with open(f"{folder}/prompts.arrow", "wb") as arrow:
        for file in files:
            first_row = loaded.num_rows
            batches = read_batches(file, lambda names, file=file: find_columns(file, names, config, all_columns))
            for batch in batches:
                tokens: list[list[int] | None] = []
                for row in rows_of(batch, our_columns(config)):
                    number = loaded.num_rows - first_row
                    loaded.num_rows += 1
                    tokens.append(None)
                    try:
                        prompt = read_prompt(row, tokenizer, template, config)
                    except ValueError as error:
                        loaded.leave_out(error, file, number, config)
                        continue
                    tokens[-1] = tokens_to_keep(prompt, file, number, config, loaded)
                    if tokens[-1] is not None:
                        data_hash.update(repr((tokens[-1], prompt)).encode())
                batch = batch.append_column("tokens", pa.array(tokens, pa.list_(pa.int32())))
                with pa.ipc.new_stream(arrow, batch.schema) as stream:
                    stream.write_batch(batch)
    loaded.check_that_some_are_left(f"--data.max-prompt-length {config.max_prompt_length}")
    loaded.data_sources.sort()
    loaded.data_hash = data_hash.hexdigest()
    return loaded


def read_prompt(
    row: dict[str, Any] | ValueError, tokenizer, template: dict[str, Any] | None, config: DataConfig,
) -> Prompt:
    """A row, checked and tokenised. Raises ValueError if it breaks a rule."""
    if isinstance(row, ValueError):
        raise row
    prompt = parse_row(row, config)
    prompt.tokens = encode(prompt.messages, tokenizer, template)
    if not prompt.tokens:
        raise ValueError(f"{template_name(tokenizer, config)} renders nothing")
    return prompt


def tokens_to_keep(prompt: Prompt, file: Path, row: int, config: DataConfig, loaded: Loaded) -> list[int] | None:
    """The tokens of a row's prompt, cut to the limit if the flags say so, or None if the row is left out. Counts in
    `loaded` what was done. Raises ValueError where the flags make a long prompt an error."""
    tokens = prompt.tokens
    limit = config.max_prompt_length
    if len(tokens) > limit:
        if config.on_long_prompt == "error":
            raise ValueError(f"{file}, row {row} (counted from 0): the prompt has {len(tokens)} tokens, more than "
                             f"--data.max-prompt-length {limit}; raise it or set --data.on-long-prompt")
        if config.on_long_prompt == "filter":
            loaded.num_filtered += 1
            return None
        head = 0 if config.on_long_prompt == "truncate-left" else limit // 2
        tail = limit - head
        tokens = tokens[:head] + tokens[len(tokens) - tail:]
        loaded.num_truncated += 1
    loaded.min_length = min(len(tokens), loaded.min_length or len(tokens))
    loaded.max_length = max(len(tokens), loaded.max_length)
    if prompt.data_source not in loaded.data_sources:
        loaded.data_sources.append(prompt.data_source)
    return tokens
