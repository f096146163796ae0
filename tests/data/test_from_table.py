"""data/from_table.py on the tables that people have, and that its rows train as verl's do."""

import csv
import io
import json
import math
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.conftest import MODEL, ROOT

sys.path.append(str(ROOT / "data"))
import from_table
import verl_rows

QUESTIONS = [(f"What is {i}, and {i}?", str(2 * i)) for i in range(1, 31)]


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """The rows that a table becomes, train and then test; what is printed."""
    def run(name, content, *flags):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        argv = ["from_table.py", str(tmp_path / name), "--out", str(tmp_path / "out"), *flags]
        monkeypatch.setattr(sys, "argv", argv)
        from_table.main()
        files = [tmp_path / "out" / f"{split}.parquet" for split in ("train", "test")]
        return [pq.read_table(file).to_pylist() if file.exists() else [] for file in files]
    run.printed = lambda: capsys.readouterr().out
    return run


def plain(separator=",", end="\n"):
    lines = [separator.join(("question", "answer")), *(f'"{q}"{separator}{a}' for q, a in QUESTIONS)]
    return end.join([*lines, ""])


def asked(rows):
    return sorted((row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows)


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", plain().encode()), ("bom.csv", b"\xef\xbb\xbf" + plain(end="\r\n").encode()),
    ("semicolons.csv", plain(";").encode()), ("tabs.tsv", plain("\t").encode()), ("bars.csv", plain("|").encode()),
    ("utf16.txt", plain("\t").encode("utf-16")), ("old_mac.csv", plain(end="\r").encode()),
    ("a.json", json.dumps([{"question": q, "answer": a} for q, a in QUESTIONS], indent=2).encode()),
    ("a.jsonl", "\n".join(json.dumps({"question": q, "answer": int(a)}) for q, a in QUESTIONS).encode()),
])
def test_every_kind_of_table_gives_the_same_rows(convert, name, content):
    train, test = convert(name, content)
    assert asked(train + test) == sorted(QUESTIONS) and len(test) == 3
    assert {row["data_source"] for row in train} == {name.partition(".")[0]}
    assert all(row["extra_info"]["question"] == row["prompt"][0]["content"] for row in train + test)


def test_any_text_comes_back_as_it_was(convert):
    """Python's own writer is the oracle: quotes, separators, line breaks and every script of the world in fields."""
    chance = random.Random(5)
    letters = '",;|\t\n\r abcé日本🍵\u2028'
    texts = [("".join(chance.choices(letters, k=12)) + "x", "".join(chance.choices(letters, k=6)) + "y")
             for _ in range(50)]
    out = io.StringIO()
    csv.writer(out).writerows([("question", "answer"), *texts])
    train, _ = convert("any.csv", out.getvalue().encode(), "--num-test", "0")
    assert [row["prompt"][0]["content"] for row in train] == [question for question, _ in texts]
    assert [row["reward_model"]["ground_truth"] for row in train] == [answer.strip() for _, answer in texts]


def test_a_system_prompt_and_lists_of_answers(convert):
    table = 'system,question,answers\nBe brief.,Capital of Greece?,"[""Athens"", ""Athína""]"\nThink.,2 + 2?,4\n'
    train, _ = convert("a.csv", table, "--answer-column", "answers", "--system-column", "system")
    assert [row["prompt"] for row in train] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of Greece?"}],
        [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 2?"}]]
    assert [row["reward_model"]["ground_truth"] for row in train] == [["Athens", "Athína"], ["4"]]
    train, _ = convert("b.csv", "question;answer\na;b| c |\nd;[1, 2]\n", "--answers-separator", "|", "--system", "S",
                       "--instruction", "Go.")
    assert [row["reward_model"]["ground_truth"] for row in train] == [["b", "c"], ["[1, 2]"]]
    assert train[0]["prompt"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "a\nGo."}]


