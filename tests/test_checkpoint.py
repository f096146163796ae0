"""Checkpoints give back every byte, on other numbers of ranks too; a killed run continues as if it had not been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from common import checkpoint, dist
from common.packing import Batch
from common.policy import ModelConfig, load_policy, read_config
from common.rollout import RolloutConfig, Sampling, make_engine, stop_tokens
from tests.conftest import ROOT, launch
from tests.rank_worker import STATE, everything, start, train


@pytest.fixture(scope="module")
def world():
    world = dist.init()
    yield world
    dist.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Rows that 2 ranks cannot share evenly (53, 9), and an untied head."""
    folder = tmp_path_factory.mktemp("checkpoints") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=53, hidden_size=24, intermediate_size=9, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def trained(model, world):
    policy, optimizer = start(model, world)
    train(policy, optimizer, range(2))
    return policy, optimizer


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name in want:
        assert torch.equal(found[name], want[name]), name


def test_round_trip_gives_back_every_byte(model, trained, world, tmp_path):
    """Weights, moments and step counts; then the next step is the same too."""
    checkpoint.save(str(tmp_path), 2, {"policy": trained}, STATE, world, keep=1)
    want = everything(*trained)
    assert len(want) == 4 * len(list(trained[0].parameters()))          # exp_avg, exp_avg_sq, step
    assert all(want[name].any() for name in want)
    policy, optimizer = start(model, world)
    assert not torch.equal(everything(policy, optimizer)["lm_head.weight"], want["lm_head.weight"])
    assert checkpoint.load_latest(str(tmp_path), {"policy": (policy, optimizer)}) == STATE
    assert_same(everything(policy, optimizer), want)
    train(policy, optimizer, range(2, 3))
    again, again_optimizer = start(model, world)
    train(again, again_optimizer, range(3))
    assert_same(everything(policy, optimizer), everything(again, again_optimizer))


def test_saving_changes_nothing(model, trained, world, tmp_path):
    before = everything(*trained)
    checkpoint.save(str(tmp_path), 2, {"policy": trained}, STATE, world, keep=1)
    assert_same(everything(*trained), before)


def test_nothing_to_load(model, world, tmp_path):
    policy, optimizer = start(model, world)
    before = everything(policy, optimizer)
    assert checkpoint.load_latest(str(tmp_path), {"policy": (policy, optimizer)}) == {}
    assert_same(everything(policy, optimizer), before)


def test_other_numbers_of_ranks(model, world, tmp_path):
    """Saved by one rank and loaded by two; saved by two and loaded by one."""
    shutil.copytree(model, tmp_path / "model")
    policy, optimizer = start(model, world)
    train(policy, optimizer, range(2))
    checkpoint.save(str(tmp_path / "by_one"), 2, {"policy": (policy, optimizer)}, STATE, world, keep=1)
    want = everything(policy, optimizer)
    launch("tests/rank_worker.py", "checkpoints", tmp_path, ranks=2, timeout=170)
    results = torch.load(tmp_path / "results.pt")
    assert results["state"] == STATE
    assert_same(results["loaded"], want)

    manifest = json.loads((tmp_path / "by_many/checkpoints/step_000004/manifest.json").read_text())
    assert manifest["world_size"] == 2
    fresh, fresh_optimizer = start(model, world)
    state = checkpoint.load_latest(str(tmp_path / "by_many"), {"policy": (fresh, fresh_optimizer)})
    assert state == STATE | {"step": 4}
    assert_same(everything(fresh, fresh_optimizer), results["trained"])
    train(policy, optimizer, range(2, 4))                               # two ranks trained as one does
    for name, tensor in everything(policy, optimizer).items():
        assert torch.allclose(results["trained"][name], tensor, rtol=1e-5, atol=1e-6), name


def test_the_newest_is_loaded(model, world, tmp_path):
    policy, optimizer = start(model, world)
    for step in range(1, 4):
        train(policy, optimizer, range(step - 1, step))
        checkpoint.save(str(tmp_path), step, {"policy": (policy, optimizer)}, STATE | {"step": step}, world, keep=3)
    fresh, fresh_optimizer = start(model, world)
    assert checkpoint.load_latest(str(tmp_path), {"policy": (fresh, fresh_optimizer)})["step"] == 3
    assert_same(everything(fresh, fresh_optimizer), everything(policy, optimizer))


@pytest.fixture
def four(trained, world, tmp_path):
    """Checkpoints of steps 1 to 4."""
    for step in range(1, 5):
        checkpoint.save(str(tmp_path), step, {"policy": trained}, STATE | {"step": step}, world, keep=4)
    return tmp_path / "checkpoints"


def names(run_dir) -> list[str]:
    return [folder.name for folder in checkpoint.complete_checkpoints(str(run_dir))]


def test_only_the_newest_are_kept(four, trained, world):
    assert names(four.parent) == ["step_000001", "step_000002", "step_000003", "step_000004"]
    checkpoint.save(str(four.parent), 5, {"policy": trained}, STATE, world, keep=2)
    assert sorted(path.name for path in four.iterdir()) == ["step_000004", "step_000005"]
    with pytest.raises(ValueError, match=r"--save.keep 0 at least 1"):
        checkpoint.SaveConfig(keep=0)


