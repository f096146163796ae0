"""Agents that know only an API, in real processes, with a real engine and the trainer's own forward."""

import asyncio
import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine, stop_tokens
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from tests.conftest import ON_THIS_MACHINE, ROOT
from tests.engine.episode_runs import Runs, make_prompt, runs_of
from tests.engine.test_episodes import STOPS

FLOAT32 = ModelConfig(compute_dtype="float32")
ENDPOINT = str(ROOT / "envs/openai_agent.py")
AGENTS = ROOT / "tests/envs/agents"
COROUTINE = '''
async def episode(chat, row):
    main, critic = chat.begin(), chat.begin("critic")
    system = {"role": "system", "content": "Answer with one number."}
    await main.reply(system, row["prompt"][-1], max_tokens=24)
    await critic.reply({"role": "user", "content": f"Is this short? Say yes or no: {main.content}"}, max_tokens=24)
    again = {"role": "user", "content": f"A critic says: {critic.content[:40]} Answer again, shorter."}
    await main.reply(again, max_tokens=24)
    right = row["reward_model"]["ground_truth"] in main.content
    return {"score": -len(main.content) / 100, "length": float(len(main.content)), "acc": float(right)}
'''


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def policy(tiny_llama, world):
    return load_policy(tiny_llama, FLOAT32, world)


@pytest.fixture(scope="module")
def run(tiny_llama, tokenizer, policy, world):
    config = RolloutConfig(engine="hf", max_response_length=300, stop_token_ids=STOPS)
    stops, hf_config = stop_tokens(tiny_llama, tokenizer), read_config(tiny_llama, FLOAT32)
    engine = make_engine(EngineSetup(tiny_llama, hf_config, config, FLOAT32, world, [[5, 6, 7]], stops, 600, 0))
    engine.wake(policy)
    return Runs(engine, tokenizer, world, [*engine.stop_token_ids, *STOPS], max_length=600)


def prompts(tokenizer, count: int, **columns) -> list:
    found = [make_prompt(tokenizer, number) for number in range(count)]
    return [replace(prompt, row={"prompt": prompt.messages, "reward_model": {"ground_truth": "2"}} | columns)
            for prompt in found]


def sequences(samples) -> list:
    return [part for sample in samples for part in sample.response.parts]


def gradient(policy, samples) -> tuple[float, list[torch.Tensor]]:
    """A policy-gradient loss, with the score as advantage: its value and gradient."""
    parts = sequences(samples)
    advantages = [sample.score for sample in samples for _ in sample.response.parts]
    batch = Batch.build(
        [part.prompt for part in parts], [part.tokens for part in parts],
        rollout_logps=[part.logp for part in parts], masks=[part.mask for part in parts],
    )
    policy.zero_grad()
    logp, _ = policy(batch, 1.0)
    owners = torch.repeat_interleave(torch.arange(len(parts)), batch.cu_seqlens.diff())
    weights = torch.tensor(advantages)[owners] * batch.mask
    loss = -(logp * weights).sum() / batch.mask.sum()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def test_an_agent_of_the_sdk_is_trained_like_a_coroutine(run, policy, tokenizer, monkeypatch, tmp_path):
    """The same tokens, masks, log-probs and scores, so the same loss and gradient. What the model wrote is text for the
    agent, and that text encoded again would be other tokens."""
    (tmp_path / "coroutine.py").write_text(COROUTINE)
    monkeypatch.setenv("AGENT", str(AGENTS / "sdk_agent.py"))
    rows = prompts(tokenizer, 3)
    agents, coroutines = [
        sorted(run(file, rows, num_samples=2, lockstep=True), key=lambda sample: sample.index)
        for file in (ENDPOINT, str(tmp_path / "coroutine.py"))
    ]
    num_others = 0
    for agent, coroutine in zip(agents, coroutines, strict=True):
        assert agent.extras.pop("endpoint/requests") == 3.0 and agent.extras.pop("endpoint/conversations") == 2.0
        assert set(agent.extras.values()) >= {0.0} and agent.extras["endpoint/errors"] == 0.0
        assert agent.score == coroutine.score and agent.extras["length"] == coroutine.extras["length"]
        found, expected = [vars(sample.response) | {"tools": None} for sample in (agent, coroutine)]
        assert found == expected  # but for the seconds that the code took
        critic, main = agent.response.parts
        assert (critic.role, main.role, agent.response.num_turns) == ("critic", "", 3)
        assert [value for value, _, _ in runs_of(main.mask)] == [True, False, True] and all(critic.mask)
        for part in (critic, main):
            for value, start, end in runs_of(part.mask):
                written = part.tokens[start:end]
                num_others += value and tokenizer.encode(tokenizer.decode(written)) != written
    assert num_others > 0
    (loss, grads), (expected, others) = gradient(policy, agents), gradient(policy, coroutines)
    assert loss == expected != 0 and max(float(grad.abs().max()) for grad in grads) > 0
    assert all(torch.equal(grad, other) for grad, other in zip(grads, others, strict=True))


