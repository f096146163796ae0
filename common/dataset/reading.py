"""Reads the rows of parquet and JSON lines files as a stream: a file may be larger than memory.

`find_files` turns what the user names into files, `read_rows` gives a file's rows, and `row_of` turns one of them into
Python values. What cannot be read, or lacks a column, raises ValueError.
"""

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.prompts import DataConfig

PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".jsonl", ".ndjson", ".json")
BATCH_ROWS = 512  # read and stored together
Choose = Callable[[Path, list[str]], dict[str, str]]
"""A file, and the names of its columns (of a JSON line: of its fields) -> {our name: name in the file}."""


def find_files(entries: Sequence[str]) -> list[Path]:
    """Files, folders (all data files below, sorted) and globs (sorted) -> files."""
    if not entries:
        raise ValueError("no data files given; name parquet or JSON lines files, folders or globs")
    files: list[Path] = []
    for entry in entries:
        path = Path(entry)
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        else:
            found = [path] if path.exists() else [Path(name) for name in glob.glob(entry, recursive=True)]
        if not found:
            raise ValueError(f"data file {entry} does not exist, or the folder or glob matches no "
                             f"{'/'.join(SUFFIXES)} file")
        for file in found:
            if file.suffix not in SUFFIXES:
                raise ValueError(f"data file {file} must end in one of {', '.join(SUFFIXES)}")
        files += sorted(found)
    return files


def read_rows(file: Path, choose: Choose) -> Iterator[bytes | pa.StructScalar]:
    """The rows of a file as it has them, for `row_of`: JSON lines that are not blank, or parquet's chosen columns."""
    num_rows = 0
    try:
        if file.suffix not in PARQUET:
            with open(file, "rb") as text:
                for line in filter(bytes.strip, text):
                    yield line
                    num_rows += 1
            return
        with pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as parquet:  # the defaults hold it in memory
            columns = choose(file, parquet.schema_arrow.names)
            for batch in parquet.iter_batches(BATCH_ROWS, columns=list(columns.values())):
                yield from pa.StructArray.from_arrays([batch.column(name) for name in columns.values()], list(columns))
                num_rows += batch.num_rows
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: two columns of the same name
        kind = "parquet" if file.suffix in PARQUET else "JSON lines"
        raise ValueError(f"{file} cannot be read as {kind} from row {num_rows} on (counted from 0): {error}") from None


def row_of(found: bytes | pa.StructScalar, file: Path, choose: Choose) -> dict[str, Any]:
    """A row of `read_rows` as Python values, under our names. Raises ValueError for what is no text or no JSON object,
    or lacks a column."""
    if isinstance(found, pa.StructScalar):
        return found.as_py()
    try:
        row = json.loads(found)
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate (\ud800), which is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line must be a JSON object ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line must be a JSON object, not {type(row).__name__}")
    return {ours: row[name] for ours, name in choose(file, list(row)).items()}


def find_columns(file: Path, names: list[str], config: DataConfig, all_columns: bool) -> dict[str, str]:
    """Our name -> the file's name, of the columns to read. `all_columns`: those that only episodes look at, too."""
    wanted = {"prompt": config.prompt_column}
    if not config.data_source:
        wanted["data_source"] = config.data_source_column
    if config.ground_truth_column:
        wanted["ground_truth"] = config.ground_truth_column
    else:
        wanted["reward_model"] = config.reward_model_column
    missing = [name for name in wanted.values() if name not in names]
    if missing:
        raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}; verl's columns "
                         f"are needed, and other names can be given, e.g. --data.prompt-column NAME; plain columns "
                         f"need --data.ground-truth-column NAME and --data.data-source NAME")
    wanted |= {"extra_info": config.extra_info_column, "images": "images", "videos": "videos"}
    columns = {ours: name for ours, name in wanted.items() if name in names}
    if all_columns:
        columns |= {name: name for name in names if name not in {*columns, *columns.values()}}
    return columns