def test_what_a_kill_leaves_is_passed_over(four, trained):
    """No manifest, a file cut short, a file gone, a half-written folder under its temporary name."""
    (four / "step_000004/manifest.json").unlink()
    assert names(four.parent)[-1] == "step_000003"
    data = max((four / "step_000003").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    assert names(four.parent)[-1] == "step_000002"
    shutil.copytree(four / "step_000002", four / ".step_000009.partial")
    (four / "step_000002/.metadata").unlink()
    assert names(four.parent) == ["step_000001"]
    assert checkpoint.load_latest(str(four.parent), {"policy": trained})["step"] == 1


def test_an_unfinished_save_is_replaced(four, trained, world):
    (four / ".step_000005.partial").mkdir()
    (four / ".step_000005.partial/rubbish").write_text("half")
    (four / "step_000004/manifest.json").unlink()
    checkpoint.save(str(four.parent), 5, {"policy": trained}, STATE, world, keep=9)
    checkpoint.save(str(four.parent), 4, {"policy": trained}, STATE, world, keep=9)
    assert names(four.parent)[-2:] == ["step_000004", "step_000005"]
    assert not list(four.glob(".*"))
    assert not (four / "step_000005/rubbish").exists()


# --------------------------------------------------------------------------- export

@pytest.fixture(scope="module")
def exported(tiny_llama, world, tmp_path_factory):
    """The tiny Llama, with a second end token, after two steps, as a folder."""
    folder = tmp_path_factory.mktemp("run")
    source, out = shutil.copytree(tiny_llama, folder / "source"), folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    GenerationConfig(eos_token_id=[2, 7], bos_token_id=1, pad_token_id=2).save_pretrained(source)
    policy, optimizer = start(str(source), world)
    train(policy, optimizer, range(2))
    out.mkdir()
    (out / "old.safetensors").write_text("of an earlier run")
    checkpoint.export(policy, tokenizer, str(source), out, world)
    return policy, tokenizer, out


def test_export_has_the_trained_weights_in_bfloat16(exported, tiny_llama):
    policy, _, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    want = {name: tensor.bfloat16() for name, tensor in policy.full_tensors(torch.float32, 1.0)}
    assert_same({name: parameter.detach() for name, parameter in model.named_parameters()}, want)
    source = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    assert not torch.equal(source.lm_head.weight, model.lm_head.weight)
    assert model.config.tie_word_embeddings
    assert "packed" not in (out / "config.json").read_text()            # nothing of this machine's attention
    assert not list(out.glob("old*"))
    assert not list(out.parent.glob(".*"))


def test_export_gives_the_policys_logits(exported, world):
    """The folder in transformers against the folder as a policy, in float32; and in bfloat16, roughly."""
    _, tokenizer, out = exported
    prompt, response = tokenizer("What is 7 + 5?").input_ids, tokenizer(" 12 apples, I think").input_ids
    batch = Batch.build([prompt], [response])
    for dtype, tolerance in (("float32", 5e-6), ("bfloat16", 0.1)):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
        with torch.no_grad():
            rows = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        want = rows.gather(1, torch.tensor(response)[:, None])[:, 0]
        found = load_policy(str(out), ModelConfig(compute_dtype=dtype), world).score(batch, 1.0)[batch.mask]
        assert (found - want).abs().max() < tolerance
        trained = exported[0].score(batch, 1.0)[batch.mask]             # its masters are not rounded yet
        assert (found - trained).abs().max() < 0.1
    assert want.std() > 0.3


def test_export_samples_the_same_greedy_tokens(exported, world):
    policy, tokenizer, out = exported
    stops = stop_tokens(str(out), tokenizer)
    assert stops == [2, 7]
    prompts = [tokenizer(text).input_ids for text in ("What is 7 + 5?", "Anna has 3 apples.")]
    config, rollout = ModelConfig(), RolloutConfig(engine="hf")
    engine = make_engine(str(out), read_config(str(out), config), rollout, config, world, prompts, stops, 64, 0)
    engine.wake(policy)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    responses = [response.tokens for response in engine.generate(prompts, [0, 0], Sampling(0.0, 16))]
    for prompt, response in zip(prompts, responses):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert response == want.tolist()
    assert responses[0] != responses[1]


def test_export_brings_tokenizer_and_chat_template(exported):
    _, tokenizer, out = exported
    again = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    assert tokenizer.chat_template
    assert again.chat_template == tokenizer.chat_template
    assert again.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert again("Grüße, 17!").input_ids == tokenizer("Grüße, 17!").input_ids
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 7]


