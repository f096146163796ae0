"""data/pairs_from_responses.py: evaluate.py's responses become rows of dpo.py and rm.py."""

import random
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import rm
from tests.conftest import ROOT, VAL, launch

sys.path.append(str(ROOT / "data"))
import pairs_from_responses as pairs

SAMPLING = ["--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--rollout.max-response-length", "4",
            "--data.max-prompt-length", "200", "--reward.num-workers", "1", "--eval-n", "6",
            "--reward.function", str(ROOT / "tests/scripts/reward_by_length.py")]


@pytest.fixture(scope="module")
def evaluated(tiny_llama, tmp_path_factory) -> Path:
    """Eight prompts, of which one is a text and not messages; a response has score 1 if its length is odd, else 0."""
    folder = tmp_path_factory.mktemp("pairs")
    table = pq.read_table(VAL).slice(0, 8)
    pq.write_table(table, folder / "val.parquet")
    launch("evaluate.py", "--model", tiny_llama, "--val-data", folder / "val.parquet", *SAMPLING, "--run-dir",
           folder / "run", warm=True)
    return folder


def main(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["pairs_from_responses.py", *map(str, flags)])
    pairs.main()


def test_responses_of_an_evaluation_become_pairs(evaluated, tiny_llama, monkeypatch, capsys, tmp_path):
    """By the score that the reward gives the texts again; prompts in one split only; rm.py reads the rows."""
    flags = ("--responses", evaluated / "run", "--data", evaluated / "val.parquet", "--max-pairs", 3)
    main(monkeypatch, *flags, "--num-test", 2, "--out", tmp_path / "a")
    said = capsys.readouterr().out
    rows = {split: pq.read_table(tmp_path / f"a/{split}.parquet").to_pylist() for split in ("train", "test")}
    questions = [{row["prompt"][-1]["content"] for row in rows[split]} for split in ("train", "test")]
    assert len(questions[0]) >= 3 and len(questions[1]) == 2 and not questions[0] & questions[1]
    responses = pq.read_table(evaluated / "run/rollouts/val_000000_000000.parquet").to_pylist()
    sampled = {(row["prompt"], row["response"]) for row in responses}
    every = rows["train"] + rows["test"]
    known = [row["prompt"] for row in pq.read_table(evaluated / "val.parquet").to_pylist()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for row in every:
        assert row["prompt"] in known and len(row["chosen"]) % 2 == 1 and len(row["rejected"]) % 2 == 0
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert {(text, row["chosen"]), (text, row["rejected"])} <= sampled
        assert len(rm.parse(row, tokenizer, {})) == 2
    assert max(Counter(row["prompt"][-1]["content"] for row in every).values()) <= 3
    assert f"data: 56 responses to 8 prompts gave {len(every)} pairs; {8 - len(questions[0] | questions[1])}" in said
    main(monkeypatch, *flags, "--num-test", 2, "--out", tmp_path / "b")
    assert (tmp_path / "a/train.parquet").read_bytes() == (tmp_path / "b/train.parquet").read_bytes()
    with pytest.raises(ValueError, match=r"prompts have pairs; the rule is more than --num-test 8"):
        main(monkeypatch, *flags, "--num-test", 8, "--out", tmp_path / "c")
    with pytest.raises(ValueError, match="--max-pairs 0 must be at least 1"):
        main(monkeypatch, *flags, "--max-pairs", 0)
    with pytest.raises(ValueError, match="holds no rollouts/val_000000_"):
        main(monkeypatch, "--responses", tmp_path, "--data", evaluated / "val.parquet")


@pytest.mark.parametrize(("scores", "most", "number"), [
    ({"a": 1, "b": 0, "c": 0}, 4, 2), ({"a": 1, "b": 0, "c": 0}, 1, 1), ({"a": 1, "b": 1}, 4, 0), ({}, 4, 0),
    ({"a": 0.5, "b": 0.25, "c": 0}, 9, 3),                              # a > b > c: graded scores
    (dict.fromkeys("ABC", 1) | dict.fromkeys("def", 0), 3, 3),
    (dict.fromkeys("ABC", 1) | dict.fromkeys("def", 0), 9, 9),
])
def test_pairs_of_a_prompt(scores, most, number):
    found = pairs.pairs_of(scores, most, random.Random(0))
    assert len(found) == len(set(found)) == number
    assert all(scores[chosen] > scores[rejected] for chosen, rejected in found)
    if number == 3 and len(scores) == 6:                                # each of the six once
        assert {name for pair in found for name in pair} == scores.keys()


def test_what_gives_no_pair_is_counted(capsys):
    row = {"question": "q", "response": "right", "score": 1.0, "messages": None}
    rows = [row, row, row | {"score": 0.0}, row | {"response": "wrong", "score": 0.5}, row | {"response": " "},
            row | {"response": "lost", "score": None}, row | {"response": "lost", "score": float("nan")},
            row | {"question": "other"}, row | {"question": "alone"}]
    found = list(pairs.make_rows(rows, {"q": {"prompt": ["prompt"]}, "alone": {"prompt": ["x"]}}, 4, 0))
    assert found == [[{"prompt": ["prompt"], "chosen": "right", "rejected": "wrong"}]]     # the mean of 1, 1, 0: 2/3
    said = capsys.readouterr().out
    for part in ("9 responses to 2 prompts gave 1 pairs; 1 prompts have no two", "1 responses of prompts that --data",
                 "2 responses without a score", "1 responses empty", "2 responses that repeat another"):
        assert part in said


def test_the_question_is_that_of_an_evaluation_for_any_row():
    """A text as a prompt, keys that only some messages have (parquet fills them with None), numbers as ground truth."""
    from common.dataset.messages import parse_row
    from common.prompts import DataConfig
    from common.rollout import Sample
    from tools.evaluation import details_of, question_of

    for prompt, truth in (("What is 2?", "2"), ([{"role": "user", "content": "é", "name": None}], 2),
                          ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], {"a": [1.5]})):
        row = {"data_source": "d", "prompt": prompt, "reward_model": {"ground_truth": truth, "style": "rule"}}
        for extra in ({}, {"extra_info": None}, {"extra_info": {"index": 3, "seed": 1, "b": None, "a": {"x": [1.5]}}}):
            sample = Sample(0, 0, 0, parse_row(row | extra, DataConfig()))
            assert pairs.question_of(row | extra) == question_of(sample)
            assert pairs.details_of(row | extra) == details_of(sample)


