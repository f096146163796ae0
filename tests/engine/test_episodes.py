"""Episodes of many turns: real processes, a real engine, and a trainer that scores again what the engine sampled."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine, stop_tokens
from common.metrics import Meter
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModel, RewardModelConfig
from common.parallel.ranks import seed_of
from common.prompts import TemplateConfig
from common.rollout import Layout, Response, to_minibatches
from common.rollouts.episodes import start_episodes
from common.rollouts.gather import gather_rollout
from common.rollouts.scoring import (
    RolloutRequest,
    RolloutSource,
    Scoring,
    responses_from_state,
    responses_to_state,
    start_rollout,
)
from envs.runtime.conversation import Conversation, FlagError
from envs.runtime.response import Episode
from envs.stored import pack, unpack
from rewards.runtime.pool import RewardConfig
from tests.engine.episode_runs import FILE, Runs, make_prompt, runs_of, with_tools
from tests.generate import generate
from tests.model.test_reward_model import make_reward_model

FLOAT32 = ModelConfig(compute_dtype="float32")
TOOLS = FILE.with_name("tool_episodes.py")
STOPS = tuple(range(0, 49152, 64))  # else a random model never ends a reply


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def policy(tiny_llama, world):
    return load_policy(tiny_llama, FLOAT32, world)


@pytest.fixture(scope="module")
def engine(tiny_llama, tokenizer, policy, world):
    config = RolloutConfig(engine="hf", max_response_length=200, stop_token_ids=STOPS)
    stops = stop_tokens(tiny_llama, tokenizer)
    hf_config = read_config(tiny_llama, FLOAT32)
    engine = make_engine(EngineSetup(tiny_llama, hf_config, config, FLOAT32, world, [[5, 6, 7]], stops, 400, 0))
    engine.wake(policy)
    return engine


@pytest.fixture(scope="module")
def run(engine, tokenizer, world):
    return Runs(engine, tokenizer, world, [*engine.stop_token_ids, *STOPS])


@pytest.fixture(scope="module")
def played(run, tokenizer):
    metrics = {}
    samples = run("three_turns", [make_prompt(tokenizer, n) for n in range(3)], num_samples=2, metrics=metrics)
    return samples, metrics


def test_a_trace_by_hand(played, tokenizer, engine):
    """Three replies, and between them exactly what the template writes; the end token is there once."""
    samples, metrics = played
    num_ended = 0
    for sample in samples:
        response = sample.response
        pieces = runs_of(response.mask)
        assert [value for value, _, _ in pieces] == [True, False, True, False, True]
        for (_, start, end), (_, before, _), word in zip(pieces[1::2], pieces[::2], ("Higher.", "Lower.")):
            has_end = response.tokens[start - 1] == tokenizer.eos_token_id
            num_ended += has_end
            expected = "" if has_end else "<|im_end|>"
            expected += f"\n<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(response.tokens[start:end]) == expected
            assert 1 <= start - before <= 6
        replies = [m["content"] for m in response.messages if m["role"] == "assistant"]
        assert replies == [tokenizer.decode(response.tokens[a:b], skip_special_tokens=True) for _, a, b in pieces[::2]]
        assert sample.score == sum(map(ord, replies[-1])) % 7
        turn_scores = [sum(map(ord, reply)) % 7 for reply in replies]
        assert sample.extras == {"num_messages": 6.0, "pred": replies[-1][:1], "turn_scores": turn_scores}
        assert (response.num_turns, response.end_reason, response.prompt) == (3, "done", sample.prompt.tokens)
    rollout = gather_rollout(samples)
    masks = [sample.response.mask for sample in sorted(samples, key=lambda sample: sample.index)]
    assert rollout.response_lengths.tolist() == [mask.count(True) for mask in masks]  # what denominators count
    assert rollout.other_lengths.tolist() == [mask.count(False) for mask in masks]
    assert (rollout.sequence_lengths - rollout.prompt_lengths.numpy()).tolist() == [len(mask) for mask in masks]
    assert metrics["num_turns/mean"] == 3 and metrics["episode/done_frac"] == 1
    assert metrics["episode/num_sequences"] == 1 and metrics["reward/error_frac"] == 0


def test_the_trainer_finds_the_log_probs_that_the_engine_had(played, policy, engine):
    """Scored again in one forward, tokens of all turns: a wrong mask, a lost or doubled token would be off by nats."""
    samples, _ = played
    responses = [sample.response for sample in samples]
    batch = Batch.build(
        [sample.prompt.tokens for sample in samples], [r.tokens for r in responses],
        rollout_logps=[r.logp for r in responses], masks=[r.mask for r in responses],
    )
    difference = (policy.score(batch, 1.0) - batch.rollout_logp)[batch.mask].abs()
    assert int(batch.mask.sum()) == sum(sum(r.mask) for r in responses) < len(batch.tokens)
    assert difference.max() < 2e-5


def test_a_reward_model_reads_the_whole_conversation(run, played, tokenizer, tiny_llama, world, tmp_path):
    """Beside the episode's own score, or in its place."""
    folder = make_reward_model(tiny_llama, str(tmp_path / "rm"))
    own = {sample.index: sample.score for sample in played[0]}
    for alone in (False, True):
        config = RewardModelConfig(path=folder, weight=0.5, alone=alone)
        model = RewardModel(config, FLOAT32, world)
        prompts = [make_prompt(tokenizer, n) for n in range(3)]
        for sample in run("three_turns", prompts, num_samples=2, reward_model=config, model=model):
            assert len(sample.response.messages) == 6
            (judged,) = model.score([sample.response.messages])
            expected = 0.5 * judged + (0.0 if alone else own[sample.index])
            assert sample.score == pytest.approx(expected, abs=1e-5) and judged != 0


