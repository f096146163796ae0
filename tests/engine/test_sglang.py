"""Real SGLang on the CPU, started by tools.serve: its log-probs, seeds and weights, and training with it."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.flags.rollout import SamplingConfig
from common.servers.client import Client, Gone, Limits, Refused
from common.servers.dialect import Answer, Ask, Needs, check_answer
from common.servers.folder import WeightFolder
from common.servers.members import dialect_of
from common.servers.pool import Pool
from common.servers.sglang import SGLang, compare
from tests.conftest import VOCAB, launch
from tests.engine.served import KEY, KEY_NAME, SGLANG_FLAGS, Served, needs_sglang
from tests.engine.test_vllm_server import folder  # noqa: F401  # a fixture
from tests.scripts.test_supervised import metrics_of
from tools import try_script

pytestmark = [pytest.mark.slow, needs_sglang]
PROMPT = [5, 6, 7, 8]
MAX_LENGTH = 500
SERVE = ("--dtype", "float32", "--max-length", str(MAX_LENGTH), "--auth-env", KEY_NAME, *SGLANG_FLAGS)
TRAIN = [
    "--rollout.engine", "server", "--rollout.server-auth-env", KEY_NAME, "--prompts-per-step", "4",
    "--samples-per-prompt", "2", "--optim.lr", "1e-2", "--policy.compute-dtype", "float32", "--total-steps", "3",
    "--data.max-prompt-length", "200", "--rollout.max-response-length", "16", "--reward.num-workers", "0",
    "--reward.function", f"{try_script.__file__}:compute_score", "--log.rollouts-every", "1", "--save.every", "0",
    "--save.hf", "never",
]


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):  # noqa: F811
    with Served("sglang", folder, tmp_path_factory.mktemp("sglang"), ("--seeds", *SERVE)) as served:
        yield served


@pytest.fixture
def model(folder):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def asked(url: str, work, key: str = KEY):
    """What `work(client)` returns, a coroutine."""
    async def run():
        client = Client(url, key, Limits(60.0, 600.0))
        try:
            return await work(client)
        finally:
            await client.close()
    return asyncio.run(run())


def write(model, path: Path, run: str) -> WeightFolder:
    """The model's weights as the trainer writes them."""
    weights = WeightFolder(path, run, torch.float32)
    weights.write(iter([*model.named_parameters()]))
    return weights


def changed(model, seed: int):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def loaded(served, model, tmp_path):
    weights = write(model, tmp_path / "weights", "run")
    assert asked(served.urls[0], lambda client: SGLang.load(client, weights.folder, weights.name)) > 10
    return served.urls[0]


async def sample(client: Client, sampling: SamplingConfig, seed: int | None, name: str = "a") -> Answer:
    ask = Ask(name, PROMPT, seed, sampling, [2])
    answer = await SGLang.generate(client, ask)
    check_answer(client, ask, answer, VOCAB)
    return answer


