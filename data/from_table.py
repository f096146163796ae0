"""Your own table as training data: python data/from_table.py questions.csv --answer-column answer --out data/mine

Reads CSV (with commas, semicolons, tabs or bars, with or without a byte order mark), JSON (a list of objects), JSON
lines or parquet, and writes train.parquet and test.parquet (--num-test rows, chosen by --seed) in verl's columns.
`--system` is one system prompt for all rows, `--system-column` one of each row. An answer may be a list: texts in JSON,
or what --answers-separator separates; the reward function then gets a list of texts as ground_truth. It gets every
column in extra_info, under the table's names. Repeated questions stay.
"""

import argparse
import contextlib
import csv
import difflib
import io
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from verl_rows import run, tell_if_left, write

SEPARATORS = ",;\t|"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
MOST_SHOWN = 5  # bad rows that are printed
MOST_NAMES = 40  # of columns in a message
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
MAX_EXACT = 2**53  # integers up to here are floats too


def decode(file: Path, encoding: str) -> str:
    """The text of a file, in the encoding that its byte order mark says, or in `encoding`."""
    found = file.read_bytes()
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if found.startswith(mark)), encoding)
    try:
        return found.decode(encoding)
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: byte 0x{found[error.start]:02x} is not {encoding}; name the encoding "
                         f"with --encoding (cp1252 is that of many spreadsheets)") from None
    except LookupError:
        raise ValueError(f"--encoding {encoding} is not known to Python; utf-8, cp1252 and latin-1 are") from None


def read_csv(file: Path, encoding: str, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each row of a CSV file whose first line has the names. An empty field is None."""
    csv.field_size_limit(sys.maxsize)  # Python refuses fields above 131,072 characters otherwise
    text = decode(file, encoding)
    first = text.lstrip("\r\n").partition("\n")[0]
    separator = separator or max(SEPARATORS, key=first.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names: list[str] = []
    try:
        for fields in lines:
            place = f"{file}, line {lines.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not names:
                names = [field.strip() for field in fields]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise ValueError(f"{place}: two columns have the name {twice[0]!r}; the first line must name each "
                                     f"once")
                continue
            if len(fields) != len(names):
                raise ValueError(f"{place}: {len(fields)} fields, and the first line names {len(names)} columns; a "
                                 f"field that holds {separator!r} or a line break must stand in double quotes "
                                 f"(--separator names another separator)")
            yield place, {name: field if field.strip() else None for name, field in zip(names, fields)}
    except csv.Error as error:
        raise ValueError(f"{file}, line {lines.line_num}: {error}; a double quote in a quoted field is written twice"
                         ) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a key that is there twice: which value counts, nobody can say."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} is there twice in one object")
    return found


def read_json(file: Path, encoding: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a JSON list of objects, or of JSON lines."""
    text, places, rows = decode(file, encoding), [], None
    try:
        rows = json.loads(text, object_pairs_hook=unique_keys) if text.lstrip().startswith("[") else None
        places = [f"{file}, object {number}" for number in range(1, len(rows or ()) + 1)]
        if rows is None:
            # not splitlines(): a JSON text may hold U+2028 and other line ends of Unicode as they are
            numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
            places = [f"{file}, line {number}" for number, _ in numbered]
            rows = []
            for _, line in numbered:
                rows.append(json.loads(line, object_pairs_hook=unique_keys))
    except (ValueError, RecursionError) as error:
        where = places[len(rows)] if places else file
        raise ValueError(f"{where}: {error}; a file must be a JSON list of objects, or have one object a line"
                         ) from None
    for place, row in zip(places, rows):
        if not isinstance(row, dict):
            raise ValueError(f"{place}: {row!r:.80} must be an object with the columns' names")
        yield place, row


def read_table(file: Path, encoding: str, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    match file.suffix.lower():
        case ".csv" | ".tsv" | ".txt":
            yield from read_csv(file, encoding, separator)
        case ".json" | ".jsonl" | ".ndjson":
            yield from read_json(file, encoding)
        case ".parquet" | ".pq":
            try:
                rows = pq.read_table(file).to_pylist()
            except pa.ArrowException as error:
                raise ValueError(f"{file} cannot be read as parquet: {error}") from None
            yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))
        case suffix:
            raise ValueError(f"{file}: {suffix or 'no ending'} is not read; save the table as .csv, .tsv, .json, "
                             f".jsonl or .parquet (a spreadsheet: save as CSV)")


