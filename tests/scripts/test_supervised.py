"""sft.py: the loss against transformers in float64, the same for any layout, exact resume, what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.prompts import PromptSampler
from tests.conftest import launch, launch_all

ROWS = [
    {"messages": [
        {"role": "user", "content": f"Count to {n}"}, {"role": "assistant", "content": " ".join(map(str, range(n)))},
        {"role": "user", "content": "Again"}, {"role": "assistant", "content": "no " * (n % 3 + 1)},
    ]}
    for n in range(2, 14)
]
COMMON = ["--policy.compute-dtype", "float32", "--optim.lr", "1e-3", "--save.every", "1", "--total-steps", "3",
          "--data.max-length", "256", "--eval-every", "2"]
SFT = ["sft", "--rows-per-step", "5", *COMMON]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", ROWS),
            "--val-data", write(folder / "val.jsonl", ROWS[:3])]


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory) -> Path:
    """`whole`: every row in one micro-batch; `alone`: each in its own; on two ranks: `ranks`."""
    folder = tmp_path_factory.mktemp("sft")
    launch_all(folder / "one", {"whole": [*SFT, *files], "alone": [*SFT, *files, "--max-tokens-per-gpu", "1"]})
    launch_all(folder / "two", {"ranks": [*SFT, *files, "--max-tokens-per-gpu", "100"]}, ranks=2)
    return folder


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def check_same_training(run: Path, whole: Path, names: list[str]) -> None:
    """Two layouts: the same first step but for rounding (torch sums the squares of a norm in float32, on two ranks in
    another order). Of the weights after three steps only few may differ, as AdamW turns rounding into whole steps where
    a gradient is nearly 0."""
    ours, theirs = metrics_of(run), metrics_of(whole)
    assert len(ours) == len(theirs) == 4
    for name in names:
        assert theirs[1][name] != 0
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4 if "norm" in name else 1e-6), name
    expected = weights_of(whole)
    for name, weight in weights_of(run).items():
        assert ((weight - expected[name]).abs() > 1e-4).float().mean() < 0.01, name


@pytest.mark.parametrize("layout", ["one/alone", "two/ranks"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    check_same_training(runs / layout, runs / "one/whole", ["train/loss", "actor/grad_norm", "actor/entropy"])
    for ours, theirs in zip(metrics_of(runs / layout), metrics_of(runs / "one/whole")):
        assert ("val/loss" in ours) == ("val/loss" in theirs) == (ours["step"] in (0, 2, 3))
        assert ours.get("val/loss", 0) == pytest.approx(theirs.get("val/loss", 0), rel=1e-4)


def test_the_loss_and_its_gradient_are_those_of_transformers(runs, tiny_llama):
    """The first step's rows, one at a time through the Hugging Face model in float64; and the validation rows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)

    def mean_loss(rows: list[dict]) -> torch.Tensor:
        losses, count = torch.zeros((), dtype=torch.float64), 0
        for row in rows:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            encoded = tokenizer(text, return_offsets_mapping=True)
            spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text)]
            assert len(spans) == 2
            where = [t for t, (start, end) in enumerate(encoded["offset_mapping"])
                     if any(low <= start and end <= high for low, high in spans)]
            logp = model(torch.tensor([encoded["input_ids"]])).logits[0].log_softmax(-1)
            losses = losses - sum(logp[t - 1, encoded["input_ids"][t]] for t in where)
            count += len(where)
        return losses / count

    with torch.no_grad():
        assert metrics_of(runs / "one/whole")[0]["val/loss"] == pytest.approx(float(mean_loss(ROWS[:3])), rel=1e-6)
    first = metrics_of(runs / "one/whole")[1]
    loss = mean_loss([ROWS[i] for i in PromptSampler(len(ROWS), "", 0).take(5)])
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def check_exact_resume(command: list[str], whole: Path, tmp_path: Path) -> None:
    """kill -9 as the third step is logged, then the same command again: weights and metrics byte for byte."""
    script, *flags = command
    launch("tests/checkpoint/faulty.py", "log:4:0:kill", f"{script}.py", *flags, "--run-dir", tmp_path, check=False)
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]
    assert "resumed after step 2" in launch(f"{script}.py", *flags, "--run-dir", tmp_path, warm=True).stdout
    theirs = weights_of(whole)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(tmp_path).items())
    for ours, expected in zip(metrics_of(tmp_path), metrics_of(whole), strict=True):
        compared = {name for name in expected if not re.match(r"timing|perf", name)}
        assert {name: ours[name] for name in compared} == {name: expected[name] for name in compared}


def test_a_killed_sft_continues_exactly(files, runs, tmp_path):
    check_exact_resume([*SFT, *files], runs / "one/whole", tmp_path)
