"""async_grpo.py: one rank trains and one samples (or more of either), with the same numbers whoever is faster."""

import json
import re
import shutil
import signal
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import async_grpo
from common.batch import Batch
from common.checkpoint import files
from common.engine import remote
from common.engine.base import RolloutConfig
from common.engine.remote import RemoteEngine
from common.parallel.ranks import SAMPLERS
from common.rollouts.scoring import RolloutRequest
from envs.stored import join, unpack
from tests.checkpoint.faulty import LIKE_TORCHRUN, server
from tests.checkpoint.test_resume import assert_same_run, final_state, metrics, steps_on_disk, tiny_run
from tests.conftest import STOPS, VLLM, launch, make_tiny_llama
from tests.engine.episode_runs import FILE

TOTAL = 5
FAULTY = "tests/checkpoint/faulty.py"


@pytest.fixture(scope="module")
def flags(tiny_llama, tmp_path_factory) -> list[str]:
    """Five steps of two mini-batches, with a checkpoint and a file of responses after each."""
    return [*tiny_run(tiny_llama, tmp_path_factory.mktemp("data")), "--total-steps", str(TOTAL), "--save.every", "1",
            "--save.keep", "9", "--save.timeout-s", "100", "--log.rollouts-every", "1",
            "--correction.weights", "token", *STOPS]


@pytest.fixture(scope="module")
def in_one_go(flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("in_one_go")
    done = launch("async_grpo.py", *flags, "--run-dir", run, ranks=2, warm=True)
    assert "1 sampler(s), up to 1 step(s) old, corrected" in done.stdout
    return run


def rows_of(run, step: int) -> list[dict]:
    return pq.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()


EPISODES = ["--rollout.episode", f"{FILE}:three_turns", "--rollout.max-response-length", "80", "--rollout.lockstep"]


@pytest.mark.parametrize("more", [[], EPISODES], ids=["responses", "episodes"])
def test_without_staleness_it_is_grpo(more, flags, tmp_path):
    """All numbers and weights, bit for bit; the start says that nothing is corrected."""
    other = tmp_path / "val.jsonl"                                      # samplers validate on these rows, not on others
    other.write_text(json.dumps({"prompt": "What is 7 + 70?", "data_source": "sums",
                                 "reward_model": {"ground_truth": "77"}}))
    flags = [*flags, "--correction.weights", "none", "--total-steps", "3", "--eval-every", "2", *more]
    flags += ["--val-data", other]
    launch("grpo.py", *flags, "--run-dir", tmp_path / "grpo", warm=True)
    split = ["--max-staleness", "0", "--run-dir", tmp_path / "run"]
    done = launch("async_grpo.py", *flags, *split, ranks=2, warm=True)
    assert "up to 0 step(s) old, NOT corrected (--correction.weights token)" in done.stdout
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "grpo")
    assert [row.pop("rollout/staleness", None) for row in ours] == [None, 0, 0, 0]
    assert ours == theirs and ("num_turns/mean" in ours[1]) == bool(more)
    found, state = final_state(tmp_path / "run", 3), final_state(tmp_path / "grpo", 3)
    assert [name for name in state if not torch.equal(found[name], state[name])] == []


def test_tokens_are_of_the_weights_of_their_version(flags, in_one_go, tiny_llama):
    """A step's log-probs, scored again by the weights of the checkpoint before the step before, by transformers' own
    forward; those of the step before itself, which had been known by then, are others."""
    assert [row.get("rollout/staleness") for row in metrics(in_one_go)] == [None, 0, 1, 1, 1, 1]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for step in (3, 4):
        errors = []
        for made_by in (step - 2, step - 1):                            # steps on disk count from 1
            state = final_state(in_one_go, made_by)
            names = {name.removeprefix("policy.model.lm."): value for name, value in state.items() if ".model." in name}
            model.load_state_dict(names, strict=False)
            assert {name for name, _ in model.named_parameters()} <= names.keys()
            error = 0.0
            for row in rows_of(in_one_go, step):
                prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
                tokens = torch.tensor([[*prompt, *row["tokens"]]])
                logp = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                logp = logp.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
                error = max(error, (logp - torch.tensor(row["rollout_logp"])).abs().max().item())
            errors.append(error)
        assert errors[0] < 1e-4 < 1e-2 < errors[1], (step, errors)