def test_the_trainer_finds_the_log_probs_that_the_engine_had(run, policy, tokenizer, monkeypatch):
    """In one forward over each sequence: a token that was encoded again would be off by nats."""
    monkeypatch.setenv("AGENT", str(AGENTS / "sdk_agent.py"))
    parts = sequences(run(ENDPOINT, prompts(tokenizer, 2), num_samples=2))
    batch = Batch.build(
        [part.prompt for part in parts], [part.tokens for part in parts],
        rollout_logps=[part.logp for part in parts], masks=[part.mask for part in parts],
    )
    difference = (policy.score(batch, 1.0) - batch.rollout_logp)[batch.mask].abs()
    assert difference.max() < 2e-5 and int(batch.mask.sum()) > 50


def test_agents_of_verifiers_are_trained_like_others(run, policy, tokenizer, verifiers_path, monkeypatch):
    """Two roles of one model: a sequence each, with a mask over what was sampled and the log-probs that the trainer
    finds."""
    monkeypatch.setenv("PYTHONPATH", verifiers_path)
    pair = {"taskset": {"id": "toy_pair"}, "writer": ON_THIS_MACHINE, "checker": ON_THIS_MACHINE}
    monkeypatch.setenv("VERIFIERS_ENV", json.dumps(pair))
    task = json.dumps({"name": "cat", "prompt": "Write the word cat."})
    rows = prompts(tokenizer, 2, extra_info={"verifiers": task})
    samples = run(str(ROOT / "envs/verifiers_env.py"), rows)
    assert [sample.score for sample in samples] == [0.5, 0.5]  # the checker agrees that it has not the word
    for sample in samples:
        assert (sample.extras["writer_score"], sample.extras["checker_score"]) == (0.0, 1.0)
        parts = {part.role: part for part in sample.response.parts}
        assert sorted(parts) == ["checker", "writer"]
        assert all(all(part.mask) and part.tokens for part in parts.values())
        # the checker is asked about what the writer wrote; spaces and halves of letters are lost on the way
        written, asked = [re.sub(r"\W", "", tokenizer.decode(tokens, skip_special_tokens=True))
                          for tokens in (parts["writer"].tokens, parts["checker"].prompt)]
        assert "thewordcat" + written in asked
    (_, grads) = gradient(policy, samples)
    assert max(float(grad.abs().max()) for grad in grads) > 0
    parts = sequences(samples)
    batch = Batch.build(
        [part.prompt for part in parts], [part.tokens for part in parts],
        rollout_logps=[part.logp for part in parts], masks=[part.mask for part in parts],
    )
    assert (policy.score(batch, 1.0) - batch.rollout_logp)[batch.mask].abs().max() < 2e-5


@pytest.mark.sweep
def test_a_program(run, tokenizer, monkeypatch):
    """A command line of its own; previous_response_id and a stream: one conversation. Another row's program fails, and
    what it wrote to stderr is in the log."""
    monkeypatch.setenv("AGENT", f"{sys.executable} {AGENTS / 'program.py'}")
    (sample,) = run(ENDPOINT, prompts(tokenizer, 1))
    assert sample.score <= 0.0 and sample.extras["endpoint/requests"] == 2.0 and not sample.response.earlier
    assert [message["role"] for message in sample.response.messages] == ["user", "assistant"] * 2


def test_a_program_may_print_line_ends_of_unicode(monkeypatch):
    """JSON has U+2028 as it is, as JavaScript writes it."""
    monkeypatch.setenv("AGENT", "true")
    module = importlib.import_module("envs.openai_agent")
    program = [sys.executable, "-c", r"print('hello\n\"a\u2028b\"')"]
    assert asyncio.run(module.run_program(program, {})) == "a\u2028b"
    with pytest.raises(RuntimeError, match="printed nothing last"):
        asyncio.run(module.run_program([sys.executable, "-c", ""], {}))