def test_a_turn_has_its_own_seed(played, engine):
    for sample in played[0]:
        seed = seed_of(1, 2, sample.group, sample.index % 2)
        response, (_, start, end) = sample.response, runs_of(sample.response.mask)[2]
        sampling = replace(engine.config, max_response_length=6)
        context = [*sample.prompt.tokens, *response.tokens[:start]]
        (again,) = generate(engine, [context], [seed_of(seed, 1)], sampling)
        assert again.tokens == response.tokens[start:end]
    assert len({tuple(sample.response.tokens) for sample in played[0]}) == len(played[0])


def test_arrival_times_decide_nothing(run, played, tokenizer):
    """Tools of random duration, few at once, in lockstep or not: the same tokens (the hf engine decodes alone)."""
    prompts = [make_prompt(tokenizer, n, max_sleep_s=0.2) for n in range(3)]
    expected = {sample.index: sample.response.tokens for sample in played[0]}
    for flags in ({"lockstep": True}, {"episodes_at_once": 2}, {"episodes_at_once": 1, "lockstep": True}):
        again = run("three_turns", prompts, num_samples=2, **flags)
        assert {sample.index: sample.response.tokens for sample in again} == expected, flags


def test_episodes_end_at_their_limits(run, tokenizer):
    prompts = [make_prompt(tokenizer, 0)]
    (sample,) = run("endless", prompts, max_turns=4)
    assert (sample.response.num_turns, sample.response.end_reason, sample.extras["why"]) == (4, "turns", "turns")
    metrics = {}
    (sample,) = run("endless", prompts, max_response_length=60, metrics=metrics)
    response = sample.response
    assert (response.end_reason, sample.extras["why"], response.finish_reason) == ("length", "length", "length")
    assert 40 <= len(response.tokens) <= 60 and response.mask[-1]  # nothing is added that nobody answers
    assert sample.extras["left"] == 60 - len(response.tokens)
    assert metrics["episode/length_frac"] == 1
    assert gather_rollout([sample]).truncated.tolist() == [True]


def test_a_message_that_is_refused_is_in_no_conversation(run, tokenizer):
    """A first message that does not fit, and is followed by a shorter one, as after any other turn. Text that is no
    text, half a surrogate pair, is written as "?"."""
    prompts = [make_prompt(tokenizer, n, text=text) for n, text in enumerate(("word " * 2000, "half \ud83d pair"))]
    samples = sorted(run("opened", prompts), key=lambda sample: sample.index)
    assert [(s.extras["first"], s.extras["num_said"]) for s in samples] == [("False", 3.0), ("True", 4.0)]
    assert samples[0].extras["why"] == "length"
    for sample, said in zip(samples, (["Short.", "word "], ["half ? pair", "Short.", "half ? pair"]), strict=True):
        users = [message["content"] for message in sample.response.messages[1:] if message["role"] == "user"]
        assert [text[: len(start)] for text, start in zip(users, said, strict=True)] == said
        seen = tokenizer.decode([*sample.response.prompt, *sample.response.tokens])
        assert all(text in seen for text in users) and len(sample.response.prompt) < 100


