"""The flags of data, --data.*: of prompts, and of conversations that are trained on; and the files that flags name."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".jsonl", ".ndjson", ".json")
UNREAD = {
    ".arrow": "datasets reads what its save_to_disk wrote, and its to_parquet writes what is read here",
    ".feather": "write it as parquet",
    ".csv": "data/from_table.py converts it",
    ".tsv": "data/from_table.py converts it",
    ".gz": "unpack it",
    ".zst": "unpack it",
    ".bz2": "unpack it",
    ".xz": "unpack it",
    ".zip": "unpack it",
}
"""Files of data that are not read: they must not be left out of a folder in silence."""


@dataclass
class TemplateConfig:
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that breaks a rule (wrong type, empty prompt, no ground truth): stop, or skip and count it."""
    template: Literal["chat", "plain"] = "chat"
    """plain: message contents joined by blank lines, without a chat template (base models)."""
    chat_template_file: str = ""
    """A Jinja file to use instead of the tokenizer's chat template. Needs --data.template chat."""
    chat_template_kwargs: str = "{}"
    """Further arguments of the chat template, as a JSON object, e.g. '{"enable_thinking": false}'. Needs
    --data.template chat."""


@dataclass
class DataConfig(TemplateConfig):
    max_prompt_length: int = 1024
    """Longest prompt, in tokens, chat template included."""
    on_long_prompt: Literal["filter", "error", "truncate-left"] = "filter"
    """What to do with a longer prompt: leave it out, treat it as a bad row (error), or cut tokens from its start."""
    prompt_column: str = "prompt"
    """Column with the prompt: a list of {role, content}, or a string (one user message)."""
    data_source_column: str = "data_source"
    """Column with the name that selects the reward. Not with --data.data-source."""
    reward_model_column: str = "reward_model"
    """Column with {style, ground_truth}; the reward function gets ground_truth. Not with --data.ground-truth-column."""
    ground_truth_column: str = ""
    """Column whose value is the ground truth, for files without a reward_model column."""
    data_source: str = ""
    """Name that selects the reward of all rows, for files without a data_source column."""
    extra_info_column: str = "extra_info"
    """Column (may be absent) that the reward function gets, without keys whose value is null."""
    pool: Literal["all", "learning"] = "all"
    """Rows to sample. learning: those that are too easy or too hard now, by the mean of their recent scores, are mostly
    passed over. An epoch counts all rows, also those that are passed over. Needs training."""
    pool_hard: float = 0.05
    """Rows with a mean of recent scores up to this are too hard. Needs --data.pool learning."""
    pool_easy: float = 0.95
    """Rows with a mean of recent scores from this on are too easy. Needs --data.pool learning."""
    pool_rest: float = 0.1
    """Share of an epoch's rows that are too easy or too hard and are sampled nevertheless, and so measured again. Needs
    --data.pool learning."""


@dataclass
class ConversationConfig(TemplateConfig):
    max_length: int = 2048
    """Longest sequence, in tokens, chat template included."""
    on_long_row: Literal["filter", "truncate"] = "filter"
    """What to do with a row with a longer sequence: leave it out, or cut tokens from the sequence's end."""


def find_files(entries: Sequence[str], flag: str = "data file") -> list[str]:
    """Files, folders (all data files below, sorted) and globs (sorted) -> files. `flag`: what named them."""
    if not entries:
        raise ValueError("no data files given; name parquet or JSON lines files, folders or globs")
    files: list[str] = []
    for entry in entries:
        pattern = entry
        if os.path.exists(entry):                       # its name is no pattern, whatever is in it
            pattern = glob.escape(entry)
        if os.path.isdir(entry):
            pattern += "/**"
        found = []
        for name in sorted(glob.glob(pattern, recursive=True)):
            if not os.path.isfile(name):
                continue
            ending = os.path.splitext(name)[1].lower()
            if ending in SUFFIXES:
                found.append(name)
            if ending in UNREAD and name != entry:
                raise ValueError(f"{flag} {entry} has {name}, which is not read: {UNREAD[ending]}, or name the "
                                 f"files to read")
        if not found:
            raise ValueError(f"{flag} {entry} must be a {'/'.join(SUFFIXES)} file that exists, or a folder or glob "
                             f"that has some; data/from_table.py converts CSV")
        files += found
    return files
