"""The rows of data files as they stand there: JSON lines or parquet, read in pieces."""

import json
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.flags.data import PARQUET

BATCH_ROWS = 512  # read and stored together
BATCH_BYTES = 2**28  # of rows with images: less than BATCH_ROWS are read and stored together. Arrow's limit is 2**31


def read_rows(file: str, names: Collection[str]) -> Iterator[bytes | pa.StructScalar]:
    """The rows of a file, unparsed, for `row_of`: JSON lines that are not blank, or parquet rows with only the
    columns in `names`; all columns if `names` is empty."""
    is_parquet = file.lower().endswith(PARQUET)
    num_read = 0
    num_rows = 0
    try:
        if not is_parquet:
            with open(file, "rb") as text:
                yield from filter(bytes.strip, text)
            return
        with pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as parquet:  # the defaults hold it in memory
            there = parquet.schema_arrow.names
            found = []
            for name in there:
                if not names or name in names:
                    found.append(name)
            if not found:
                raise ValueError(f"{file} has none of the columns {', '.join(filter(None, names))}; it has "
                                 f"{', '.join(there)}: give names, e.g. --data.prompt-column NAME")
            num_rows = parquet.metadata.num_rows
            num_bytes = 0
            for i in range(parquet.num_row_groups):
                num_bytes += parquet.metadata.row_group(i).total_byte_size
            bytes_per_row = num_bytes // max(1, num_rows) + 1
            at_once = min(BATCH_ROWS, BATCH_BYTES // bytes_per_row + 1)
            for batch in parquet.iter_batches(at_once, columns=found):
                columns = [batch.column(name) for name in found]
                yield from pa.StructArray.from_arrays(columns, found)
                num_read += len(batch)
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: two columns of the same name
        where = ""
        if is_parquet:
            where = " as parquet"
        if num_rows and not isinstance(error, KeyError):
            where += f" in its rows {num_read} to {min(num_read + at_once, num_rows) - 1} (counted from 0)"
        raise ValueError(f"{file} cannot be read{where}: {error}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that is there twice: readers disagree which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = max(names, key=names.count)
        raise ValueError(f"the key {twice!r:.80} is there {names.count(twice)} times in one object")
    return found


def row_of(found: bytes | pa.StructScalar) -> dict[str, Any]:
    """A row of `read_rows` as Python values. Raises ValueError if it is not text or not a JSON object."""
    if isinstance(found, pa.StructScalar):
        return found.as_py(maps_as_pydicts="strict")
    try:
        row = {**json.loads(found, object_pairs_hook=unique_keys)}  # TypeError: it is no object
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate (\ud800), which is no text
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the line must be a JSON object ({error}); data/from_table.py reads a JSON list") from None
    return row
