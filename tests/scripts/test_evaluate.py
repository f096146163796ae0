"""evaluate.py: the numbers of a run's own validation, exactly; resume, ranks, models; statistics against oracles."""

import json
import math
import os
import shutil
import signal
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
from common.checkpoint.files import read_manifest, write_manifest
from common.dataset.images import Images
from common.model.policy import ModelConfig
from common.prompts import Prompt
from common.rollout import Sample
from envs.runtime.response import Response
from tests.checkpoint.faulty import server
from tests.conftest import ROOT, STOPS, VAL, launch, launch_all
from tests.model.test_reward_model import make_reward_model
from tools import evaluation, model_source
from tools.evaluation import Answer

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    return {"score": number % 7 / 3, "acc": number % 2, "pred": str(number % 3), "length": len(solution_str) / 7}
"""
EPISODES = ROOT / "tests/engine/episodes_of_tests.py"
SAMPLING = ["--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--rollout.max-response-length", "8",
            "--data.max-prompt-length", "200", "--reward.num-workers", "1", "--eval-n", "4", *STOPS]
TRAINING = ["--prompts-per-step", "4", "--samples-per-prompt", "2", "--total-steps", "1", "--optim.lr", "1e-2"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_llama) -> list[str]:
    """Two data sources, 5 and 4 prompts."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "reward.py").write_text(REWARD)
    table = pq.read_table(VAL).slice(0, 9)
    sources = [["b", "a"][i % 2] for i in range(9)]
    pq.write_table(table.set_column(table.schema.get_field_index("data_source"), "data_source", [sources]),
                   folder / "val.parquet")
    return ["--model", tiny_llama, "--val-data", str(folder / "val.parquet"), *SAMPLING,
            "--reward.function", f"{folder}/reward.py:compute_score"]


