"""The quickstart's word problems: right, disjoint, repeatable, and repaired when a file is damaged."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.conftest import ROOT


def solve(question: str) -> int:
    """The answer from the text alone: the wording decides the operation."""
    a, b = map(int, re.findall(r"\d+", question))
    if "boxes" in question:
        return a * b
    return a - b if "left" in question else a + b


def generate(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(ROOT / "data" / "word_problems.py"), "--out", str(folder), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_word_problems_are_right_disjoint_and_repeatable(tmp_path, smollm):
    assert "written" in generate(tmp_path / "a")
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert {split: len(items) for split, items in rows.items()} == {"train": 2048, "test": 96}
    questions = Counter()
    for split, items in rows.items():
        for index, item in enumerate(items):
            assert list(item) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert item["data_source"] == "word_problems"
            assert item["extra_info"] == {"split": split, "index": index}
            example, solution, question = (message["content"] for message in item["prompt"])
            assert [message["role"] for message in item["prompt"]] == ["user", "assistant", "user"]
            assert int(item["reward_model"]["ground_truth"]) == solve(question) > 0
            working, answer = solution.split("\n")
            assert answer == f"#### {solve(example)}"
            a, operation, b, equals, result = working.split()
            assert equals == "="
            assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
            assert [int(a), int(b)] == list(map(int, re.findall(r"\d+", example)))
            questions[question] += 1
    assert max(questions.values()) == 1  # so no test problem is in train
    assert not questions.keys() & {item["prompt"][0]["content"] for items in rows.values() for item in items}
    share = Counter(question.split()[-1] for question in questions)  # now? left? have? together?
    assert set(share) == {"now?", "left?", "have?", "together?"}
    assert min(share.values()) > 0.15 * len(questions)
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    prompts = load_prompts([str(tmp_path / "a" / "train.parquet")], tokenizer, DataConfig(max_prompt_length=128))
    assert len(prompts) == 2048

    generate(tmp_path / "b")
    generate(tmp_path / "c", "--seed", "1")
    same, other = [(tmp_path / name / "train.parquet").read_bytes() for name in "bc"]
    assert (tmp_path / "a" / "train.parquet").read_bytes() == same != other


def test_word_problems_leave_a_complete_file_and_replace_their_own_alone(tmp_path):
    flags = ("--num-train", "20", "--num-test", "5")
    generate(tmp_path, *flags)
    train = tmp_path / "train.parquet"
    before, modified = train.read_bytes(), train.stat().st_mtime_ns
    assert generate(tmp_path, *flags).count("is complete") == 2
    assert train.stat().st_mtime_ns == modified
    assert "train.parquet written" in generate(tmp_path, *flags, "--seed", "1")
    assert train.read_bytes() != before
    train.write_bytes(before[:100])
    with pytest.raises(subprocess.CalledProcessError) as failed:
        generate(tmp_path, *flags)
    assert "train.parquet would be replaced" in failed.value.stderr and train.read_bytes() == before[:100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