def test_export_in_several_files(trained, exported, model, world, tmp_path):
    """Small files with an index, an untied head."""
    checkpoint.export(trained[0], exported[1], model, tmp_path / "model", world, file_gb=2048 / 2**30)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    pairs = [pair for file in files for pair in load_file(file).items()]
    weights = dict(pairs)
    assert len(pairs) == len(weights)                                   # each in one file only
    assert all(file.stat().st_size < 2 * 4096 + 53 * 24 * 2 for file in files)
    assert_same(weights, {name: tensor.bfloat16() for name, tensor in trained[0].full_tensors(torch.float32, 1.0)})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])


# --------------------------------------------------------------------------- a real run, killed and resumed

TOTAL, PROMPTS, SAMPLES = 4, 2, 4
NOT_COMPARED = ("timing_s/", "perf/", "rollout/tokens_per_s")


@pytest.fixture(scope="module")
def flags(tiny_llama, tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "data_source": "sums", "reward_model": {"ground_truth": str(2 * i)}}
            for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--model", tiny_llama, "--train-data", str(data), "--val-data", str(data), "--total-steps", str(TOTAL),
        "--prompts-per-step", str(PROMPTS), "--samples-per-prompt", str(SAMPLES), "--minibatches-per-step", "2",
        "--kl-loss-coef", "0.1", "--eval-every", "0", "--eval-n", "1", "--save.every", "2",
        "--policy.compute-dtype", "float32",
        "--optim.lr", "0.01", "--optim.schedule", "linear", "--optim.warmup-steps", "2",
        "--rollout.engine", "hf", "--rollout.max-response-length", "6", "--data.max-prompt-length", "100",
        "--reward.function", "tests/reward_for_resume.py", "--reward.num-workers", "1", "--reward.timeout-s", "600",
    ]


def metrics(run_dir) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(NOT_COMPARED)} for row in rows]


def tensors(value, prefix="") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    nested = value.items() if isinstance(value, dict) else ()
    return {name: tensor for key, x in nested for name, tensor in tensors(x, f"{prefix}/{key}").items()}


def final_state(run_dir) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    file = run_dir / "whole.pt"
    dcp_to_torch_save(run_dir / f"checkpoints/step_{TOTAL:06d}", file)
    return tensors(torch.load(file, weights_only=False))


def assert_same_run(run, want) -> None:
    assert metrics(run) == metrics(want)
    assert_same(final_state(run), final_state(want))
    assert (run / "model/model-00000.safetensors").read_bytes() == (want / "model/model-00000.safetensors").read_bytes()


@pytest.fixture(scope="module")
def in_one_go(flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("in_one_go")
    launch("grpo.py", *flags, "--run-dir", run, timeout=170)
    return run


def test_the_run_learns_something(in_one_go, tiny_llama):
    """Guard: what is compared below is not constant, and every kind of number is there."""
    rows = metrics(in_one_go)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert len({row["critic/rewards/mean"] for row in rows[1:]}) > 1
    assert all(row["actor/grad_norm"] > 0.01 for row in rows[1:])
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([0.005, 0.01, 0.01, 0.0])
    assert rows[-1]["val-core/sums/acc/greedy"] >= 0
    start = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()["model.embed_tokens.weight"]
    end = AutoModelForCausalLM.from_pretrained(in_one_go / "model").state_dict()["model.embed_tokens.weight"]
    assert (start - end.float()).abs().max() > 0.005


def test_a_killed_run_continues_exactly(flags, in_one_go, tmp_path):
    """kill -9 in step 4, after the checkpoint of step 2: a fresh process drops step 3's line and does it again."""
    run, marker = tmp_path / "run", tmp_path / "stuck"
    calls = 5 * 2 + 3 * PROMPTS * SAMPLES                               # validation before training, three steps
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"OMP_NUM_THREADS": "1", "HANG_AFTER": str(calls), "HANG_MARKER": str(marker)}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "grpo.py", *flags, "--run-dir", str(run)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 170
            while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert marker.exists(), (tmp_path / "log").read_text()[-3000:]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
    assert names(run) == ["step_000002"]
    done = launch("grpo.py", *flags, "--run-dir", run, timeout=170)
    assert "resumed after step 2" in done.stdout
    assert_same_run(run, in_one_go)


def test_a_finished_run_is_left_as_it_is(flags, in_one_go, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(in_one_go, run)
    done = launch("grpo.py", *flags, "--run-dir", run, timeout=170)
    assert f"resumed after step {TOTAL}" in done.stdout
    assert_same_run(run, in_one_go)


def test_two_ranks_do_what_one_does_and_continue_exactly(flags, in_one_go, tmp_path):
    """The same tokens and rewards in the first step, the same gradient; then resumed without the last checkpoint."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    launch("grpo.py", *flags, "--run-dir", whole, ranks=2, timeout=170)
    ours, theirs = metrics(whole)[1], metrics(in_one_go)[1]
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value == pytest.approx(theirs[key], rel=1e-5, abs=2e-6), key
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / f"checkpoints/step_{TOTAL:06d}")
    shutil.rmtree(resumed / "model")
    launch("grpo.py", *flags, "--run-dir", resumed, ranks=2, timeout=170)
    assert_same_run(resumed, whole)
