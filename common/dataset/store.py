"""Reads the rows of data files and keeps them, checked and tokenised, in an Arrow file that a node's ranks share.

A data set may be larger than memory: one process a node streams it once and appends token ids and rows (as JSON) to the
file. Indexing reads a row from the file. The file's name is removed as soon as all ranks have it open.
"""

import difflib
import glob
import hashlib
import inspect
import json
import os
import re
import tempfile
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch.distributed as dist
from torch import Tensor

from common.dataset.images import Images, embedding_size, encode_prompt, family_of, inputs_of
from common.dataset.loaded import Loaded
from common.dataset.messages import as_text, as_written, parse_row
from common.forward.vision import FAMILIES
from common.parallel.exchange import deliver
from common.parallel.ranks import check_at_least, together
from common.prompts import DataConfig, TemplateConfig
from envs.pictures import blank, flatten_contents
from envs.runtime.lengths import lengths_of
from envs.runtime.template import check_tokens, rendered
from rewards import json_object
from rewards.runtime.cleaner import own_folder

PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".jsonl", ".ndjson", ".json")
PICTURES = ("images", "videos")  # columns of files, not of texts
BATCH_ROWS = 512  # read and stored together
BATCH_BYTES = 2**28  # of rows with images: less than BATCH_ROWS are read and stored together. Arrow's limit is 2**31
SCHEMA = pa.schema({"tokens": pa.list_(pa.int32()), "row": pa.large_string(), "images": pa.list_(pa.binary())})
"""Of a prompt. `images`: the files, null where it has none."""


class PromptSet(Sequence):
    """The prompts in file order, read from the stored `table`; `loaded` says what was left out."""

    def __init__(self, table: pa.Table, loaded: Loaded, config: DataConfig, tokenizer, is_for_episodes: bool = False):
        self.table = table
        self.loaded = loaded
        self.config = config
        self.tokenizer = tokenizer
        self.is_for_episodes = is_for_episodes
        self.own_images: dict[int, list[str]] = {}
        """Further images, in base64, of the sequences that this rank trains in this step, by number."""

    @cached_property
    def has_images(self) -> bool:
        """Whether the prompts have images, or episodes may get some."""
        may_get_some = self.is_for_episodes and family_of(self.tokenizer.name_or_path) in FAMILIES
        return may_get_some or self.table["images"].null_count < len(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        tokens, row, images = (column[index].as_py() for column in self.table.columns)
        prompt = parse_row(json.loads(row), self.config)
        prompt.tokens = tokens
        if images:
            prompt.images = Images(images, self.tokenizer.name_or_path)
        return prompt

    def images_of(self, number: int, row: int) -> list[bytes]:
        """The images of a sequence with this number in the step, in their order. `row`: of the prompt whose images come
        first; below 0: there are none."""
        of_row = self[row].images.files if row >= 0 else []
        return [*of_row, *map(b64decode, self.own_images.get(number, ()))]

    def take_images(self, rollout: Any, minibatches: Iterable[Any]) -> None:
        """Get `own_images` of the sequences in this rank's mini-batches from the ranks that sampled them, with common
        /rollout.py's rollout. All ranks call it."""
        if self.has_images:
            own = {number: part.images for number, *_, part in rollout.sequences() if part.images}
            wanted = [number for batch in chain(*minibatches) for number in batch.number.tolist()]
            self.own_images = deliver(own, wanted)

    def inputs_of(self, file: bytes | None) -> tuple[list[int], dict[str, Tensor]]:
        """The tokens of an image, and the model's other inputs. None: of a small picture that is in no prompt."""
        return inputs_of(file or blank(), self.tokenizer.name_or_path)


def template_arguments(tokenizer, config: TemplateConfig) -> dict[str, Any] | None:
    """The arguments of `apply_chat_template` besides the messages; None for --data.template plain. Raises ValueError
    for arguments that are no JSON object, a missing template file, and a tokenizer without a template."""
    if config.template == "plain":
        return None
    arguments = json_object("--data.chat-template-kwargs", config.chat_template_kwargs)
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    names = [name for name in arguments if name not in own]
    if config.chat_template_file:
        arguments["chat_template"] = Path(config.chat_template_file).read_text()
    elif not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template (a base model?); use "
                         f"--data.template plain, or give one with --data.chat-template-file FILE")
    words = re.findall(r"\w+", str(arguments.get("chat_template") or tokenizer.chat_template))
    if unread := [name for name in names if name not in words]:
        similar = difflib.get_close_matches(unread[0], set(words), n=1)
        meant = f"; did you mean {similar[0]}?" if similar else "; leave it out"
        raise ValueError(f"--data.chat-template-kwargs has {unread[0]}, which the chat template never reads{meant}")
    return arguments


def render(messages: list[dict[str, str]], tokenizer, template: dict[str, Any] | None, is_prompt: bool = True) -> str:
    """The text of messages, through the chat template with the arguments `template`, or without one if that is None. A
    prompt ends with the text that begins an answer. Raises ValueError for messages that the chat template refuses or
    fails on. Its special tokens are the template's own: see envs/runtime/template.py."""
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    return rendered(tokenizer, messages, add_generation_prompt=is_prompt, **template)