@pytest.fixture(scope="module")
def runs(flags, tmp_path_factory) -> Path:
    """A training run with validation, evaluations in one chunk and in three, of a part, with another seed, of the run's
    checkpoint; on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    train = ["--train-data", flags[flags.index("--val-data") + 1], *TRAINING, "--save.every", "1"]
    launch_all(folder / "one", {
        "grpo": ["grpo", *flags, *train], "lora": ["grpo", *flags, *train, "--lora.rank", "4"],
        "whole": ["evaluate", *flags], "chunks": ["evaluate", *flags, "--prompts-per-chunk", "4"],
        "seed": ["evaluate", *flags, "--seed", "1", "--compare", str(folder / "one/whole")],
        "trained": ["evaluate", *flags, "--model", str(folder / "one/grpo")],
        "greedy": ["evaluate", *flags, "--eval-n", "0", "--eval-prompts", "3"],
    })
    launch_all(folder / "two", {"whole": ["evaluate", *flags, "--prompts-per-chunk", "5"]}, ranks=2)
    return folder


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers_of(run: Path) -> dict:
    return json.loads((run / "evaluation.json").read_text())


def validation_of(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(("val-core/", "val-aux/a/", "val-aux/b/"))}


def answers_of(run: Path) -> list[Answer]:
    return evaluation.read_answers(run)[0]


def test_the_numbers_are_those_of_a_runs_validation(runs):
    """To the last digit: before training with the run's --model, after it with the run's checkpoint."""
    before, after = map(validation_of, metrics_of(runs / "one/grpo"))
    assert len(before) == 36 and before != after
    assert validation_of(numbers_of(runs / "one/whole")["metrics"]) == before
    assert validation_of(numbers_of(runs / "one/trained")["metrics"]) == after
    assert {"val-core/a/acc/mean@4", "val-core/b/acc/greedy", "val-core/a/acc/maj@4/mean"} < before.keys()
    assert 0 < before["val-core/a/acc/mean@4"] < 1


def test_the_reward_and_its_other_numbers_by_source(runs):
    """By hand from what the reward function returns for the responses on disk: in a run's validation, and in what
    evaluate.py writes and prints."""
    rows = pq.read_table(runs / "one/whole/rollouts/val_000000_000000.parquet").to_pylist()
    validated, written = metrics_of(runs / "one/grpo")[0], numbers_of(runs / "one/whole")
    for source, greedy in product("ab", (True, False)):
        mine = [row for row in rows if row["data_source"] == source and row["greedy"] == greedy]
        by_prompt = {row["group"]: [sum(map(ord, x["response"])) % 7 / 3 for x in mine if x["group"] == row["group"]]
                     for row in mine}
        name, values = "greedy" if greedy else "mean@4", [*by_prompt.values()]
        want = {f"reward/{name}": np.mean(values), f"length/{name}": np.mean([len(x["response"]) / 7 for x in mine])}
        if not greedy:
            want |= {"reward/std@4": np.mean([np.std(x) for x in values]),
                     "reward/best@4/mean": np.mean([max(x) for x in values])}
            assert want["reward/std@4"] > 0
        for numbers in (validated, written["metrics"]):
            assert {x: numbers[f"val-aux/{source}/{x}"] for x in want} == pytest.approx(want)
        shown = written["results"][source]["results"][f"reward/{name}"]
        assert shown["value"] == pytest.approx(want[f"reward/{name}"]) and shown["low"] <= shown["value"]
        assert any(line.startswith(f"  reward/{name} ") for line in evaluation.table_of(written["results"]))
        assert shown["value"] != pytest.approx(validated[f"val-core/{source}/acc/{name}"])


def test_lost_responses_and_an_earlier_versions_files_have_a_reward(runs, tmp_path):
    """Earlier files have the score as float32, NaN if it is lost."""
    old = tmp_path / "old"
    shutil.copytree(runs / "one/whole", old)
    file = evaluation.file_of(old, 0)
    table = pq.read_table(file).drop_columns(["counted_reward"])
    scores = [math.nan, *table["score"].to_pylist()[1:]]
    pq.write_table(table.set_column(table.schema.get_field_index("score"), "score", [scores]), file)
    for answer, other, score in zip(answers_of(old), answers_of(runs / "one/whole"), scores, strict=True):
        assert answer.reward == (0 if math.isnan(score) else pytest.approx(other.reward, rel=1e-6))
        assert answer._replace(reward=0.0) == other._replace(reward=0.0) and answer.numbers.keys() == {"acc", "length"}
    plain = {"data_source": "a", "group": 0, "vote": None, "greedy": False, "num_sampled": 1, "finish_reason": "stop",
             "question": "", "row": 0, "prompt": "", "score": float(np.float32(0.1)), "reward_parts": "{}"}
    assert [evaluation.answer_of(plain | {"acc": acc}).reward for acc in (0.1, 1.0)] == [0.1, float(np.float32(0.1))]
    evaluation.report(old, "", [])
    name = "val-aux/a/length/mean@4"
    assert numbers_of(old)["metrics"][name] == numbers_of(runs / "one/whole")["metrics"][name]
    lost = Sample(0, 0, 0, Prompt([], "a", "", {}, []), Response([], [], "stop"))
    assert evaluation.own_columns(lost, False)["counted_reward"] == 0


@pytest.mark.sweep
def test_reward_models_and_episodes_are_those_of_a_run(flags, tiny_llama, tmp_path):
    """Scores that are no float32 numbers, alone and added to a function's; conversations of three turns."""
    model = make_reward_model(tiny_llama, str(tmp_path / "reward_model"))
    plain = flags[:flags.index("--reward.function")]
    kinds = {"alone": [*plain, "--reward-model.path", model, "--reward-model.alone"],
             "episode": [*plain, "--rollout.episode", f"{EPISODES}:three_turns", "--rollout.max-response-length", "80"]}
    train = ["--train-data", flags[flags.index("--val-data") + 1], *TRAINING]
    launch_all(tmp_path, {
        **{f"run_{kind}": ["grpo", *more, *train] for kind, more in kinds.items()},
        **{kind: ["evaluate", *more, "--prompts-per-chunk", "4"] for kind, more in kinds.items()},
    })
    for kind in kinds:
        before = validation_of(metrics_of(tmp_path / f"run_{kind}")[0])
        ours = validation_of(numbers_of(tmp_path / kind)["metrics"])
        # a reward model packs what it scores, and rounds by what runs together
        assert ours == (pytest.approx(before, abs=1e-6) if kind == "alone" else before) and len(before) >= 10
    assert not before["val-core/a/acc/mean@4"].is_integer()
    rows = pq.read_table(tmp_path / "episode/rollouts/val_000000_000000.parquet").to_pylist()
    assert all(len(json.loads(row["messages"])) > 2 for row in rows) and {row["num_turns"] for row in rows} == {3}
    assert all(0 < row["num_sampled"] < row["response_length"] for row in rows)     # the other tokens are a user's


def test_chunks_and_ranks_change_nothing(runs):
    whole = answers_of(runs / "one/whole")
    assert len(whole) == 9 * 5 and len({answer.vote for answer in whole}) > 1
    for other in ("one/chunks", "two/whole"):
        assert answers_of(runs / other) == whole
        for name in ("metrics", "results"):
            assert numbers_of(runs / other)[name] == numbers_of(runs / "one/whole")[name]
    assert sorted(path.name for path in (runs / "one/chunks/rollouts").iterdir()) == [
        f"val_000000_{first:06d}.parquet" for first in (0, 4, 8)]
    assert answers_of(runs / "one/seed") != whole