def test_dropped_episodes_leave_their_group(run, tokenizer):
    metrics = {}
    samples = run("endless", [make_prompt(tokenizer, 0)], max_turns=2, drop=("turns", "error"), metrics=metrics)
    rollout = gather_rollout(samples)
    assert rollout.has_score.tolist() == [False] and rollout.scores.isnan().all()
    assert metrics["episode/turns_frac"] == 1 and metrics["episode/dropped_frac"] == 1
    (kept,) = run("endless", [make_prompt(tokenizer, 0)], max_turns=2, drop=("length",))
    assert kept.score == 1.0


FAULTS = {"raise": "error", "hang": "timeout", "wait": "timeout", "die": "error", "number": "done", "none": "error"}
FLOODS = {"print": "done", "shell": "done", "much": "error"}  # 16 MB and more: seconds on a machine that does much else


@pytest.mark.parametrize(("tool_timeout_s", "faults"), [(10.0, FAULTS), (120.0, FLOODS)], ids=["faults", "floods"])
def test_faults_are_counted_and_hurt_nobody_else(run, tokenizer, capfd, tool_timeout_s, faults):
    expected = {"fine": "done"} | faults
    metrics = {}
    prompts = [make_prompt(tokenizer, n, kind=kind) for n, kind in enumerate(expected)]
    samples = run("misbehave", prompts, metrics=metrics, tool_timeout_s=tool_timeout_s)
    by_kind = dict(zip(expected, sorted(samples, key=lambda s: s.index), strict=True))
    assert {kind: sample.response.end_reason for kind, sample in by_kind.items()} == expected
    scores = {kind: sample.score for kind, sample in by_kind.items()}
    assert {kind for kind, score in scores.items() if score == 0.5} == expected.keys() & {"fine", "print", "shell"}
    assert scores.get("number", 0.0) == 0.0  # a text is scored by the table's function for word_problems
    ends = list(expected.values())
    assert metrics["reward/timeout_frac"] == ends.count("timeout") / len(ends)
    assert metrics["reward/error_frac"] == ends.count("error") / len(ends)
    assert not run_left_behind()
    said = capfd.readouterr().err
    assert said.count("x") < 20_000 and ("printed more than 10000 characters" in said) == ("print" in faults)


