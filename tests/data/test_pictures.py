"""data/shapes.py against a count of the pixels, and data/geo3k.py on a folder in its source's real layout."""

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.data.test_data_sets import card

sys.path.append(str(ROOT / "data"))
import geo3k

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info", "images"]
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


def generate(folder: Path, *flags: str) -> dict[str, list[dict]]:
    command = [sys.executable, "data/shapes.py", "--out", str(folder), "--num-train", "64", "--num-test", "16", *flags]
    subprocess.run(command, check=True, cwd=ROOT)
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def look(png: bytes) -> tuple[str, int]:
    """The colour that is not grey, and how many quarters of the picture have a centre of mass of their own."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    coloured = np.ptp(pixels, axis=2) > 60
    red, green, blue = pixels[coloured].mean(0)
    colour = "yellow" if min(red, green) > 150 else ["red", "green", "blue"][int(np.argmax([red, green, blue]))]
    height, width = coloured.shape
    quarters = [half for rows in (coloured[: height // 2], coloured[height // 2 :])
                for half in (rows[:, : width // 2], rows[:, width // 2 :])]
    return colour, sum(quarter.sum() > 60 for quarter in quarters)


@pytest.mark.parametrize("question", ["colour", "count"])
def test_shapes_are_what_the_answer_says(question, tmp_path):
    rows = generate(tmp_path / "a", "--question", question)
    pictures = [row["images"][0]["bytes"] for split in rows.values() for row in split]
    assert len(set(pictures)) == 80 and len({Image.open(io.BytesIO(png)).size for png in pictures}) > 5
    for row in rows["train"] + rows["test"]:
        assert list(row) == COLUMNS and row["prompt"][0]["content"].count("<image>") == len(row["images"]) == 1
        colour, count = look(row["images"][0]["bytes"])
        assert row["reward_model"]["ground_truth"] == (colour if question == "colour" else NUMBERS[count])
    answers = Counter(row["reward_model"]["ground_truth"] for row in rows["test"])
    assert sorted(answers.values()) == [4, 4, 4, 4]
    if question == "colour":
        assert generate(tmp_path / "b") == rows


def test_geo3k(tmp_path, monkeypatch):
    png = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 9, 9)).save(png, "PNG")
    text = datasets.Value("string")
    features = datasets.Features({"images": datasets.List(datasets.Image()), "problem": text, "answer": text})
    row = {"images": [{"bytes": png.getvalue(), "path": "a.png"}], "problem": "<image>Find x.", "answer": "5"}
    hub = tmp_path / "hub"
    card(hub, {"default": {"train": "data/train-*", "test": "data/test-*"}})
    (hub / "data").mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_list([row], features=features).to_parquet(hub / f"data/{split}-00000-of-00001.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["geo3k.py", "--out", str(tmp_path / "out"), "--source", str(hub)])
    geo3k.main()
    (found,) = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert list(found) == COLUMNS and found["data_source"] == "hiyouga/geometry3k"
    assert found["prompt"][0]["content"].startswith("<image>Find x.\n") and found["reward_model"]["ground_truth"] == "5"
    assert np.asarray(Image.open(io.BytesIO(found["images"][0]["bytes"]))).tolist() == [[[9, 9, 9]] * 40] * 30
    with pytest.raises(ValueError, match=r"train row 0: the problem 'x' must have as many <image> as pictures, 1"):
        list(geo3k.rows([row | {"problem": "x"}], "train"))
