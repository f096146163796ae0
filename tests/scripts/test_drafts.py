"""Whole runs of grpo.py with --rollout.drafts and without, in float32: the same weights, texts and numbers."""

import json
import signal

import pytest
import torch

from tests.checkpoint import shards
from tests.checkpoint.faulty import server
from tests.checkpoint.test_resume import NOT_COMPARED, tiny_run
from tests.conftest import VLLM, VOCAB, make_tiny_llama
from tests.engine.episode_runs import FILE

ENDS = tuple(map(str, range(0, VOCAB, 32)))
TOTAL = 10


def numbers_of(run) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = (*NOT_COMPARED, "rollout/spec_")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in rows]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), 128)            # vLLM's attention on CPUs: heads of 32


@pytest.mark.engine
@pytest.mark.parametrize(("more", "temperatures"), [
    (["--rollout.stop", "er", "on", "--rollout.max-response-length", "40"], (0.2, 0.7)),
    pytest.param(["--rollout.top-p", "0.9", "--rollout.top-k", "50", "--correction.weights", "token",
                  "--rollout.stop-token-ids", *ENDS, "--rollout.max-response-length", "40"], (0.3, 0.2),
                 marks=pytest.mark.sweep),
    pytest.param(["--rollout.episode", f"{FILE}:two_temperatures", "--rollout.lockstep",
                  "--rollout.stop-token-ids", *ENDS, "--rollout.max-response-length", "150"], (0.2, 0.4),
                 marks=pytest.mark.sweep),
])
def test_a_run_with_drafts_is_the_run_without(more, temperatures, model, tmp_path):
    """The one with drafts is killed after step 6 and continues with an empty history, and shorter drafts."""
    flags = [*tiny_run(model, tmp_path), "--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1",
             "--rollout.max-num-seqs", "8", "--save.every", "2", "--total-steps", str(TOTAL), "--eval-every", "5",
             "--log.rollouts-every", "1", "--rollout.temperature", str(temperatures[0]), "--eval-temperature",
             str(temperatures[1]), "--optim.lr", "0.0005", *more]
    start, log = server(VLLM), tmp_path / "log"
    plain, drafted = tmp_path / "plain", tmp_path / "drafted"
    assert start(log, "none", "grpo.py", *flags, "--run-dir", plain) == 0, log.read_text()[-6000:]
    flags += ["--rollout.drafts", "4", "--run-dir", drafted]
    assert start(log, "log after:6:0:kill", "grpo.py", *flags) == -signal.SIGKILL, log.read_text()[-6000:]
    assert start(log, "none", "grpo.py", *flags, "--rollout.drafts", "3") == 0, log.read_text()[-6000:]
    assert "resumed after step" in log.read_text()

    ours, theirs = numbers_of(drafted), numbers_of(plain)
    assert [row["step"] for row in ours] == list(range(TOTAL + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)} == {}, a["step"]
    found, state = (shards.whole(run / f"checkpoints/step_{TOTAL:06d}") for run in (drafted, plain))
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    for folder in ("model", "rollouts"):
        names = sorted(path.name for path in (plain / folder).iterdir())
        assert names == sorted(path.name for path in (drafted / folder).iterdir()) and len(names) > 1
        for name in names:
            assert (drafted / folder / name).read_bytes() == (plain / folder / name).read_bytes(), name
    rows = [json.loads(line) for line in (drafted / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        print(row["step"], row["rollout/spec_accept_length"], row["rollout/spec_accept_rate"])
        assert row["actor/grad_norm"] > 0.01
    assert max(row["rollout/spec_accept_length"] for row in rows[1:]) > 1.2
    assert not any(name.startswith("rollout/spec") for name in json.loads(
        (plain / "metrics.jsonl").read_text().splitlines()[-1]))
