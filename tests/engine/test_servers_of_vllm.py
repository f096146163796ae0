"""A real server of vLLM on the CPU samples for grpo.py and async_grpo.py: the same tokens as the engine in process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from common.flags.rollout import SamplingConfig
from common.servers.client import Limits, Refused
from common.servers.dialect import Ask, Needs
from common.servers.folder import WeightFolder
from common.servers.pool import Pool
from common.servers.transfer import Held
from common.sync.checksums import as_numbers, checksum
from tests.conftest import ROOT, STOPS, VOCAB, launch
from tests.engine.servers import KEY, VLLMServer, make_model
from tests.scripts.test_supervised import metrics_of
from tools import try_script

pytestmark = [pytest.mark.engine, pytest.mark.sweep]
FLAGS = [
    "--prompts-per-step", "2", "--samples-per-prompt", "4", "--optim.lr", "1e-3", "--policy.compute-dtype", "float32",
    "--data.max-prompt-length", "200", "--rollout.max-response-length", "16",
    "--reward.function", f"{try_script.__file__}:compute_score", "--reward.num-workers", "0",
    "--log.rollouts-every", "1", "--save.every", "0", "--save.hf", "never", *STOPS,
]
IN_PROCESS = ["--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1"]
DIFFERENCE = "training/rollout_probs_diff_mean"
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm) -> str:
    return make_model(tmp_path_factory.mktemp("tiny_for_servers"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    os.environ[KEY] = "a key of this test"
    server = VLLMServer(model, tmp_path_factory.mktemp("log") / "server.log").start().wait()
    yield server
    server.kill()
    del os.environ[KEY]


def flags_of(server: VLLMServer) -> list[str]:
    return ["--rollout.engine", "server", "--rollout.servers", server.url, "--rollout.server-auth-env", KEY]


def tokens_of(run_dir: Path, step: int) -> list[list[int]]:
    return [row["tokens"] for row in rows_of(run_dir, step)]


def rows_of(run_dir: Path, step: int) -> list[dict]:
    return pq.read_table(run_dir / f"rollouts/step_{step:06d}.parquet").to_pylist()


def must_be_the_same(ours: Path, theirs: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        assert tokens_of(ours, step) == tokens_of(theirs, step)
    for line, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        of_validation = [name for name in line if name.startswith("val")]
        assert [line[name] for name in of_validation] == [other[name] for name in of_validation]
        if "actor/grad_norm" not in line:
            continue
        assert line["sync/num_checksums"] == other["sync/num_checksums"] == 20
        assert line["training/rollout_probs_diff_mean"] == pytest.approx(other["training/rollout_probs_diff_mean"])
        assert line["actor/grad_norm"] == other["actor/grad_norm"] > 0


def test_in_turn_a_server_samples_what_the_engine_in_process_does(server, model, small_train, tmp_path):
    """Validation, whose responses are greedy too, and training."""
    given = ["--model", model, "--train-data", small_train, *FLAGS, "--total-steps", "3",
             "--val-data", small_train, "--eval-every", "2", "--eval-n", "1", "--eval-prompts", "8"]
    launch("grpo.py", *given, *flags_of(server), "--run-dir", tmp_path / "server")
    launch("grpo.py", *given, *IN_PROCESS, "--run-dir", tmp_path / "own")
    must_be_the_same(tmp_path / "server", tmp_path / "own", 3)
    launch("grpo.py", *given, *flags_of(server), "--rollout.server-transfer", "gloo", "--run-dir", tmp_path / "gloo")
    must_be_the_same(tmp_path / "gloo", tmp_path / "own", 3)


VARIANTS = {
    "two trainers": ["grpo.py"],
    "texts that end a response, and filters": [
        "grpo.py", "--rollout.stop", "e", " the", "--rollout.temperature", "0.8", "--rollout.top-p", "0.7",
        "--rollout.top-k", "50", "--correction.weights", "token"],
    "episodes and samplers": [
        "async_grpo.py", "--samplers", "1", "--correction.weights", "token", "--rollout.episode",
        "envs/guess_number.py", "--rollout.max-turns", "4", "--rollout.max-response-length", "150",
        "--reward.num-workers", "1", "--train-data"],
    "more groups than are trained": ["dapo.py", "--keep-surplus", "--correction.preset", "decoupled-token-is"],
    "a greedy baseline": ["rloo.py", "--baseline", "remax", "--rollout.max-response-length", "1"],
}
WITH_TWO_RANKS = ("two trainers", "episodes and samplers")
SAMPLED = ("index", "tokens", "mask", "finish_reason", "end_reason", "score")


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_is_sampled_is_what_the_engine_in_process_samples(variant, server, model, small_train, tmp_path):
    """Tokens, their log-probs, why they end, and what is learned of them."""
    script, *flags = VARIANTS[variant]
    if flags[-1:] == ["--train-data"]:
        subprocess.run([sys.executable, "data/guess_number.py", "--out", tmp_path / "data", "--num-train", "32"],
                       check=True, cwd=ROOT)
        flags.append(str(tmp_path / "data/train.parquet"))
    ranks = 2 if variant in WITH_TWO_RANKS else 0
    for name, engine in (("server", flags_of(server)), ("own", IN_PROCESS)):
        launch(script, "--model", model, "--train-data", small_train, *FLAGS, *engine, "--total-steps", "3", *flags,
               "--run-dir", tmp_path / name, ranks=ranks)
    num_tokens = 0
    for step in range(1, 4):
        ours, theirs = rows_of(tmp_path / "server", step), rows_of(tmp_path / "own", step)
        for row, other in zip(ours, theirs, strict=True):
            assert [row[name] for name in SAMPLED] == [other[name] for name in SAMPLED]
            assert row["rollout_logp"] == pytest.approx(other["rollout_logp"], abs=1e-5, nan_ok=True)
            num_tokens += len(row["tokens"])
    assert num_tokens > 5
    gradients = [[line["actor/grad_norm"] for line in metrics_of(tmp_path / name)] for name in ("server", "own")]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-6) and max(gradients[0]) > 0


def test_samplers_that_ask_a_server_make_the_rollouts_of_those_with_an_engine(server, model, small_train, tmp_path):
    given = ["--model", model, "--train-data", small_train, *FLAGS, "--samplers", "1", "--correction.weights", "token",
             "--total-steps", "4"]
    launch("async_grpo.py", *given, *flags_of(server), "--run-dir", tmp_path / "server", ranks=2)
    launch("async_grpo.py", *given, *IN_PROCESS, "--run-dir", tmp_path / "own", ranks=2)
    must_be_the_same(tmp_path / "server", tmp_path / "own", 4)
    launch("async_grpo.py", *given, *flags_of(server), "--rollout.server-transfer", "gloo", "--run-dir",
           tmp_path / "gloo", ranks=2)
    must_be_the_same(tmp_path / "gloo", tmp_path / "own", 4)


def test_groups_in_flight_are_continued(server, model, small_train, tmp_path):
    """Their aborted requests come back with what was sampled."""
    launch("grpo.py", "--model", model, "--train-data", small_train, *FLAGS, *flags_of(server), "--total-steps", "6",
           "--rollout.in-flight", "2", "--correction.preset", "decoupled-token-is", "--rollout.max-response-length",
           "200", "--rollout.max-num-seqs", "3", "--run-dir", tmp_path)
    lines = metrics_of(tmp_path)
    assert sum(line["rollout/carried_tokens"] for line in lines) > 0
    trained = [line for line in lines if "actor/grad_norm" in line]     # a step may have no group that is whole
    assert len(trained) >= 3 and all(line[DIFFERENCE] < 1e-3 for line in trained)


@pytest.fixture
def pool(server):
    needs = Needs("float32", 512, SIZES)
    pool = Pool(lambda: [server.url], os.environ[KEY], Limits(20.0, 3600.0), needs, 64, loads=True)
    yield pool
    pool.close()


def weights_of(model: str, folder: Path, factor: float = 1.0, wrong: str = "") -> WeightFolder:
    """The model's weights times a factor, whose checksums are those of the weights but for the `wrong` one."""
    from safetensors.torch import load_file

    tensors = {name: tensor * factor for name, tensor in load_file(Path(model) / "model.safetensors").items()}
    weights = WeightFolder(folder, f"run_{folder.name}", torch.float32)
    weights.write(iter(tensors.items()))
    sums = as_numbers({name: checksum(tensor, torch.float32) for name, tensor in tensors.items()})
    if wrong:
        sums[wrong] = (sums[wrong][0] + 1, sums[wrong][1])
    weights.complete(sums)
    return weights


