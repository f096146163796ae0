"""The tokenised prompts of a run, in a temporary Arrow file that all ranks of a node map into memory.

A data set may be larger than memory: one process a node streams it once and appends rows and token ids to the file. A
prompt is read from there when it is asked for.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from common.dataset.reading import find_files, read_batches, rows_of
from common.prompts import DataConfig, Prompt, make_encoder, parse_row


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