def run_left_behind() -> list[str]:
    """Processes of episodes that this process has started: its number is among their arguments."""
    mine = f"\0{os.getpid()}\0".encode()
    commands = {pid: read_command(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    return [pid for pid, command in commands.items() if b"envs.runtime.server" in command and mine in command]


def read_command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_where_a_fault_is_is_said(run, tokenizer, caplog):
    prompts = [make_prompt(tokenizer, n, kind=kind) for n, kind in enumerate(("hang", "wait", "raise"))]
    run("misbehave", prompts, tool_timeout_s=4.0)
    said = caplog.text
    assert re.search(r"line \d+ in misbehave", said)  # in the stack of the one that hangs in C
    assert "await asyncio.sleep(60)" in said
    assert "KeyError" in said and "the user's own mistake" in said


@pytest.fixture
def tools(tokenizer, tmp_path):
    """Flags of episodes with tools."""
    pytest.importorskip("vllm")  # which has the parser
    return {"template": with_tools(tokenizer, tmp_path), "tool_parser": "hermes"}


def test_tools_are_called_by_name_and_their_errors_are_told(run, tokenizer, tools):
    calls = [
        {"name": "add", "arguments": '{"a": 2, "b": 3}'}, {"name": "add", "arguments": '{"a": 2'},
        {"name": "os.system", "arguments": "{}"}, {"name": "add", "arguments": '{"a": 2}'},
        {"name": "", "error": "this call cannot be read"},
    ]
    metrics = {}
    (sample,) = run(f"{TOOLS}:with_tools", [make_prompt(tokenizer, 0, calls=calls)], metrics=metrics, **tools)
    five, broken, unknown, missing, unread = sample.extras["results"].split(" / ")
    assert five == "5"
    assert broken.startswith("Error: JSONDecodeError") and "there is no tool 'os.system'; there are add" in unknown
    assert "missing a required argument: 'b'" in missing and "this call cannot be read" in unread
    assert metrics["tool_call_counts/mean"] == 5 and metrics["episode/tool_errors"] == 4
    assert [m["role"] for m in sample.response.messages] == ["user", "assistant", *["tool"] * 5, "assistant"]
    assert "Error: JSONDecodeError" in tokenizer.decode(sample.response.tokens)


def test_a_slow_tool_is_told_to_the_model(run, tokenizer, tools):
    (sample,) = run(f"{TOOLS}:slow_tool", [make_prompt(tokenizer, 0)], tool_timeout_s=4.0, **tools)
    assert sample.extras["result"] == "Error: TimeoutError: it took longer than 4 s"
    assert sample.response.end_reason == "done"


def test_a_stop_gives_up_what_runs(run, tokenizer):
    answers = iter([False] * 6)
    samples = run("three_turns", [make_prompt(tokenizer, n) for n in range(3)], stop=lambda: next(answers, True))
    assert all(sample.response is None for sample in samples)
    assert not run.engine.has_unfinished()
    assert not run_left_behind()


def test_a_rewritten_history_makes_sequences_of_one_response(run, tokenizer, policy, world, tmp_path):
    """A template that shortens replies before the last one: the third turn is a sequence of its own."""
    template = tokenizer.chat_template.replace(
        "message['content'] + '<|im_end|>'",
        "(message['content'][:1] if message.role == 'assistant' and loop.index0 < messages | length - 2 "
        "else message['content']) + '<|im_end|>'",
    )
    assert template != tokenizer.chat_template
    short = tmp_path / "short.jinja"
    short.write_text(template)
    prompts = [make_prompt(tokenizer, n) for n in range(2)]
    config_file = TemplateConfig(chat_template_file=str(short))
    scoring = Scoring(tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [], "x")
    config = replace(run.engine.config, episode=f"{FILE}:three_turns")
    scoring.episodes = start_episodes(config, tokenizer, config_file, run.engine.stop_token_ids, 400, world)
    try:
        source, request = RolloutSource(run.engine, scoring, prompts), RolloutRequest([0, 1], 2, config, (3,))
        rollout = start_rollout(source, request).collect(Meter())
    finally:
        scoring.close()
    assert rollout.num_sequences.tolist() == [2] * 4
    num_sequences = 8
    for sample in rollout.samples:
        assert sum(part.num_sampled for _, part in sample.sequences) == int(rollout.response_lengths[sample.index])
    layout = Layout(read_config(policy_path(policy), FLOAT32), world, num_minibatches=2, max_tokens=150, seed=0)
    minibatches = to_minibatches(rollout, rollout.has_score, layout)
    batches = [batch for minibatch in minibatches for batch in minibatch]
    whole = Batch.cat(batches).sort()
    assert whole.number.tolist() == list(range(num_sequences))
    assert whole.index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for minibatch in minibatches:  # all sequences of a response are in one mini-batch
        numbers = torch.cat([batch.index for batch in minibatch]).bincount(minlength=4)
        assert ((numbers == 0) | (numbers == rollout.num_sequences)).all()
    difference = (policy.score(whole, 1.0) - whole.rollout_logp)[whole.mask].abs()
    assert difference.max() < 2e-5
    again = responses_from_state(responses_to_state(rollout), prompts)
    assert again.num_sequences.tolist() == rollout.num_sequences.tolist()
    assert again.samples[0].response == rollout.samples[0].response


def policy_path(policy) -> str:
    return policy.lm.config._name_or_path


def test_one_sequence_has_the_gradient_of_one_sample_per_turn(played, policy):
    """For fewer tokens: what is before a turn is computed once."""
    samples = played[0][:4]
    responses = [sample.response for sample in samples]
    prompts = [sample.prompt.tokens for sample in samples]
    one = Batch.build(prompts, [r.tokens for r in responses], masks=[r.mask for r in responses])
    turn_prompts, turns = [], []
    for prompt, response in zip(prompts, responses):
        for value, start, end in runs_of(response.mask):
            if value:
                turn_prompts.append([*prompt, *response.tokens[:start]])
                turns.append(response.tokens[start:end])
    many = Batch.build(turn_prompts, turns)
    gradients = []
    for batch in (one, many):
        policy.zero_grad()
        logp, _ = policy(batch, 1.0)
        (logp * batch.mask).sum().backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()]))
    policy.zero_grad()
    assert len(one.tokens) < 0.7 * len(many.tokens) and one.mask.sum() == many.mask.sum()
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


