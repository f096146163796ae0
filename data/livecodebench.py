"""LiveCodeBench (Jain et al. 2024), programs with test cases: python data/livecodebench.py --out data/livecodebench

From livecodebench/code_generation_lite on the Hugging Face hub; writes test.parquet. --release v6 (the default) are the
175 problems that the sixth release added, a download of 0.1 GB; release_v6 are all 1,055 in six files, 4.5 GB.
--from-date and --to-date keep problems of a time, such as those after a model's training data ends. The ground truth is
JSON, {"inputs": [...], "outputs": [...]}, the public test cases first, for standard input and output, and with
"fn_name" for calls of a method of class Solution.

The benchmark asks that all test cases pass, and rewards/code.py runs 10 by default, so evaluate with the line below.
Test cases of a problem are some megabytes, which each recorded response repeats: hence the few prompts a chunk.
    --reward.kwargs '{"max_cases": 1000, "continuous": false, "timeout_s": 6, "total_s": 300}' --reward.timeout-s 330 \\
        --prompts-per-chunk 16
"""

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain

from verl_rows import download, make_row, parser, run, write

PROGRAM = ("Write a Python program that solves this problem. It reads standard input and writes standard output. "
           "Answer with the whole program in one ```python block.")
FUNCTION = ("Solve this problem in Python: complete the code below. Answer with the whole code, the class included, in "
            "one ```python block.")
RELEASE = re.compile(r"(release_)?v([1-6])")
MAX_BYTES = 1 << 30
"""Largest size of a problem's test cases, decompressed."""
ROWS_IN_MEMORY = 32
KEYS = {"input", "output", "testtype"}
# What a pickle of one text consists of; none of these opcodes imports, calls or builds anything.
TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
HARMLESS = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP", *TEXTS)


def pickled_text(data: bytes) -> str:
    """The text in a pickle that holds one text and nothing else. It is read as data and never unpickled, which could
    run code. ValueError for any other pickle."""
    texts = []
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name not in HARMLESS:
            raise ValueError(f"its pickle has the opcode {opcode.name}; the rule is one text and nothing else")
        if opcode.name in TEXTS:
            texts.append(value)
    if len(texts) != 1:
        raise ValueError(f"its pickle has {len(texts)} texts; the rule is one text and nothing else")
    return texts[0]


def decode_cases(text: str) -> list[dict]:
    """The test cases of a column, {input, output, testtype} each: JSON, or JSON that was pickled, compressed and
    written in base64. ValueError if it is neither, or larger than MAX_BYTES."""
    if not text.lstrip().startswith("["):
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(f"they are neither JSON nor compressed ({error})") from None
        if not unpacker.eof:
            raise ValueError(f"they are cut off, or more than {MAX_BYTES >> 20} MiB")
        text = pickled_text(data)
    cases = json.loads(text)
    if not isinstance(cases, list) or not all(isinstance(case, dict) and case.keys() >= KEYS for case in cases):
        raise ValueError(f"they are {text:.80}; the rule is a list of {{input, output, testtype}}")
    return cases


def rows(source_rows: Iterable[dict], from_date: date, to_date: date) -> Iterator[dict]:
    """{question_content, starter_code, public_test_cases, private_test_cases, metadata, ...} -> verl's rows."""
    left_out = Counter()
    for index, row in enumerate(source_rows):
        day = str(row["contest_date"])[:10]
        if not from_date <= date.fromisoformat(day) <= to_date:
            left_out["of another date"] += 1
            continue
        try:
            cases = [*decode_cases(row["public_test_cases"]), *decode_cases(row["private_test_cases"])]
        except ValueError as error:
            raise ValueError(f"row {index} ({row['question_id']}): the test cases cannot be read: {error}") from None
        if not cases:
            left_out["without a test case"] += 1
            continue
        truth = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
        name = json.loads(row["metadata"] or "{}").get("func_name")
        if {case["testtype"] for case in cases} != {"functional" if name else "stdin"}:
            raise ValueError(f"row {index} ({row['question_id']}): the kinds of its test cases do not fit func_name "
                             f"{name!r}")
        if name:
            truth["fn_name"] = name
        starter = f"\n\n```python\n{row['starter_code'].rstrip()}\n```" if row["starter_code"] else ""
        question = f"{FUNCTION if name else PROGRAM}\n\n{row['question_content'].strip()}{starter}"
        yield make_row("livecodebench", question, json.dumps(truth), "code", "test", index,
                       question_id=row["question_id"], difficulty=row["difficulty"], date=day,
                       platform=row["platform"])
    for why, count in left_out.items():
        print(f"data: {count} problems {why} left out")


def files_of(release: str) -> list[str]:
    """The files of a release: `v3` has what the third one added, `release_v3` all up to it. ValueError for others."""
    found = RELEASE.fullmatch(release)
    if not found:
        raise ValueError(f"--release {release} must be v1 to v6, or release_v1 to release_v6")
    last = int(found[2])
    numbers = range(1, last + 1) if found[1] else [last]
    return [f"test{number if number > 1 else ''}.jsonl" for number in numbers]


def main() -> None:
    args = parser(__doc__, "livecodebench", "livecodebench/code_generation_lite")
    args.add_argument("--release", default="v6", help="v1 to v6: the problems that a release added; release_v1 to "
                      "release_v6: all problems up to it (v6)")
    args.add_argument("--from-date", type=date.fromisoformat, default=date.min,
                      help="first day of a contest, as 2025-01-31 (no limit)")
    args.add_argument("--to-date", type=date.fromisoformat, default=date.max,
                      help="last day of a contest (no limit)")
    args = args.parse_args()
    parts = (download(args.source, split="test", json_lines=file) for file in files_of(args.release))
    found = rows(chain.from_iterable(parts), args.from_date, args.to_date)
    write(found, args.out / "test.parquet", ROWS_IN_MEMORY)


if __name__ == "__main__":
    run(main)