def sample(pool: Pool, seed: int, count: int) -> None:
    pool.add(seed, Ask(f"request-{seed}", [*range(5, 40)], seed, SamplingConfig(1.0, count), [2]))


def take(pool: Pool, count: int) -> dict:
    found = {}
    end = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        found |= dict(pool.take(0.2))
    return found


def test_an_aborted_response_is_the_beginning_of_the_whole_one(pool, model, tmp_path):
    weights = weights_of(model, tmp_path)
    pool.present(weights.folder, weights.name)
    pool.wait_ready(60.0)
    pause_s = 0.7
    for _ in range(12):                                                 # until all are amid their tokens
        for seed in range(6):
            sample(pool, seed, 460)
        time.sleep(pause_s)
        parts = dict(pool.abort(set(range(6))))
        lengths = [len(part.tokens) for part in parts.values()]
        if len(parts) == 6 and min(lengths) > 0 and {part.finish_reason for part in parts.values()} == {"abort"}:
            break
        take(pool, 6 - len(parts))
        pause_s *= 1.5 if 0 in lengths else 0.7
    assert len(parts) == 6 and {part.finish_reason for part in parts.values()} == {"abort"}, parts
    for seed in range(6):
        sample(pool, seed, len(parts[seed].tokens))
    for seed, whole in take(pool, 6).items():
        assert whole.tokens == parts[seed].tokens
        assert whole.logp == pytest.approx(parts[seed].logp, abs=1e-5)
        assert set(whole.versions) == {weights.name}


