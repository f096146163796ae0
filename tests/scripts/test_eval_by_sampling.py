"""--eval-by sampling: sft.py and dpo.py validate with responses of the policy that a reward function scores."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import STOPS, launch, launch_all, make_tiny_llama
from tests.scripts.test_supervised import PAIRS, check_exact_resume, metrics_of, weights_of, write
from tools import try_script

SFT_ROWS = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
FLAGS = ["--rows-per-step", "4", "--policy.compute-dtype", "float32", "--optim.lr", "1e-2", "--save.every", "1",
         "--total-steps", "3", "--data.max-length", "300"]
SAMPLING = ["--eval-every", "2", "--eval-by", "sampling", "--eval-n", "2", "--eval-prompts", "6", "--rollout.engine",
            "hf", "--rollout.max-response-length", "8", *STOPS, "--reward.num-workers", "1", "--reward.function",
            f"{try_script.__file__}:compute_score_of_some"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory, tiny_llama, small_train) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("rows")
    model = ["--model", tiny_llama]
    found = {}
    for script, rows in {"sft": SFT_ROWS, "dpo": PAIRS}.items():
        data = ["--train-data", write(folder / f"{script}.jsonl", rows)]
        found[script] = [script, *FLAGS, *model, *data, "--val-data", small_train, *SAMPLING]
        found[f"{script}_without"] = [script, *FLAGS, *model, *data]
    return found


@pytest.fixture(scope="module")
def runs(commands, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    launch_all(folder / "one", commands)
    launch_all(folder / "two", {"sft": commands["sft"]}, ranks=2)
    return folder


def results_of(run: Path) -> list[dict[str, float]]:
    """Of each validation what it says of the task."""
    found = [{name: value for name, value in row.items() if name.startswith("val-core/")} for row in metrics_of(run)]
    return [row for row in found if row]


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_the_results_are_those_of_the_responses(script, runs):
    """Before the first step and after the second and third; those of the last are computed again from its responses."""
    run = runs / "one" / script
    results = results_of(run)
    assert len(results) == 3 and len({*map(str, results)}) > 1
    assert all({re.sub("@2.*", "", name) for name in row} == {"val-core/word_problems/acc/greedy",
               "val-core/word_problems/acc/mean", "val-core/word_problems/acc/best"} for row in results)
    rows = pq.read_table(run / "rollouts/val_000003.parquet").to_pylist()
    assert len(rows) == 12
    for row in rows:
        score = try_script.compute_score_of_some("", row["response"], row["ground_truth"])
        assert row["score"] == score
    mean = sum(row["score"] for row in rows) / 12
    assert results[-1]["val-core/word_problems/acc/mean@2"] == pytest.approx(mean) != 0


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_training_is_that_of_a_run_without_validation(script, runs):
    ours, theirs = weights_of(runs / "one" / script), weights_of(runs / "one" / f"{script}_without")
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_the_last_validation_is_that_of_evaluate(runs, commands, tiny_llama, small_train, tmp_path):
    """evaluate.py samples the same responses from the trained model."""
    run = runs / "one/sft"
    rollout = SAMPLING[SAMPLING.index("--eval-n") :]
    launch("evaluate.py", "--model", run / "model", "--val-data", small_train, *rollout, "--run-dir", tmp_path / "out",
           "--policy.compute-dtype", "float32", "--data.max-prompt-length", "300", warm=True)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out/rollouts").glob("*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist() if not row["greedy"]]
    ours = pq.read_table(run / "rollouts/val_000003.parquet").to_pylist()
    assert [row["response"] for row in rows] == [row["response"] for row in ours] and len(rows) == 12
    assert len({row["response"] for row in ours}) > 6


def test_two_ranks_sample_the_same(runs):
    ours, theirs = results_of(runs / "two/sft"), results_of(runs / "one/sft")
    assert ours[0] == pytest.approx(theirs[0])                          # before rounding makes weights differ
    assert len(ours) == len(theirs) == 3


@pytest.mark.sweep
@pytest.mark.engine
def test_vllm_samples_with_the_weights_of_the_step(commands, tmp_path, tmp_path_factory):
    """vLLM starts before the model is loaded, sleeps during the steps and gets their weights: the responses at
    temperature 0 are those of Hugging Face's generate with the model of the run, and not with that of the start."""
    start = make_tiny_llama(tmp_path_factory.mktemp("tiny_vllm"), 128)  # its attention on CPUs has heads of 32
    _, *flags = commands["sft"]
    launch("sft.py", *flags, "--model", start, "--rollout.engine", "vllm", "--rollout.max-num-seqs", "16",
           "--rollout.kv-cache-gb", "0.25", "--eval-temperature", "0", "--eval-n", "1", "--run-dir", tmp_path)
    assert len(results_of(tmp_path)) == 3
    rows = pq.read_table(tmp_path / "rollouts/val_000003.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(start)
    found = []
    for folder in (tmp_path / "model", start):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
            tokens = model.generate(**prompt, do_sample=False, max_new_tokens=8, eos_token_id=-1)[0]
            text = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            found.append(text.startswith(row["response"].rstrip("\ufffd")))        # where a stop token ended it
    assert all(found[:6]) and not any(found[6:]) and sum(len(row["response"]) for row in rows) > 20, rows


def test_a_killed_run_continues_exactly(commands, runs, tmp_path):
    check_exact_resume(commands["sft"], runs / "one/sft", tmp_path)


@pytest.mark.parametrize(("flags", "words"), [
    (["--rollout.engine", "hf"], "--rollout.engine does nothing without --eval-by sampling: leave it out, or set that"),
    (["--eval-n", "2"], "--eval-n does nothing without --eval-by sampling"),
    (["--eval-by", "sampling", "--rollout.temperature", "0.5"], "--rollout.temperature 0.5 is of training on what was "
                                                               "sampled: validation has --eval-temperature"),
    (["--eval-by", "sampling", "--rollout.engine", "hf", "--rollout.max-response-length", "1000000"],
     "--rollout.max-response-length 1000000 leaves no token of the model's context"),
])
def test_flags_that_cannot_act_are_refused(flags, words, commands, small_train):
    script, *given = commands["sft_without"]
    done = launch(f"{script}.py", *given, "--val-data", small_train, *flags, warm=True, check=False)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_it_needs_validation_data(commands):
    script, *flags = commands["dpo_without"]
    done = launch(f"{script}.py", *flags, "--eval-by", "sampling", warm=True, check=False)
    assert done.returncode == 2 and "--eval-by sampling does nothing" in done.stderr and "--val-data" in done.stderr


def test_rows_of_conversations_are_no_prompts(commands):
    """--val-data with the columns of sft.py, which have no ground truth."""
    script, *flags = commands["sft_without"]
    train = flags[flags.index("--train-data") + 1]
    done = launch(f"{script}.py", *flags, "--val-data", train, *SAMPLING, warm=True, check=False)
    assert done.returncode == 2 and json.dumps("data_source")[1:-1] in done.stderr, done.stderr
