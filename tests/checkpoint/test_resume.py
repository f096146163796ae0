"""Real runs, killed, stopped and resumed: weights, optimizer state, metrics and texts as if nothing had been."""

import json
import shutil
import signal
from datetime import datetime, timedelta, timezone

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.checkpoint import files
from common.rollout import Response
from common.rollouts.in_flight import Group
from envs.stored import pack, split, write_parts
from tests.checkpoint import shards
from tests.checkpoint.faulty import server
from tests.conftest import VLLM, VOCAB, launch, make_tiny_llama
from tests.engine.episode_runs import FILE

TOTAL, PROMPTS, SAMPLES = 4, 2, 4
# seconds, memory, and how many weights a process compares: all at its first sync
# episode/restarted: how many episodes lost their process when the run was stopped
NOT_COMPARED = ("timing_", "val-aux/timing_", "perf/", "rollout/tokens_per_s", "sleep/", "sync/", "episode/restarted")


def tiny_run(model: str, folder) -> list[str]:
    """Flags of a run of four steps with two mini-batches each, a reference, warm-up and validation."""
    data = folder / "questions.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "data_source": "sums", "reward_model": {"ground_truth": str(2 * i)}}
            for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--model", model, "--train-data", str(data), "--val-data", str(data), "--total-steps", str(TOTAL),
        "--prompts-per-step", str(PROMPTS), "--samples-per-prompt", str(SAMPLES), "--minibatches-per-step", "2",
        "--kl-loss-coef", "0.1", "--eval-every", "0", "--eval-n", "1", "--save.every", "2",
        "--policy.compute-dtype", "float32",
        "--optim.lr", "0.01", "--optim.schedule", "linear", "--optim.warmup-steps", "2",
        "--rollout.engine", "hf", "--rollout.max-response-length", "6", "--data.max-prompt-length", "100",
        "--reward.function", "tests/scripts/reward_for_resume.py", "--reward.num-workers", "1",
        "--reward.timeout-s", "600",
    ]


def metrics(run_dir) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(NOT_COMPARED)} for row in rows]


def final_state(run_dir, total: int = TOTAL) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    return shards.whole(run_dir / f"checkpoints/step_{total:06d}")


def assert_same_run(run, want, total: int = TOTAL) -> None:
    ours, theirs = metrics(run), metrics(want)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs):
        assert {k: (a.get(k), b.get(k)) for k in a | b if a.get(k) != b.get(k)} == {}, a["step"]
    found, state = final_state(run, total), final_state(want, total)
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    assert (run / "model/model.safetensors").read_bytes() == (want / "model/model.safetensors").read_bytes()
    recorded = sorted(path.name for path in (run / "rollouts").iterdir())
    assert recorded == sorted(path.name for path in (want / "rollouts").iterdir()) and len(recorded) > 1
    for name in recorded:
        assert (run / "rollouts" / name).read_bytes() == (want / "rollouts" / name).read_bytes(), name


def steps_on_disk(run_dir) -> list[int]:
    return [files.read_manifest(folder)["state"]["step"] for folder in files.complete_checkpoints(run_dir)]