def test_weights_that_differ_from_their_checksums_are_refused_and_the_next_ones_taken(pool, model, tmp_path):
    wrong = weights_of(model, tmp_path / "wrong", wrong="model.norm.weight")
    pool.present(wrong.folder, wrong.name)
    with pytest.raises(Refused, match=r"checksums differ.*in 1 tensors: model.norm.weight"):
        pool.wait_ready(60.0)
    other = weights_of(model, tmp_path / "other", factor=1.5)
    pool.present(other.folder, other.name)
    pool.wait_ready(60.0)
    sample(pool, 1, 4)
    assert set(take(pool, 1)[1].versions) == {other.name} and pool.num_compared == 20


def test_older_weights_are_not_loaded_over_newer_ones(pool, model, tmp_path):
    """As a request would that a stopped server reads late."""
    weights = weights_of(model, tmp_path)
    first = weights.folder
    checksums = json.loads((first / "checksums.json").read_text())
    pool.present(first, weights.name)
    pool.wait_ready(60.0)
    (first / "checksums.json").write_text(json.dumps(checksums | {"version": 7}))
    pool.present(first, "seventh")
    pool.wait_ready(60.0)
    (first / "checksums.json").write_text(json.dumps(checksums | {"version": 6}))
    pool.present(first, "sixth")
    with pytest.raises(Refused, match=r"version 6 come after those of version 7"):
        pool.wait_ready(60.0)


def test_two_runs_that_share_a_server_never_take_each_others_tokens(server, model, tmp_path):
    """Both ask for responses of one token, as fast as they can; the one that came first ends in a line."""
    factors = {"weights_a": 1.0, "weights_b": 1.5}
    pools = {}
    taken = {run: [] for run in factors}
    number = 0
    end = time.monotonic() + 90
    try:
        for run, factor in factors.items():
            pools[run] = Pool(lambda: [server.url], os.environ[KEY], Limits(20.0, 3600.0), Needs("float32", 512, SIZES),
                              64, loads=True)
            weights = weights_of(model, tmp_path / run, factor)
            pools[run].present(weights.folder, f"{run}-000000")
            while len(taken[run]) < 100 and time.monotonic() < end:
                for other, pool in pools.items():
                    while len(pool.open) < 24:
                        number += 1
                        sample(pool, number, 1)
                    taken[other] += [answer for _, answer in pool.take(0.01)]
        while not pools["weights_a"].are_taken and time.monotonic() < end:
            time.sleep(0.05)
        assert pools["weights_a"].are_taken and pools["weights_b"].num_ready == 1
        assert "which another run gave it since: two runs cannot share a server" in pools["weights_a"].troubles()
    finally:
        for pool in pools.values():
            pool.close()
    for run, factor in factors.items():
        assert len(taken[run]) >= 100
        tokens = sorted({token for answer in taken[run] for token in answer.tokens})
        expected = {token: logp_of(model, factor, [token], [*range(5, 40)])[0] for token in tokens}
        for answer in taken[run]:
            assert answer.logp[0] == pytest.approx(expected[answer.tokens[0]], abs=1e-4)