def rows_of(*extras: dict, **others) -> list[dict]:
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "Play."}], "reward_model": {"ground_truth": ""}}
    return [row | {"extra_info": extra} | others for extra in extras]


def test_prompts_that_differ_in_extra_info_alone(tmp_path, monkeypatch, capsys):
    """Their responses are not mixed; in files of an earlier version they cannot be told apart."""
    rows = rows_of({"seed": 1, "index": 0}, {"seed": 2, "index": 1})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    scores = [(rows[0], "a", 1.0), (rows[1], "a", 0.0), (rows[0], "b", 0.0), (rows[1], "b", 1.0)]
    responses = [{"question": pairs.question_of(row), "details": pairs.details_of(row), "response": text,
                  "score": score, "messages": None} for row, text, score in scores]
    file = tmp_path / "run/rollouts/val_000000_000000.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(responses), file)
    flags = ("--responses", tmp_path / "run", "--data", tmp_path / "data.parquet", "--out", tmp_path / "out")
    main(monkeypatch, *flags)
    found = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert sorted((row["chosen"], row["rejected"]) for row in found) == [("a", "b"), ("b", "a")]
    pq.write_table(pa.Table.from_pylist(responses).drop_columns(["details"]), file)
    with pytest.raises(ValueError, match=r"is of an earlier version of evaluate\.py, which told no prompts apart"):
        main(monkeypatch, *flags)
    pq.write_table(pa.Table.from_pylist(responses[::2]).drop_columns(["details"]), file)
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "data.parquet")           # alone, its text identifies it
    (tmp_path / "out/test.parquet").touch()
    capsys.readouterr()
    main(monkeypatch, *flags)
    assert f"{tmp_path}/out/test.parquet stays, and is not of this start" in capsys.readouterr().out
    (row,) = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert (row["chosen"], row["rejected"]) == ("a", "b")


def test_pairs_have_the_images_of_their_prompt(tmp_path, monkeypatch):
    """Prompts that differ in their images alone are told apart as evaluate.py tells them."""
    from common.dataset.images import Images
    from common.dataset.messages import parse_row
    from common.prompts import DataConfig
    from common.rollout import Sample
    from tools.evaluation import details_of

    (tmp_path / "b.png").write_bytes(b"second")
    files = [{"bytes": b"first", "path": None}, {"bytes": None, "path": str(tmp_path / "b.png")}]
    rows = [*rows_of({}, images=[files[0]]), *rows_of({}, images=[files[1]]), *rows_of({"seed": 3}, images=[])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    for row, content in zip(rows, (b"first", b"second", b"")):
        prompt = parse_row(row, DataConfig())
        prompt.images = Images([content], "") if content else None
        assert pairs.details_of(row) == details_of(Sample(0, 0, 0, prompt))
    responses = [{"question": pairs.question_of(row), "details": pairs.details_of(row), "response": text,
                  "score": score, "messages": None}
                 for n, row in enumerate(rows) for text, score in ((f"good {n}", 1.0), (f"bad {n}", 0.0))]
    file = tmp_path / "run/rollouts/val_000000_000000.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(responses), file)
    main(monkeypatch, "--responses", tmp_path / "run", "--data", tmp_path / "data.parquet", "--out", tmp_path / "out")
    found = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert {row["chosen"]: row["images"] or [] for row in found} == {
        "good 0": [files[0]], "good 1": [files[1]], "good 2": []}


def test_files_that_are_not_there_or_of_something_else(tmp_path, monkeypatch):
    (tmp_path / "run/rollouts").mkdir(parents=True)
    pq.write_table(pa.table({"question": ["q"]}), tmp_path / "run/rollouts/val_000000_000000.parquet")
    pq.write_table(pa.table({"question": ["q"], "data_source": ["d"]}), tmp_path / "other.parquet")
    pq.write_table(pa.Table.from_pylist(rows_of({"seed": 1})), tmp_path / "data.parquet")
    for name, rule in (
            ("typo.parquet", "typo.parquet cannot be read as parquet: "), (".", "cannot be read as parquet: "),
            ("other.parquet", "other.parquet has no column prompt; it must be a file of evaluate.py's"),
            ("data.parquet", "val_000000_000000.parquet is no file of evaluate.py: it has no column messages")):
        with pytest.raises(ValueError, match=rule) as raised:
            main(monkeypatch, "--responses", tmp_path / "run", "--data", tmp_path / name)
        assert "\n" not in str(raised.value)