def expected_logp(model, tokens: list[int], sampling: SamplingConfig) -> list[float]:
    """In float64; SGLang keeps the tokens that are among the first by both filters, of all probabilities."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    model.float()
    found = []
    for row, token in zip((logits / sampling.temperature).softmax(-1), tokens):
        best, order = row.sort(descending=True)
        before = best.cumsum(0) - best
        keep = (before <= sampling.top_p) & (torch.arange(len(best)) < (sampling.top_k or len(best)))
        kept = best * keep
        found.append((kept[(order == token).nonzero()[0, 0]] / kept.sum()).log().item())
    return found


@pytest.mark.parametrize("sampling", [
    SamplingConfig(1.0, 20), SamplingConfig(0.6, 20), SamplingConfig(1.4, 20), SamplingConfig(1.0, 20, top_k=5),
    SamplingConfig(0.8, 20, top_p=0.6), SamplingConfig(0.8, 20, top_p=0.7, top_k=50),
], ids=str)
def test_log_probs_are_of_what_is_sampled_from(sampling, loaded, model):
    for seed in range(3):
        answer = asked(loaded, lambda client, seed=seed: sample(client, sampling, seed))
        assert answer.logp == pytest.approx(expected_logp(model, answer.tokens, sampling), abs=2e-5)
        assert answer.versions == ["run-000000"] * len(answer.tokens)


def test_seeds_decide_the_tokens_whatever_else_is_sampled(loaded):
    config = SamplingConfig(1.0, 30)

    async def together(client):
        return await asyncio.gather(*[sample(client, config, seed, f"n{seed}") for seed in range(12)])

    alone = asked(loaded, lambda client: sample(client, config, 5))
    beside = asked(loaded, together)
    assert beside[5].tokens == alone.tokens
    assert len({tuple(answer.tokens) for answer in beside}) == 12
    greedy = [asked(loaded, lambda client: sample(client, config, None)).tokens for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_a_response_keeps_the_token_or_text_that_ends_it(loaded):
    free = asked(loaded, lambda client: sample(client, SamplingConfig(1.0, 40), 1))

    async def stopped(client):
        ask = Ask("s", PROMPT, 1, SamplingConfig(1.0, 40), [2, free.tokens[7]])
        return await SGLang.generate(client, ask)

    answer = asked(loaded, stopped)
    end = free.tokens.index(free.tokens[7])
    assert answer.tokens == free.tokens[: end + 1] and answer.finish_reason == "stop"
    assert len(answer.logp) == len(answer.versions) == end + 1


def test_an_aborted_request_returns_what_it_has_and_others_go_on(loaded):
    async def work(client):
        long = asyncio.create_task(sample(client, SamplingConfig(1.0, 480), 3, "r-1"))
        other = asyncio.create_task(sample(client, SamplingConfig(1.0, 120), 4, "r-12"))
        await asyncio.sleep(0.5)
        await SGLang.abort(client, ["r-1", "unknown"])
        return await long, await other, await sample(client, SamplingConfig(1.0, 480), 3)

    aborted, other, whole = asked(loaded, work)
    assert aborted.finish_reason == "abort" and 0 < len(aborted.tokens) < len(whole.tokens)
    assert aborted.tokens == whole.tokens[: len(aborted.tokens)] and len(aborted.versions) == len(aborted.tokens)
    assert other.finish_reason in ("stop", "length")


def test_a_sync_gives_the_server_the_trainers_weights(loaded, model, tmp_path):
    """Checksums of all of its tensors, the version, and the log-probs; requests that run are aborted. A load that was
    left paused, and one of a folder that is gone, are no obstacle."""
    changed(model, 7)
    weights = write(model, tmp_path / "others", "run")
    weights.version = 0
    weights.write(iter([*model.named_parameters()]))
    config = SamplingConfig(1.0, 20)

    async def work(client):
        running = asyncio.create_task(sample(client, SamplingConfig(1.0, 480), 3))
        await asyncio.sleep(0.3)
        await client.call("/pause_generation", {"mode": "abort"})
        with pytest.raises(Refused):
            await SGLang.load(client, tmp_path / "gone", "gone")
        assert await SGLang.version(client) == "run-000000"
        count = await SGLang.load(client, weights.folder, weights.name)
        return await running, count, await SGLang.version(client), await sample(client, config, 3)

    running, count, version, answer = asked(loaded, work)
    held = asked(loaded, lambda client: client.call("/weights_checker", {"action": "checksum"}))
    # queries, keys and values are one, gates and ups too
    assert count == 20 and len(held["ranks"][0]["checksums"]) == 14
    assert running.finish_reason == "abort" and set(running.versions) == {"run-000000"}
    assert version == "run-000001" and set(answer.versions) == {"run-000001"}
    assert answer.logp == pytest.approx(expected_logp(model, answer.tokens, config), abs=2e-5)


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
def test_a_server_that_stands_still_in_a_sync_never_samples_older_weights_as_newer(
        path, served, model, tmp_path, monkeypatch):
    """The trainer gives up, and has newer weights when the server goes on, which then reads what it was asked before,
    too. Short responses, as many as it takes: each is of the weights whose name it has."""
    pids = served.pids()[served.urls[0]]
    call = Client.call
    stopped = []

    async def stopping(client, asked, *given, **named):
        if asked == path and weights.version == 1 and not stopped:
            stopped.append(asked)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        return await call(client, asked, *given, **named)

    monkeypatch.setattr(Client, "call", stopping)
    needs = Needs("float32", MAX_LENGTH, {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2})
    weights = WeightFolder(tmp_path, f"weights_{path[1:]}", torch.float32)
    pool = Pool(lambda: served.urls[:1], KEY, Limits(3.0, 5.0), needs, 8, loads=True)
    expected = {}
    number = 0
    try:
        for version in range(3):
            weights.write(iter([*changed(model, version).named_parameters()]))
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT])).logits[0, -1]
            expected[weights.name] = logits.log_softmax(-1)
            pool.present(weights.folder, weights.name)
            if version == 1:
                with pytest.raises(Gone):
                    pool.wait_ready(8.0)
                continue
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            pool.wait_ready(60.0)
            taken = []
            end = time.monotonic() + 60
            while len(taken) < 100 and time.monotonic() < end:
                while len(pool.open) < 8:
                    number += 1
                    pool.add(number, Ask(f"request-{number}", PROMPT, number, SamplingConfig(1.0, 1), [2]))
                taken += [answer for _, answer in pool.take(0.1)]
            assert len(taken) >= 100 and stopped == [path] * (version > 0)
            pool.abort({*pool.open})
            for answer in taken:
                assert answer.versions == [weights.name]
                assert answer.logp[0] == pytest.approx(expected[weights.name][answer.tokens[0]].item(), abs=2e-5)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        pool.close()


def test_other_weights_than_the_trainers_are_found(loaded, model, tmp_path):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-6
    weights = write(model, tmp_path / "others", "other")
    with pytest.raises(Refused, match=r"checksums differ: .* in 1 tensors: model.layers.1.self_attn.qkv_proj.weight"):
        asked(loaded, lambda client: compare(client, weights.folder))
    index = weights.folder / "model.safetensors.index.json"
    place = json.loads(index.read_text())
    del place["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(place))
    with pytest.raises(Refused, match=r"goes into 1 weights of the server \(model.norm.weight\)"):
        asked(loaded, lambda client: compare(client, weights.folder))


def test_what_training_needs_is_checked(served):
    url = served.urls[0]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}
    assert asked(url, dialect_of) is SGLang
    assert asked(url, lambda client: SGLang.problems(client, Needs("float32", MAX_LENGTH, sizes))) == []
    dtype, length = asked(url, lambda client: SGLang.problems(client, Needs("bfloat16", MAX_LENGTH + 1, sizes)))
    assert "--dtype bfloat16" in dtype and f"--context-length {MAX_LENGTH + 7}" in length
    with pytest.raises(Refused, match="status 401"):
        asked(url, SGLang.version, key="wrong")
    logs = (served.folder / "logs").read_text() if (served.folder / "logs").is_file() else ""
    for log in (served.folder / "logs").iterdir():
        logs += log.read_text()
        assert log.stat().st_mode & 0o77 == 0
    assert KEY not in logs and KEY not in served.said.read_text()


def steps_of(run: Path) -> list[dict]:
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:  # in float32, of every token of the step
        assert row["training/rollout_probs_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
        assert row["servers/moved"] == 0
    return rows


def test_grpo_in_turn(served, folder, small_train, tmp_path):  # noqa: F811
    """The weights change by much in each step, and all of its tokens are of the new ones; the run repeats itself."""
    flags = ["--model", folder, "--train-data", small_train, *TRAIN, "--rollout.servers", *served.urls]
    for name in ("first", "second"):
        launch("grpo.py", *flags, "--run-dir", tmp_path / name, warm=True, env={KEY_NAME: KEY})
    first, second = steps_of(tmp_path / "first"), steps_of(tmp_path / "second")
    assert [row["actor/grad_norm"] for row in first] == [row["actor/grad_norm"] for row in second]
    assert first[1]["sync/num_checksums"] == 20 and "sync/num_not_compared" not in first[1]
    for file in (tmp_path / "first").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_async_grpo_with_two(served, folder, small_train, tmp_path):  # noqa: F811
    """The second server has no seeds."""
    (tmp_path / "second").mkdir()
    with Served("sglang", folder, tmp_path / "second", SERVE) as second:
        flags = ["--model", folder, "--train-data", small_train, *TRAIN]
        flags += ["--rollout.servers", *served.urls, *second.urls]
        launch("async_grpo.py", *flags, "--samplers", "1", "--max-staleness", "0", "--run-dir", tmp_path / "run",
               ranks=2, warm=True, env={KEY_NAME: KEY})
    rows = steps_of(tmp_path / "run")
    assert all(row["servers/ready"] == 2 for row in rows)
    shutil.rmtree(tmp_path / "run")