def test_two_ranks_on_each_side_give_the_same_numbers(flags, in_one_go, tmp_path):
    """They continue a run of one rank on each side, with the rollout that was made ahead."""
    shutil.copytree(in_one_go / "checkpoints/step_000001", tmp_path / "checkpoints/step_000001")
    shutil.copy(in_one_go / "metrics.jsonl", tmp_path)
    layout = ["--samplers", "2", "--total-steps", "3", "--run-dir", tmp_path]
    done = launch("async_grpo.py", *flags, *layout, ranks=4, warm=True)
    assert "--samplers was 1, is 2" in done.stdout and "resumed after step 1" in done.stdout
    for ours, theirs in zip(metrics(tmp_path)[2:], metrics(in_one_go)[2:4], strict=True):
        for name in ("critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss",
                     "rollout_corr/kl", "rollout/staleness"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def names(rank: int | str) -> str:
    """What another rank says of one that ended, as a regular expression: its number and the phase that it reported,
    which is still 'setup' where a tiny run ends within the second of its first report."""
    report = rf"(\[rank {rank}\] in phase '[^']+'|rank {rank}: ended by an error: ArithmeticError)"
    return rf"\[rank \d\] another rank ended, in phase '[^']+'. Its last report: (rank 0: .*)?{report}"


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["rollout:130:1:kill", "optimizer:6:0:kill"])
def test_the_end_of_one_side_ends_the_other_and_loses_nothing(fault, flags, in_one_go, tmp_path):
    """kill -9 while a sampler samples; while a trainer makes an optimizer step."""
    done = launch(FAULTY, fault, "async_grpo.py", *flags, "--run-dir", tmp_path, ranks=2, timeout=170, check=False)
    assert done.returncode == 1 and re.search(names(fault.split(":")[2]), done.stderr), done.stderr[-6000:]
    saved = steps_on_disk(tmp_path)[-1]
    assert 1 <= saved < TOTAL
    again = launch("async_grpo.py", *flags, "--run-dir", tmp_path, ranks=2, warm=True)
    assert f"resumed after step {saved}" in again.stdout
    assert_same_run(tmp_path, in_one_go, TOTAL)


@pytest.mark.sweep
@pytest.mark.parametrize(("fault", "codes"), [("rollout:60:2:kill", [1, 1, -9]), ("reward:2:1:raise", [1, 1, 1])])
def test_a_sampler_that_ends_without_torchrun_ends_the_run_which_names_it(fault, codes, flags, in_one_go, tmp_path):
    """Of two samplers, whose reports alone end the other ranks. The next start continues exactly."""
    start = server()
    flags = [*flags, "--samplers", "2", "--total-steps", "3", "--run-dir", tmp_path]
    start(tmp_path / "log", fault, "async_grpo.py", *flags, ranks=3, env={"SILENT_S": "6"})
    said = (tmp_path / "log").read_text()
    assert start.codes == codes and re.search(names(fault.split(":")[2]), said), said[-6000:]
    assert steps_on_disk(tmp_path) in ([], [1])
    assert start(tmp_path / "log", "none", "async_grpo.py", *flags, ranks=3) == 0
    for ours, theirs in zip(metrics(tmp_path)[1:], metrics(in_one_go)[1:4], strict=True):
        assert ours["critic/score/mean"] == pytest.approx(theirs["critic/score/mean"]), ours["step"]
        assert ours["rollout/staleness"] == theirs["rollout/staleness"]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["rollout:100:1:usr1", "forward:16:0:usr1"])
def test_a_signal_to_either_side_stops_both_and_the_run_continues_exactly(fault, flags, in_one_go, tmp_path):
    """While a sampler samples: the step is finished. Before the first optimizer step of a step: that is given up. At
    the end of the second start the trainer, which has the store of the job, does not leave before the sampler."""
    start = server()
    flags = [*flags, "--run-dir", tmp_path, "--save.every", "0"]
    assert start(tmp_path / "log", fault, "async_grpo.py", *flags, ranks=2) == 128 + signal.SIGUSR1
    assert start.codes == [138, 0]
    assert re.search(r"stopped by SIGUSR1 after step \d, which is saved", (tmp_path / "log").read_text())
    assert len(steps_on_disk(tmp_path)) == 1
    assert start(tmp_path / "log", "export:1:0:freeze", "async_grpo.py", *flags, ranks=2) == 0
    assert start.codes == [0, 0], (tmp_path / "log").read_text()[-6000:]
    assert_same_run(tmp_path, in_one_go, TOTAL)