def test_the_responses_have_the_form_of_a_runs(runs):
    """And the page of a report shows them."""
    table = pq.read_table(runs / "one/whole/rollouts/val_000000_000000.parquet")
    recorded = pq.read_table(runs / "one/grpo/rollouts/val_000000.parquet")
    shared = table.select(recorded.schema.names)
    assert shared.schema.equals(recorded.schema)
    sampled = [row for row in table.to_pylist() if not row["greedy"]]
    for ours, theirs in zip(sampled, recorded.to_pylist(), strict=True):
        assert {name: ours[name] for name in theirs if name != "index"} == {
            name: value for name, value in theirs.items() if name != "index"}
    launch("-m", "tools.report", runs / "one/whole")
    assert "val-core/a/acc/mean@4" in (runs / "one/whole/report.html").read_text()


def test_an_evaluation_of_some_prompts_without_samples(runs):
    results = numbers_of(runs / "one/greedy")["results"]
    assert {source: (found["prompts"], [*found["results"]]) for source, found in results.items()} == {
        "a": (1, ["greedy", "reward/greedy"]), "b": (2, ["greedy", "reward/greedy"])}
    assert results["a"]["results"]["greedy"]["low"] is None                          # one prompt has no interval


def test_a_killed_evaluation_continues(flags, runs, tmp_path):
    """kill -9 in the second chunk: the file of the first stays as it is, and the numbers are those of one that was not
    killed. Other flags, data and weights are refused."""
    slow = tmp_path / "slow.py"
    slow.write_text(REWARD.replace("    number", """    import os, pathlib, signal, time
    if extra_info['index'] == 5 and not pathlib.Path(__file__).with_name('again').exists():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
    number""", 1))
    command = [*flags, "--reward.function", f"{slow}:compute_score", "--prompts-per-chunk", "4", "--run-dir",
               str(tmp_path / "run")]
    code = server()(tmp_path / "log", "none", "evaluate.py", *command)
    assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
    first = tmp_path / "run/rollouts/val_000000_000000.parquet"
    written = first.stat().st_mtime_ns
    assert [path.name for path in first.parent.glob("*.parquet")] == [first.name]
    (tmp_path / "again").touch()
    other = launch("evaluate.py", *command, "--eval-n", "2", warm=True, check=False)
    assert other.returncode == 2 and "has another evaluation, --eval-n was 4, is 2" in other.stderr
    said = launch("evaluate.py", *command, warm=True).stdout
    assert "4 of 9 prompts" not in said and "8 of 9 prompts" in said and first.stat().st_mtime_ns == written
    assert answers_of(tmp_path / "run") == answers_of(runs / "one/chunks")
    ours, theirs = numbers_of(tmp_path / "run"), numbers_of(runs / "one/chunks")
    assert ours["results"] == theirs["results"] and ours["metrics"] == theirs["metrics"]
    again = launch("evaluate.py", *command, warm=True).stdout                        # nothing is left to sample
    assert "of 9 prompts" not in again and "mean@4" in again