def test_a_server_without_a_key_in_the_request_answers_nothing(server, model, small_train, tmp_path):
    done = launch("grpo.py", "--model", model, "--train-data", small_train, *FLAGS, "--rollout.engine", "server",
                  "--rollout.servers", server.url, "--rollout.server-timeout-s", "5", "--total-steps", "1",
                  "--run-dir", tmp_path, check=False)
    assert done.returncode != 0 and "status 401" in done.stdout + done.stderr


class SlowTensors(dict):
    """Calls `at_tensor` before each tensor is sent."""

    def values(self):
        for number, tensor in enumerate(super().values()):
            if self.is_sent:
                self.at_tensor(number)
            yield tensor
        self.is_sent = True  # they were described

    is_sent = False


def held_of(model: str, factor: float, tensors: type[dict] = dict, wrong: str = "") -> Held:
    from safetensors.torch import load_file

    found = tensors({name: one * factor for name, one in load_file(Path(model) / "model.safetensors").items()})
    sums = as_numbers({name: checksum(tensor, torch.float32) for name, tensor in found.items()})
    if wrong:
        sums[wrong] = (sums[wrong][0] + 1, sums[wrong][1])
    return Held("gloo", torch.device("cpu"), found, sums)


def logp_of(model: str, factor: float, tokens: list[int], prompt: list[int]) -> list[float]:
    """By transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= factor
        logp = lm(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def must_sample_as(pool: Pool, model: str, factor: float, version: str) -> None:
    sample(pool, 1, 8)
    answer = take(pool, 1)[1]
    assert set(answer.versions) == {version} and pool.num_compared == 20
    assert answer.logp == pytest.approx(logp_of(model, factor, answer.tokens, [*range(5, 40)]), abs=1e-4)


def test_weights_by_a_group_are_compared_and_a_broken_transfer_is_made_up_for(server, model):
    """The server stands still in the middle of a transfer: the trainer gives up, and the worker does when it goes on;
    then it joins with a new group, and half a model leaves no trace."""
    needs = Needs("float32", 512, SIZES, "gloo")
    pool = Pool(lambda: [server.url], os.environ[KEY], Limits(4.0, 3600.0), needs, 64, loads=True)
    try:
        pool.present(held_of(model, 1.5), "first")
        pool.wait_ready(60.0)
        must_sample_as(pool, model, 1.5, "first")
        pool.present(held_of(model, 0.5, wrong="model.norm.weight"), "wrong")
        with pytest.raises(Refused, match=r"checksums differ.*in 1 tensors: model.norm.weight"):
            pool.wait_ready(60.0)
        given = held_of(model, 0.8, SlowTensors)
        stopped = []

        def stop_once(number: int) -> None:
            if number == 7 and not stopped:
                stopped.append(number)
                server.signal(signal.SIGSTOP)

        given.tensors.at_tensor = stop_once
        pool.present(given, "second")
        end = time.monotonic() + 60
        while "the transfer of weights broke" not in pool.troubles() and time.monotonic() < end:
            time.sleep(0.1)
        assert "the transfer of weights broke" in pool.troubles() and stopped == [7]
        server.signal(signal.SIGCONT)
        pool.wait_ready(60.0)
        must_sample_as(pool, model, 0.8, "second")
    finally:
        server.signal(signal.SIGCONT)
        pool.close()


def test_all_workers_of_a_server_receive_the_weights(model, tmp_path):
    """Tensor-parallel ones, each of which then holds its part."""
    parallel = VLLMServer(model, tmp_path / "log", tensor_parallel_size="2").start()
    needs = Needs("float32", 512, SIZES, "gloo")
    pool = Pool(lambda: [parallel.url], os.environ.get(KEY, ""), Limits(20.0, 3600.0), needs, 64, loads=True)
    try:
        parallel.wait()
        pool.present(held_of(model, 1.5), "first")
        pool.wait_ready(60.0)
        must_sample_as(pool, model, 1.5, "first")
    finally:
        pool.close()
        parallel.kill()


def test_nccl_is_called_as_vllm_has_it():
    """Which no test here runs: what `common/servers/group.py` calls is there, with these arguments."""
    import inspect

    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary, ncclUniqueId
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    inspect.signature(uid_init_process_group).bind(b"", 0, 2, torch.device("cuda", 0))
    inspect.signature(PyNcclCommunicator.broadcast).bind(None, torch.zeros(1), src=0, stream=None)
    inspect.signature(PyNcclCommunicator.destroy).bind(None)
    inspect.signature(NCCLLibrary.ncclGetUniqueId).bind(None)
    assert len(bytes(ncclUniqueId())) == NCCL_UNIQUE_ID_BYTES
