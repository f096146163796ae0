"""Reads the rows of parquet and JSON lines files as a stream of small batches: a file may be larger than memory.

`find_files` turns what the user names into files, `read_json_lines` and `read_parquet` give a file's batches of Arrow
rows, and `rows_of` turns a batch into Python values. Files that cannot be read, or lack a column, raise ValueError.
"""

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.prompts import DataConfig

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson", ".json")
OPTIONAL = ("extra_info", "images", "videos")
BATCH_ROWS = 512  # read and stored together


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


def read_batches(file: Path, choose: Callable[[Path, list[str]], dict[str, str]]) -> Iterator[pa.RecordBatch]:
    """Rows in batches, by the kind of file."""
    return read_json_lines(file) if file.suffix in JSON_LINES else read_parquet(file, choose)


def read_json_lines(file: Path) -> Iterator[pa.RecordBatch]:
    """The lines that are not blank, as they are, in one column `json`, in batches."""
    try:
        with open(file, "rb") as text:
            lines = (line for line in text if line.strip())
            while rows := list(islice(lines, BATCH_ROWS)):
                yield pa.record_batch([pa.array(rows, pa.binary())], names=["json"])
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def read_parquet(file: Path, choose: Callable[[Path, list[str]], dict[str, str]]) -> Iterator[pa.RecordBatch]:
    """Columns under our names, in batches. `choose`: from the names in the file to {our name: name in the file}."""
    num_rows = 0
    try:
        with pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as parquet:  # the defaults hold it in memory
            columns = choose(file, parquet.schema_arrow.names)
            for batch in parquet.iter_batches(BATCH_ROWS, columns=list(columns.values())):
                yield pa.record_batch([batch.column(name) for name in columns.values()], names=list(columns))
                num_rows += batch.num_rows
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: two columns of the same name
        raise ValueError(f"{file} cannot be read as parquet from row {num_rows} on (counted from 0): {error}") from None


def find_columns(file: Path, names: list[str], config: DataConfig, all_columns: bool) -> dict[str, str]:
    """Our name -> the file's name, of the columns to read. `all_columns`: those that only episodes look at, too."""
    wanted = our_columns(config)
    missing = [name for key, name in wanted.items() if name not in names and key not in OPTIONAL]
    if missing:
        raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}; verl's columns "
                         f"are needed, and other names can be given, e.g. --data.prompt-column NAME; plain columns "
                         f"need --data.ground-truth-column NAME and --data.data-source NAME")
    columns = {key: name for key, name in wanted.items() if name in names}
    if all_columns:
        columns |= {name: name for name in names if name not in {*columns, *columns.values()}}
    return columns


def our_columns(config: DataConfig) -> dict[str, str]:
    """Our name -> the name in the files, of all columns that are read. The last three may be absent."""
    columns = {"prompt": config.prompt_column}
    if not config.data_source:
        columns["data_source"] = config.data_source_column
    if config.ground_truth_column:
        columns["ground_truth"] = config.ground_truth_column
    else:
        columns["reward_model"] = config.reward_model_column
    return columns | {"extra_info": config.extra_info_column, "images": "images", "videos": "videos"}


def rows_of(batch: pa.RecordBatch, columns: dict[str, str]) -> list[dict[str, Any] | ValueError]:
    """The rows of a batch as Python values. A row that has none (broken JSON, bytes that are not UTF-8) becomes the
    error. `columns`: our name -> the name in the files."""
    if "json" in batch.schema.names:
        return [parse_json(line, columns) for line in batch.column("json").to_pylist()]
    try:
        return batch.to_pylist()
    except ValueError as error:
        if len(batch) == 1:
            return [ValueError(f"a value cannot be read: {error}")]
        return [row for i in range(len(batch)) for row in rows_of(batch.slice(i, 1), columns)]


def parse_json(line: bytes, columns: dict[str, str]) -> dict[str, Any] | ValueError:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate (\ud800), which is no text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the line must be a JSON object ({error})")
    if not isinstance(row, dict):
        return ValueError(f"the line must be a JSON object, not {type(row).__name__}")
    others = {name: value for name, value in row.items() if name not in {*columns, *columns.values()}}
    return others | {key: row[name] for key, name in columns.items() if name in row}