def test_two_evaluations_in_pairs(runs, flags):
    """By hand from the responses of both, which have the same prompts."""
    here, there = answers_of(runs / "one/seed"), answers_of(runs / "one/whole")
    compared = {(x["data_source"], x["result"]): x for x in numbers_of(runs / "one/seed")["compared"]}
    assert compared.keys() == set(product(("a", "b"), ("mean", "greedy")))
    for (source, result), found in compared.items():
        means = [[np.mean([x.acc for x in answers if x.group == group and x.greedy == (result == "greedy")])
                  for group in range(9) if "ba"[group % 2] == source] for answers in (here, there)]
        differences = np.subtract(*means)
        assert found["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        flips = [np.dot(signs, differences) for signs in product((-1, 1), repeat=len(differences))]
        p_value = np.mean(np.abs(flips) >= abs(differences.sum()) - 1e-9)
        assert found["p_value"] == pytest.approx(p_value) and found["not_shared"] == 0
        rows = [group for group in range(9) if "ba"[group % 2] == source]
        assert {change["row"] for change in found["changed"]} == {
            row for row, difference in zip(rows, differences) if difference}
    assert compared["a", "greedy"]["difference"] == 0 and compared["a", "greedy"]["p_value"] == 1      # no seed
    assert any(found["changed"] for found in compared.values())
    lines = evaluation.comparison_lines(list(compared.values()), "x\x1b", {})
    assert "\x1b" not in "".join(lines) and any("p = " in line for line in lines)
    # of every row that changed, the text that the user wrote, and nothing of the template
    asked = [row["prompt"][-1]["content"] for row in pq.read_table(flags[flags.index("--val-data") + 1]).to_pylist()]
    shown = [line for line in lines if line.startswith("  row ")]
    assert len({line.split()[1] for line in shown}) > 1
    for line in shown:
        row = int(line.split()[1][:-1])
        assert line.endswith(f"   {asked[row][:100]}") and len(asked[row]) < 100
    assert all(change["asked"] == asked[change["row"]] and change["asked"] in change["prompt"]
               for found in compared.values() for change in found["changed"])


SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
MATHS = "Solve the following math problem step by step. Put the last line of your response as Answer: $Answer. "
END = " Let's think step by step and output the final answer after \"####\"."
TALE = "A train leaves the station of the town at nine and comes to a halt. " * 3


@pytest.mark.parametrize(("messages", "asked"), [
    ([(USER, "What?")], "What?"), ([(SYSTEM, "Be brief."), (USER, "What?")], "What?"),
    ([(USER, "One?"), (ASSISTANT, "1"), (USER, "Two?")], "Two?"), ([(USER, "Go on:"), (ASSISTANT, "It is")], "Go on:"),
    ([(USER, "Play"), (ASSISTANT, ""), ("tool", "3")], "Play"), ([(SYSTEM, "Rules")], "Rules"),
    ([(SYSTEM, "Rules"), (ASSISTANT, "I begin")], "I begin"), ([(USER, "real"), (USER, " \n")], "real"),
    ([(SYSTEM, "You win by 3."), (USER, "\n ")], "You win by 3."), ([], ""),
])
def test_what_is_shown_of_a_prompt(messages, asked):
    prompt = Prompt([], "a", "1", {}, [{"role": role, "content": content} for role, content in messages])
    assert evaluation.asked_of(prompt) == asked


@pytest.mark.parametrize(("texts", "shown"), [
    (["What is 1?", "What is 2?"], ["What is 1?", "What is 2?"]),
    ([f"{MATHS}Is 12 even?{END}", f"{MATHS}Is 13 odd?{END}"],
     [f"...12 even?{END}"[:103], f"...13 odd?{END}"[:103]]),
    ([f"Anna has{END * 2}", f"Bert has{END * 2}"], [f"{name} has{END * 2}"[:100] + "..." for name in ("Anna", "Bert")]),
    ([f"{TALE}alone"], [f"{TALE}alone"[:100] + "..."]), ([f"{TALE}x"] * 2, [f"{TALE}x"[:100] + "..."] * 2),
    ([f"{TALE}when?", "Short"], [f"{TALE}when?"[:100] + "...", "Short"]),
    ([f"{TALE}12", f"{TALE}123"], ["...12", "...123"]), ([TALE, f"{TALE}more"], ["...halt.", "...halt. more"]),
    (["a\n\n b\tc"], ["a b c"]), ([], []),
    (["x" * 300, "x" * 299 + "y"], ["x" * 100 + "..."] * 2), (["", "b"], ["", "b"]),
])
def test_questions_are_shown_from_where_they_differ(texts, shown):
    assert evaluation.told_apart(texts) == shown


def test_a_single_question_is_told_apart_from_those_that_did_not_change():
    texts = [f"{MATHS}Is 12 even?{END}"]
    assert evaluation.told_apart(texts, [f"{MATHS}How far?{END}", *texts]) == [f"...Is 12 even?{END}"[:103]]
    assert evaluation.told_apart(texts, [f"{MATHS}How far?{END}", "Short"]) == [texts[0][:100] + "..."]


def test_evaluations_of_other_questions_are_not_compared():
    ours, theirs = ([answer("a", 0, 1.0, question=name)] for name in ("one", "other"))
    with pytest.raises(ValueError, match="share no question"):
        evaluation.compare(ours, theirs)


def question(*images: bytes, **extra) -> tuple[str, str]:
    pictures = Images([*images], "model") if images else None
    sample = Sample(0, 0, 0, Prompt([], "a", "42", extra, [{"role": "user", "content": "What?"}], images=pictures))
    return evaluation.question_of(sample), evaluation.details_of(sample)


def test_questions_that_differ_in_their_images_or_extra_info_alone():
    """The place of a row in its files is no part of a question: copies of a data set may split it elsewhere."""
    different = [question(), question(b"x"), question(b"y"), question(b"x", b"y"), question(b"y", b"x"),
                 question(seed=1), question(seed=2), question(b"x", seed=1), question(options={"map": "S"})]
    assert len({*different}) == 9 and len({asked for asked, _ in different}) == 1
    assert question(seed=1, level="a", split="test", index=7) == question(level="a", seed=1, index="x7", answer=None)


def test_such_questions_are_compared_with_themselves():
    """In the other order; by messages and ground truth alone, each would be compared with another one."""
    ours = [answer("a", i, i / 4, question="q", details=str(i)) for i in range(4)]
    theirs = [answer("a", i, (3 - i) / 4, question="q", details=str(3 - i)) for i in range(3)]
    (found,) = evaluation.compare(ours, theirs)
    assert found["prompts"] == 3 and found["not_shared"] == 1 and found["changed"] == [] and found["there"] == 0.5


def test_evaluations_of_an_earlier_version(runs, tmp_path):
    """Their files have no details: still compared, but where that would pair questions that are not the same."""
    shutil.copytree(runs / "one/whole", tmp_path / "old")
    file = evaluation.file_of(tmp_path / "old", 0)
    pq.write_table(pq.read_table(file).drop_columns(["details"]), file)
    here, there, old = (answers_of(run) for run in (runs / "one/seed", runs / "one/whole", tmp_path / "old"))
    assert all(x.details for x in there) and not any(x.details for x in old)
    assert evaluation.compare(here, old) == evaluation.compare(here, there)
    assert evaluation.compare(old, old)[0]["difference"] == 0
    twice = [answer("a", i, 1.0, question="q", details=str(i)) for i in range(2)]
    with pytest.raises(ValueError, match="one of the two evaluations is of an earlier version") as raised:
        evaluation.compare(twice, [answer("a", i, 1.0, question="q") for i in range(2)])
    assert "\n" not in str(raised.value)


# --------------------------------------------------------------------------- models

@pytest.mark.sweep
def test_adapters_give_the_numbers_of_the_run_that_trained_them(flags, runs, tmp_path):
    """Exported in peft's format, then merged by evaluate.py."""
    launch("-m", "tools.checkpoints", "export", runs / "one/lora", tmp_path / "adapter", "--adapter")
    models = {"peft": tmp_path / "adapter", "checkpoint": runs / "one/lora/checkpoints/step_000001"}
    launch_all(tmp_path, {name: ["evaluate", *flags, "--model", str(path)] for name, path in models.items()})
    before, after = map(validation_of, metrics_of(runs / "one/lora"))
    assert before != after
    for name in ("peft", "checkpoint"):
        assert validation_of(numbers_of(tmp_path / name)["metrics"]) == after


def test_merged_adapters_by_hand(runs, tiny_llama, tmp_path):
    """W + scale B A in float64, with the scale of rsLoRA."""
    rng, folder = torch.Generator().manual_seed(0), tmp_path / "adapter"
    folder.mkdir()
    layer, base = "model.layers.1.mlp.down_proj", load_file(Path(tiny_llama) / "model.safetensors")
    a, b = torch.randn(9, 64, generator=rng), torch.randn(32, 9, generator=rng)
    save_file({f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b},
              folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 9, "lora_alpha": 6, "use_rslora": True, "base_model_name_or_path": tiny_llama}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert model_source.resolve(str(folder)) == str(folder)
    out = model_source.write_model(str(folder), tmp_path / "out", ModelConfig(compute_dtype="float32"))
    merged = load_file(Path(out) / "model.safetensors")
    expected = base[f"{layer}.weight"].double() + 6 / 3 * b.double() @ a.double()
    assert (merged[f"{layer}.weight"] - expected).abs().max() < 1e-5 < (expected - base[f"{layer}.weight"]).abs().max()
    assert all(torch.equal(merged[name], base[name]) for name in base if name != f"{layer}.weight")
    for key, value in {"use_dora": True, "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}}.items():
        (folder / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        with pytest.raises(ValueError, match=f"must be plain LoRA, these are LORA {key}"):
            model_source.read_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"base_model.model.model.nothing.lora_A.weight": a}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has an adapter of model\.nothing, which"):
        model_source.write_model(str(folder), tmp_path / "other", ModelConfig())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="a pickle"):
        model_source.read_adapter(folder)


def test_what_names_a_model(runs, tiny_llama, tmp_path):
    assert model_source.resolve(tiny_llama) == tiny_llama and model_source.resolve("Qwen/Q") == "Qwen/Q"
    assert model_source.resolve(str(runs / "one/grpo")) == str(runs / "one/grpo/checkpoints/step_000001")
    assert model_source.write_model("Qwen/Q", tmp_path / "out", ModelConfig()) == "Qwen/Q"
    run = tmp_path / "run"
    shutil.copytree(runs / "one/grpo", run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=rf"nor adapters: name {run}/model"):
        model_source.resolve(str(run))


# --------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize(("changed", "message"), [
    (["--eval-n", "-1"], "--eval-n -1 must be at least 0"),
    (["--prompts-per-chunk", "0"], "--prompts-per-chunk 0 must be at least 1"),
    (["--rollout.temperature", "0.6"], "--rollout.temperature 0.6 is of training: evaluation has --eval-temperature"),
    (["--rollout.top-p", "0.9"], "--rollout.top-p 0.9 is of training"),
    (["--compare", "/nowhere"], "--compare /nowhere does not exist"),
])
def test_what_cannot_work_is_refused_before_anything_starts(flags, tmp_path, changed, message):
    done = launch("evaluate.py", *flags, "--run-dir", tmp_path / "run", *changed, warm=True, check=False)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_not_taken(flags, runs):
    done = launch("evaluate.py", *flags, "--run-dir", runs / "one/grpo", warm=True, check=False)
    assert done.returncode == 2 and "is the folder of something else" in done.stderr