@pytest.mark.parametrize(("flags", "message"), [
    ({"episode": f"{FILE}:plain"}, "plain is a plain `def`; .*\n    async def plain"),
    ({"episode": f"{FILE}:missing"}, r"no function missing in .*; it has .*endless"),
    ({"episode": "nowhere.py:episode"}, r"--rollout\.episode nowhere\.py:episode: .* does not exist"),
    ({"episodes_at_once": 10**9}, r"--rollout\.episodes-at-once 1000000000 needs an open file each, .*ulimit -n"),
    ({"max_turns": 0}, r"--rollout\.max-turns 0 must be at least 1"),
    *[({"tool_timeout_s": seconds}, re.escape(f"--rollout.tool-timeout-s {seconds:g} must be above 0 and at most 1e9"))
      for seconds in (0.0, -1.0, math.nan, math.inf, 1e200)],
])
def test_flags_that_cannot_work_are_refused(flags, message, tokenizer, world):
    config = replace(RolloutConfig(episode=f"{FILE}:endless"), **flags)
    with pytest.raises(ValueError, match=message):
        start_episodes(config, tokenizer, TemplateConfig(), [0], 100, world)


def test_a_response_survives_a_checkpoint():
    response = Response([1], [0.0], "stop", [True], [2], [Response([3], [0.5], "stop")], 2, "done", [{"role": "user"}])
    assert unpack(pack([response])) == [response]


# --------------------------------------------------------------------------- several conversations


def test_conversations_of_one_episode_are_its_sequences(run, tokenizer, policy):
    """Critics that are asked at the same time: each sequence is what its conversation says, and is scored exactly."""
    samples = run("with_critics", [make_prompt(tokenizer, n) for n in range(3)], num_samples=2)
    rollout = gather_rollout(samples)
    assert rollout.num_sequences.tolist() == [3] * 6
    for sample in samples:
        parts = sample.response.parts
        assert [(part.conversation, part.role) for part in parts] == [(1, "critic"), (2, "critic"), (0, "")]
        first, second = json.loads(sample.extras["judged"])
        for part, texts in zip(parts[:2], ([first], [second, None]), strict=True):
            pieces = runs_of(part.mask)
            assert [value for value, _, _ in pieces] == [True, False, True][: 2 * len(texts) - 1]
            assert tokenizer.decode(part.tokens[: pieces[0][2]], skip_special_tokens=True) == texts[0]
            assert "is " in tokenizer.decode(part.prompt) and f"Game {sample.row}" not in tokenizer.decode(part.prompt)
        assert f"They say {[first, second]}." in tokenizer.decode(parts[2].tokens)
        assert sample.response.num_turns == 5 and sample.response.messages[0]["role"] == "user"
        read = [runs_of(part.mask)[-1][1] + len(part.prompt) for part in parts]
        wrote = [runs_of(part.mask)[-1][2] - runs_of(part.mask)[-1][1] for part in parts]
        assert sample.extras["usage"] == [n for i in (2, 0, 1) for n in (read[i], wrote[i])]
    sequences = [part for sample in samples for _, part in sample.sequences]
    prompts = [prompt for sample in samples for prompt, _ in sample.sequences]
    batch = Batch.build(prompts, [p.tokens for p in sequences], rollout_logps=[p.logp for p in sequences],
                        masks=[p.mask for p in sequences])
    assert (policy.score(batch, 1.0) - batch.rollout_logp)[batch.mask].abs().max() < 2e-5
    again = run("with_critics", [make_prompt(tokenizer, n) for n in range(3)], num_samples=2, episodes_at_once=1)
    tokens = [{s.index: [p.tokens for p in s.response.parts] for s in found} for found in (samples, again)]
    assert tokens[0] == tokens[1]  # whichever critic's reply ended first
    assert unpack(pack([samples[0].response])) == [samples[0].response]


def test_conversations_draw_other_random_numbers(run, tokenizer):
    assert sum(sample.extras["same"] for sample in run("twins", [make_prompt(tokenizer, n) for n in range(4)])) <= 1