def render_prompt(messages: list[dict[str, str]], tokenizer, template: dict[str, Any] | None) -> str:
    """The text of a prompt. A last message of the assistant is the beginning of the response, and goes on."""
    if messages[-1]["role"] != "assistant" or template is None:
        return render(messages, tokenizer, template)
    if messages[-1].get("tool_calls"):
        raise ValueError("the prompt ends with calls of the assistant: the tools' results must follow")
    return render(messages, tokenizer, template | {"continue_final_message": True}, is_prompt=False)


def load_prompts(files: Sequence[str], tokenizer, config: DataConfig, all_columns: bool = False) -> PromptSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). Raises ValueError, naming file, row,
    rule and flag, for files that cannot be read, for bad rows (unless skipped), and if no row is left. `all_columns`:
    keep columns without a meaning here, too, in `Prompt.row`."""
    template = template_arguments(tokenizer, config)
    embedded = embedding_size(tokenizer.name_or_path)
    limit, lengths = config.max_prompt_length, lengths_of(tokenizer)

    def leave_out(num_tokens: int | str, loaded: Loaded) -> list[dict[str, Any]]:
        if config.on_long_prompt == "error":
            raise ValueError(f"the prompt has {num_tokens} tokens, more than --data.max-prompt-length "
                             f"{limit}; raise it or set --data.on-long-prompt")
        loaded.num_filtered += 1
        return []

    def encode_row(row: dict[str, Any], loaded: Loaded) -> list[dict[str, Any]]:
        prompt = parse_row(row, config)
        text, images = render_prompt(prompt.messages, tokenizer, template), row.pop("images")
        if all_columns and prompt.messages[-1]["role"] == "assistant":
            raise ValueError("the prompt ends with a message of the assistant, which an episode cannot continue")
        loaded.note_special(text, tokenizer, is_plain=template is None)
        # without some of its tokens, an image is none
        is_cut = config.on_long_prompt == "truncate-left" and not images
        least = lengths.least_tokens(text)
        if least > limit:
            if not is_cut:
                return leave_out(f"at least {least}", loaded)
            text = lengths.part(text, 2 * limit, at_end=True)
        encoded = encode_prompt(text, images, tokenizer, is_plain=template is None)
        tokens = encoded["tokens"]
        if not tokens:
            raise ValueError("the chat template renders nothing; --data.chat-template-file FILE names another")
        check_tokens(tokens, tokenizer, embedded)
        if len(tokens) > limit:
            if not is_cut:
                return leave_out(len(tokens), loaded)
            encoded["tokens"] = tokens[-limit:]
            loaded.num_truncated += 1
        loaded.data_sources.add(prompt.data_source)
        loaded.num_without_truth += prompt.ground_truth == ""
        return [encoded | {"row": json.dumps(row, default=as_text)}]

    named = "prompt", "data_source", "reward_model", "ground_truth", "extra_info"
    columns = {name: vars(config)[f"{name}_column"] for name in named}
    form = RowFormat(config, ("--data.max-prompt-length", limit), SCHEMA, columns, encode_row, all_columns)
    return PromptSet(*load_rows(files, form), config, tokenizer, all_columns)


@dataclass
class RowFormat:
    """How rows of data files become rows that are stored."""

    config: TemplateConfig
    limit: tuple[str, int]  # a flag and its value, the longest length in tokens
    schema: pa.Schema
    columns: dict[str, str]  # to read: our name -> the files' name
    encode: Callable[[dict[str, Any], Loaded], list[dict[str, Any]]]  # a row -> stored rows; [] if it is left out
    all_columns: bool = False  # read the others, too


def load_rows(files: Sequence[str], form: RowFormat) -> tuple[pa.Table, Loaded]:
    """The rows that `store_rows` writes, mapped to memory: only indexing reads a row. In a process group, where all
    ranks must call this, each node's first rank writes; the others wait and get the same rows or the same error."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = max(rank - int(os.environ.get("LOCAL_RANK", "0")), 0)  # torchrun: the ranks of a node are consecutive
    with tempfile.TemporaryDirectory("-prompts", dir=own_folder()) as folder:  # empty where another rank writes
        def work() -> tuple[str, Loaded]:
            try:
                return f"{folder}/rows.arrow", store_rows(f"{folder}/rows.arrow", files, form)
            except OSError as error:  # those of reading are ValueErrors by now
                raise ValueError(f"cannot store the tokenised prompts: {error}; set TMPDIR to another folder") from None

        path, loaded = together(lambda: work() if rank == first else None, ValueError)[first]
        table = pa.ipc.open_stream(pa.memory_map(path)).read_all()
        if dist.is_initialized():
            dist.barrier()  # the file is open everywhere: its name can go, the mapping stays
    loaded.lengths = "{min} to {max}".format(**pc.min_max(pc.list_value_length(table["tokens"])).as_py())
    return table, loaded