@pytest.mark.parametrize(("name", "make"), [
    *((name, lambda path: path.write_text("mine")) for name in evaluation.OWN_FILES),
    ("rollouts", os.mkdir), ("model", os.mkdir), ("begun", os.mkdir),
    ("metrics.jsonl", lambda path: path.symlink_to("/nowhere")), ("evaluation.json", os.mkfifo),
])
def test_what_no_evaluation_wrote_is_not_replaced(flags, name, make, tmp_path, tiny_llama):
    import tyro

    run = tmp_path / "run"
    args = tyro.cli(evaluate.Args, args=[*flags, "--run-dir", str(run)])
    run.mkdir()
    make(run / name)
    with pytest.raises(ValueError, match=rf"is the folder of something else: it has {name}, which an evaluation would"):
        evaluation.begin(args, str(tiny_llama), 1)
    assert [path.name for path in run.iterdir()] == [name]
    assert not (run / name).is_file() or (run / name).read_text() == "mine"


def test_an_evaluation_writes_through_no_link(flags, tmp_path, tiny_llama):
    import tyro

    run = tmp_path / "run"
    args = tyro.cli(evaluate.Args, args=[*flags, "--run-dir", str(run)])
    run.mkdir()
    evaluation.begin(args, str(tiny_llama), 1)
    evaluation.begin(args, str(tiny_llama), 1)                          # it continues
    (tmp_path / "notes").write_text("mine")
    (run / "evaluation.json").symlink_to(tmp_path / "notes")
    with pytest.raises(ValueError, match=r"evaluation.json is a symbolic link, whose target would be overwritten"):
        evaluation.begin(args, str(tiny_llama), 1)