def test_an_interval_is_no_list_of_answers(convert):
    train, _ = convert("a.csv", 'question,answer\nWhere is x?,"[1, 2]"\n')
    assert train[0]["reward_model"]["ground_truth"] == "[1, 2]"


@pytest.mark.parametrize(("levels", "kept"), [
    ([1, "hard"], ["1", "hard"]),
    ([1, 2.5, None], [1.0, 2.5, None]),
    ([2**53 + 1, 0.5], ["9007199254740993", "0.5"]),        # no float is that integer
    ([10**400, 0.5], ["1" + "0" * 400, "0.5"]),
    ([True, 2.5], ["true", "2.5"]),
], ids=["words", "fractions", "inexact", "huge", "truths"])
def test_further_columns_of_several_types(convert, levels, kept):
    rows = [{"question": "a", "answer": "b", "level": level} for level in levels]
    train, _ = convert("a.json", json.dumps(rows))
    found = [row["extra_info"]["level"] for row in train]
    assert found == kept and [type(value) for value in found] == [type(value) for value in kept]


@pytest.mark.parametrize(("values", "kept"), [
    ([[1, "a"], [2, 3]], ['[1, "a"]', "[2, 3]"]),
    ([2**63, 1], ["9223372036854775808", "1"]), ([2**70, None], [str(2**70), None]),
    ([{}, {}], ["{}", "{}"]), ([{"a": {}}, {"a": {}}], ['{"a": {}}', '{"a": {}}']),
    ([{"a": 1}, {"a": "x"}], ['{"a": 1}', '{"a": "x"}']), ([[{"b": 1}], [{"b": [2]}]], ['[{"b": 1}]', '[{"b": [2]}]']),
    ([{"a": 1}, {"b": [2]}], [{"a": 1, "b": None}, {"a": None, "b": [2]}]), ([[1], [2, 3]], [[1], [2, 3]]),
], ids=["mixed", "64 bits", "70 bits", "no fields", "inner without", "conflict", "inner conflict", "union", "list"])
def test_further_columns_that_no_parquet_column_holds(convert, values, kept):
    """As JSON text; what a column can hold stays as it is."""
    rows = [{"question": "a", "answer": "b", "more": value} for value in values]
    train, _ = convert("a.json", json.dumps(rows))
    assert [row["extra_info"]["more"] for row in train] == kept


def test_both_files_have_the_types_of_all_rows(convert, tmp_path):
    """Whichever row is in the smaller one: alone, an object without a field would have a type that no file holds."""
    rows = [{"question": "a", "answer": "b", "more": {"x": 1} if i == 5 else {}} for i in range(12)]
    for seed in range(12):
        convert("a.json", json.dumps(rows), "--num-test", "1", "--seed", str(seed))
        schemas = [pq.read_schema(tmp_path / f"out/{split}.parquet") for split in ("train", "test")]
        assert schemas[0] == schemas[1]


def test_an_omitted_field_is_a_bad_row(convert):
    rows = [{"question": "a", "answer": "b"}, {"question": "c"}, {"answer": "e", "question": "d", "level": 1}]
    with pytest.raises(ValueError, match=r"a\.json, object 2: answer is missing; --on-bad-row skip leaves"):
        convert("a.json", json.dumps(rows))
    train, _ = convert("a.json", json.dumps(rows), "--on-bad-row", "skip")
    assert asked(train) == [("a", "b"), ("d", "e")]
    assert "left out" in (said := convert.printed()) and "object 2: answer is missing" in said
    with pytest.raises(ValueError, match=r"level2: there is no such column.*Is it --system-column 'level'"):
        convert("a.json", json.dumps(rows), "--system-column", "level2")


def test_numbers_as_answers(convert, tmp_path):
    """pandas writes a column of integers with an empty field as floats, and the empty field as NaN."""
    table = pa.table({"question": ["a", "b", "c", "d"], "answer": [42.0, 2.5, math.nan, 1e300]})
    pq.write_table(table, tmp_path / "b.parquet")
    train, _ = convert("a.parquet", (tmp_path / "b.parquet").read_bytes(), "--on-bad-row", "skip")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["42", "2.5", "1e+300"]
    assert "row 3: answer is empty" in convert.printed()
    train, _ = convert("a.json", '[{"question": "a", "answer": [4.0, 5, "6.0"]}]')
    assert train[0]["reward_model"]["ground_truth"] == ["4", "5", "6.0"]