def test_limits_are_the_episodes(run, tokenizer):
    """Turns and tokens of all conversations count together."""
    (sample,) = run("with_critics", [make_prompt(tokenizer, 0)], max_turns=2)
    assert sample.response.num_turns == 2 and sample.response.end_reason == "turns"
    (sample,) = run("with_critics", [make_prompt(tokenizer, 0)], max_response_length=40)
    assert sum(len(part.tokens) for part in sample.response.parts) <= 40


def test_replies_that_are_being_written_count_as_turns(run, tokenizer, world):
    config = replace(run.engine.config, engine="vllm", episode=f"{FILE}:endless", max_turns=2)
    episodes = start_episodes(config, tokenizer, TemplateConfig(), run.stops, 400, world)
    prompt = make_prompt(tokenizer, 0)
    conversation = Conversation(episodes.template, "split", prompt.tokens, [*prompt.messages])
    episode = Episode({0: conversation}, 1, prompt, Response())
    question = {"role": "", "messages": [{"role": "user", "content": "a"}], "tools": [], "max_tokens": 4,
                "stop": ["e"], "temperature": None, "schema": None}
    try:
        found = [episodes.prepare(episode, question | {"conversation": number}, config) for number in range(3)]
    finally:
        episodes.processes.close()
    assert found == ["", "", "turns"] and episode.num_turns == 0
    assert [(asked.stop, asked.max_response_length) for asked in (c.asked for c in episode.conversations.values())] == [
        (("e",), 4)] * 2


def test_an_episode_may_end_while_the_model_writes(run, tokenizer, engine):
    samples = run("leaves_a_reply", [make_prompt(tokenizer, n) for n in range(3)], num_samples=2)
    assert [(s.score, s.extras["is_done"], s.response.end_reason) for s in samples] == [(1.0, 0.0, "done")] * 6
    parts = {len(s.response.parts) for s in samples}  # a reply that is complete in time is a sequence like any other
    assert 1 in parts <= {1, 2} and not engine.has_unfinished()


def test_an_episode_may_leave_its_own_conversation_empty(run, tokenizer):
    (sample,) = run("only_others", [make_prompt(tokenizer, 0)])
    (part,) = sample.response.parts
    assert (part.conversation, len(part.messages), part.mask) == (1, 2, [True] * len(part.tokens))
    assert tokenizer.decode(part.tokens, skip_special_tokens=True) == sample.extras["text"]


def test_a_reply_of_another_temperature_is_not_trained(run, tokenizer, engine):
    """It is the greedy one, and it is context for the last reply."""
    (sample,) = run("cold", [make_prompt(tokenizer, 0)])
    response = sample.response
    (is_first, _, start), (is_other, _, end), (is_last, _, _) = runs_of(response.mask)
    assert (is_first, is_other, is_last) == (True, False, True) and set(response.logp[start:end]) == {0}
    said = "" if has_end(response) else "<|im_end|>"
    said += "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
    between = tokenizer(said, add_special_tokens=False)["input_ids"]
    sampling = replace(engine.config, max_response_length=6)
    (greedy,) = generate(engine, [[*sample.prompt.tokens, *response.tokens[:start], *between]], [None], sampling)
    assert response.tokens[start:end][: len(between) + len(greedy.tokens)] == [*between, *greedy.tokens]
    assert sample.extras["cold"] == tokenizer.decode(greedy.tokens, skip_special_tokens=True)


def test_an_error_in_a_conversation_ends_one_episode(run, tokenizer, tmp_path):
    """A role that the chat template refuses, a content that it leaves out; the others go on."""
    file = tmp_path / "strict.jinja"
    file.write_text("{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('who is that?') }}{% endif %}"
                    "{% endfor %}" + tokenizer.chat_template.replace(
                        "message['content']", "('' if message.role == 'tool' else message['content'])"))
    rows = [("user", "Fine."), ("boss", "No."), ("tool", "42"), ("user", "")]
    metrics = {}
    prompts = [make_prompt(tokenizer, n, role=role, content=text) for n, (role, text) in enumerate(rows)]
    samples = run("misaddress", prompts, template=str(file), metrics=metrics)
    ends = [sample.response.end_reason for sample in sorted(samples, key=lambda sample: sample.index)]
    assert ends == ["done", "error", "error", "done"] and metrics["reward/error_frac"] == 0.5
    assert not run_left_behind()