def check_columns(file: Path, named: dict[str, str], names: list[str]) -> None:
    """ValueError for a flag that names no column of the table. `named`: flag -> column; `names`: those of all rows."""
    for flag, column in named.items():
        if column and column not in names:
            near = difflib.get_close_matches(column.lower(), {name.lower(): name for name in names}, 1)
            meant = next((name for name in names if near and name.lower() == near[0]), "")
            hint = f". Is it {flag} {meant!r}?" if meant else ""
            raise ValueError(f"{file}: {flag} {column}: there is no such column; there are "
                             f"{', '.join(map(repr, names[:MOST_NAMES]))}{hint}")


def value_of(row: dict[str, Any], column: str) -> Any:
    """A field. ValueError for an empty one, and for one that an object of JSON leaves out."""
    value = row.get(column)
    is_nan = isinstance(value, float) and math.isnan(value)  # what pandas writes for an empty field
    if value is None or is_nan or (isinstance(value, str) and not value.strip()) or value == []:
        raise ValueError(f"{column} is {'empty' if column in row else 'missing'}")
    return value


def text_of(value: Any) -> str:
    """42.0 is 42: a column of integers with empty fields has become one of floats in most programs."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        value = int(value)
    return str(value)


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """A text as the user's message; a list of messages, or JSON text of one, as it is. ValueError for a list of
    something else, and for the text that pandas writes into CSV."""
    if isinstance(prompt, str) and MESSAGES.match(prompt):
        try:
            prompt = json.loads(prompt)
        except ValueError:
            raise ValueError(f"{prompt!r:.80} looks like chat messages and is no JSON: write the column with json.dumps"
                             ) from None
    if not isinstance(prompt, list):
        return [{"role": "user", "content": str(prompt)}]
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") is None or message.get("content") is None:
            raise ValueError(f"{message!r:.80} must be a chat message with role and content (ShareGPT's "
                             f"have from and value: rename them)")
    return [*prompt]


def answer_of(value: Any, separator: str) -> Any:
    """The ground truth: a text, or a list of texts. ValueError for an object, and for a list
    that is empty or has an object, a list or nothing in it."""
    if isinstance(value, str) and separator:
        value = [part.strip() for part in value.split(separator) if part.strip()]
    elif isinstance(value, str) and value.strip().startswith("["):  # texts alone: [1, 2] may be an interval
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            value = found if found and all(isinstance(part, str) for part in found) else value
    parts = value if isinstance(value, list) else [value]
    if not parts or any(part is None or isinstance(part, dict | list) or not str(part).strip() for part in parts):
        raise ValueError(f"the answer {value!r:.80} must be a text or a number, or a list of these, none of them empty"
                         f"; an object can be written as JSON text")
    if isinstance(value, list):
        return [text_of(part) for part in value]
    return value.strip() if isinstance(value, str) else text_of(value)


def row_of(table: dict[str, Any], index: int, source: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row in verl's columns. ValueError for an empty field, or a prompt that is no list of messages."""
    prompt = value_of(table, args.prompt_column)
    answer = answer_of(value_of(table, args.answer_column), args.answers_separator)
    messages = messages_of(prompt)
    if args.instruction:
        content = messages[-1]["content"]
        more = f"\n{args.instruction}"
        content = [*content, {"type": "text", "text": more}] if isinstance(content, list) else f"{content}{more}"
        messages[-1] = messages[-1] | {"content": content}  # a copy: extra_info has the table's own
    system = value_of(table, args.system_column) if args.system_column else args.system
    if system:
        messages = [{"role": "system", "content": str(system)}, *messages]
    return {
        "data_source": source,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": table | {"index": table.get("index", index)},
    }