def store_rows(path: str, files: Sequence[str], form: RowFormat) -> Loaded:
    """Stream `files` into the Arrow file `path`. Raises ValueError for a row that breaks a rule, unless such rows are
    skipped, and if no row is left."""
    flag, limit = form.limit
    check_at_least(1, {flag: limit})
    columns = form.columns | {"images": "images", "videos": "videos"}
    loaded = Loaded(find_files(files))
    bad = loaded.bad_rows
    data_hash = hashlib.sha256()
    with open(path, "wb") as arrow, pa.ipc.new_stream(arrow, form.schema) as stream:
        for file in loaded.files:
            kept, num_bytes = [], 0
            for number, row in enumerate(read_rows(file, [] if form.all_columns else columns.values())):
                loaded.num_rows += 1
                try:
                    found = row_of(row)
                    renamed = {ours: found[name] for ours, name in columns.items() if name in found}
                    found = flatten_contents((found if form.all_columns else {}) | renamed)
                    found = {name: value if name in PICTURES else as_written(value, name)
                             for name, value in found.items()}
                    if found.get("videos") or (found["images"] and "images" not in form.schema.names):
                        raise ValueError("images or videos is not empty; nothing here reads videos, and images do not "
                                         "go with sft.py and dpo.py")
                    new = form.encode(found, loaded)
                except ValueError as error:
                    if form.config.on_bad_row == "error":
                        raise ValueError(f"{file}, row {number} (counted from 0): {error}; --data.on-bad-row skip "
                                         f"leaves such rows out") from None
                    bad.append({"file": file, "row": number, "rule": str(error)})
                    continue
                data_hash.update(repr(new).encode())
                kept += new
                num_bytes += sum(len(image) for one in new for image in one.get("images", ()))
                if len(kept) >= BATCH_ROWS or num_bytes > BATCH_BYTES:
                    stream.write_batch(pa.RecordBatch.from_pylist(kept, form.schema))
                    kept, num_bytes = [], 0
            stream.write_batch(pa.RecordBatch.from_pylist(kept, form.schema))
    if not loaded.num_rows:
        raise ValueError(f"{', '.join(loaded.files)}: there are no rows in it")
    if loaded.num_rows == loaded.num_filtered + len(bad):
        shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}" if bad else ""
        raise ValueError(f"{', '.join(loaded.files)}: none of {loaded.num_rows} rows is left: {loaded.num_filtered} "
                         f"have more than {flag} {limit} tokens, {len(bad)} are bad{shown}")
    loaded.data_hash = data_hash.hexdigest()
    return loaded


def find_files(entries: Sequence[str], flag: str = "data file") -> list[str]:
    """Files, folders (all data files below, sorted) and globs (sorted) -> files. `flag`: what named them."""
    if not entries:
        raise ValueError("no data files given; name parquet or JSON lines files, folders or globs")
    files: list[str] = []
    for entry in entries:
        pattern = glob.escape(entry) if os.path.exists(entry) else entry
        names = glob.glob(f"{pattern}/**" if os.path.isdir(entry) else pattern, recursive=True)
        found = sorted(name for name in names if name.endswith(SUFFIXES) and os.path.isfile(name))
        if not found:
            raise ValueError(f"{flag} {entry} must be a {'/'.join(SUFFIXES)} file that exists, or a folder or glob "
                             f"that has some; data/from_table.py converts CSV")
        files += found
    return files


def read_rows(file: str, names: Collection[str]) -> Iterator[bytes | pa.StructScalar]:
    """The rows of a file, unparsed, for `row_of`: JSON lines that are not blank, or parquet rows with only the columns
    in `names`; all columns if `names` is empty."""
    num_read, num_rows = 0, 0
    try:
        if not file.endswith(PARQUET):
            with open(file, "rb") as text:
                yield from filter(bytes.strip, text)
            return
        with pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as parquet:  # the defaults hold it in memory
            found = [name for name in parquet.schema_arrow.names if name in names or not names]
            if not found:
                raise ValueError(f"{file} has none of the columns {', '.join(filter(None, names))}; it has "
                                 f"{', '.join(parquet.schema_arrow.names)}: give names, e.g. --data.prompt-column NAME")
            num_rows = parquet.metadata.num_rows
            num_bytes = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups))
            at_once = min(BATCH_ROWS, BATCH_BYTES // (num_bytes // max(1, num_rows) + 1) + 1)
            for batch in parquet.iter_batches(at_once, columns=found):
                yield from pa.StructArray.from_arrays([batch.column(name) for name in found], found)
                num_read += len(batch)
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: two columns of the same name
        where = " as parquet" if file.endswith(PARQUET) else ""
        if num_rows and not isinstance(error, KeyError):
            where += f" in its rows {num_read} to {min(num_read + at_once, num_rows) - 1} (counted from 0)"
        raise ValueError(f"{file} cannot be read{where}: {error}") from None


def row_of(found: bytes | pa.StructScalar) -> dict[str, Any]:
    """A row of `read_rows` as Python values. Raises ValueError if it is not text or not a JSON object."""
    if isinstance(found, pa.StructScalar):
        return found.as_py(maps_as_pydicts="strict")
    try:
        row = {**json.loads(found)}  # TypeError: it is no object
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate (\ud800), which is no text
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the line must be a JSON object ({error}); data/from_table.py reads a JSON list") from None
    return row