def test_a_model_in_the_folder_that_no_export_wrote_is_neither_read_nor_replaced(runs, tmp_path):
    checkpoint = model_source.resolve(str(runs / "one/grpo"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("mine")
    with pytest.raises(ValueError, match=r"model would be replaced, and has no plainrl.json"):
        model_source.write_model(checkpoint, tmp_path / "model", ModelConfig())
    assert (tmp_path / "model/config.json").read_text() == "mine"


def test_other_weights_and_other_data_are_refused(flags, tmp_path, monkeypatch, tiny_llama):
    import tyro

    model = shutil.copytree(tiny_llama, tmp_path / "model")
    args = tyro.cli(evaluate.Args, args=[*flags, "--model", str(model), "--run-dir", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    evaluation.begin(args, str(model), 1)
    evaluation.begin(args, str(model), 1)
    with pytest.raises(ValueError, match="ranks was 1, is 2"):
        evaluation.begin(args, str(model), 2)
    written = (model / "model.safetensors").stat().st_mtime_ns
    os.utime(model / "model.safetensors", (1, 1))
    with pytest.raises(ValueError, match="weights was"):
        evaluation.begin(args, str(model), 1)
    os.utime(model / "model.safetensors", ns=(written, written))
    evaluation.begin(args, str(model), 1)
    file = evaluation.file_of(tmp_path / "run", 0)
    file.parent.mkdir()
    schema = evaluation.schema_with({"data_hash": "x"})
    pq.write_table(schema.empty_table(), file)
    assert evaluation.missing_chunks(args, 600, "x") == [512]
    with pytest.raises(ValueError, match="responses to other prompts"):
        evaluation.missing_chunks(args, 600, "y")
    file.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"val_000000_000000\.parquet is no file of an evaluation, or is damaged"):
        evaluation.missing_chunks(args, 600, "x")


def test_chat_templates_are_told_the_day_on_which_an_evaluation_began(flags, tmp_path):
    """Also when it goes on later, and when another one is compared with it."""
    import tyro

    for name, more in {"one": [], "two": ["--compare", str(tmp_path / "one")], "three": []}.items():
        args = tyro.cli(evaluate.Args, args=[*flags, *more, "--run-dir", str(tmp_path / name)])
        (tmp_path / name).mkdir()
        day = evaluation.begin(args, "model", 1)
        if name == "one":
            begun = read_manifest(tmp_path / "one/begun")
            assert begun[evaluation.DAY] == day
            write_manifest(tmp_path / "one/begun", begun | {evaluation.DAY: "2024-02-29"})
        assert evaluation.begin(args, "model", 1) == (day if name == "three" else "2024-02-29")


@pytest.mark.parametrize("flag", ["--reward.function", "--rollout.episode"])
def test_a_reward_that_was_edited_is_refused(flag, flags, tmp_path):
    """What is on disk was scored by the other one, and the same command would print the old numbers. An evaluation of
    an earlier version, which does not know its code, goes on."""
    import tyro

    code = tmp_path / "mine.py"
    code.write_text(REWARD)
    args = tyro.cli(evaluate.Args, args=[*flags, flag, f"{code}:compute_score", "--run-dir", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    evaluation.begin(args, "model", 1)
    code.write_text(REWARD.replace("% 7", "% 5"))
    with pytest.raises(ValueError, match=r"another evaluation, the code that scores \(its hash\) was \w+, is \w+: "):
        evaluation.begin(args, "model", 1)
    begun = read_manifest(tmp_path / "run/begun")
    write_manifest(tmp_path / "run/begun", {name: value for name, value in begun.items() if "hash" not in name})
    evaluation.begin(args, "model", 1)


# --------------------------------------------------------------------------- statistics

def answer(source: str, group: int, acc: float, **others) -> Answer:
    plain = {"vote": None, "greedy": False, "num_sampled": 3, "finish_reason": "stop", "question": str(group),
             "row": group, "prompt": ""}
    return Answer(source, group, acc, **plain | others)


def test_the_interval_is_that_of_all_resamples():
    """Of 5 prompts all 5^5 resamples, counted one by one; two results at once."""
    values = np.array([[0.0, 5.0], [0.25, 1.0], [0.5, 1.5], [1.0, -2.0], [1.0, 0.0]])
    means = [values[[*chosen]].mean(0) for chosen in product(range(5), repeat=5)]
    expected = np.percentile(means, [2.5, 97.5], axis=0)
    found = evaluation.bootstrap_interval(values)
    assert np.abs(found - expected).max() < 0.06 and (found[1] > values.mean(0)).all() and (found[0] < found[1]).all()
    assert evaluation.bootstrap_interval(values[:1]) is None
    assert np.array_equal(found, evaluation.bootstrap_interval(values))


def test_the_interval_covers_the_truth():
    """Of 200 draws of 60 prompts, about 95% of the intervals hold the mean that was drawn from."""
    rng = np.random.default_rng(1)
    draws = [rng.binomial(1, 0.4, (60, 1)).astype(float) for _ in range(200)]
    intervals = [evaluation.bootstrap_interval(values) for values in draws]
    covered = np.mean([low[0] <= 0.4 <= high[0] for low, high in intervals])
    assert 0.89 < covered < 0.99


def test_pass_at_k_is_the_closed_form():
    """1 - C(n - c, k) / C(n, k), and the mean over all subsets."""
    n, ones = 6, (0, 1, 3, 6)
    groups = [[answer("a", group, float(i < c)) for i in range(n)] for group, c in enumerate(ones)]
    found = evaluation.per_prompt(groups, greedy=False)
    assert [*found] == ["mean@6", "pass@2", "pass@4", "pass@6"]
    for k in (2, 4, 6):
        assert found[f"pass@{k}"] == pytest.approx([1 - math.comb(n - c, k) / math.comb(n, k) for c in ones])
        subsets = [[any(i < c for i in subset) for subset in combinations(range(n), k)] for c in ones]
        assert found[f"pass@{k}"] == pytest.approx(np.mean(subsets, axis=1))
    assert "best@2" in evaluation.per_prompt([[answer("a", 0, 0.5), answer("a", 0, 1.0)]], greedy=False)


def test_maj_at_k_is_the_mean_over_subsets(monkeypatch):
    """Written again with counts; ties are shared, samples without a vote have none."""
    group = [(1.0, "x"), (0.0, "y"), (1.0, "x"), (0.0, "y"), (0.0, "z"), (0.0, None)]
    for k in (1, 2, 3, 6):
        expected = []
        for subset in combinations(group, k):
            votes = [vote for _, vote in subset if vote]
            top = {vote for vote in votes if votes.count(vote) == max(map(votes.count, votes))}
            expected.append(np.mean([acc for acc, vote in subset if vote in top]) if top else 0.0)
        assert evaluation.majority_at(group, k) == pytest.approx(np.mean(expected))
        assert 0 < np.mean(expected) < 1
    exact = evaluation.majority_at(group, 3)
    monkeypatch.setattr(evaluation, "SUBSETS", 19)                                   # one less than there are
    assert 0 < abs(evaluation.majority_at(group, 3) - exact) < 0.3


def test_the_paired_test_against_the_binomial_distribution():
    """Differences of one size are McNemar's exact test: twice the tail of a fair coin. The random flips agree."""
    for worse, better in ((0, 5), (2, 9), (4, 4), (0, 0), (1, 0), (8, 20), (3, 25)):
        m, k = worse + better, min(worse, better)
        expected = min(1.0, 2 * sum(math.comb(m, i) for i in range(k + 1)) / 2**m)
        differences = np.array([-1.0] * worse + [1.0] * better + [0.0] * 7)
        found, test = evaluation.paired_test(differences)
        assert ("all sign flips" in test) == (m <= 16)
        assert found == pytest.approx(expected, abs=1e-12 if m <= 16 else 0.004), (worse, better)
    small = evaluation.paired_test(np.array([0.1, 0.2, 0.3]))[0]
    assert small == pytest.approx(2 / 8)


@pytest.mark.parametrize("num_prompts", [8, 40])
def test_the_paired_test_has_no_unit(num_prompts):
    """The signs as they are, and all turned, are two of 2^P: no p-value is below that. Scores may be 1e9 in size."""
    rng = np.random.default_rng(1)
    for same_sign in (True, False):
        for _ in range(10):
            differences = rng.random(num_prompts) + (0.1 if same_sign else -0.4)
            found, *others = [evaluation.paired_test(differences * unit)[0] for unit in (1, 1e-12, 1e5, 1e8, 1e9)]
            assert found >= 2 / 2**num_prompts and others == pytest.approx([found] * 4, rel=1e-9)
            assert not same_sign or num_prompts > 16 or found == 2 / 2**num_prompts


def test_the_table(capsys):
    answers = [answer("b\x1b", g, float(g < 3), greedy=greedy, num_sampled=4 + g, finish_reason=reason)
               for g, reason in enumerate(["stop", "length", "stop", "stop"]) for greedy in (True, False, False)]
    results = evaluation.results_from(answers)
    found = results["b\x1b"]
    assert found["prompts"] == 4 and found["response_length/mean"] == 5.5 and found["truncated_frac"] == 0.25
    assert found["results"]["mean@2"]["value"] == found["results"]["pass@2"]["value"] == 0.75
    assert found["results"]["mean@2"]["low"] == 0.25 and found["results"]["mean@2"]["high"] == 1.0
    lines = evaluation.table_of(results)
    assert lines[0] == "b\\x1b: 4 prompts, 5.5 tokens a response, 25.0% truncated"
    assert lines[1:] == [f"  {name:12} 0.7500   [0.2500, 1.0000]" for name in ("greedy", "mean@2", "pass@2")]


@pytest.mark.sweep
@pytest.mark.engine
def test_vllm_gives_the_numbers_of_a_runs_validation(flags, tmp_path, tmp_path_factory):
    """One process each, as users run them."""
    from tests.conftest import make_tiny_llama

    model = make_tiny_llama(tmp_path_factory.mktemp("tiny_vllm"), 128)
    shared = [*flags, "--model", model, "--rollout.engine", "vllm", "--rollout.max-num-seqs", "16",
              "--rollout.kv-cache-gb", "0.25"]
    data = flags[flags.index("--val-data") + 1]
    launch("grpo.py", *shared, "--train-data", data, *TRAINING, "--run-dir", tmp_path / "grpo")
    launch("evaluate.py", *shared, "--run-dir", tmp_path / "evaluate")
    before = validation_of(metrics_of(tmp_path / "grpo")[0])
    assert validation_of(numbers_of(tmp_path / "evaluate")["metrics"]) == before and len(before) == 36
    assert (ROOT / "evaluate.py").is_file()
