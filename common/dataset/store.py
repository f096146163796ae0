"""Reads the rows of data files and keeps them, checked and tokenised, in an Arrow file that a node's ranks share.

A data set may be larger than memory: one process a node streams it once and appends token ids and rows (as JSON) to the
file. Indexing reads a row from the file. The file's name is removed as soon as all ranks have it open.
"""

import difflib
import hashlib
import inspect
import json
import os
import re
import tempfile
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist
from torch import Tensor

from common.dataset.images import Images, embedding_size, encode_prompt, family_of, inputs_of
from common.dataset.loaded import Loaded
from common.dataset.messages import as_text, as_written, parse_row
from common.dataset.rows import BATCH_BYTES, BATCH_ROWS, read_rows, row_of
from common.dataset.videos import is_given
from common.flags.data import DataConfig, TemplateConfig, find_files
from common.flags.rules import check_at_least
from common.forward.vision import FAMILIES
from common.parallel.exchange import deliver
from common.parallel.ranks import together
from envs.pictures import blank, flatten_contents
from envs.runtime.lengths import lengths_of
from envs.runtime.template import check_tokens, rendered
from rewards import json_object
from rewards.runtime.cleaner import own_folder

PICTURES = ("images", "videos")  # columns of files, not of texts
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

    def images_of_all(self, sets: Sequence[Any]) -> "PromptSet | None":
        """What holds the images that a run's models see, of these sets; None: they see none. An engine alone sees those
        of validation."""
        return self if self.has_images else None

    def images_of(self, number: int, row: int) -> list[bytes]:
        """The images of a sequence with this number in the step, in their order. `row`: of the prompt whose images
        come first, if it has some; below 0: there are none."""
        files: list[bytes] = []
        if row >= 0:
            of_prompt = self[row].images
            if of_prompt is not None:
                files = of_prompt.files
        own = self.own_images.get(number, ())
        return [*files, *map(b64decode, own)]

    def take_images(self, rollout: Any, minibatches: Iterable[Any]) -> None:
        """Get `own_images` of the sequences in this rank's mini-batches from the ranks that sampled them, with common
        /rollout.py's rollout. All ranks call it."""
        if self.has_images:
            own = {}
            for number, *_, part in rollout.sequences():
                if part.images:
                    own[number] = part.images
            wanted: list[int] = []
            for batch in chain(*minibatches):
                wanted += batch.number.tolist()
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
    names = []
    for name in arguments:
        if name not in own:
            names.append(name)
    if config.chat_template_file:
        arguments["chat_template"] = Path(config.chat_template_file).read_text()
    elif not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template (a base model?); use "
                         f"--data.template plain, or give one with --data.chat-template-file FILE")
    words = re.findall(r"\w+", str(arguments.get("chat_template") or tokenizer.chat_template))
    unread = []
    for name in names:
        if name not in words:
            unread.append(name)
    if unread:
        similar = difflib.get_close_matches(unread[0], set(words), n=1)
        meant = "; leave it out"
        if similar:
            meant = f"; did you mean {similar[0]}?"
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
    limit = config.max_prompt_length
    lengths = lengths_of(tokenizer)

    def leave_out(num_tokens: int | str, loaded: Loaded) -> list[dict[str, Any]]:
        if config.on_long_prompt == "error":
            raise ValueError(f"the prompt has {num_tokens} tokens, more than --data.max-prompt-length "
                             f"{limit}; raise it or set --data.on-long-prompt")
        loaded.num_filtered += 1
        return []

    def encode_row(row: dict[str, Any], loaded: Loaded) -> list[dict[str, Any]]:
        prompt = parse_row(row, config)
        text = render_prompt(prompt.messages, tokenizer, template)
        images = row.pop("images")
        num_videos = sum(map(is_given, images))
        if all_columns and num_videos:
            raise ValueError("videos is not empty, and an episode reads no videos")
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
        loaded.num_videos += num_videos
        if prompt.ground_truth == "":
            loaded.num_without_truth += 1
        return [encoded | {"row": json.dumps(row, default=as_text)}]

    columns = {
        "prompt": config.prompt_column,
        "data_source": config.data_source_column,
        "reward_model": config.reward_model_column,
        "ground_truth": config.ground_truth_column,
        "extra_info": config.extra_info_column,
    }
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
            stored = f"{folder}/rows.arrow"
            try:
                return stored, store_rows(stored, files, form)
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
    loaded = Loaded(find_files(files))
    data_hash = hashlib.sha256()
    with open(path, "wb") as arrow, pa.ipc.new_stream(arrow, form.schema) as stream:
        for file in loaded.files:
            store_file(stream, file, form, loaded, data_hash)
    bad = loaded.bad_rows
    if not loaded.num_rows:
        raise ValueError(f"{', '.join(loaded.files)}: there are no rows in it")
    if loaded.num_rows == loaded.num_filtered + len(bad):
        shown = ""
        if bad:
            shown = f"; the first bad row: {bad[0]['file']}, row {bad[0]['row']}: {bad[0]['rule']}"
        raise ValueError(f"{', '.join(loaded.files)}: none of {loaded.num_rows} rows is left: {loaded.num_filtered} "
                         f"have more than {flag} {limit} tokens, {len(bad)} are bad{shown}")
    for ours, name in form.columns.items():
        # a name of ours may be absent where its column may be; one that was given must be there
        if name and name != ours and name not in loaded.columns:
            raise ValueError(f"{', '.join(loaded.files)}: no row has the column {name} that --data."
                             f"{ours.replace('_', '-')}-column names")
    loaded.data_hash = data_hash.hexdigest()
    return loaded


def store_file(stream: pa.RecordBatchStreamWriter, file: str, form: RowFormat, loaded: Loaded,
               data_hash: Any) -> None:
    """Write the rows of one file to `stream`, count them in `loaded`, and add what is stored to `data_hash`."""
    names: Collection[str] = []                                 # all columns
    if not form.all_columns:
        names = [*form.columns.values(), *PICTURES]
    kept: list[dict[str, Any]] = []
    num_bytes = 0                                               # of the images in them
    for number, row in enumerate(read_rows(file, names)):
        loaded.num_rows += 1
        try:
            found = row_of(row)
            loaded.columns |= found.keys() & form.columns.values()
            new = form.encode(columns_of(found, form), loaded)
        except ValueError as error:
            if form.config.on_bad_row == "error":
                raise ValueError(f"{file}, row {number} (counted from 0): {error}; --data.on-bad-row skip "
                                 f"leaves such rows out") from None
            loaded.bad_rows.append({"file": file, "row": number, "rule": str(error)})
            continue
        data_hash.update(repr(new).encode())
        kept += new
        for one in new:
            num_bytes += sum(map(len, one.get("images") or ()))
        if len(kept) >= BATCH_ROWS or num_bytes > BATCH_BYTES:
            stream.write_batch(pa.RecordBatch.from_pylist(kept, form.schema))
            kept = []
            num_bytes = 0
    stream.write_batch(pa.RecordBatch.from_pylist(kept, form.schema))


def columns_of(found: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """A row of a file under our names. `images`: its images, and then its videos."""
    row = {}
    if form.all_columns:
        row = dict(found)
    for ours, name in form.columns.items():
        if name in found:
            row[ours] = found[name]
    for name in PICTURES:
        if name in found:
            row[name] = found[name]
    row = flatten_contents(row)
    for name, value in row.items():
        if name not in PICTURES:
            row[name] = as_written(value, name)
    row["images"] = [*row["images"], *({"video": video} for video in row.pop("videos"))]
    return row
