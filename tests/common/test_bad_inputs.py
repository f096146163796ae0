"""Bad inputs tried, and what each gave. The table is the parametrisation; as markdown, with all messages:

    python -m tests.common.test_bad_inputs
"""

import json
import re
import resource
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.conftest import MODEL, ROOT


def row(content="What is 2 + 2?", **changes) -> dict:
    return {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": content}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}} | changes


GOOD = json.dumps(row()).encode()


def parquet(rows: list[dict], change: Callable[[bytes], bytes] = lambda content: content, name="rows.parquet"):
    """A case's files: one parquet file whose bytes went through `change`."""
    def make(folder: Path) -> list[str]:
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return [str(folder / name)]
    return make


def damaged_row_group(rows: int, per_group: int, group: int):
    """A parquet file of several row groups; the first page of one of them is zeros."""
    def make(folder: Path) -> list[str]:
        file = folder / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row(str(i) * 9) for i in range(rows)]), file, row_group_size=per_group)
        groups = pq.read_metadata(file)
        assert groups.num_row_groups > group
        start = groups.row_group(group).column(0).dictionary_page_offset
        content = file.read_bytes()
        file.write_bytes(content[:start] + bytes(20) + content[start + 20 :])
        return [str(file)]
    return make


def table(**columns):
    def make(folder: Path) -> list[str]:
        names, arrays = zip(*columns.items())
        pq.write_table(pa.table(list(arrays), names=[name.rstrip("_") for name in names]), folder / "rows.parquet")
        return [str(folder / "rows.parquet")]
    return make


def sources(column: pa.Array):
    return table(**COLUMNS | {"data_source": column})


def text(content: bytes, name="rows.jsonl"):
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [str(folder / name)]
    return make


def lines(**changes):
    """Three JSON lines, the second with `changes`."""
    return between(json.dumps(row(**changes)).encode())


def between(line: bytes):
    return text(b"\n".join([GOOD, line, GOOD]))