def of_one_type(values: list[Any]) -> list[Any]:
    """The values of a column that mixes types: integers and fractions as floats, where no float rounds an integer; all
    else as text, JSON where it is none. None stays."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float} and all(abs(value) <= MAX_EXACT for value in values if isinstance(value, int)):
        return [None if value is None else float(value) for value in values]
    return [value if value is None or isinstance(value, str) else json.dumps(value, default=str) for value in values]


def is_storable(values: list[Any]) -> bool:
    """Whether a parquet file can hold them in one column. It cannot hold integers of more than 64 bits, objects without
    a field, and lists or objects whose parts have several types."""
    try:
        pq.write_table(pa.table({"column": pa.array(values)}), pa.BufferOutputStream())
    except (pa.ArrowException, OverflowError):
        return False
    return True


def with_parts(rows: list[dict[str, Any]]) -> None:
    """Where some message's content is a list of parts, make that of all messages one: a column has one type."""
    if any(isinstance(message["content"], list) for row in rows for message in row["prompt"]):
        for row in rows:
            row["prompt"] = [
                message if isinstance(message["content"], list) else
                message | {"content": [{"type": "text", "text": str(message["content"])}]} for message in row["prompt"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a .csv, .tsv, .json, .jsonl or .parquet file")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--prompt-column", default="question", help="column of texts or chat messages (question)")
    parser.add_argument("--answer-column", default="answer", help="column of answers, or of lists of answers (answer)")
    parser.add_argument("--answers-separator", default="", help="what separates the answers of a field, such as '|'")
    parser.add_argument("--instruction", default="", help="text after every question, on a line of its own")
    parser.add_argument("--system", default="", help="the system prompt of all rows")
    parser.add_argument("--system-column", default="", help="column with the system prompt of each row")
    parser.add_argument("--data-source", default="", help="name of the data in metrics (the file's name)")
    parser.add_argument("--num-test", type=int, default=-1, help="rows of test.parquet (a tenth, at most 500)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the choice of test rows (0)")
    parser.add_argument("--separator", default="", help="of CSV fields (found in the first line)")
    parser.add_argument("--encoding", default="utf-8", help="of text without a byte order mark (utf-8)")
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error",
                        help="a row with an empty field (error)")
    args = parser.parse_args()
    source = args.data_source or args.table.stem
    rows, bad = [], []
    tables = list(read_table(args.table, args.encoding, args.separator))
    named = {"--prompt-column": args.prompt_column, "--answer-column": args.answer_column,
             "--system-column": args.system_column}
    if tables:
        check_columns(args.table, named, list(dict.fromkeys(name for _, table in tables for name in table)))
    for place, table in tables:
        try:
            rows.append(row_of(table, len(rows), source, args))
        except ValueError as error:
            bad.append(f"{place}: {error}")
    if bad and args.on_bad_row == "error":
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise ValueError(f"{bad[0]}{more}; --on-bad-row skip leaves such rows out")
    for line in bad[:MOST_SHOWN]:
        print(f"data: left out: {line}")
    num_test = min(len(rows) // 10, 500) if args.num_test < 0 else args.num_test
    if not rows and not bad:
        raise ValueError(f"{args.table} has no rows; the first line of a CSV file names the columns")
    if num_test >= len(rows):
        raise ValueError(f"{args.table} has {len(rows)} good rows and {len(bad)} bad; the rule is more than --num-test "
                         f"{num_test}")
    for name in dict.fromkeys(name for row in rows for name in row["extra_info"]):  # a parquet column has one type
        values = [row["extra_info"].get(name) for row in rows]
        has_one_type = len({type(value) for value in values if value is not None}) <= 1
        if not has_one_type or not is_storable(values):
            for row, value in zip(rows, of_one_type(values)):
                row["extra_info"][name] = value
    lists = [isinstance(row["reward_model"]["ground_truth"], list) for row in rows]
    if any(lists) and not all(lists):
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            row["reward_model"]["ground_truth"] = truth if isinstance(truth, list) else [truth]
    with_parts(rows)
    chosen = set(random.Random(args.seed).sample(range(len(rows)), num_test))
    print(f"data: {len(rows)} rows of {args.table}, {len(bad)} left out. The first prompt and ground truth:")
    print(*(f"    {message['role']}: {message['content']!r:.200}" for message in rows[0]["prompt"]), sep="\n")
    print(f"    ground_truth: {rows[0]['reward_model']['ground_truth']!r:.200}")
    schema = pa.Table.from_pylist(rows).schema  # of both files, whichever rows have an empty field
    parts = {"train": [i for i in range(len(rows)) if i not in chosen], "test": sorted(chosen)}
    for split, part in parts.items():
        if part:
            write([rows[i] for i in part], args.out / f"{split}.parquet", group_rows=len(rows), schema=schema)
        else:
            tell_if_left(args.out / f"{split}.parquet")
    val = f" --val-data {args.out}/test.parquet" if num_test else ""
    print(f"data: train with --train-data {args.out}/train.parquet{val} --reward.function my_reward.py:compute_score")


if __name__ == "__main__":
    run(main)