def test_a_signal_to_any_sampler_stops_the_run(flags, tmp_path):
    """Here to the last of two."""
    start = server()
    flags = [*flags, "--run-dir", tmp_path, "--save.every", "0", "--samplers", "2"]
    start(tmp_path / "log", "rollout:100:2:usr1", "async_grpo.py", *flags, ranks=3)
    said = (tmp_path / "log").read_text()
    assert start.codes == [138, 0, 0] and "stopped by SIGUSR1" in said, said[-3000:]


def test_no_rollout_finds_the_prefixes_of_a_validation(monkeypatch):
    """After engine.wake the cache is empty, also in grpo.py and in a run that continues after the validation."""
    seen = []
    engine = SimpleNamespace(_wake_cache=lambda: seen.append("empty"), measured=dict)
    pending = SimpleNamespace(collect=lambda meter: None)
    monkeypatch.setattr(async_grpo, "start_rollout", lambda source, request: seen.append(request.rows) or pending)
    monkeypatch.setattr(async_grpo, "responses_to_state", lambda rollout: b"")
    requests = [RolloutRequest([row], 1, RolloutConfig(), (0,), with_greedy=row == 0) for row in range(2)]
    asked = [*(("rollout", request) for request in requests), ("end", None)]
    bridge = SimpleNamespace(receive=lambda on_wait: asked.pop(0), has_message=lambda: False,
                             send_share=lambda share: None, send=lambda message: None)
    run = SimpleNamespace(start_engine=lambda: (engine, 0), scoring=None, train_set=None, val_set=None,
                          watchdog=SimpleNamespace(phase=lambda name: None, signal=0))
    async_grpo.sample(run, bridge)
    assert seen == ["empty", [0], "empty", [1]]


def test_a_signal_ends_a_validation(flags, tmp_path):
    """The samplers leave it unfinished, which would take another 30 tokens of a second each."""
    start = server()
    faults = "rollout:25:1:slow:1,validation:1:0:usr1:0.5"              # the first 24 tokens are the probe's
    start(tmp_path / "log", faults, "async_grpo.py", *flags, "--run-dir", tmp_path, ranks=2)
    said = (tmp_path / "log").read_text()
    assert start.codes == [138, 0] and "there is nothing to save yet" in said, said[-3000:]
    assert 0 < said.count("slow rollout") < 12


def test_an_error_names_the_rank_of_the_job(flags, tmp_path):
    """Not the rank among the samplers, which is 0."""
    start = server()
    start(tmp_path / "log", "rollout:1:1:raise", "async_grpo.py", *flags, "--run-dir", tmp_path, ranks=2,
          env=LIKE_TORCHRUN)
    said = (tmp_path / "log").read_text()
    assert start.codes == [1, 1] and "[rank 0] another rank ended, in phase" in said, said[-3000:]
    assert re.search(r"\[rank 1\] ended by an error:\n(.*\n)*ArithmeticError: asked to fail", said)
    assert "[rank0]" not in said


def test_a_scorer_that_hangs_ends_both_sides(flags, tmp_path):
    start = server()
    code = start(tmp_path / "log", "reward:5:1:hang", "async_grpo.py", *flags, "--run-dir", tmp_path,
                 "--save.timeout-s", "3", ranks=2)
    said = (tmp_path / "log").read_text()
    assert code == 124 and start.codes == [124, 124], said[-3000:]
    assert "phase 'wait' takes longer than --save.timeout-s 3" in said
    assert "phase 'rollout, for the trainers' takes longer" in said and "in collect" in said