def beside(name: str):
    """A folder with a file that is read, and another one."""
    def make(folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_bytes(GOOD)
        (folder / name).write_bytes(b"x")
        return [str(folder)]
    return make


def named(pattern: str):
    """No file is made; `pattern` is asked for."""
    return lambda folder: [f"{folder}/{pattern}" if pattern else str(folder)]


def not_utf8(values: list[bytes]) -> pa.Array:
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


COLUMNS = {name: [row()[name]] * 2 for name in ("data_source", "prompt", "reward_model")}
LONG = [row(), row("one two three four five six " * 9)]
NO_OBJECT = "the line must be a JSON object"
NO_ROLE = "prompt has a message whose role is None; it must be a string"

# (what is wrong, its files, flags, what an error says; "N prompts, M bad" where nothing is wrong with the rest)
FILES = [
    ("a file that does not exist", named("absent.parquet"), {}, "absent.parquet must be a .* file that exists"),
    ("a glob that matches nothing", named("*.parquet"), {}, "or a folder or glob that has some"),
    ("a folder without data files", named(""), {}, "or a folder or glob that has some"),
    ("no file at all", lambda folder: [], {}, "no data files given"),
    ("a file of another kind", text(GOOD, "rows.csv"), {}, "rows.csv must be a .parquet.*from_table.py converts CSV"),
    ("a compressed file", text(GOOD, "rows.jsonl.gz"), {}, "rows.jsonl.gz must be a .parquet/"),
    ("a parquet file of 0 bytes", parquet([row()], lambda b: b""), {}, "rows.parquet cannot be read as parquet: "),
    ("a parquet file cut in half", parquet([row()], lambda b: b[: len(b) // 2]), {}, "cannot be read"),
    ("a parquet file cut by one byte", parquet([row()], lambda b: b[:-1]), {}, "cannot be read"),
    ("text named .parquet", text(GOOD, "rows.parquet"), {}, "cannot be read"),
    ("a parquet file with zeros in its pages", parquet([row(str(i) * 50) for i in range(400)],
                                                        lambda b: b[:20] + bytes(200) + b[220:]), {},
     r"rows.parquet cannot be read as parquet in its rows 0 to 399 .counted from 0.: "),
    ("a parquet file whose third row group is damaged", damaged_row_group(rows=2000, per_group=700, group=2), {},
     r"rows.parquet cannot be read as parquet in its rows 1024 to 1535 .counted from 0.: "),
    ("a parquet file without rows", table(**{name: pa.array([], pa.string()) for name in COLUMNS}), {},
     "rows.parquet: there are no rows in it"),
    ("a JSON lines file without rows", text(b"\n\n"), {}, "rows.jsonl: there are no rows in it"),
    ("a column is missing", table(prompt=COLUMNS["prompt"], question=["?", "?"]), {},
     "data_source is None; it must be a name .--data.data-source"),
    ("no column is known", table(question=["?"], answer=["4"]), {},
     "rows.parquet has none of the columns prompt, .*; it has question, answer: .* --data.prompt-column NAME"),
    ("a column name that does not exist", parquet([row()]), {"prompt_column": "question"},
     "question is None; it must name a column of strings or lists"),
    ("a folder with a compressed file beside another", beside("more.jsonl.gz"), {}, "more.jsonl.gz, which is not read"),
    ("a folder of datasets' save_to_disk", beside("data-00000-of-00001.arrow"), {},
     "arrow, which is not read: .*to_parq"),
    ("two columns of the same name", table(**COLUMNS, prompt_=["a", "b"]), {}, 'Field "prompt" exists 2 times'),
]
ROWS = [
    ("broken JSON", between(b'{"prompt": '), {}, NO_OBJECT),
    ("the last line cut", text(GOOD + b"\n" + GOOD + b"\n" + GOOD[:50]), {}, NO_OBJECT),
    ("a JSON list", between(b"[1]"), {}, f"{NO_OBJECT} .'list' object is not a mapping"),
    ("JSON nested 100,000 deep", between(b"[" * 100_000), {}, NO_OBJECT),
    ("bytes that are not UTF-8, in JSON", between(b'{"prompt": "\xff\xfe"}'), {}, NO_OBJECT),
    ("bytes that are not UTF-8, in parquet", sources(not_utf8([b"mine", b"\xff\xfe"])), {}, 
     "'utf-8' codec can't decode"),
    ("half a surrogate pair", lines(prompt="\ud800?"), {}, f"{NO_OBJECT} .*surrogates not allowed"),
    ("a key that is there twice", between(b'{"prompt": "x", "answer": "1", "answer": "2"}'), {},
     f"{NO_OBJECT} .the key 'answer' is there 2 times in one object"),
    ("ground_truth is NaN", between(GOOD.replace(b'"4"', b"NaN")), {}, "has a ground_truth that is NaN"),
    ("ground_truth is a missing number of pandas", parquet([row(reward_model={"ground_truth": truth})
                                                           for truth in (4.0, float("nan"), 5.0)]), {},
     "has a ground_truth that is NaN"),
    ("messages as JSON text", lines(prompt=json.dumps(row()["prompt"])), {}, "prompt is the JSON text of messages"),
    ("an empty JSON object", between(b"{}"), {}, "prompt is None; it must name a column of strings or lists"),
    ("prompt is null", lines(prompt=None), {}, "prompt is None; it must name a column of strings or lists"),
    ("prompt is a number", lines(prompt=5), {}, "prompt is 5; it must name a column of strings or lists"),
    ("prompt is an empty list", lines(prompt=[]), {}, "prompt is empty; there must be at least one message"),
    ("prompt is an empty string", lines(prompt=""), {}, "prompt is empty"),
    ("the last message is blank", lines(content=" \n"), {}, "prompt is empty; .*text in the last"),
    ("prompt is a list of strings", lines(prompt=["text"]), {}, "it must name a column of strings or lists of {ro"),
    ("a message without role", lines(prompt=[{"content": "x"}]), {}, NO_ROLE),
    ("a message without content", lines(prompt=[{"role": "user"}]), {}, "a message whose content is None"),
    ("a message with an image", lines(prompt=[{"role": "user", "content": [{"type": "image"}]}]), {},
     "there are images, and .* is a llama model; .* read images"),
    ("a message with a video", lines(prompt=[{"role": "user", "content": [{"type": "video"}]}]), {},
     "there are videos, and .* is a llama model; .* read videos"),
    ("a message with a number", lines(prompt=[{"role": "user", "content": 5}]), {}, "a message whose content is 5"),
    ("an images column with an image", lines(images=[{"bytes": "x"}]), {},
     "there are images, and .* is a llama model; .* read images"),
    ("a videos column with two videos, in parquet", parquet([row(videos=[]), row(videos=["a.mp4", "b.mp4"])]), {},
     "there are videos, and .* is a llama model; .* read videos"),
    ("data_source is null", lines(data_source=None), {}, "data_source is None; it must be a name"),
    ("data_source is a number", lines(data_source=3), {}, "data_source is 3; it must be a name"),
    ("data_source is empty", lines(data_source=""), {}, "data_source is ''; it must be a name"),
    ("reward_model is null", lines(reward_model=None), {}, "reward_model is None; it must have a ground_truth"),
    ("reward_model is a string", lines(reward_model="4"), {}, "reward_model is '4'; it must have a ground_truth"),
    ("no ground_truth", lines(reward_model={"style": "rule"}), {}, "it must have a ground_truth"),
    ("an answer column with an empty row", text(b"\n".join(
        json.dumps({"prompt": "1 + 1?", "answer": answer}).encode() for answer in ("2", None, "2"))),
     {"ground_truth_column": "answer", "data_source": "openai/gsm8k"}, "answer is .*; it must have a ground_truth"),
    ("extra_info is a list", lines(extra_info=[1]), {}, r"extra_info is \[1\]; it must be a struct or absent"),
    ("the chat template refuses the roles", lines(prompt=[{"role": "tool", "content": "x"}]),
     {"chat_template_file": "strict.jinja"}, "the chat template refuses it: no tools"),
]
SETTINGS = [
    ("a column for extra_info that does not exist", parquet(LONG), {"extra_info_column": "meta"},
     "no row has the column meta that --data.extra-info-column names"),
    ("a prompt too long, to stop at", parquet(LONG), {"max_prompt_length": 40, "on_long_prompt": "error"},
     r"row 1 \(counted from 0\): the prompt has \d+ tokens, more than --data.max-prompt-length 40"),
    ("all prompts too long", parquet(LONG), {"max_prompt_length": 5},
     "none of 2 rows is left: 2 have more than --data.max-prompt-length 5 tokens, 0 are bad"),
    ("a limit of 0 tokens", parquet(LONG), {"max_prompt_length": 0}, "--data.max-prompt-length 0 must be at least 1"),
    ("template arguments that are no JSON", parquet(LONG), {"chat_template_kwargs": "thinking=no"},
     "--data.chat-template-kwargs thinking=no must be a JSON object"),
    ("template arguments that are a list", parquet(LONG), {"chat_template_kwargs": "[1]"}, "must be a JSON object"),
    ("a template file with an error", parquet(LONG), {"chat_template_file": "broken.jinja"},
     "row 0 .*the chat template refuses it: "),
    ("a template that renders nothing", parquet(LONG), {"chat_template_file": "empty.jinja"},
     "row 0 .*the chat template renders nothing; --data.chat-template-file FILE names another"),
    ("a template that calls itself", parquet(LONG), {"chat_template_file": "recursive.jinja"},
     "row 0 .*the chat template refuses it: maximum recursion depth exceeded"),
    ("a base model without template", parquet(LONG), {"template": "chat", "base": True},
     "has no chat template .*use --data.template plain, or give one with --data.chat-template-file"),
    ("no room for the tokenised prompts", parquet(LONG), {"room": 100},
     "cannot store the tokenised prompts: .*set TMPDIR to another folder"),
]
UNUSUAL = [
    ("a prompt that is a JSON list, and no messages", lines(prompt='["role", {"role": 1}]'), {}, 3),
    ("CRLF, blank lines, a byte order mark", text(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD + b"\r\n"), {}, 2),
    ("a null byte and emoji in the text", lines(content="a\0b \U0001f600"), {}, 3),
    ("ground_truth is a number, a struct", text(b"\n".join(
        json.dumps(row(reward_model={"ground_truth": truth})).encode() for truth in (4, {"target": 3}))), {}, 2),
    ("further columns; extra_info absent", table(**COLUMNS, notes=[1, 2]), {}, 2),
    ("images is empty, videos is null", parquet([row(images=[], videos=None), row(images=[], videos=None)]), {}, 2),
    ("extra_info is null", parquet([row(extra_info=None)]), {}, 1),
    ("strings stored as categories", sources(pa.array(["a", "b"]).dictionary_encode()), {}, 2),
    ("large strings", sources(pa.array(["a", "b"], pa.large_string())), {}, 2),
    ("string views", sources(pa.array(["a", "b"], pa.string_view())), {}, 2),
    ("content in parts of text", parquet([row(), row(prompt=[{"role": "user", "content": [
        {"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]}])][1:]), {}, 1),
    ("a key that only one message has", parquet([row(prompt=[
        {"role": "user", "content": "x"}, {"role": "user", "content": "y", "name": "z"}])]), {}, 1),
]
CASES = {name: (make, flags, rule) for name, make, flags, rule in FILES + ROWS + SETTINGS + UNUSUAL}
TEMPLATES = {"strict.jinja": "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}hi",
             "broken.jinja": "{% if %}", "empty.jinja": "{% if false %}hi{% endif %}",
             "recursive.jinja": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}


@cache
def tokenizer(base: bool):
    made = AutoTokenizer.from_pretrained(MODEL)
    if base:
        made.chat_template = None
    return made


def gave(name: str, folder: Path, **more) -> str:
    """What load_prompts says: its error, or how many prompts it gives and how many rows were bad."""
    make, flags, _ = CASES[name]
    flags = flags | more
    base, room = flags.pop("base", False), flags.pop("room", resource.RLIM_INFINITY)
    if flags.get("chat_template_file") in TEMPLATES:
        (folder / "template.jinja").write_text(TEMPLATES[flags["chat_template_file"]])
        flags["chat_template_file"] = str(folder / "template.jinja")
    files, (soft, hard) = make(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room if room < soft or soft < 0 else soft, hard))
    try:
        prompts = load_prompts(files, tokenizer(base), DataConfig(**flags))
    except ValueError as error:
        return f"error: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(prompt.tokens for prompt in prompts)
    return f"{len(prompts)} prompts, {len(prompts.loaded.bad_rows)} bad"


@pytest.mark.parametrize("name", [case[0] for case in FILES + ROWS + SETTINGS])
def test_bad_input_is_an_error_that_names_the_rule(name, tmp_path):
    said = gave(name, tmp_path)
    assert said.startswith("error: ")
    assert re.search(CASES[name][2], said), said


@pytest.mark.parametrize("name", [case[0] for case in ROWS])
def test_bad_row_is_named_or_skipped(name, tmp_path):
    bad = 2 if name == "the last line cut" else 1
    assert f"row {bad} (counted from 0): " in (said := gave(name, tmp_path)) and "rows." in said
    assert said.endswith("--data.on-bad-row skip leaves such rows out")
    good = 1 if "in parquet" in name else 2
    assert gave(name, tmp_path, on_bad_row="skip") == f"{good} prompts, 1 bad"


@pytest.mark.parametrize("name", [case[0] for case in FILES])
def test_bad_file_is_never_skipped(name, tmp_path):
    assert gave(name, tmp_path, on_bad_row="skip").startswith("error: ")


@pytest.mark.parametrize("name", [case[0] for case in UNUSUAL])
def test_unusual_input_is_read(name, tmp_path):
    assert gave(name, tmp_path) == f"{CASES[name][2]} prompts, 0 bad"


def markdown() -> str:
    """The table, made by trying every case."""
    out = ["# Bad inputs tried, and what each gave", "",
           "Made by `python -m tests.common.test_bad_inputs`; every line is also a test.", ""]
    for title, cases in (("Files", FILES), ("Rows", ROWS), ("Settings", SETTINGS), ("Unusual, and read", UNUSUAL)):
        skip = title == "Rows"
        out += [f"## {title}", "", "| input | gave |" + (" with `--data.on-bad-row skip` |" if skip else ""),
                "| --- | --- |" + (" --- |" if skip else "")]
        for name, *_ in cases:
            with tempfile.TemporaryDirectory() as folder:
                said = gave(name, Path(folder)).replace(f"{folder}/", "").replace(folder, "FOLDER")
                then = f" {gave(name, Path(folder), on_bad_row='skip')} |" if skip else ""
            out.append(f"| {name} | {' '.join(said.replace(str(MODEL), 'MODEL').split())} |{then}")
        out.append("")
    return "\n".join(out)


def test_the_document_counts_every_case():
    rows = re.findall(r"^\| (\w[\w, ]*) \| (\d+) \|", (ROOT / "tests/evidence/bad_inputs.md").read_text(), re.MULTILINE)
    counts = {"files": len(FILES), "rows": len(ROWS), "settings": len(SETTINGS), "unusual, and read": len(UNUSUAL)}
    assert {kind: int(number) for kind, number in rows} == counts


if __name__ == "__main__":
    sys.stdout.write(markdown())