@pytest.fixture(scope="module")
def flags(tiny_llama, tmp_path_factory) -> list[str]:
    return tiny_run(tiny_llama, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def start():
    """Runs of one rank, in forks of a process that has imported torch and transformers."""
    return server()


@pytest.fixture(scope="module")
def in_one_go(flags, start, tmp_path_factory):
    run = tmp_path_factory.mktemp("in_one_go")
    logs = {"REWARD_LOG": str(run / "texts"), "DRAWS": str(run / "draws"), "PHASES": str(run / "phases")}
    code = start(run / "log", "none", "grpo.py", *flags, "--run-dir", run, env=logs)
    assert code == 0, (run / "log").read_text()[-6000:]
    return run


def test_the_run_learns_something(in_one_go, tiny_llama):
    """Guard: what is compared below is not constant, and every kind of number is there."""
    rows = metrics(in_one_go)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert len({row["critic/rewards/mean"] for row in rows[1:]}) > 1
    assert all(row["actor/grad_norm"] > 0.01 for row in rows[1:])
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([0.005, 0.01, 0.01, 0.005])
    assert rows[-1]["val-core/sums/acc/greedy"] >= 0
    start = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()["model.embed_tokens.weight"]
    end = AutoModelForCausalLM.from_pretrained(in_one_go / "model").state_dict()["model.embed_tokens.weight"]
    assert (start - end.float()).abs().max() > 0.005


def test_what_takes_long_before_the_first_step_is_a_phase_of_its_own(in_one_go):
    """Each of them has the whole of --save.timeout-s."""
    phases = [name for name in (in_one_go / "phases").read_text().splitlines() if not name.startswith("after ")]
    assert phases[:5] == ["setup", "setup of the engine", "setup of models", "validation", "gen"]
    assert phases[5 : phases.index("gen", 5)] == ["reward", "old_log_prob", "ref", "update_actor"]
    assert phases[-3:] == ["update_actor", "testing", "save_checkpoint"]


def test_a_killed_run_continues_exactly(flags, start, in_one_go, tmp_path):
    """kill -9 in step 4, before its update: the next process drops step 3's line and does it again, text by text, and
    writes in the background. Started once more, it has nothing to do."""
    run, texts, log = tmp_path / "run", tmp_path / "texts", tmp_path / "log"
    flags = [*flags, "--run-dir", run]
    assert start(log, "optimizer:7:0:kill", "grpo.py", *flags) == -signal.SIGKILL
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
    assert steps_on_disk(run) == [2]
    flags.append("--save.async")
    logs = {"REWARD_LOG": str(texts), "DRAWS": str(tmp_path / "draws")}
    assert start(log, "none", "grpo.py", *flags, env=logs) == 0, log.read_text()[-6000:]
    assert "resumed after step 2" in log.read_text()
    assert_same_run(run, in_one_go)
    before = 5 * 2 + 2 * PROMPTS * SAMPLES                              # validation, two steps
    # without the text that each start scores before it loads a model
    found, want = ([text for text in file.read_text().splitlines() if "Let me see." not in text]
                   for file in (texts, in_one_go / "texts"))
    assert found == want[before:] and len(set(found)) > 10
    draws = (in_one_go / "draws").read_text().splitlines()              # of a fork, from the global generators
    assert (tmp_path / "draws").read_text().splitlines() == draws[-2:]
    assert draws[-1].split()[1:] != draws[-2].split()[1:]
    config = (run / "config.json").read_bytes()
    assert start(log, "none", "grpo.py", *flags, "--optim.lr", "0.5") == 0
    assert f"{run} is finished. Nothing was changed; other flags now: --optim.lr was 0.01, is 0.5" in log.read_text()
    assert (run / "config.json").read_bytes() == config and not (run / "start_3").exists()
    assert_same_run(run, in_one_go)


@pytest.mark.parametrize(("fault", "number", "saved"), [
    ("rollout:81:0:int", signal.SIGINT, 2),                 # while step 3 is sampled: it is dropped
    ("forward:22:0:usr1", signal.SIGUSR1, 2),               # in its update, before an optimizer step: it is dropped
    ("optimizer after:5:0:term", signal.SIGTERM, 3),        # after the first of two optimizer steps: it is finished
    ("save:1:0:term", signal.SIGTERM, 2),                   # while step 2 is saved anyway
])
def test_a_stopped_run_continues_exactly(fault, number, saved, flags, start, in_one_go, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    flags = [*flags, "--run-dir", run, "--save.every", "2" if fault.startswith("save") else "0"]
    assert start(log, fault, "grpo.py", *flags) == 128 + number
    assert f"stopped by {number.name} after step {saved}, which is saved" in log.read_text()
    assert steps_on_disk(run) == [saved]
    assert [row["step"] for row in metrics(run)] == list(range(saved + 1))
    assert start(log, "none", "grpo.py", *flags) == 0, log.read_text()[-6000:]
    assert_same_run(run, in_one_go)


def test_a_run_stopped_in_its_last_validation_makes_up_for_it(flags, start, in_one_go, tmp_path):
    """The step is saved at once, without its validation; the next start validates, and logs the step as a whole."""
    run, log = tmp_path / "run", tmp_path / "log"
    flags = [*flags, "--run-dir", run]
    assert start(log, "rollout:112:0:term", "grpo.py", *flags) == 128 + signal.SIGTERM
    assert f"stopped by SIGTERM after step {TOTAL}, which is saved" in log.read_text()
    assert [row["step"] for row in metrics(run)] == list(range(TOTAL)) and not (run / "model").exists()
    unvalidated = shutil.copytree(run, tmp_path / "unvalidated")
    assert start(log, "none", "grpo.py", *flags) == 0, log.read_text()[-6000:]
    assert_same_run(run, in_one_go)
    for name in ("--val-data", "--eval-n"):                 # nothing is validated now: it is logged all the same
        where = flags.index(name)
        flags = [*flags[:where], *flags[where + 2 :]]
    flags = [*flags, "--run-dir", unvalidated]
    assert start(log, "none", "grpo.py", *flags) == 0, log.read_text()[-6000:]
    assert [row["step"] for row in metrics(unvalidated)] == list(range(TOTAL + 1))


def test_a_stop_while_the_engine_is_awake_saves_what_is_offloaded(flags, start, tmp_path):
    """dapo.py collects its rewards between wake and sleep, when weights and moments are in host memory."""
    where, log = flags.index("--kl-loss-coef"), tmp_path / "log"
    flags = [*flags[:where], *flags[where + 2 :], "--save.every", "0", "--offload.params", "--offload.optimizer"]
    assert start(log, "none", "dapo.py", *flags, "--run-dir", tmp_path / "whole") == 0, log.read_text()[-6000:]
    flags += ["--run-dir", tmp_path / "again"]
    assert start(log, "rollout:81:0:usr1", "dapo.py", *flags) == 128 + signal.SIGUSR1, log.read_text()[-6000:]
    assert steps_on_disk(tmp_path / "again") == [2] and "phase 'gen'" not in log.read_text()
    assert start(log, "none", "dapo.py", *flags) == 0, log.read_text()[-6000:]
    assert_same_run(tmp_path / "again", tmp_path / "whole")


def test_a_run_stopped_before_its_first_step_starts_again(flags, start, in_one_go, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    flags = [*flags, "--run-dir", run]
    assert start(log, "rollout:1:0:usr1", "grpo.py", *flags) == 128 + signal.SIGUSR1
    assert "there is nothing to save yet" in log.read_text()
    assert steps_on_disk(run) == []
    assert start(log, "none", "grpo.py", *flags) == 0, log.read_text()[-6000:]
    assert_same_run(run, in_one_go)


def test_two_ranks_do_what_one_does_and_continue_exactly(flags, start, in_one_go, tmp_path):
    """The same tokens and rewards in the first step, the same gradient. Then rank 1 is killed as it writes its part of
    step 4's checkpoint, and torchrun starts both again by itself: the run ends as the undisturbed one did."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    log = tmp_path / "log"
    assert start(log, "none", "grpo.py", *flags, "--run-dir", whole, ranks=2) == 0, log.read_text()[-6000:]
    ours, theirs = metrics(whole)[1], metrics(in_one_go)[1]
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if not key.startswith("global_seqlen/"):                            # tokens of a rank
            assert value == pytest.approx(theirs[key], rel=1e-5, abs=2e-6), key
    done = launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
                  "tests/checkpoint/faulty.py", "write:2:1:kill", "grpo.py", *flags, "--run-dir", again, timeout=300)
    assert "resumed after step 2" in done.stdout
    assert_same_run(again, whole)


@pytest.mark.sweep
@pytest.mark.parametrize(("script", "more"), [
    ("ppo.py", ["--kl-reward-coef", "0.1", "--kl-controller", "adaptive", "--kl-target", "0.001"]),
    ("dapo.py", ["--keep-surplus", "--max-gen-batches", "4", "--overlong-buffer", "2", "--rollout.lockstep",
                 "--rollout.episode", f"{FILE}:three_turns", "--rollout.max-response-length", "80"]),
    ("rloo.py", ["--baseline", "remax", "--kl-reward-coef", "0.1"]),
])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_other_scripts_continue_exactly(ranks, script, more, flags, start, tmp_path):
    """kill -9 after step 3: critic, adaptive coefficient and surplus groups (of episodes) come back with step 2."""
    where = flags.index("--kl-loss-coef")
    flags, log = [*flags[:where], *flags[where + 2 :], *more], tmp_path / "log"
    for name, faults in {"whole": ["none"], "again": ["log after:4:0:kill", "none"]}.items():
        for fault in faults:
            arguments = (fault, script, *flags, "--run-dir", tmp_path / name)
            code = start(log, *arguments, ranks=ranks)
            assert (code == 0) == (fault == "none"), log.read_text()[-6000:]
    assert "resumed after step 2" in log.read_text()
    assert all(row["actor/grad_norm"] > 0.01 for row in metrics(tmp_path / "again")[1:])
    assert_same_run(tmp_path / "again", tmp_path / "whole")


def test_a_fixed_kl_coefficient_is_the_flags(flags, start, tmp_path):
    """Also in a run that continues from another one with another coefficient. The controller's comes back."""
    where, log = flags.index("--kl-loss-coef"), tmp_path / "log"
    flags = [*flags[:where], *flags[where + 2 :], "--total-steps", "2"]
    assert start(log, "none", "ppo.py", *flags, "--run-dir", tmp_path / "other") == 0, log.read_text()[-6000:]
    flags += ["--kl-reward-coef", "0.05", "--save.resume", str(tmp_path / "other"), "--total-steps", "3"]
    assert start(log, "none", "ppo.py", *flags, "--run-dir", tmp_path / "run") == 0, log.read_text()[-6000:]
    assert metrics(tmp_path / "run")[-1]["actor/reward_kl_penalty_coeff"] == 0.05


EPISODES = ["--rollout.episode", f"{FILE}:long_talk", "--rollout.lockstep", "--rollout.in-flight", "1.5",
            "--rollout.max-response-length", "150"]


@pytest.mark.sweep
@pytest.mark.engine
@pytest.mark.parametrize(("ranks", "script", "more", "faults"), [
    (1, "grpo.py", EPISODES, ["episode:70:0:kill", "episode:50:0:term"]),
    (1, "grpo.py", ["--rollout.drafts", "4"], ["reward:3:0:term"]),     # what ends first depends on them
    pytest.param(1, "grpo.py", [], ["reward:3:0:term"], marks=pytest.mark.slow),
    pytest.param(2, "dapo.py", ["--keep-surplus", "--max-gen-batches", "3"], ["log after:3:0:kill"],
                 marks=pytest.mark.slow),
])
def test_with_vllm_a_run_that_was_ended_continues_exactly(ranks, script, more, faults, tmp_path, smollm):
    """In step 2, episodes also in step 3 as they go on: by kill -9, or by SIGTERM, where the engine must be closed
    before the process group. What was in flight, and dapo.py's surplus groups, come back with the step before."""
    model = make_tiny_llama(tmp_path / "tiny", 128)                         # vLLM's attention on CPUs: heads of 32
    flags = [*tiny_run(model, tmp_path), "--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1",
             "--rollout.max-num-seqs", "8", "--save.every", "1", "--total-steps", "3", "--log.rollouts-every", "1",
             "--rollout.in-flight", "2", "--correction.preset", "decoupled-token-is",
             "--rollout.max-response-length", "50", "--rollout.stop-token-ids", *map(str, range(0, VOCAB, 16)), *more]
    start, log, errors = server(VLLM), tmp_path / "log", tmp_path / "errors"
    env = {"TMPDIR": str(tmp_path)}                                         # kill -9 leaves temporary folders
    assert start(log, "none", script, *flags, "--run-dir", tmp_path / "whole", ranks=ranks) == 0, log.read_text()
    flags += ["--run-dir", tmp_path / "again"]
    for saved, fault in enumerate(faults, 1):
        errors.unlink(missing_ok=True)
        code = -signal.SIGKILL if fault.endswith("kill") else 128 + signal.SIGTERM
        found = start(log, fault, script, *flags, ranks=ranks, errors=errors, env=env)
        assert found == code, errors.read_text()[-6000:]
        assert steps_on_disk(tmp_path / "again")[-1] == saved
        if code > 0:
            assert f"stopped by SIGTERM after step {saved}, which is saved" in log.read_text()
            assert "Traceback" not in errors.read_text() and "Exception" not in errors.read_text(), errors.read_text()
    assert start(log, "none", script, *flags, ranks=ranks) == 0 and f"resumed after step {saved}" in log.read_text()
    rows = metrics(tmp_path / "again")
    assert rows[1]["rollout/carried_tokens"] > 0 and rows[2]["fully_async/partial/partial_ratio"] > 0
    assert all(row["actor/grad_norm"] > 0.01 for row in rows[1:])
    assert_same_run(tmp_path / "again", tmp_path / "whole", 3)


def test_without_in_flight_what_a_checkpoint_has_in_flight_is_dropped_and_counted(flags, start, in_one_go, tmp_path):
    """In the first step after the resume; all else is as if nothing had been in flight."""
    saved = tmp_path / "run/checkpoints/step_000002"
    shutil.copytree(in_one_go / "checkpoints/step_000002", saved)
    shutil.copytree(in_one_go / "rollouts", tmp_path / "run/rollouts")
    shutil.copy(in_one_go / "metrics.jsonl", tmp_path / "run")
    manifest = files.read_manifest(saved)
    responses = [Response([5] * n, [0.0] * n, "", versions=[1] * n) for n in range(SAMPLES)]
    group = vars(Group(0, 1, [0] * SAMPLES, responses, [None] * SAMPLES, flags=""))
    known = [{"number": number, "engine": 0, "row": 0, "step": 1, "flags": ""} for number in range(2)]
    in_flight = {"in_flight": known, "in_flight_responses": pack([[0, group], [1, group]])}
    manifest["state"]["script"], parts = split(in_flight)
    write_parts(saved, 0, parts)
    manifest["flags"]["--rollout.in-flight"] = 2.0
    files.write_manifest(saved, manifest)
    flags, log = [*flags, "--run-dir", tmp_path / "run", "--save.allow-changes"], tmp_path / "log"
    assert start(log, "none", "grpo.py", *flags) == 0, log.read_text()[-6000:]
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(row) for row in rows]
    assert numbers[3]["rollout/dropped_tokens"] == 12.0 and numbers[3]["rollout/staleness/max"] == 0
    in_flight = {name for name in numbers[3] if name.startswith(("rollout/staleness", "fully_async"))}
    in_flight |= {"rollout/carried_tokens", "rollout/dropped_tokens"}
    assert not in_flight & numbers[4].keys()
    numbers[3] = {name: value for name, value in numbers[3].items() if name not in in_flight}
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    assert_same_run(tmp_path / "run", in_one_go)


def test_a_checkpoint_is_exported_without_its_run(in_one_go, tmp_path):
    """From its folder alone, in a process without a group: the bytes that the run's own end wrote, and what loads."""
    alone = shutil.copytree(in_one_go / "checkpoints/step_000004", tmp_path / "step_000004")
    done = launch("tools/checkpoints.py", "export", alone, tmp_path / "out", warm=True)
    assert "step_000004 ->" in done.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (in_one_go / "model").iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} < set(names)
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (in_one_go / "model" / name).read_bytes(), name


@pytest.mark.sweep
def test_a_run_goes_on_after_midnight(tiny_llama, tmp_path):
    """Its chat template writes the date, and the prompts that it trains on stay those of the first day. Another run
    that starts from its checkpoint has them, too. (Time zones 46 hours apart stand for two days.)"""
    template = tmp_path / "template.jinja"
    template.write_text("Today is {{ strftime_now('%d %B %Y, %H:%M') }}.{% for m in messages %}<|im_start|>"
                        "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    rows = [{"prompt": f"{i} + 1?", "response": f"{i + 1}"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sft.py", "--model", tiny_llama, "--train-data", str(tmp_path / "rows.jsonl"), "--rows-per-step", "2",
               "--policy.compute-dtype", "float32", "--data.chat-template-file", str(template), "--data.max-length",
               "256"]
    launch(*command, "--run-dir", tmp_path / "run", "--total-steps", "1", env={"TZ": "XXX+23"})
    day = files.read_manifest(tmp_path / "run/checkpoints/step_000001")["state"]["day"]
    said = launch(*command, "--run-dir", tmp_path / "run", "--total-steps", "2", env={"TZ": "XXX-23"}).stdout
    assert "resumed after step 1" in said
    shutil.rmtree(tmp_path / "run/model")
    other = launch(*command, "--run-dir", tmp_path / "other", "--total-steps", "3", "--save.resume",
                   str(tmp_path / "run/checkpoints/step_000002"), env={"TZ": "XXX-23"}).stdout
    assert "resumed after step 2" in other
    days = [files.read_manifest(tmp_path / name)["state"]["day"]
            for name in ("run/checkpoints/step_000002", "other/checkpoints/step_000003")]
    assert days == [day, day]
    assert datetime.now(timezone(timedelta(hours=23))).date().isoformat() > day
