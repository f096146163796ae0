"""Reads the rows of parquet and JSON lines files as a stream: a file may be larger than memory.

`find_files` turns what the user names into files, `read_rows` gives a file's rows, and `row_of` turns one of them into
Python values. What cannot be read raises ValueError.
"""

import glob
import json
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".jsonl", ".ndjson", ".json")
BATCH_ROWS = 512  # read and stored together


def find_files(entries: Sequence[str]) -> list[str]:
    """Files, folders (all data files below, sorted) and globs (sorted) -> files."""
    if not entries:
        raise ValueError("no data files given; name parquet or JSON lines files, folders or globs")
    files: list[str] = []
    for entry in entries:
        pattern = glob.escape(entry) if os.path.exists(entry) else entry
        names = glob.glob(f"{pattern}/**" if os.path.isdir(entry) else pattern, recursive=True)
        found = sorted(name for name in names if name.endswith(SUFFIXES) and os.path.isfile(name))
        if not found:
            raise ValueError(f"data file {entry} must be a {'/'.join(SUFFIXES)} file that exists, or a folder or glob "
                             f"that has some")
        files += found
    return files


def read_rows(file: str, names: Collection[str]) -> Iterator[bytes | pa.StructScalar]:
    """The rows of a file as it has them, for `row_of`: JSON lines that are not blank, or parquet's, of which only the
    columns with these names are read; all, if there are no names."""
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
            for batch in parquet.iter_batches(BATCH_ROWS, columns=found):
                yield from pa.StructArray.from_arrays([batch.column(name) for name in found], found)
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: two columns of the same name
        raise ValueError(f"{file} cannot be read: {error}") from None


def row_of(found: bytes | pa.StructScalar) -> dict[str, Any]:
    """A row of `read_rows` as Python values. Raises ValueError for what is no text or no JSON object."""
    if isinstance(found, pa.StructScalar):
        return found.as_py()
    try:
        row = {**json.loads(found)}  # TypeError: it is no object
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate (\ud800), which is no text
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the line must be a JSON object ({error})") from None
    return row
