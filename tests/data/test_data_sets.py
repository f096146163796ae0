"""data/NAME.py: each loader on a folder in its source's real layout, read by the `datasets` library as from the hub."""

import base64
import functools
import http.server
import importlib.metadata
import json
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import types
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import rewards
from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.conftest import MODEL, ROOT

sys.path.append(str(ROOT / "data"))
import aime
import amc
import apps
import countdown
import dapo_math
import gpqa
import gsm8k
import hendrycks_math
import humaneval_plus
import ifeval
import livecodebench
import math500
import mbpp
import mbpp_plus
import reasoning_gym_task
import search
import verl_rows

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


tokenizer = functools.cache(lambda: AutoTokenizer.from_pretrained(MODEL))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The library's own cache in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def json_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def card(folder: Path, configs: dict[str, dict[str, str]]) -> None:
    """README.md with the part of the data set's card that says which files are which split of which configuration."""
    lines = ["---", "configs:"]
    for name, files in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, pattern in files.items():
            lines += [f"  - split: {split}", f"    path: {pattern}"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def convert(module, monkeypatch, out: Path, *flags: str) -> dict[str, list[dict]]:
    """The rows that `python data/NAME.py --out OUT flags` writes, as they come back through common/data.py."""
    monkeypatch.setattr(sys, "argv", [module.__file__, "--out", str(out), *map(str, flags)])
    module.main()
    written = {}
    for split in [split for split in ("train", "test") if (out / f"{split}.parquet").exists()]:
        path = out / f"{split}.parquet"
        written[split] = pq.read_table(path).to_pylist()
        assert pq.read_schema(path).names == COLUMNS
        prompts = load_prompts([str(path)], tokenizer(), DataConfig())
        assert [prompt.messages for prompt in prompts] == [row["prompt"] for row in written[split]]
        assert [prompt.ground_truth for prompt in prompts] == [row["reward_model"]["ground_truth"]
                                                              for row in written[split]]
    return written


def truths(rows: list[dict]) -> list:
    return [row["reward_model"]["ground_truth"] for row in rows]


def test_gsm8k(tmp_path, monkeypatch):
    train = [
        {"question": "Ann has 3 bags of 400 nuts. How many nuts?",
         "answer": "Ann has 3*400=<<3*400=1200>>1200 nuts.\n#### 1,200"},
        {"question": "It was 4 degrees and fell by 7. What now?", "answer": "4-7=<<4-7=-3>>-3\n#### -3"},
    ]
    card(tmp_path / "hub", {"main": {"train": "main/train-*", "test": "main/test-*"}})
    parquet(tmp_path / "hub/main/train-00000-of-00001.parquet", train)
    parquet(tmp_path / "hub/main/test-00000-of-00001.parquet", train[1:])
    rows = convert(gsm8k, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    assert truths(rows["train"]) == ["1200", "-3"] and truths(rows["test"]) == ["-3"]
    first = rows["train"][0]
    assert first["data_source"] == "openai/gsm8k" and first["ability"] == "math"
    assert first["prompt"][0]["content"].startswith(train[0]["question"]) and "####" in first["prompt"][0]["content"]
    assert first["extra_info"] == {"split": "train", "index": 0, **train[0]}
    with pytest.raises(ValueError, match="train row 0: the answer 'none' has no number"):
        list(gsm8k.rows([{"question": "?", "answer": "none"}], "train"))


def test_hendrycks_math(tmp_path, monkeypatch):
    solutions = {
        r"so $x=\boxed{\frac{1}{2}}$.": r"\frac{1}{2}",
        r"First \boxed{1}, no: $\boxed{\left\{ 1,2 \right\}}$": r"\left\{ 1,2 \right\}",
        r"Hence the answer is $\boxed 7$.": "7",
        r"It is \fbox{D}.": "D",
        r"the set $\boxed{\{x : x > \sqrt{2}\}}$": r"\{x : x > \sqrt{2}\}",
        r"two cases, $\boxed{\left\{ a, b \right.}$": r"\left\{ a, b \right.",
    }
    source = [{"problem": f"Problem {i}: $x^2$?", "level": "Level 3", "type": "Algebra", "solution": solution}
              for i, solution in enumerate(solutions)]
    parquet(tmp_path / "hub/data/train-00000-of-00001.parquet", source)
    parquet(tmp_path / "hub/data/test-00000-of-00001.parquet", source[:1])
    rows = convert(hendrycks_math, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    assert truths(rows["train"]) == list(solutions.values())
    assert {row["data_source"] for row in rows["train"]} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert rows["train"][1]["extra_info"] == {"split": "train", "index": 1, "level": "Level 3", "type": "Algebra"}
    assert "\\boxed{}" in rows["train"][0]["prompt"][0]["content"]
    for unboxed in ("no answer", r"\boxed{ never closed", r"\boxed{}"):
        with pytest.raises(ValueError, match=r"test row 0: .* has no boxed answer"):
            list(hendrycks_math.rows([source[0] | {"solution": unboxed}], "test"))


def verl_row(problem: str, answer: str, index: str) -> dict:
    """As BytedTsinghua-SIA publishes them."""
    content = f"Solve this. The last line must be of the form Answer: $Answer.\n\n{problem}\n\nRemember the form."
    return {"data_source": "math_dapo", "prompt": [{"content": content, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": index}}


def test_dapo_math_keeps_each_problem_once_and_unchanged(tmp_path, monkeypatch, capsys):
    problems = [verl_row(f"What is {i} + 1?", str(i + 1), f"9a{i}b-77") for i in range(3)]
    parquet(tmp_path / "train/data/dapo-math-17k.parquet", problems * 100)
    parquet(tmp_path / "test/data/aime-2024.parquet", problems[:1] * 32)
    rows = convert(dapo_math, monkeypatch, tmp_path / "out", "--source", tmp_path / "train",
                   "--test-source", tmp_path / "test")
    assert rows == {"train": problems, "test": problems[:1]}
    assert "297 repeated rows left out" in capsys.readouterr().out


def test_aime(tmp_path, monkeypatch):
    parquet(tmp_path / "2024/data/train-00000-of-00001.parquet", [
        {"id": 60, "problem": "Find $n$.", "solution": "It is 025.", "answer": "025", "url": "u", "year": "2024"}])
    card(tmp_path / "2025", {f"AIME2025-{paper}": {"test": f"aime2025-{paper}.jsonl"} for paper in ("I", "II")})
    json_lines(tmp_path / "2025/aime2025-I.jsonl", [{"question": "Find $m$.", "answer": "70"},
                                                    {"question": "An angle?", "answer": r"336^\circ"}])
    json_lines(tmp_path / "2025/aime2025-II.jsonl", [{"question": "Find $k$.", "answer": "468"}])
    rows = convert(aime, monkeypatch, tmp_path / "out", "--source", tmp_path / "2024", "--test-source",
                   tmp_path / "2025")
    assert truths(rows["train"]) == ["25"] and truths(rows["test"]) == ["70", "336", "468"]
    assert [row["data_source"] for row in rows["train"] + rows["test"]] == ["aime2024"] + 3 * ["aime2025"]
    other = [{"ID": "2024-II-4", "Problem": "Let $x$.", "Solution": "s", "Answer": 33}]  # Maxwell-Jia/AIME_2024
    assert truths(list(aime.rows(other, 2024, "train"))) == ["33"]
    for answer in ("1000", "x", ""):
        with pytest.raises(ValueError, match="is no integer from 0 to 999"):
            list(aime.rows([{"problem": "p", "answer": answer}], 2024, "train"))


def test_aime_of_other_copies(tmp_path, monkeypatch):
    """Without the two papers as configurations, and with splits of other names."""
    row = {"problem": "Find $n$.", "answer": "25"}
    parquet(tmp_path / "2024/data/test-00000-of-00001.parquet", [row])
    parquet(tmp_path / "2025/data/train-00000-of-00001.parquet", [row, row])
    rows = convert(aime, monkeypatch, tmp_path / "out", "--source", tmp_path / "2024", "--split", "test",
                   "--test-source", tmp_path / "2025", "--test-split", "train")
    assert truths(rows["train"]) == ["25"] and truths(rows["test"]) == ["25", "25"]
    assert [row["data_source"] for row in rows["test"]] == ["aime2025", "aime2025"]


def test_apps(tmp_path, monkeypatch, capsys):
    def row(i, cases, starter=""):
        return {"id": i, "question": f"Problem {i}.\n", "solutions": '["print(1)"]', "input_output": cases,
                "difficulty": "interview", "url": "https://x", "starter_code": starter}

    stdin = '{"inputs": ["3\\n1 2 3\\n"], "outputs": ["6\\n"]}'
    call = '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[' + "9" * 5000 + "]]}"
    train = [row(0, stdin), row(1, call, "def add(a, b):\n    pass"), row(2, ""),
             row(3, '{"inputs": [], "outputs": []}'), row(4, '{"inputs": ["1"], "outputs": []}')]
    json_lines(tmp_path / "hub/train.jsonl", train)
    json_lines(tmp_path / "hub/test.jsonl", train[:1])
    (tmp_path / "hub/apps.py").write_text("raise SystemExit('a loading script of the hub must not run')")
    rows = convert(apps, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    assert truths(rows["train"]) == [stdin, call] and truths(rows["test"]) == [stdin]
    program, function = (row["prompt"][0]["content"] for row in rows["train"])
    assert program.startswith("Problem 0.") and "standard input" in program
    assert "function add" in function and "def add(a, b):" in function and "standard input" not in function
    assert [row["extra_info"]["index"] for row in rows["train"]] == [0, 1]
    assert rows["train"][0]["data_source"] == "apps"
    assert "3 train problems without test cases left out" in capsys.readouterr().out


def test_mbpp(tmp_path, monkeypatch):
    row = {"task_id": 602, "text": "Write a function to add.", "code": "def add(a, b): return a + b",
           "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == K"], "test_setup_code": "K = 0",
           "challenge_test_list": ["assert add(-1, 1) == 0"]}
    card(tmp_path / "hub", {"full": {"train": "full/train-*", "test": "full/test-*"}})
    for split in ("train", "test"):
        parquet(tmp_path / f"hub/full/{split}-00000-of-00001.parquet", [row])
    rows = convert(mbpp, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    cases = json.loads(truths(rows["train"])[0])["assert_case"]
    assert len(cases) == 3
    for case in cases:
        exec(row["code"] + "\n" + case, {})
    with pytest.raises(AssertionError):
        exec("def add(a, b): return a * b\n" + cases[0], {})
    content = rows["train"][0]["prompt"][0]["content"]
    assert "assert add(1, 2) == 3" in content and "add(-1" not in content  # the other cases are not shown


def test_math500(tmp_path, monkeypatch):
    row = {"problem": "What is half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}",
           "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json"}
    json_lines(tmp_path / "hub/test.jsonl", [row])
    card(tmp_path / "hub", {"default": {"test": "test.jsonl"}})
    rows = convert(math500, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    assert truths(rows["test"]) == [row["answer"]] and rows.keys() == {"test"}
    found = rows["test"][0]
    assert found["prompt"][0]["content"].startswith(row["problem"]) and r"\boxed{}" in found["prompt"][0]["content"]
    assert found["extra_info"]["level"] == "1" and found["extra_info"]["unique_id"] == row["unique_id"]
    assert rewards.find(found["data_source"])(found["data_source"], r"So \boxed{\dfrac12}.", row["answer"])["acc"]
    with pytest.raises(ValueError, match="row 0 has no answer"):
        next(math500.rows([row | {"answer": ""}]))


def test_amc(tmp_path, monkeypatch):
    """Both sources: a number with ".0", and a text."""
    parquet(tmp_path / "hub/data/train-00000-of-00001.parquet", [
        {"id": 0, "problem": "What is 140 + 2?", "answer": 142.0, "url": "https://x"}])
    card(tmp_path / "hub", {"default": {"train": "data/train-*"}})
    rows = convert(amc, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")
    assert truths(rows["test"]) == ["142"] and rows["test"][0]["data_source"] == "amc"
    parquet(tmp_path / "amc23/data/test-00000-of-00001.parquet", [
        {"id": 0, "question": "What is 3 times 9?", "answer": "27.0", "url": "https://x"},
        {"id": 1, "question": "What is half of 5?", "answer": "2.5", "url": "https://x"}])
    card(tmp_path / "amc23", {"default": {"test": "data/test-*"}})
    rows = convert(amc, monkeypatch, tmp_path / "b", "--source", tmp_path / "amc23", "--split", "test")
    assert truths(rows["test"]) == ["27", "2.5"]
    assert rewards.find("amc")("amc", "It is so.\nAnswer: 27", "27")["acc"]
    with pytest.raises(ValueError, match="AMC row 0: the answer 'x' is no number"):
        next(amc.rows([{"question": "?", "answer": "x"}]))


def test_gpqa(tmp_path, monkeypatch):
    """The letter is that of the correct answer, at every place for some question; columns as in the hub's CSV."""
    source = [{"Record ID": f"rec{i}", "Question": f" Question {i}? ", "Correct Answer": f"right {i}\n",
               **{f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}, "Subdomain": "Genetics",
               "High-level domain": "Biology"} for i in range(40)]
    names = ",".join(f'"{name}"' for name in source[0])
    lines = [",".join(f'"{value}"' for value in row.values()) for row in source]
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/gpqa_diamond.csv").write_text("\n".join([names, *lines, ""]))
    card(tmp_path / "hub", {"gpqa_diamond": {"train": "gpqa_diamond.csv"}})
    rows = convert(gpqa, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")["test"]
    for i, row in enumerate(rows):
        content = row["prompt"][0]["content"]
        assert content.startswith(f"Question {i}?\n\nA) ") and f"\n{truths([row])[0]}) right {i}\n" in content
        assert content.count("wrong") == 3 and row["data_source"] == "gpqa_diamond"
    assert set(truths(rows)) == set("ABCD")
    other = convert(gpqa, monkeypatch, tmp_path / "b", "--source", tmp_path / "hub", "--seed", "1")["test"]
    assert truths(other) != truths(rows)


PLUS = """import numpy as np


def assertion(out, exp, atol):
    if not out == exp:
        assert atol != 0 and np.allclose(out, exp, rtol=1e-07, atol=atol)


"""


@pytest.mark.sweep
def test_humaneval_plus_and_mbpp_plus(tmp_path, monkeypatch):
    """The reward runs the tests: a right program scores 1, a wrong one 0."""
    check = """def check(candidate):
    for args, expected in zip([[1, 2], [0.1, 0.2]], [3, 0.3]):
        assertion(candidate(*args), expected, 1e-6)
"""
    human = {"task_id": "HumanEval/0", "prompt": 'def add(a, b):\n    """Sum."""\n', "canonical_solution":
             "    return a + b\n", "entry_point": "add", "test": PLUS + check}
    parquet(tmp_path / "human/data/test-00000-of-00001.parquet", [human])
    card(tmp_path / "human", {"default": {"test": "data/test-*"}})
    calls = "for args, expected in zip([[1, 2], [0.1, 0.2]], [3, 0.3]):\n    assertion(add(*args), expected, 1e-6)\n"
    basic = {"task_id": 7, "code": "def add(a, b): return a + b", "prompt": "Write a function to add.", "source_file":
             "x.ipynb", "test_imports": [], "test_list": ["assert add(1, 2) == 3"], "test": PLUS + calls}
    parquet(tmp_path / "basic/data/test-00000-of-00001.parquet", [basic])
    card(tmp_path / "basic", {"default": {"test": "data/test-*"}})
    for module, name, shown in ((humaneval_plus, "human", '"""Sum."""'), (mbpp_plus, "basic", "assert add(1, 2) == 3")):
        row, = convert(module, monkeypatch, tmp_path / f"{name}_out", "--source", tmp_path / name)["test"]
        assert shown in row["prompt"][0]["content"] and "allclose" not in row["prompt"][0]["content"]
        score = rewards.find(row["data_source"])
        for program, expected in (("def add(a, b):\n    return a + b", 1.0), ("def add(a, b):\n    return 3", 0.0)):
            answer = f"Here:\n```python\n{program}\n```"
            found = score(row["data_source"], answer, row["reward_model"]["ground_truth"], timeout_s=60.0, total_s=60.0)
            assert found["score"] == expected


def packed(content) -> str:
    """As the benchmark's authors pack the hidden test cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def cases_of(kind: str, *pairs: tuple[str, str]) -> str:
    return json.dumps([{"input": given, "output": wanted, "testtype": kind} for given, wanted in pairs])


def problem(number: int, public: str, private: str, date: str, name: str = "") -> dict:
    starter = f"class Solution:\n    def {name}(self, a: List[int]) -> int:\n        " if name else ""
    return {"question_title": f"t{number}", "question_content": f"Problem {number}.\n", "platform": "leetcode",
            "question_id": f"q{number}", "contest_id": "c", "contest_date": date, "starter_code": starter,
            "difficulty": "hard", "public_test_cases": public, "private_test_cases": private,
            "metadata": json.dumps({"func_name": name} if name else {})}


STDIN = cases_of("stdin", ("2 3\n", "5\n"))
ALL_CASES = {"max_cases": 1000, "continuous": False, "timeout_s": 30, "total_s": 300}


@pytest.mark.sweep
def test_livecodebench(tmp_path, monkeypatch, capsys):
    """The reward runs all cases: a right program scores 1, and one that is wrong in the last hidden case 0."""
    hidden = cases_of("stdin", *((f"{n} 1\n", f"{n + 1}\n") for n in range(11)))
    json_lines(tmp_path / "hub/test.jsonl", [problem(1, STDIN, STDIN, "2023-08-21T00:00:00")])
    json_lines(tmp_path / "hub/test2.jsonl", [
        problem(2, STDIN, packed(hidden), "2024-10-01T00:00:00"),
        problem(3, cases_of("functional", ("[1, 2]", "3")), packed(cases_of("functional", ("[5]", "5"))),
                "2024-11-02T00:00:00", "total"),
        problem(4, "[]", packed("[]"), "2024-11-03T00:00:00"),
    ])
    (tmp_path / "hub/code_generation_lite.py").write_text("raise SystemExit('a loading script must not run')")
    flags = ("--source", tmp_path / "hub", "--release")
    first, second = convert(livecodebench, monkeypatch, tmp_path / "v2", *flags, "v2")["test"]
    assert "1 problems without a test case left out" in capsys.readouterr().out
    truth = json.loads(first["reward_model"]["ground_truth"])
    assert truth == {"inputs": ["2 3\n", *(f"{n} 1\n" for n in range(11))],
                     "outputs": ["5\n", *(f"{n + 1}\n" for n in range(11))]}
    assert json.loads(second["reward_model"]["ground_truth"])["fn_name"] == "total"
    asked = [row["prompt"][0]["content"] for row in (first, second)]
    assert "standard input" in asked[0] and "Problem 2." in asked[0] and "5" not in asked[0]
    assert "def total(self" in asked[1] and "standard input" not in asked[1]
    assert first["extra_info"] == {"split": "test", "index": 0, "question_id": "q2", "difficulty": "hard",
                                   "date": "2024-10-01", "platform": "leetcode"}
    score = rewards.find("livecodebench")
    method = "class Solution:\n    def total(self, a: List[int]) -> int:\n        return "
    for row, program, expected in (
        (first, "print(sum(map(int, input().split())))", 1.0),
        (first, "a, b = map(int, input().split())\nprint(a + b if a < 10 else 0)", 0.0),
        (second, method + "sum(a)", 1.0), (second, method + "3", 0.0),
    ):
        answer, truth = f"So:\n```python\n{program}\n```", row["reward_model"]["ground_truth"]
        assert score("livecodebench", answer, truth, **ALL_CASES)["score"] == expected, program

    whole = convert(livecodebench, monkeypatch, tmp_path / "all", *flags, "release_v2", "--to-date", "2024-10-31")
    assert [row["extra_info"]["question_id"] for row in whole["test"]] == ["q1", "q2"]
    assert "2 problems of another date left out" in capsys.readouterr().out
    assert livecodebench.files_of("release_v3") == ["test.jsonl", "test2.jsonl", "test3.jsonl"]
    for release in ("v7", "release_v0", "6", "v6 "):
        with pytest.raises(ValueError, match="must be v1 to v6, or release_v1 to release_v6"):
            livecodebench.files_of(release)


class Harm:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize(("private", "rule"), [
    (packed(Harm()), "its pickle has the opcode STACK_GLOBAL"), (packed(["a"]), "has the opcode EMPTY_LIST"),
    (packed(("[]", "{}")), "has the opcode TUPLE2"), (packed(b"[]"), "has the opcode SHORT_BINBYTES"),
    (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "has 0 texts"),
    (base64.b64encode(zlib.compress(b"\x80\x04")).decode(), "pickle exhausted"),
    (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-6]).decode(), "cut off, or more than"),
    (packed("[" + " " * 5000 + "]"), "cut off, or more than"),
    ("no base64", "neither JSON nor compressed"), (packed("{}"), "the rule is a list of"),
    (packed('[{"input": "1"}]'), "the rule is a list of"),
    (packed(cases_of("functional", ("[1]", "1"))), "kinds of its test cases do not fit func_name None"),
])
def test_livecodebench_unpickles_nothing(private, rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(livecodebench, "MAX_BYTES", 4096)
    day = livecodebench.date
    with pytest.raises(ValueError, match=rf"row 0 \(q1\).*({rule})"):
        list(livecodebench.rows([problem(1, STDIN, private, "2024-01-01")], day.min, day.max))
    assert not (tmp_path / "unpickled").exists()
    pickle.loads(pickle.dumps(Harm()))                                  # it would have been
    assert (tmp_path / "unpickled").exists()


def test_livecodebench_reads_long_texts():
    """Of every pickle protocol since text has opcodes, as long as those that pickle writes outside a frame."""
    text = cases_of("stdin", ("ä\n" * 100_000, "\u2028"))
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        assert livecodebench.pickled_text(pickle.dumps(text, protocol)) == text


def test_ifeval(tmp_path, monkeypatch):
    """As in the source's parquet, where each instruction has the arguments of all."""
    none = {"num_words": None, "relation": None, "keywords": None}
    row = {"key": 1000, "prompt": "Write 3 words with 'tea'.", "instruction_id_list": [
        "length_constraints:number_words", "keywords:existence"],
        "kwargs": [none | {"num_words": 3, "relation": "at least"}, none | {"keywords": ["tea"]}]}
    parquet(tmp_path / "hub/data/train-00000-of-00001.parquet", [row])
    card(tmp_path / "hub", {"default": {"train": "data/train-*"}})
    found, = convert(ifeval, monkeypatch, tmp_path / "out", "--source", tmp_path / "hub")["test"]
    assert found["prompt"] == [{"role": "user", "content": row["prompt"]}] and found["data_source"] == "ifeval"
    assert json.loads(found["reward_model"]["ground_truth"]) == row | {
        "kwargs": [{"num_words": 3, "relation": "at least"}, {"keywords": ["tea"]}]}
    for kwargs in ([], [{}, {}]):
        with pytest.raises(ValueError, match=r"row 0 has 1 instructions and arguments of [02]"):
            next(ifeval.rows([row | {"instruction_id_list": ["a"], "kwargs": kwargs}]))


def test_countdown_problems_have_solutions_and_are_distinct(tmp_path, monkeypatch):
    flags = ("--num-train", "400", "--num-test", "40")
    rows = convert(countdown, monkeypatch, tmp_path / "a", *flags)
    assert {split: len(items) for split, items in rows.items()} == {"train": 400, "test": 40}
    seen, sizes, operators = set(), set(), set()
    for row in rows["train"] + rows["test"]:
        truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["solution"]
        assert eval(solution, {"__builtins__": {}}) == truth["target"]
        assert sorted(map(int, re.findall(r"\d+", solution))) == sorted(truth["numbers"])
        assert 10 <= truth["target"] <= 999 and all(1 <= number <= 99 for number in truth["numbers"])
        content = row["prompt"][0]["content"]
        assert str(truth["numbers"]) in content and f"equals {truth['target']}." in content
        seen.add((truth["target"], *sorted(truth["numbers"])))
        sizes.add(len(truth["numbers"]))
        operators |= set(solution) & set("+-*/")
    assert len(seen) == 440 and sizes == {3, 4} and operators == set("+-*/")
    many = [truth for _, row in countdown.make_rows(20_000, 500, 0) for truth in truths([row])]
    assert len(many) == len({(truth["target"], *sorted(truth["numbers"])) for truth in many}) == 20_500
    assert rows["train"][0]["data_source"] == "countdown"
    again = convert(countdown, monkeypatch, tmp_path / "b", *flags)
    other = convert(countdown, monkeypatch, tmp_path / "c", *flags, "--seed", "1")
    assert again == rows and truths(other["train"]) != truths(rows["train"])
    with pytest.raises(ValueError, match="--num-train 0 and --num-test 512 must be at least 1"):
        convert(countdown, monkeypatch, tmp_path / "d", "--num-train", "0")


def test_reasoning_gym_rows_hold_the_whole_entry():
    """On an entry as the library makes them: the answer may be None, as for its task graph_color."""
    entry = {"question": "Color it.\n", "answer": None, "metadata": {"source_dataset": "graph_color", "k": [1, 2]}}
    row = next(iter(reasoning_gym_task.rows([entry], "graph_color", "test")))
    assert row["data_source"] == "reasoning_gym/graph_color"
    assert json.loads(row["reward_model"]["ground_truth"]) == entry
    assert row["extra_info"] == {"split": "test", "index": 0, "task": "graph_color"}
    assert row["prompt"][0]["content"].startswith("Color it.\n\n")


def test_reasoning_gym_makes_any_task_and_its_scorer_takes_the_rows(tmp_path, monkeypatch):
    library = pytest.importorskip("reasoning_gym", reason="optional: pip install reasoning-gym==0.1.25")
    for task in ("chain_sum", "graph_color", "knights_knaves"):
        rows = convert(reasoning_gym_task, monkeypatch, tmp_path / task, "--task", task, "--num-train", "20",
                       "--num-test", "5")
        assert len(rows["test"]) == 5 and 10 < len(rows["train"]) <= 20
        questions = [row["prompt"][0]["content"] for row in rows["train"] + rows["test"]]
        assert len(set(questions)) == len(questions)
        scorer = library.get_score_answer_fn(task)
        entry = json.loads(truths(rows["train"])[0])
        assert entry["metadata"]["source_dataset"] == task
        assert scorer(entry["answer"], entry) == (0.0 if entry["answer"] is None else 1.0)
        assert scorer("nonsense", entry) < 0.5
    narrow = convert(reasoning_gym_task, monkeypatch, tmp_path / "narrow", "--task", "chain_sum", "--num-train", "9",
                     "--num-test", "3", "--config", '{"min_terms": 2, "max_terms": 2}')
    assert all(json.loads(truth)["metadata"]["num_terms"] == 2 for truth in truths(narrow["train"]))
    for flags, rule in [(("--task", "chess"), "--task chess is unknown; the library has ab, acre"),
                        (("--task", "chain_sum", "--config", "[]"), r"--config \[\] must be a JSON object"),
                        (("--task", "arc_agi"), "--task arc_agi: its scorer does not take entries that were JSON"),
                        (("--task", "chain_sum", "--num-test", "0"), "--num-test 0 must be at least 1")]:
        with pytest.raises(ValueError, match=rule):
            convert(reasoning_gym_task, monkeypatch, tmp_path / "bad", *flags)


def test_a_setting_that_a_task_of_reasoning_gym_has_not(monkeypatch):
    """The library's tasks are dataclasses whose checks are assertions, as this one's."""
    @dataclass
    class Config:
        size: int
        seed: int
        min_terms: int = 2

        def __post_init__(self):
            assert self.min_terms > 0, "min_terms must be positive"

    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS, factory.create_dataset = {"chain_sum": Config}, lambda task, **config: Config(**config)
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    for config, rule in (({"min_term": 3}, "min_term"), ({"size": 3}, "size"), ({"min_terms": 0}, "must be positive")):
        with pytest.raises(ValueError, match=rf"--config .*: the task chain_sum refuses it: .*{rule}"):
            reasoning_gym_task.make_entries("chain_sum", 5, 0, config)


# ---- as users run them ----

def script(name: str, *flags: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "data" / name), *map(str, flags)], cwd=cwd, text=True,
                          capture_output=True, env=os.environ | env, timeout=120)


@pytest.mark.parametrize(("name", "source"), [("gsm8k.py", "openai/gsm8k"), ("apps.py", "codeparrot/apps")])
def test_without_a_network_the_script_says_so(tmp_path, name, source):
    done = script(name, "--out", tmp_path / "out", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {source} could not be loaded: no network, or no such data set")
    assert f"hf download --repo-type dataset {source}" in done.stderr and "give --source DIR" in done.stderr
    assert not list(tmp_path.glob("out/*"))


def test_a_data_set_that_the_hub_does_not_have_is_one_line(tmp_path):
    """A hub that answers as the real one does: its error has several lines."""
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        done = script("apps.py", "--source", "nobody/typo", "--out", tmp_path / "out", cwd=tmp_path, HF_HUB_OFFLINE="0",
                      HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
        hub.shutdown()
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: nobody/typo could not be loaded: no network, or no such data set (")


def test_a_mistake_is_a_message_that_the_terminal_does_not_obey():
    """Of a ValueError, which may quote what was downloaded, and of a file that cannot be read or written."""
    for error, said in ((ValueError("row (\x1b]0;title\x07): \u202e\nsee"), "row (\\x1b]0;title\\x07): \\u202e\nsee"),
                        (PermissionError(13, "Permission denied", "out"), "[Errno 13] Permission denied: 'out'")):
        def main(error=error):
            raise error

        with pytest.raises(SystemExit) as end:
            verl_rows.run(main)
        assert end.value.code == f"error: {said}"


def test_without_the_datasets_library_the_script_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # what an import of a missing package raises
    with pytest.raises(ValueError, match="package datasets is not installed; run `pip install datasets=="):
        convert(gsm8k, monkeypatch, tmp_path)


def test_no_script_replaces_a_module_that_something_imports():
    """`python data/NAME.py` puts data/ first on sys.path."""
    names = {path.stem for path in (ROOT / "data").glob("*.py")}
    assert {"gsm8k", "hendrycks_math", "verl_rows"} <= names
    taken = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "common", "rewards"}
    assert not names & (taken | {"datasets", "reasoning_gym"})


def test_two_writers_of_one_file(tmp_path, capsys):
    """The second waits for the first, whatever a killed one has left, and finds its file complete."""
    path, begun, goes_on = tmp_path / "rows.parquet", threading.Event(), threading.Event()
    (tmp_path / ".rows.parquet.tmp").write_bytes(b"PAR1half")

    def rows():
        yield from ({"number": number} for number in range(3000))
        begun.set()
        assert goes_on.wait(60)

    first = threading.Thread(target=verl_rows.write, args=(rows(), path))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=verl_rows.write, args=(({"number": n} for n in range(3000)), path))
    second.start()
    second.join(0.2)
    assert not path.exists() and second.is_alive()
    goes_on.set()
    first.join()
    second.join()
    assert pq.read_table(path).column("number").to_pylist() == list(range(3000))
    assert capsys.readouterr().out.splitlines() == [
        f"data: {path} {how}, 3000 problems" for how in ("written", "is complete")
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_was_written_here_is_replaced(tmp_path):
    """A file of this function gives way to other rows; any other one stays as it is, unless it has these very rows."""
    path, own = tmp_path / "rows.parquet", [{"number": number} for number in range(3000)]

    def other_rows():
        return ({"number": -number} for number in range(3000))

    verl_rows.write(own, path)
    written, table = path.read_bytes(), pq.read_table(path)
    mark = {"plainrl": pq.read_metadata(path).metadata[b"plainrl"]}
    verl_rows.write(other_rows(), path)
    assert pq.read_table(path).column("number").to_pylist()[-1] == -2999

    def pandas() -> None:
        table.to_pandas().to_parquet(path)

    def link() -> None:
        (tmp_path / "elsewhere").write_bytes(written)
        path.symlink_to(tmp_path / "elsewhere")

    others = [
        lambda: path.write_bytes(b""), lambda: path.write_bytes(b"mine"), lambda: path.write_text("number\n1\n2\n"),
        pandas, link, path.mkdir, lambda: path.symlink_to(tmp_path / "nothing"),
        lambda: pq.write_table(table.slice(0, 10).replace_schema_metadata(mark), path),  # chosen rows
        lambda: pq.write_table(pa.table({"number": [1], "mine": [2]}), path),
        lambda: pq.write_table(table.replace_schema_metadata(None), path),              # of an earlier version
        lambda: path.write_bytes(written[:2000] + b"x" + written[2001:]), lambda: path.write_bytes(written[:-100]),
    ]
    for make in others:
        path.unlink() if not path.is_dir() else path.rmdir()
        make()
        before = None if path.is_dir() or not path.exists() else path.read_bytes()
        with pytest.raises(ValueError, match=r"rows.parquet would be replaced, .*: move it away, or name another"):
            verl_rows.write(other_rows(), path)
        assert before is None or path.read_bytes() == before
        assert {file.name for file in tmp_path.iterdir()} <= {"rows.parquet", "elsewhere"}
    path.unlink()
    pq.write_table(table.replace_schema_metadata(None), path, row_group_size=1024)      # of an earlier version
    before = path.read_bytes()
    verl_rows.write(own, path)
    assert path.read_bytes() == before
    (tmp_path / ".rows.parquet.tmp").write_text("mine")
    with pytest.raises(ValueError, match=r".rows.parquet.tmp is in the way"):
        verl_rows.write(own, path)
    assert (tmp_path / ".rows.parquet.tmp").read_text() == "mine"


def test_a_corpus_of_others_is_not_replaced(tmp_path, monkeypatch):
    """data/search.py's own one is, also of other flags."""
    corpus = tmp_path / "corpus.jsonl"

    def make(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["search.py", "--out", str(tmp_path), *flags])
        search.main()

    make("--num-people", "50")
    before = corpus.read_text()
    make("--seed", "1")
    assert len(corpus.read_text().splitlines()) == 400 > len(before.splitlines()) == 150
    own = json.loads(before.splitlines()[0])
    for row in ({"title": "mine", "text": "mine"}, own | {"text": own["text"] + " And more."}, own | {"source": "mine"},
                own | {"title": "mine"}, {"title": own["title"]}, [], "mine", 1):
        corpus.write_text(before + json.dumps(row) + "\n")
        rows = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        with pytest.raises(ValueError, match=r"corpus.jsonl would be replaced, and is no corpus of this script"):
            make()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == rows


def test_ctrl_c_ends_a_script_without_a_traceback(tmp_path):
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'data')!r}); import verl_rows, os, signal, time\n" \
             "signal.signal(signal.SIGINT, signal.default_int_handler)\n" \
             "def main():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(20)\nverl_rows.run(main)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_distinct_and_write(tmp_path, capsys, monkeypatch):
    rng = random.Random(0)
    rows = [verl_rows.make_row("s", f"question {rng.random()}", "1", "math", "train", i) for i in range(3000)]
    path = tmp_path / "deep" / "train.parquet"
    verl_rows.write(iter(rows), path)
    assert pq.read_table(path).to_pylist() == rows
    assert pq.ParquetFile(path).num_row_groups == 3
    before = path.stat().st_mtime_ns
    verl_rows.write(rows, path)
    assert path.stat().st_mtime_ns == before and "is complete, 3000 problems" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no rows for"):
        verl_rows.write([], tmp_path / "none.parquet")
    monkeypatch.setattr(os, "access", lambda *_: False)                 # another user's; root may write all
    with pytest.raises(ValueError, match="cannot be written by this user: name another folder, --out"):
        verl_rows.write(rows, path)
    assert [file.name for file in path.parent.iterdir()] == ["train.parquet"]