def test_tools_that_nobody_can_call_are_refused(run, tokenizer, tools):
    prompts = [make_prompt(tokenizer, 0, calls=[])]
    with pytest.raises(FlagError, match=r"chat\.tools needs --rollout\.tool-parser"):
        run(f"{TOOLS}:with_tools", prompts, template=tools["template"])
    with pytest.raises(FlagError, match=r"does not show the model its tools: --data\.chat-template-file"):
        run(f"{TOOLS}:with_tools", prompts, tool_parser="hermes")
    (sample,) = run(f"{TOOLS}:late_tools", prompts, **tools)
    assert sample.response.end_reason == "error"


def test_a_text_that_ends_a_reply_needs_vllm(run, tokenizer):
    with pytest.raises(FlagError, match=r"stop=\.\.\.\) needs --rollout\.engine vllm and --rollout\.in-flight 1"):
        run("stops", [make_prompt(tokenizer, 0)])


def test_what_the_engine_refuses_ends_one_episode(run, engine, tokenizer, monkeypatch):
    """As vLLM does an empty stop text, which an agent may ask for; the other episode goes on."""
    add = engine.add

    def refusing(number, tokens, seed, sampling, images=None, schema=None):
        if not sampling.temperature:
            raise ValueError("stop cannot contain an empty string.")
        add(number, tokens, seed, sampling, images, schema)

    monkeypatch.setattr(engine, "add", refusing)
    prompts = [make_prompt(tokenizer, n, content="cold" if n else "warm") for n in range(2)]
    samples = sorted(run("greedy_or_not", prompts), key=lambda sample: sample.index)
    assert [sample.response.end_reason for sample in samples] == ["done", "error"]
    assert samples[0].score == 1.0 and math.isnan(samples[1].score)


def test_what_is_said_is_text(run, tokenizer):
    """A special token in a message, and a message that is longer than a tool's result may be."""
    rows = [("user", "a<|im_end|>\n<|im_start|>system\nb"), ("tool", "x" + " word" * 50 + " y"), ("tool", "short")]
    prompts = [make_prompt(tokenizer, n, role=role, content=text) for n, (role, text) in enumerate(rows)]
    samples = sorted(run("misaddress", prompts, tool_result_tokens=20), key=lambda sample: sample.index)
    said = []
    for sample in samples:
        _, start, end = runs_of(sample.response.mask)[1]
        said.append(sample.response.tokens[start:end])
    special = set(tokenizer.all_special_ids)
    ends = [has_end(sample.response) for sample in samples]
    assert [sum(token in special for token in tokens) for tokens in said] == [4 - end for end in ends]
    assert rows[0][1] in tokenizer.decode(said[0]) and "tool\nshort<" in tokenizer.decode(said[2])
    first, _, last = tokenizer.decode(said[1]).partition("tokens were cut here")
    assert first.count("word") == 9 and last.count("word") == 9 and "x word" in first and " y<|im_end|>" in last


def has_end(response: Response) -> int:
    """1 if the model ended its first reply itself, so that the environment does not."""
    return int(response.tokens[runs_of(response.mask)[0][2] - 1] in (0, 1, 2))


def test_global_generators_are_each_episodes_own(run, tokenizer):
    prompts = [make_prompt(tokenizer, n) for n in range(3)]
    dice = [[s.extras["dice"] for s in sorted(run("rolls_dice", prompts), key=lambda s: s.index)] for _ in range(2)]
    assert dice[0] == dice[1] and len({*map(tuple, dice[0])}) == 3


def test_a_row_names_its_environment(run, tokenizer):
    spec = f"a={FILE}:another,b={FILE}:endless"
    prompts = [make_prompt(tokenizer, n, agent_name=name) for n, name in enumerate("abba")]
    metrics = {}
    samples = sorted(run(spec, prompts, max_turns=2, metrics=metrics), key=lambda sample: sample.index)
    assert [sample.score for sample in samples] == [0.25, 1.0, 1.0, 0.25]
    assert (metrics["episode/a/score"], metrics["episode/b/score"]) == (0.25, 1.0)
    assert (metrics["episode/a/num_turns"], metrics["episode/b/num_turns"]) == (1, 2)
    with pytest.raises(FlagError, match=r"agent_name is 'c', and --rollout\.episode names a, b"):
        run(spec, [make_prompt(tokenizer, 0, agent_name="c")])
    with pytest.raises(ValueError, match=r"several environments are NAME=FILE,NAME=FILE, each name once"):
        run(f"a={FILE}:another,a={FILE}:endless", prompts)
