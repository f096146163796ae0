"""Shared parts of this folder's scripts: a row in verl's columns, downloads from the Hugging Face hub, writing parquet.

`python data/NAME.py` puts this folder first on sys.path. So no file here may have the name of a module that something
imports: the file would be imported instead (hendrycks_math.py and not math.py; apps.py and not code.py).
"""

import argparse
import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 1024
MARK = b"plainrl"
"""Key in the footer of the files that are written here. Its value is the number and the CRC-32 of the bytes before."""


def make_row(data_source: str, question: str, ground_truth: Any, ability: str, split: str, index: int, /,
             **extra: Any) -> dict[str, Any]:
    """One prompt as verl's own preprocessing writes it: `question` as the only message, `extra` in extra_info."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index} | extra,
    }


def library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"package {error.name} is not installed; run `pip install datasets==5.2.0`") from None
    return datasets


@contextlib.contextmanager
def explained(source: str) -> Iterator[None]:
    """A ValueError of one line for what the network or the hub answer. The hub's own errors are OSErrors too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = " ".join(str(error).split())
        raise ValueError(
            f"{source} could not be loaded: no network, or no such data set ({said}). Without a network: run `hf "
            f"download --repo-type dataset {source} --local-dir DIR` where there is one, copy DIR, give --source DIR"
        ) from None


def download(source: str, *config: str, split: str, json_lines: str = "") -> Iterable[dict]:
    """The rows of one split of a hub data set, or of a local copy of its folder, by the `datasets` library; those of
    the file `json_lines` in it, where the library would ask for a loading script."""
    datasets = library()
    from huggingface_hub import hf_hub_download

    print(f"data: {split} split of {source}", flush=True)
    with explained(source):
        if not json_lines:
            return datasets.load_dataset(source, *config, split=split)
        local = Path(source, json_lines)
        file = str(local) if local.is_file() else hf_hub_download(source, json_lines, repo_type="dataset")
        return datasets.load_dataset("json", data_files={split: file}, split=split)


def configs_of(source: str) -> list[str]:
    """The names of the configurations of a hub data set, or of a local copy of its folder."""
    with explained(source):
        return library().get_dataset_config_names(source)


def distinct(rows: Iterable[dict], key: Callable[[dict], Any]) -> Iterable[dict]:
    """Leave out rows whose key has occurred before, and print how many."""
    seen, num_repeated = set(), 0
    for row in rows:
        if key(row) in seen:
            num_repeated += 1
        else:
            seen.add(key(row))
            yield row
    if num_repeated:
        print(f"data: {num_repeated} repeated rows left out")


def open_alone(path: Path) -> BinaryIO:
    """An empty file to write, after every other process that opened it so has closed it, or has ended."""
    while True:
        file = path.open("ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            with path.open("rb") as left:
                if not b"PAR1".startswith(left.read(4)):
                    raise ValueError(f"{path} is in the way, and of no script here: move it away")
            file.seek(0)
            file.truncate()  # what a killed process left
            return file
        file.close()  # it has been renamed meanwhile


def checksum(path: Path, size: int) -> int:
    """The CRC-32 of the first bytes."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(min(size, 1 << 22)):
            value = zlib.crc32(chunk, value)
            size -= len(chunk)
    return value


def is_own(path: Path) -> bool:
    """Whether a file is as `write` wrote it."""
    try:
        size, expected = json.loads(pq.read_metadata(path).metadata[MARK])
        return not path.is_symlink() and checksum(path, size) == expected
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return False


def has_rows_of(path: Path, written: Path) -> bool:
    """Whether a file has the rows of one that `write` wrote; an earlier version wrote no mark."""
    try:
        old, new = pq.read_metadata(path), pq.read_metadata(written)
    except (OSError, pa.ArrowException):
        return False
    size, expected = json.loads(new.metadata[MARK])
    return old.num_rows == new.num_rows and old.schema.equals(new.schema) and checksum(path, size) == expected


def write(rows: Iterable[dict], path: Path, group_rows: int = ROW_GROUP_ROWS, schema: pa.Schema | None = None) -> None:
    """Write in one rename, so that an existing file is always complete. A file that already has these rows is not
    touched; one that is not as this function wrote it is refused. `group_rows` rows are in memory at once; without a
    `schema` the first of these decide the types of the columns. Two processes may write the same file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} cannot be written by this user: name another folder, --out")
    temporary = path.with_name(f".{path.name}.tmp")
    rows, writer, num_rows = iter(rows), None, 0
    with open_alone(temporary) as file:
        try:
            while group := list(islice(rows, group_rows)):
                table = pa.Table.from_pylist(group, schema=writer.schema if writer else schema)
                writer = writer or pq.ParquetWriter(file, table.schema)
                writer.write_table(table)
                num_rows += len(group)
            if writer:
                file.flush()
                size = file.tell()
                writer.add_key_value_metadata({MARK: json.dumps([size, checksum(temporary, size)])})
        finally:
            if writer:
                writer.close()
        file.flush()
        is_new = num_rows > 0 and not (path.exists() and has_rows_of(path, temporary))
        is_others = is_new and os.path.lexists(path) and not is_own(path)
        if is_new and not is_others:
            os.replace(temporary, path)
        else:
            temporary.unlink()
    if is_others:
        raise ValueError(f"{path} would be replaced, and is not as a script here wrote it (or is of an earlier version)"
                         f": move it away, or name another folder, --out")
    if not num_rows:
        raise ValueError(f"no rows for {path}")
    print(f"data: {path} {'written' if is_new else 'is complete'}, {num_rows} problems")


def tell_if_left(path: Path) -> None:
    """Print that a file of an earlier start, or the user's own, is there although this start writes none."""
    if path.exists():
        print(f"data: {path} stays, and is not of this start: delete it if an earlier one wrote it, because "
              f"train.parquet may have its rows")


def parser(doc: str, out: str, source: str = "") -> argparse.ArgumentParser:
    """The flags that all scripts have: --out, and --source where there is something to download."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("data") / out,
                      help=f"folder for train.parquet and test.parquet (data/{out})")
    if source:
        made.add_argument("--source", default=source, help=f"hub name, or a local copy of the folder ({source})")
    return made


def add_sizes(made: argparse.ArgumentParser, num_train: int, num_test: int) -> None:
    """The flags of scripts that generate their rows, with these defaults."""
    made.add_argument("--num-train", type=int, default=num_train, help=f"rows of train.parquet ({num_train})")
    made.add_argument("--num-test", type=int, default=num_test, help=f"rows of test.parquet ({num_test})")
    made.add_argument("--seed", type=int, default=0, help="random seed of the rows (0)")


def visible(text: str) -> str:
    """The text with what a terminal would obey, and is no line end, as Python writes it, `\\x1b`: it may be downloaded.
    As tools/terminal.py, which scripts of this folder do not find."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def run(main: Callable[[], None]) -> None:
    """Calls main() and prints a mistake in flags or files, a ValueError or an OSError, as a message. Ctrl-C ends it
    without one."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError) as error:
        sys.exit(visible(f"error: {error}"))


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} {text} must be a JSON object")
    return value