def test_messages_as_prompts_stay_what_they_are(convert):
    """--instruction and --system with contents that are lists of parts; extra_info has the table's own messages."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " this?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "b"}, {"prompt": "Why?", "answer": "c"}]
    flags = ("--prompt-column", "prompt", "--instruction", "Go.", "--system", "S")
    train, _ = convert("a.json", json.dumps(rows), *flags)
    from envs.pictures import flatten_contents
    assert [flatten_contents(row)["prompt"] for row in train] == [
        [{"role": "system", "content": "S"}, {"role": "user", "content": text}]
        for text in ("What is this?\nGo.", "Why?\nGo.")]
    texts = [[{"role": "user", "content": "One?"}], [{"role": "user", "content": "Two?"}]]
    train, _ = convert("b.json", json.dumps([{"prompt": text, "answer": "b"} for text in texts]), *flags)
    assert [row["prompt"][1]["content"] for row in train] == ["One?\nGo.", "Two?\nGo."]
    assert [row["extra_info"]["prompt"] for row in train] == texts
    table = io.StringIO()
    csv.writer(table).writerows([["prompt", "answer"], *([json.dumps(text), "b"] for text in texts)])
    train, _ = convert("c.csv", table.getvalue(), *flags)
    assert [row["prompt"][1]["content"] for row in train] == ["One?\nGo.", "Two?\nGo."]


def test_a_long_field_of_a_csv_file_is_read(convert):
    train, _ = convert("a.csv", f'question,answer\n"{"long " * 40_000}",b\n')
    assert len(train[0]["prompt"][0]["content"]) == 200_000


def test_a_test_file_of_before_is_not_passed_over_in_silence(convert, tmp_path):
    convert("a.csv", plain())
    assert "stays" not in convert.printed()
    convert("a.csv", plain(), "--num-test", "0")
    assert f"{tmp_path}/out/test.parquet stays, and is not of this start" in convert.printed()
    assert (tmp_path / "out/test.parquet").exists()                     # it may be the user's own


def test_the_table_s_own_column_index_stays(convert):
    train, _ = convert("a.csv", "index,question,answer\nq7,a,b\nq9,c,d\n")
    assert [row["extra_info"]["index"] for row in train] == ["q7", "q9"]
    train, _ = convert("b.csv", "question,answer\na,b\nc,d\n")
    assert [row["extra_info"]["index"] for row in train] == [0, 1]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=repr)
def test_json_lines_end_at_a_line_feed_alone(convert, end):
    """JSON texts may hold the further line ends of Unicode as they are."""
    texts = ["a\u2028b", "c\u2029d", "e\u0085f"]
    rows = [json.dumps({"question": text, "answer": "x"}, ensure_ascii=False) for text in texts]
    train, _ = convert("a.jsonl", end.join([*rows, "", ""]))
    assert [row["prompt"][0]["content"] for row in train] == texts
    with pytest.raises(ValueError, match=r"b.jsonl, line 4: Expecting"):
        convert("b.jsonl", end.join([*rows, "no"]))


@pytest.mark.parametrize(("name", "content", "flags", "message"), [
    ("a.csv", "question,answer\na,b\nc,\n", (), "a.csv, line 3: answer is empty; --on-bad-row skip"),
    ("a.csv", "question,answer\n ,b\n", (), "line 2: question is empty"),
    ("a.csv", "Question,Answer\na,b\n", (), "there are 'Question', 'Answer'. Is it --prompt-column 'Question'?"),
    ("a.csv", plain(), ("--answer-column", "anwser"), "--answer-column anwser: there is no such column"),
    ("a.csv", "question,answer\nWhat is 1, 2?,3\n", (), "line 2: 3 fields, and the first line names 2 columns"),
    ("a.csv", 'question,answer\n"a "b" c",3\n', (), "a double quote in a quoted field is written twice"),
    ("a.csv", "question,answer,answer\na,b,c\n", (), "two columns have the name 'answer'"),
    ("a.csv", "question,answer\nGrèce,Athènes\n".encode("cp1252"), (), "line 2: byte 0xe8 is not utf-8; name the enc"),
    ("a.csv", plain(), ("--encoding", "utf-9"), "--encoding utf-9 is not known"),
    ("a.csv", "", (), "has no rows"),
    ("a.csv", "question,answer\n", (), "has no rows"),
    ("a.csv", plain(), ("--num-test", "30"), "30 good rows and 0 bad; the rule is more than --num-test 30"),
    ("a.jsonl", '{"question": "a", "answer": "b"}\n{"question": "a" 1}\n', (), "a.jsonl, line 2: Expecting"),
    ("a.jsonl", '{"question": "a", "answer": "b", "answer": "c"}\n', (), "line 1: the key 'answer' is there twice"),
    ("a.csv", """question,answer\n"[{'role': 'user', 'content': 'a'}]",b\n""", (), "is no JSON: write the column with"),
    ("a.json", "[1]", (), "must be an object with the columns' names"),
    ("a.json", '[{"question": "a", "answer": "b"},\n{"question" "c"}]', (), "a.json: Expecting ':' delimiter: line 2"),
    ("a.json", "[" * 100_000, (), "a.json: "),
    ("a.json", json.dumps([{"question": [{"from": "human", "value": "Hi"}], "answer": "b"}]), (),
     "a.json, object 1: {'from': 'human', 'value': 'Hi'} must be a chat message with role and content"),
    ("a.json", json.dumps([{"question": "a", "answer": {"target": ["b"]}}]), (),
     "a.json, object 1: the answer {'target': ['b']} must be a text or a number, or a list of these, none of th"),
    ("a.json", json.dumps([{"question": "a", "answer": ["b", None]}]), (), "the answer ['b', None] must be a text or"),
    ("a.json", json.dumps([{"question": "a", "answer": [["b"]]}]), (), "the answer [['b']] must be a text"),
    ("a.json", json.dumps([{"question": "a", "answer": ["b", " "]}]), (), "the answer ['b', ' '] must be a text or a"),
    ("a.csv", "question,answer\na,|\n", ("--answers-separator", "|", "--separator", ","), "the answer [] must be"),
    ("a.parquet", "no", (), "cannot be read as parquet"),
    ("a.xlsx", "PK", (), ".xlsx is not read; save the table as .csv"),
])
def test_mistakes_are_named(convert, name, content, flags, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        convert(name, content, *flags)
    assert "\n" not in str(raised.value)


def test_bad_rows_are_left_out_and_named_on_request(convert):
    train, test = convert("a.csv", plain() + "c,\n", "--on-bad-row", "skip", "--num-test", "5")
    assert (len(train), len(test)) == (25, 5)
    assert "a.csv, line 32: answer is empty" in convert.printed()


def test_its_rows_are_read_by_the_trainer(convert, tmp_path):
    from transformers import AutoTokenizer

    convert("a.csv", "\ufeffquestion;answer\nQuelle est la capitale ?;Athènes\n")
    prompts = load_prompts([str(tmp_path / "out")], AutoTokenizer.from_pretrained(MODEL), DataConfig())
    assert prompts[0].ground_truth == "Athènes" and prompts[0].messages[0]["content"] == "Quelle est la capitale ?"
    assert prompts[0].extra_info["answer"] == "Athènes"


def test_a_mistake_is_one_line_on_the_terminal(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "data/from_table.py", tmp_path / "a.csv", "--out", tmp_path],
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path / 'a.csv'} is not a file\n")
    assert verl_rows.run.__doc__