@pytest.mark.sweep
def test_programs_that_rows_name(run, tokenizer, monkeypatch, caplog, tmp_path):
    good = tmp_path / "good.py"
    good.write_text(
        "import json, os, urllib.request\n"
        "body = json.dumps({'model': 'policy', 'max_tokens': 4, 'messages': json.loads(os.environ['ROW'])['prompt']})\n"
        "headers = {'x-api-key': os.environ['ANTHROPIC_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['ANTHROPIC_BASE_URL'] + '/v1/messages'\n"
        "answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)))\n"
        "print(json.dumps({'score': answer['usage']['output_tokens']}))\n"
    )
    commands = [
        f"{sys.executable} {good}", f"{sys.executable} -c 'import sys; sys.exit(\"what went wrong\")'",
        f"{sys.executable} -c 'print(1)'", "",
    ]
    monkeypatch.setenv("AGENT", "row")
    rows = [prompts(tokenizer, 1, extra_info={"agent": command})[0] for command in commands]
    for row, end, said in zip(rows, ("done", "error", "error", "error"), (
        "", "what went wrong", "without a request to the model", "row's extra_info.agent is ''",
    )):
        caplog.clear()
        (sample,) = run(ENDPOINT, [row])
        assert sample.response.end_reason == end and said in caplog.text
        if end == "done":
            assert sample.score == sum(sample.response.mask) == len(sample.response.tokens) >= 1


@pytest.mark.sweep
@pytest.mark.parametrize(("agent", "message"), [
    ("", "names no agent"), ("no_such_program x", "there is no program no_such_program"),
    ("missing.py:solve", "does not exist"), ("AGENTS/sdk_agent.py:other", "no function other"),
    ("FOLDER/two.py", "is called with one argument, the row"),
])
def test_mistakes_in_the_variable(run, tokenizer, monkeypatch, tmp_path, agent, message):
    (tmp_path / "two.py").write_text("def solve(client, row): ...\n")
    monkeypatch.setenv("AGENT", agent.replace("AGENTS", str(AGENTS)).replace("FOLDER", str(tmp_path)))
    with pytest.raises(ValueError, match=message) as caught:
        run(ENDPOINT, prompts(tokenizer, 1))
    assert str(caught.value).startswith("--rollout.episode envs/openai_agent.py")


@pytest.mark.sweep
def test_the_variables_are_the_agents_alone(run, tokenizer, monkeypatch, tmp_path):
    """A plain def in a thread, with the address and the token of its own episode; the trainer keeps its variables."""
    (tmp_path / "spy.py").write_text(
        "import os\nfrom openai import OpenAI\n"
        "def solve(row):\n"
        "    OpenAI().chat.completions.create(model='policy', messages=row['prompt'], max_tokens=2)\n"
        "    return {'score': 1.0, 'url': os.environ['OPENAI_BASE_URL'], 'key': os.environ['OPENAI_API_KEY'],\n"
        "            'proxy': os.environ['NO_PROXY'], 'more': str('ANTHROPIC_AUTH_TOKEN' in os.environ)}\n"
    )
    monkeypatch.setenv("AGENT", str(tmp_path / "spy.py"))
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's")
    monkeypatch.setenv("NO_PROXY", "example.org")
    extras = [sample.extras for sample in run(ENDPOINT, prompts(tokenizer, 4))]
    assert len({extra["url"] for extra in extras}) == len({extra["key"] for extra in extras}) == 4
    assert all(extra["url"].startswith("http://127.0.0.1:") and len(extra["key"]) >= 43 for extra in extras)
    assert {(extra["proxy"], extra["more"]) for extra in extras} == {("example.org,127.0.0.1", "False")}


@pytest.mark.sweep
def test_the_same_in_every_way_of_saying_it(run, tokenizer, monkeypatch, tmp_path):
    """One conversation over the three APIs, each with its client or by hand: the model's tokens are the same."""
    (tmp_path / "ways.py").write_text(Path(__file__).with_name("ways_of_saying_it.py").read_text())
    found = []
    for way in ("chat", "responses", "messages"):
        monkeypatch.setenv("AGENT", f"{tmp_path / 'ways.py'}:{way}")
        (sample,) = run(ENDPOINT, prompts(tokenizer, 1))
        assert not sample.response.earlier
        found.append(json.dumps([sample.response.prompt, sample.response.tokens, sample.response.logp]))
    assert found[0] == found[1] == found[2]