def test_vllm_on_the_samplers_side(flags, tmp_path):
    model = make_tiny_llama(tmp_path / "model", hidden_size=128)
    flags = [*flags, "--model", model, "--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1", "--total-steps", "2"]
    launch("async_grpo.py", *flags, "--run-dir", tmp_path / "run", ranks=2, warm=VLLM)
    rows = metrics(tmp_path / "run")[1:]
    assert [row["rollout/staleness"] for row in rows] == [0, 1]
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-3
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:]
    probes = [json.loads(line)["sync/probe_prob_diff"] for line in lines]
    assert len(probes) == 2 and max(probes) < 1e-3


@pytest.mark.parametrize(("trainers", "engines"), [(1, 3), (2, 5), (4, 2)])
def test_each_engine_is_compared_by_a_trainer_and_none_compares_all(trainers, engines):
    """A trainer without an engine of its own runs the model too, or the collectives of the others would wait for it."""
    probed = [Batch.build([[5, 6]], [[7 + number]], rollout_logps=[[-1.0]]) for number in range(engines)]
    shares = []
    for rank in range(trainers):
        engine = RemoteEngine.__new__(RemoteEngine)
        engine.world, engine.probed = SimpleNamespace(rank=rank, size=trainers, device="cpu"), probed
        shares.append(engine._sample_probe().tokens[2::3].tolist())
    assert {token for share in shares for token in share} == {7 + number for number in range(engines)}
    assert {len(share) for share in shares} <= {max(engines // trainers, 1), -(-engines // trainers)}


def test_ranks_of_one_engine_have_one_probe(monkeypatch):
    monkeypatch.setattr(remote, "all_gather_objects", lambda mine: [f"{mine} {engine}" for engine in (0, 0, 1, 1)])
    monkeypatch.setattr(remote, "all_names", sorted)
    probe = SimpleNamespace(to=lambda device: f"on {device}, of engine")
    engine = SimpleNamespace(config=SimpleNamespace(tp=2), _load=lambda tensors, sent: (3, set()), _wake_weights=int,
                             _wake_cache=int, _sample_probe=lambda: probe)
    assert remote.receive_weights(engine, None, {}) == (3, [], ["on cpu, of engine 0", "on cpu, of engine 1"])


@pytest.mark.parametrize(("change", "message"), [
    (["--samplers", "0"], "--samplers 0 must be at least 1 and below the world size 2"),
    (["--samplers", "2"], "where all ranks train and sample: grpo.py"),
    (["--max-staleness", "-1"], "--max-staleness -1 must be at least 0"),
    (["--rollout.in-flight", "1.5", "--rollout.engine", "vllm"], "--rollout.in-flight must be left out"),
])
def test_what_cannot_work_is_refused(change, message, flags, tmp_path):
    done = launch("async_grpo.py", *flags, "--run-dir", tmp_path, *change, ranks=2, warm=True, check=False)
    assert done.returncode == 2 and message in done.stderr


def test_a_reward_model_needs_the_engines_share_of_a_gpu(monkeypatch):
    def passed(*arguments):
        raise InterruptedError("what main does next")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(SAMPLERS, "0")  # main sets it: put back at the end
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(async_grpo, "resolve_correction", passed)
    args = async_grpo.Args(model="m", train_data=("x",))
    with pytest.raises(InterruptedError):
        async_grpo.main(args)
    args.reward_model.path = "rm"
    with pytest.raises(ValueError, match=r"--reward-model.path needs --rollout.gpu-mem"):
        async_grpo.main(args)
    args.rollout.gpu_memory_utilization = 0.6
    with pytest.raises(InterruptedError):
        async_grpo.main(args)


def test_throughput_is_that_of_a_rank_of_either_side(in_one_go):
    for row in map(json.loads, (in_one_go / "metrics.jsonl").read_text().splitlines()[1:]):
        per_rank = row["perf/total_num_tokens"] / row["timing_s/step"] / 2
        assert row["perf/throughput"] == pytest.approx(per_rank)


def test_the_checkpoint_has_the_rollouts_that_were_made_ahead(in_one_go):
    folder = in_one_go / "checkpoints/step_000002"
    (ahead,) = join(files.read_manifest(folder)["state"], folder, [0])["script"]["ahead"]
    assert ahead["version"] == 1 and len(unpack(ahead["samples"])) == 8
    assert async_grpo.Args.max_staleness == 1
