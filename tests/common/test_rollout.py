"""Rollouts between engine, reward workers and trainer; group statistics; validation metrics against enumeration."""

import itertools
import json
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig

from common.batch import Batch
from common.correction import CorrectionConfig, measure
from common.engine.base import Engine, RolloutConfig, SamplingConfig, validation_sampling
from common.metrics import Meter, Timer
from common.parallel.ranks import seed_of
from common.prompts import Prompt
from common.rollout import Layout, Response, Rollout, Sample, scatter_fields, to_minibatches
from common.rollouts import measured, scoring
from common.rollouts.gather import gather_rollout
from common.rollouts.record import row_of
from common.rollouts.scoring import RolloutRequest, RolloutSource, responses_from_state, responses_to_state
from common.rollouts.validation import best_at, evaluate, majority, validation_metrics
from common.run import Run, RunArgs
from common.segments import group_count, group_lead, group_log_mean_exp, group_mean, group_std, group_sum, is_constant
from common.tracking.health import HealthCheck
from common.tracking.logger import LogConfig
from common.tracking.step import rollout_metrics
from envs.runtime.conversation import ChatTemplate, Conversation
from envs.stored import join, split, write_parts
from rewards.format import tags
from rewards.runtime.pool import RewardConfig, Scores

LLAMA = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
DATA = [Prompt([1] * (3 + row), f"source{row % 2}", str(row), {"row": row}, []) for row in range(6)]


def make_samples(scores, group_size=2, rows=None, extras=None) -> list[Sample]:
    """Responses of 1, 2, 3 ... tokens, a group per prompt; every third was truncated."""
    rows = list(range(len(scores) // group_size)) if rows is None else rows
    samples = []
    for i, score in enumerate(scores):
        response = Response([7] * (i + 1), [-0.5] * (i + 1), "length" if i % 3 == 2 else "stop")
        row = rows[i // group_size]
        samples.append(Sample(i, i // group_size, row, DATA[row], response, score=score,
                              extras=extras[i] if extras else {}))
    return samples


def by_index(rollout: Rollout) -> dict[int, tuple[int, float]]:
    return {s.index: (s.group, s.score) for s in rollout.samples}


def test_what_shows_images_is_told_from_text(world):
    """Equal tokens may be other pictures: `Batch.row` is -1 for what shows none, the prompt's row where that begins the
    sequence, and a number of its own for another prompt."""
    samples = make_samples([1.0] * 6, group_size=1)
    shown = replace(DATA[1], images="its pictures")
    tokens = DATA[1].tokens
    for sample, prompt, response in zip(samples, (DATA[1], DATA[1], DATA[1], shown, shown, shown), (
        Response([7]), Response([7], prompt=tokens), Response([7], prompt=tokens, images=["a tool's"]),
        Response([7]), Response([7], prompt=tokens, images=["others"]), Response([7], prompt=[5], images=["others"]),
    ), strict=True):
        sample.prompt, sample.row, sample.response = prompt, 1, replace(response, logp=[-0.5], mask=[True])
    assert gather_rollout(samples).batch.image_row.tolist() == [-1, -1, 1, 1, -2 - 4, -2 - 5]


def test_a_rollout_knows_every_response(world):
    samples = make_samples([1.0, float("nan"), 0.5, 2.0])
    rollout = gather_rollout([samples[i] for i in (2, 0, 3, 1)])
    assert rollout.scores.nan_to_num(nan=-1).tolist() == [1, -1, 0.5, 2]
    assert rollout.group.tolist() == [0, 0, 1, 1] and len(rollout) == 4
    assert rollout.response_lengths.tolist() == [1, 2, 3, 4] and rollout.prompt_lengths.tolist() == [3, 3, 4, 4]
    assert rollout.truncated.tolist() == [False, False, True, False]
    assert rollout.has_score.tolist() == [True, False, True, True]
    assert rollout.sequence_lengths.tolist() == [4, 5, 7, 8]


class Decoding:
    """A tokenizer without special tokens."""
    bos_token_id = eos_token_id = pad_token_id = None

    def __init__(self, decode):
        self.decode, self.added_tokens_decoder = decode, {}

    def __len__(self):
        return 0


@pytest.mark.parametrize("tp", [1, 2])
def test_a_response_is_known_by_its_place_and_has_a_seed_of_its_own(tp):
    """The second of two engines samples prompts 1 and 3 of four, three responses each; all are scored as they end, each
    by one rank of the engine."""
    seen = {}

    def complete(requests, sampling, on_finish, stop):
        seen.update(prompts=[r.prompt.tokens for r in requests], seeds=[r.seed for r in requests])
        for i in reversed(range(len(requests))):
            on_finish(i, Response([i], [-0.5], "stop"))

    engine = SimpleNamespace(local_prompts=lambda count: range(1, count, 2), complete=complete, tp_rank=tp - 1,
                             config=SimpleNamespace(tp=tp))
    submitted = []
    pool = SimpleNamespace(grouped=False, submit=lambda *given: submitted.append(given))
    tokenizer = Decoding(lambda tokens: f"text {tokens[0]}")
    judge = SimpleNamespace(pool=pool, tokenizer=tokenizer, advance=lambda: None, episodes=None)
    source = RolloutSource(engine, judge, DATA)
    pending = scoring.start_rollout(source, RolloutRequest([5, 4, 3, 2], 3, SamplingConfig(), (7, "x")))
    assert [(s.index, s.group, s.row) for s in pending.samples] == [
        (3, 1, 4), (4, 1, 4), (5, 1, 4), (9, 3, 2), (10, 3, 2), (11, 3, 2)]
    assert seen["prompts"] == [[1] * 7] * 3 + [[1] * 5] * 3
    assert seen["seeds"] == [seed_of(7, "x", group, number) for group in (1, 3) for number in range(3)]
    assert submitted[0] == (5, "source0", "text 5", "2", {"row": 2})
    assert [given[0] for given in submitted] == [i for i in (5, 4, 3, 2, 1, 0) if i % tp == tp - 1]
    request = RolloutRequest([5, 4, 3, 2], 2, SamplingConfig(), (7, "x"), with_greedy=True)
    pending = scoring.start_rollout(source, request)
    assert [(s.index, s.group, s.row) for s in pending.samples] == [
        (9, 1, 4), (2, 1, 4), (3, 1, 4), (11, 3, 2), (6, 3, 2), (7, 3, 2)]
    sampled = [[seed_of(7, "x", group, number) for number in range(2)] for group in (1, 3)]
    assert seen["seeds"] == [None, *sampled[0], None, *sampled[1]]


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_validation_is_one_call_of_the_engine(world, num_samples):
    """Greedy answers are right on rows 4 and 2, sampled ones where the number is 1; a stop leaves no results."""
    calls, recorded = [], []

    def complete(requests, sampling, on_finish, stop):
        calls.append(sampling)
        for i, seed in enumerate(request.seed for request in requests):
            number = 2 if seed is None else [seed_of(7, "val", i // (1 + num_samples), n) for n in range(2)].index(seed)
            on_finish(i, Response([number], [-0.5], "stop"))

    answers = []
    pool = SimpleNamespace(
        grouped=False, submit=lambda i, source, text, truth, info: answers.append((int(text), info["row"])),
        results=lambda: Scores([], [float(row in (4, 2) if number == 2 else number) for number, row in answers],
                               [{} for _ in answers], [None for _ in answers]))
    engine = SimpleNamespace(local_prompts=range, complete=complete, tp_rank=0, config=SimpleNamespace(tp=1),
                             sleep=lambda: None)
    tokenizer = Decoding(lambda tokens: f"{tokens[0]}")
    judge = SimpleNamespace(pool=pool, tokenizer=tokenizer, advance=lambda: None, episodes=None, model=None,
                            config=RewardConfig())
    sampling = validation_sampling(RolloutConfig(val_top_k=5, top_k=3), temperature=0.7)
    request = RolloutRequest([5, 4, 3, 2], num_samples, sampling, (7, "val"))
    found = evaluate(RolloutSource(engine, judge, DATA), request, recorded.extend)
    assert [(call.temperature, call.top_k) for call in calls] == [(0.7, 5)]
    by_source = {name: value for name, value in found.items() if name.startswith("val-core")}
    greedy = {f"source{row % 2}": row in (4, 2) for row in (5, 4)}
    assert {name: by_source[f"val-core/{name}/acc/greedy"] for name in greedy} == greedy
    means = [value for name, value in by_source.items() if name.endswith("/acc/mean@2")]
    assert means == [0.5, 0.5] if num_samples else len(by_source) == 2
    assert {s.index for s in recorded} == set(range(8 if num_samples else 4))
    assert evaluate(RolloutSource(engine, judge, DATA, lambda: True), request, recorded.extend) is None


class Told(Engine):
    """An engine that says the same to every prompt, and tells what it is asked to do."""

    def __init__(self, events: list[str]):
        self.events, self.awake, self.config, self.tp_rank = events, False, RolloutConfig(), 0
        self.local_prompts = range

    def wake(self, policy):
        self.events.append("wake")
        self.policy, self.awake = policy, True
        return {}

    def sleep(self):
        self.events.append("sleep")
        self.awake = False
        return {}

    def complete(self, requests, sampling, on_finish, stop):
        self.events.append("sample")
        for i in range(len(requests)):
            on_finish(i, Response([7], [-0.5], "stop"))


def test_another_policy_does_not_go_on_with_what_is_in_flight():
    run = Run(RunArgs(model="", train_data=()), 2, CorrectionConfig())
    actor, critic = object(), object()
    run.models = {"policy": actor, "critic": critic}
    run.engine = SimpleNamespace(policy=critic)
    for _ in range(2):                                                      # also of a resumed run
        run._check_in_flight()
        run.script_state = json.loads(json.dumps(run.script_state))
    run.engine.policy = actor
    with pytest.raises(ValueError, match="policy critic began would be continued by the policy policy: set --rollout"):
        run._check_in_flight()


def test_a_reward_model_scores_while_the_engine_sleeps(world):
    """Its passes have no memory beside the engine: in a validation, which a signal may end, and where a step has more
    than one rollout. Without one the engine stays awake between these."""
    events: list[str] = []
    model = SimpleNamespace(score=lambda given, _: events.append("score") or [1.0] * len(given), weight=1.0,
                            reads_images=False)
    run = Run(RunArgs(model="", train_data=(), eval_n=1, log=LogConfig(rollouts_every=0)), 2, CorrectionConfig())
    run.engine, run.policy, run.val_set, run.train_set = Told(events), None, DATA, DATA
    tokenizer = Decoding(lambda tokens: "text")
    run.scoring = SimpleNamespace(pool=None, tokenizer=tokenizer, episodes=None, model=model, config=RewardConfig(),
                                  check_new=lambda request: None)
    run.recorder, run.watchdog = SimpleNamespace(config=run.args.log), SimpleNamespace(signal=0)
    run.tracker = SimpleNamespace(progress=lambda name, total: nullcontext(lambda: None))
    run.checkpoints = SimpleNamespace(check=lambda: None, stopping=lambda: False)
    run.timer, run.meter, run.metrics, run.step = Timer(), Meter(), {}, 0
    run.success_rates = torch.full((10,), torch.nan)

    def happens(call) -> list[str]:
        events.clear()
        call()
        return list(events)

    assert happens(lambda: run._validate(1)) == ["wake", "sample", "sleep", "score"]
    run.watchdog.signal = 15
    assert happens(lambda: run._validate(1)) == ["wake", "sample", "sleep"]
    run.engine.wake(other := object())                                  # a second policy of the script
    for scorer, want in ((model, ["sample", "sleep", "score", "wake"]), (None, ["sample"])):
        run.scoring.model = scorer
        assert happens(lambda: run.collect(run.sample([0, 1], 2, RolloutConfig(), 0))) == want
    assert run.engine.policy is other
    pending, run.scoring.model = run.sample([0, 1], 2, RolloutConfig(), 0), model
    run.engine.sleep()
    assert happens(lambda: run.collect(pending)) == ["score"]


def test_lost_scores_and_names_are_counted_over_all_ranks(world, monkeypatch):
    """3 of 4 scores are lost here and none of the other rank's 4: 3 of 8, the run goes on. 5 of 8 are too many. Of
    2 x 40 names in reward dicts, the first 64 become metrics."""
    lost_elsewhere = 0
    names = sorted(f"{name}_{rank}" for name in range(40) for rank in range(2))
    scores = Scores([*range(4)], [float("nan")] * 3 + [1.0], [{f"{n}_0": 1.0 for n in range(40)}] * 4,
                    ["timeout", "crash", "crash", None])
    pool = SimpleNamespace(grouped=False, results=lambda: scores)
    judge = SimpleNamespace(pool=pool, model=None, episodes=None, config=RewardConfig())
    monkeypatch.setattr(scoring, "all_sum", lambda here: torch.tensor(here) + torch.tensor([lost_elsewhere, 4]))
    monkeypatch.setattr(measured, "all_names", lambda here: sorted(here | set(names)))
    pending = scoring.PendingRollout(None, judge, make_samples([0.0] * 4), SamplingConfig())
    meter = Meter()
    assert pending.collect(meter).has_score.tolist() == [False] * 3 + [True]
    assert meter.reduce()["reward/error_frac"] == 2 / 4 and meter.reduce()["reward/timeout_frac"] == 1 / 4
    shares = {"reward/timeout_frac", "reward/error_frac", "reward/form_frac"}
    assert meter.sums.keys() - shares == {f"reward/{n}" for n in names[:64]}
    lost_elsewhere = 2
    with pytest.raises(RuntimeError, match=r"62% of the samples have no reward \(5 of 8 on all ranks\)"):
        pending.collect(Meter())


@pytest.mark.parametrize(("on_error", "want"), [("drop", math.nan), ("zero", 0.0), ("stop", None)])
def test_a_reward_models_score_that_is_no_number_is_a_failure(world, on_error, want):
    """It counts, against the limit too; a sample that the reward function lost stays its failure."""
    lost = 0.0 if on_error == "zero" else math.nan
    scores = Scores([*range(6)], [1.0, 2.0, 3.0, 4.0, lost, 6.0], [{}] * 6, [None] * 4 + ["timeout", None])
    judged = [0.5, math.nan, math.inf, -3e9, 1.0, -2.0]
    judge = SimpleNamespace(pool=SimpleNamespace(grouped=False, results=lambda: scores), episodes=None,
                            model=SimpleNamespace(score=lambda *_: judged, weight=2.0, unread={}, reads_images=False),
                            config=RewardConfig(on_error=on_error, max_error_frac=0.7))
    pending, meter = scoring.PendingRollout(None, judge, make_samples([0.0] * 6), SamplingConfig()), Meter()
    rule = r"the reward model gave nan, times --reward-model.weight 2; the rule is a finite number of at most 1e\+09 "
    if want is None:
        with pytest.raises(RuntimeError, match=rf"reward of sample 1 failed and --reward.on-error is stop: {rule}"):
            pending.collect(meter)
        return
    got = pending.collect(meter)
    # --reward.on-error zero gives a failed sample the reward 0, whatever the reward model says of it
    assert got.scores.tolist() == pytest.approx([2.0, want, want, want, want, 2.0], nan_ok=True)
    metrics = meter.reduce()
    assert (metrics["reward/error_frac"], metrics["reward/timeout_frac"]) == (3 / 6, 1 / 6)
    assert metrics["reward/model"] == pytest.approx((0.5 - 3e9 + 1 - 2) / 4)
    judge.config.max_error_frac, scores.failures = 0.5, [None] * 4 + ["timeout", None]
    scores.scores, scores.first_failure = [1.0] * 6, ""
    with pytest.raises(RuntimeError, match=rf"(?s)67% of the samples have no reward \(4 of 6 .*{rule}"):
        pending.collect(Meter())


@pytest.mark.parametrize(("on_error", "want"), [("drop", math.nan), ("zero", 0.0), ("stop", None)])
def test_an_episode_that_failed_has_no_score_of_a_reward_model_alone(world, on_error, want):
    """--reward-model.alone: no reward function could say that its code raised, or took too long."""
    samples = make_samples([0.0] * 4)
    for sample, end_reason in zip(samples, ("done", "error", "timeout", "length")):
        sample.response.end_reason = end_reason
    judge = SimpleNamespace(pool=None, episodes=None, config=RewardConfig(on_error=on_error),
                            model=SimpleNamespace(score=lambda *_: [1.0, 2.0, 3.0, 4.0], weight=0.5, unread={},
                                                  reads_images=False))
    pending, meter = scoring.PendingRollout(None, judge, samples, SamplingConfig()), Meter()
    if want is None:
        with pytest.raises(RuntimeError, match=r"reward of sample 1 failed and --reward.on-error is stop"):
            pending.collect(meter)
        return
    assert pending.collect(meter).scores.tolist() == pytest.approx([0.5, want, want, 2.0], nan_ok=True)
    assert meter.reduce()["reward/error_frac"] == 2 / 4


def deal(rollout, world, skip_zero_advantage=False, num_minibatches=1, in_loss=None, step=-1, **more):
    """Mini-batches of the responses that have a score."""
    in_loss = rollout.has_score if in_loss is None else in_loss
    layout = Layout(LLAMA, world, num_minibatches, **{"max_tokens": 99, "seed": 0} | more)
    return to_minibatches(rollout, in_loss, layout, step, skip_zero_advantage)


def with_advantages(advantages: list[float], scores: list[float] | None = None) -> Rollout:
    """Responses of 1, 2, 3 ... tokens."""
    rollout = gather_rollout(make_samples([1.0] * len(advantages) if scores is None else scores, group_size=4,
                                          rows=[*range(len(advantages) // 4)]))
    rollout.batch.advantage = rollout.to_tokens(torch.tensor(advantages))
    return rollout


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_tokens", [9, 40, 999])
def test_of_those_without_an_advantage_one_of_each_minibatch_runs(world, seed, max_tokens):
    """Of 20 responses 4 have no score, and run and count nowhere; of the others the left out ones count."""
    generator = np.random.default_rng(seed)
    advantages = generator.choice([0.0, 0.0, 0.5, -1.0], 20).tolist()
    scores = [math.nan if i in (2, 7, 11, 12) else 1.0 for i in range(20)]
    rollout = with_advantages(advantages, scores)
    minibatches = deal(rollout, world, True, num_minibatches=3, max_tokens=max_tokens, seed=seed)
    counted, watched = torch.zeros(20), []
    for minibatch in minibatches:
        batch = Batch.cat(minibatch.microbatches).select(range(len(Batch.cat(minibatch.microbatches))))
        canaries = batch.index[batch.canary].tolist()
        has_idle = [i for i in minibatch.left_out_lengths.nonzero()[:, 0].tolist() if minibatch.num_left_out]
        assert len(canaries) <= 1 and (canaries or not has_idle)
        assert all(advantages[i] == 0 and math.isfinite(scores[i]) for i in canaries + has_idle)
        assert all(advantages[i] or i in canaries for i in batch.index.tolist() if i >= 0)
        assert torch.equal(batch.measured, batch.mask & ~torch.isin(batch.index[batch.sequence_ids],
                                                                    torch.tensor(canaries, dtype=torch.int64)))
        counted += minibatch.left_out_lengths
        counted.index_add_(0, batch.index.clamp(min=0), batch.mask.float() @ torch.nn.functional.one_hot(
            batch.sequence_ids, len(batch)).float())
        watched += canaries
    assert counted.tolist() == [0.0 if math.isnan(score) else i + 1 for i, score in enumerate(scores)]
    assert watched and len(watched) == len(set(watched))


def test_another_canary_in_another_step(world):
    """It is drawn from all that could be left out, so that what touches only some of them is found in the end."""
    rollout, found = with_advantages([0.0] * 7 + [1.0]), set()
    for seed in range(60):
        (minibatch,) = deal(rollout, world, True, seed=seed)
        found |= {int(i) for batch in minibatch for i in batch.index[batch.canary]}
    assert found == {*range(7)}


def test_a_response_without_tokens_is_no_canary(world):
    samples = make_samples([1.0] * 4)
    for sample in samples[:3]:
        sample.response = Response([], [], "length")
    rollout = gather_rollout(samples)
    rollout.batch.advantage = torch.zeros(len(rollout.batch.tokens))
    (minibatch,) = deal(rollout, world, True)
    assert [batch.index.tolist() for batch in minibatch] == [[3]] and minibatch.num_left_out == 0


def test_all_sequences_of_an_episode_are_its_canary(world):
    samples = make_samples([1.0] * 2)
    earlier = Response([7] * 3, [-0.5] * 3, "stop")
    earlier.prompt = [5, 5]
    samples[0].response.earlier.append(earlier)
    rollout = gather_rollout(samples)
    rollout.batch.advantage = rollout.to_tokens(torch.tensor([0.0, 1.0]))
    (minibatch,) = deal(rollout, world, True)
    batch = Batch.cat(minibatch.microbatches)
    assert (batch.index.tolist(), batch.canary.tolist()) == ([0, 0, 1], [True, True, False])


def test_an_advantage_on_some_of_the_tokens_is_one(world):
    rollout = with_advantages([0.0] * 4)
    rollout.batch.advantage[rollout.batch.cu_seqlens[3:].long() - 1] = 0.5          # the last tokens of the last two
    (minibatch,) = deal(rollout, world, True)
    (batch,) = minibatch
    assert {2, 3} < set(batch.index.tolist()) and len(batch) == 3 and minibatch.num_left_out == 1
    rollout.batch.advantage = (~rollout.batch.mask).float()                         # on prompts, where nothing reads it
    (minibatch,) = deal(rollout, world, True)
    assert minibatch.num_left_out == 3


def test_advantages_must_be_there_to_be_skipped(world):
    with pytest.raises(ValueError, match=r"rollout.batch.advantage must be written before run.to_minibatches"):
        deal(gather_rollout(make_samples([1.0] * 4)), world, True)


def test_groups_are_joined_taken_and_numbered_anew(world):
    first = gather_rollout(make_samples([1, 2, 3, 4], rows=[0, 1]))
    second = gather_rollout(make_samples([5, 6, 7, 8], rows=[2, 3]))
    both = first.cat(second)
    assert both.scores.tolist() == [*range(1, 9)] and both.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert by_index(both) == {i: (i // 2, i + 1) for i in range(8)}
    assert by_index(second) == {i: (i // 2, i + 5) for i in range(4)}           # the argument stays as it was
    taken = both.select([3, 0])
    assert taken.scores.tolist() == [7, 8, 1, 2] and taken.group.tolist() == [0, 0, 1, 1]
    assert by_index(taken) == {0: (0, 7), 1: (0, 8), 2: (1, 1), 3: (1, 2)}
    assert taken.response_lengths.tolist() == [3, 4, 1, 2]
    nothing = both.select([])
    assert nothing.samples == [] and len(nothing) == 0
    assert nothing.cat(first).scores.tolist() == first.scores.tolist()


def test_only_sequences_with_the_prompt_of_their_row_share_its_images(world):
    """Four groups, the first three with images. Of the third response's episode, two sequences have prompts of their
    own; the images of all others are looked up by their row."""
    samples = make_samples([1.0] * 8, rows=[4, 1, 3, 0])
    for sample in samples[:6]:
        sample.prompt = replace(sample.prompt, images=object())
    for tokens in ([5], [6]):
        part = Response(tokens, [-0.5], "stop")
        part.prompt = [2]
        part.images = object()
        samples[2].response.earlier.append(part)
    rows = gather_rollout(samples).batch.image_row.tolist()
    assert [row for row in rows if row >= -1] == [4, 4, 1, 1, 3, 3, -1, -1]
    own = [row for row in rows if row < -1]
    assert len(own) == len(set(own)) == 2


def test_single_responses_are_taken(world):
    """The best of each group, such as a replay keeps: numbers, groups and rows follow, whatever the order given."""
    rollout = gather_rollout(make_samples([1, 2, 3, 4, 5, 6], rows=[5, 2, 3]))
    assert rollout.row.tolist() == [5, 5, 2, 2, 3, 3]
    taken = rollout.take([5, 1, 4, 1])
    assert taken.scores.tolist() == [2, 5, 6] and taken.group.tolist() == [0, 1, 1] and taken.row.tolist() == [5, 3, 3]
    assert by_index(taken) == {0: (0, 2), 1: (1, 5), 2: (1, 6)}
    assert taken.response_lengths.tolist() == [2, 5, 6] and taken.batch.index.tolist() == [0, 1, 2]
    assert by_index(rollout) == {i: (i // 2, i + 1) for i in range(6)}     # the argument stays as it was
    assert len(rollout.take([])) == 0
    assert rollout.take(range(6)).scores.tolist() == rollout.scores.tolist()
    assert rollout.take([0]).cat(rollout.take([3])).group.tolist() == [0, 1]
    for wrong in ([6], [-1], [0, 99]):
        with pytest.raises(ValueError, match=r"rollout.take: responses -?\d+ to -?\d+ of 6, must be numbers"):
            rollout.take(wrong)
    rollout.batch.extra["mine"] = rollout.batch.tokens
    with pytest.raises(ValueError, match=r"select and take would lose the fields \['mine'\]"):
        rollout.take([0])


def test_groups_may_differ_in_size(world):
    samples = make_samples([1, 2, 3, 4, 5], rows=[0, 1, 2])
    for sample, group in zip(samples, [0, 0, 0, 1, 2]):
        sample.group = group
    taken = gather_rollout(samples).select([2, 0])
    assert taken.scores.tolist() == [5, 1, 2, 3] and taken.group.tolist() == [0, 1, 1, 1]


def test_a_rollout_survives_a_checkpoint_on_any_number_of_ranks(world, tmp_path, monkeypatch):
    samples = make_samples([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rows=[4, 2, 5],
                           extras=[{"acc": i, "per_token": [i / 7] * 5000} for i in range(6)])
    assert responses_from_state(responses_to_state(gather_rollout(samples)), DATA).samples == samples
    monkeypatch.setattr("common.rollouts.scoring.gather_rollout", lambda samples: samples)
    for rank, share in enumerate([samples[:3], samples[3:4], samples[4:]]):
        state = {"step": 4, "script": {"made": [{"share": responses_to_state(SimpleNamespace(samples=share))}]}}
        plain, parts = split(state)
        assert plain["step"] == 4 and "per_token" not in str(plain)
        write_parts(tmp_path, rank, parts)
    found = {}
    for size in (1, 2, 3, 5):
        joined = [join(plain, tmp_path, range(rank, 3, size)) for rank in range(size)]
        shares = [responses_from_state(state["script"]["made"][0]["share"], DATA) for state in joined]
        assert sorted(chain(*shares), key=lambda s: s.index) == samples
        found[size] = [[s.index for s in share] for share in shares]
    assert found == {1: [[*range(6)]], 2: [[0, 1, 2, 4, 5], [3]], 3: [[0, 1, 2], [3], [4, 5]],
                     5: [[0, 1, 2], [3], [4, 5], [], []]}


def test_group_statistics_by_hand():
    x = torch.tensor([1.0, 3.0, float("nan"), 5.0, 5.0, 2.0, float("nan")], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    assert group_sum(x, group).tolist() == [4, 4, 4, 10, 10, 2, 0]
    assert group_count(x, group).tolist() == [2, 2, 2, 2, 2, 1, 0]
    assert group_mean(x, group).nan_to_num(nan=-1).tolist() == [2, 2, 2, 5, 5, 2, -1]
    assert group_std(x, group).nan_to_num(nan=-1).tolist() == pytest.approx([2**0.5] * 3 + [0, 0, 0, 0])
    assert group_lead(x[:6], group[:6]).tolist() == [0, 2, 0, 0, 0, 0]
    assert is_constant(x, group).tolist() == [False, False, False, True, True, True, True]
    assert is_constant(x[:0], group[:0]).tolist() == []


@pytest.mark.parametrize("value", [0.1, 0.7, 1.1, -1 / 3, 1e9 / 3, 5e-324, 1e300])
def test_the_mean_of_equal_values_is_that_value(value):
    """Their sum over their number often is not: 0.1 + 0.1 + 0.1 is above 0.3."""
    group = torch.arange(1, 65).repeat_interleave(torch.arange(1, 65))
    x = torch.full((len(group),), value, dtype=torch.float64)
    assert torch.equal(group_mean(x, group), x) and (group_std(x, group) == 0).all() and is_constant(x, group).all()
    assert (group_sum(x, group) / group_count(x, group) != x).any() or value in (5e-324, 1e300)
    x[0] = x[-1] = value * (1 + 2**-52) if abs(value) > 1e-300 else 0.0     # the smallest difference that there is
    assert is_constant(x, group).tolist() == [True] + [True] * (len(x) - 65) + [False] * 64


ADVANTAGES = torch.tensor([0, 1.0, 0, 0.5, 0, -0.5, 0, 0])


def dealt(world, every: bool = False):
    """Eight responses in two mini-batches; three of those without an advantage are left out unless `every` one runs."""
    return deal(with_advantages(ADVANTAGES.tolist()), world, not every, num_minibatches=2, max_tokens=12)


def test_advantages_that_are_scattered_must_be_0_for_those_left_out(world):
    """`scatter_fields` is given those of all responses, and refuses where it is not."""
    def scattered(minibatches, advantages, whole):
        batch = Batch.cat(list(itertools.chain(*minibatches)))
        scatter_fields(minibatches, advantages, advantage=batch.to_tokens(whole))
        return batch

    minibatches = dealt(world)
    left_out = [i for minibatch in minibatches for i in minibatch.left_out_lengths.nonzero()[:, 0].tolist()]
    assert len(left_out) == 3
    batch = scattered(minibatches, ADVANTAGES, 2 * ADVANTAGES)
    assert torch.equal(Batch.cat(list(itertools.chain(*minibatches))).advantage, 2 * batch.advantage)
    for i in left_out:
        fork = ADVANTAGES.index_add(0, torch.tensor([i]), torch.tensor([0.25]))
        with pytest.raises(ValueError, match=rf"response {i} was left out .* now has the advantage 0.25: give skip_z"):
            scattered(dealt(world), fork, fork)
        scattered(dealt(world, every=True), fork, fork)                    # all run
    minibatches = dealt(world)
    scatter_fields(minibatches, value=Batch.cat(list(itertools.chain(*minibatches))).mask.float())
    assert all(torch.equal(b.value, b.mask.float()) for b in itertools.chain(*minibatches))


# --------------------------------------------------------------------------- a script's own fields

def with_own_fields(batch: Batch) -> Batch:
    """Numbers that say where they stand: [T], [T, 3] and [S]."""
    index = batch.index[batch.sequence_ids]                                # [T]
    batch.extra["place"] = (100 * index + batch.sequence_positions).double()
    batch.extra["three"] = torch.stack([index, batch.sequence_positions, batch.tokens], dim=1)
    batch.response_extra["seven"] = 7 * batch.index.to(torch.int32)
    return batch


def check_own_fields(batch: Batch) -> list[int]:
    """Returns the responses; everything of a dummy is 0."""
    assert {"place", "three"} == batch.extra.keys() and batch.response_extra.keys() == {"seven"}
    place, three, seven = batch.extra["place"], batch.extra["three"], batch.response_extra["seven"]
    assert (place.dtype, three.dtype, seven.dtype) == (torch.float64, torch.int64, torch.int32)
    tokens, at = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    for n, index in enumerate(batch.index.tolist()):
        assert seven[n] == (7 * index if index >= 0 else 0)
        for position, t in enumerate(range(at[n], at[n + 1])):
            assert place[t] == (100 * index + position if index >= 0 else 0)
            assert three[t].tolist() == ([index, position, tokens[t]] if index >= 0 else [0, 0, 0])
    return batch.index.tolist()


def test_own_fields_travel_with_the_responses(world):
    rollout = gather_rollout(make_samples([1.0] * 6))
    batch = with_own_fields(rollout.batch)
    assert check_own_fields(batch) == [*range(6)]
    assert check_own_fields(batch.select([4, 0, 4])) == [4, 0, 4]
    assert check_own_fields(batch.select([])) == []
    assert check_own_fields(batch.dummy()) == [-1]
    assert check_own_fields(batch.microbatch(np.array([5, 2]))) == [5, 2]
    assert check_own_fields(batch.microbatch(np.array([], dtype=np.int64))) == [-1]
    assert check_own_fields(batch.to("cpu")) == check_own_fields(replace(batch)) == [*range(6)]
    both = Batch.cat([batch.select([3, 1]), batch.dummy(), batch.select([0])])
    assert check_own_fields(both) == [3, 1, -1, 0] and check_own_fields(both.sort()) == [0, 1, 3]
    in_loss = torch.tensor([1, 1, 0, 1, 1, 1]) > 0
    minibatches = deal(rollout, world, num_minibatches=2, in_loss=in_loss, max_tokens=9)
    found = [check_own_fields(microbatch) for microbatch in itertools.chain(*minibatches)]
    assert sorted(itertools.chain(*found)) == [0, 1, 3, 4, 5] and len(found) > 2
    with pytest.raises(ValueError, match=r"extra.place, extra.three, response_extra.seven is in some of the batches"):
        Batch.cat([batch, gather_rollout(make_samples([1.0] * 2)).batch])
    with pytest.raises(ValueError, match=r"Batch.extra.place has shape \[2\], must be \[\d+\]: one per token"):
        replace(batch, extra={"place": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"Batch.response_extra.seven has shape \[2\], must be \[6\]: one per resp"):
        replace(batch, response_extra={"seven": torch.zeros(2)})


def test_a_field_that_would_be_lost_is_refused(world):
    batch = gather_rollout(make_samples([1.0] * 2)).batch
    with pytest.raises(AttributeError, match=r"no field 'entropy'.*batch.extra\['entropy'\].*batch.response_extra\['"):
        batch.entropy = torch.zeros(len(batch.tokens))
    with pytest.raises(AttributeError, match="no field 'weight'"):
        batch.weight = torch.zeros(len(batch.tokens))
    batch.old_logp = torch.zeros(len(batch.tokens))                        # a field
    assert not hasattr(batch, "entropy")


# --------------------------------------------------------------------------- groups

def records(rollout: Rollout) -> list[dict]:
    """A dict for each response, with what all ranks know, its sample's and its part of the flat batch."""
    batch, rows = rollout.batch, []
    for i in range(len(rollout)):
        rows.append({name: values[i].item() for name, values in rollout.tensors().items()})
        (sample,) = [s for s in rollout.samples if s.index == i]
        spans = [slice(*batch.cu_seqlens[n : n + 2].tolist()) for n in (batch.index == i).nonzero()[:, 0]]
        rows[i] |= {"sample": sample, "tokens": [batch.tokens[span].tolist() for span in spans],
                    "logp": [batch.rollout_logp[span].tolist() for span in spans]}
        assert (sample.index, sample.group) == (i, rows[i]["group"])
    return rows


def random_rollout(seed: int) -> Rollout:
    """Groups of one to four responses, some of several sequences, in no order, each with tokens of its own."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(5), rng.integers(1, 5, 5))).tolist()
    samples = []
    for i, of_group in enumerate(group):
        parts = [Response([100 * seed + 10 * i + n] * (i % 3 + 1), [-float(i)] * (i % 3 + 1),
                          "length" if i % 4 == 0 else "stop") for n in range(1 + i % 2)]
        parts[-1].earlier = parts[:-1]
        samples.append(Sample(i, of_group, of_group, DATA[of_group], parts[-1], score=float(rng.random()), step=i % 3))
    return gather_rollout([samples[i] for i in rng.permutation(len(samples))])


def slow_select(rows: list[dict], groups) -> list[dict]:
    """Group by group, in the order of their numbers before."""
    found = []
    for new, old in enumerate(groups):
        for row in rows:
            if row["group"] == old:
                found.append(row | {"group": new, "sample": replace(row["sample"], index=len(found), group=new)})
    return found


@pytest.mark.parametrize("seed", range(6))
def test_select_then_cat_is_a_loop_over_responses(world, seed):
    first, second = random_rollout(seed), random_rollout(seed + 10)
    first.batch, second.batch                                              # cached before  # noqa: B018
    groups = np.random.default_rng(seed).permutation(5)[: seed % 4 + 1].tolist()
    rows, others = slow_select(records(first), groups), slow_select(records(second), [4, 0, 2])
    taken = first.select(groups)
    assert records(taken) == rows
    both = taken.cat(second.select([4, 0, 2]))
    joined = [row | {"group": row["group"] + len(groups), "sample": replace(
        row["sample"], index=row["sample"].index + len(rows), group=row["group"] + len(groups))} for row in others]
    assert records(both) == rows + joined
    assert records(both.select([len(groups), 0])) == slow_select(rows + joined, [len(groups), 0])
    assert both.step.tolist() == [s.step for s in sorted(both.samples, key=lambda s: s.index)]


def test_cat_of_further_responses_to_the_same_prompts(world):
    """They join the groups, which are compared as a whole; groups of other prompts are refused."""
    first, second = random_rollout(0), random_rollout(1)
    both = first.cat(second, same_groups=True)
    assert both.group.tolist() == first.group.tolist() + second.group.tolist()
    assert both.row.tolist() == both.group.tolist() and sorted(s.index for s in both.samples) == [*range(len(both))]
    mean = group_mean(both.scores, both.group)
    for group in range(5):
        in_group = [row["scores"] for row in records(both) if row["group"] == group]
        assert mean[both.group == group].tolist() == pytest.approx([np.mean(in_group)] * len(in_group))
    moved = second.select([1, 0, 2, 3, 4])
    with pytest.raises(ValueError, match=r"same_groups=True\): a group has another row here than there"):
        first.cat(moved, same_groups=True)


def test_groups_are_selected_before_own_fields_are_written(world):
    """After it they would be lost; `advantage` is written anew anyway."""
    rollout, other = random_rollout(0), random_rollout(1)
    rollout.batch.advantage = torch.zeros(len(rollout.batch.tokens))
    assert rollout.select([0]).batch.advantage is None
    for own in ("extra", "response_extra"):
        written = random_rollout(0)
        length = len(written.batch.tokens) if own == "extra" else len(written.batch)
        getattr(written.batch, own)["entropy"] = torch.zeros(length)
        for change in (lambda w: w.select([0]), lambda w: w.cat(other), lambda w: other.cat(w)):
            with pytest.raises(ValueError, match=r"would lose the fields \['entropy'\] of rollout.batch: write them"):
                change(written)


# --------------------------------------------------------------------------- per token and per response

def test_any_token_is_of_the_whole_response(world):
    """Responses of one and of two sequences: true where a token of any of them is."""
    rollout = random_rollout(3)
    batch = rollout.batch
    assert len(batch) > len(rollout)
    owner = batch.index[batch.sequence_ids].tolist()
    for seed in range(20):
        is_true = torch.rand(len(owner), generator=torch.Generator().manual_seed(seed)) < 0.07
        want = [any(flag for flag, i in zip(is_true.tolist(), owner) if i == index) for index in range(len(rollout))]
        got = rollout.any_token(is_true)
        assert got.dtype == torch.bool and got.tolist() == want
    assert not rollout.any_token(torch.zeros(len(owner), dtype=torch.bool)).any()


def test_numbers_for_each_token_stand_on_the_response(world):
    """0 on prompts, and for a response without a score, which need not have any."""
    extras = [{"parts": [float(10 * i + t) for t in range(i + 1)]} for i in range(4)]
    extras[2] = {}
    samples = make_samples([1.0, 0.5, float("nan"), 0.0], extras=extras)
    rollout = gather_rollout([samples[i] for i in (3, 0, 2, 1)])
    got, want = rollout.token_numbers("parts"), []
    for i, sample in enumerate(samples):
        want += [0.0] * len(sample.prompt.tokens) + (extras[i].get("parts") or [0.0] * (i + 1))
    assert got.tolist() == want and got.dtype == torch.float32
    assert got[rollout.batch.mask].tolist() == [0, 10, 11, 0, 0, 0, 30, 31, 32, 33]


@pytest.mark.parametrize(("numbers", "found"), [
    ([1.0] * 5, "a list of 5"), ([1.0] * 3, "a list of 3"), (None, "None"), (0.5, "0.5"), ("1 2", "'1 2'")])
def test_numbers_of_another_length_name_the_row(world, numbers, found):
    extras = [{"parts": [0.0] * (i + 1)} for i in range(4)]
    extras[3] = {"parts": numbers} if numbers is not None else {}
    rollout = gather_rollout(make_samples([1.0] * 4, rows=[4, 5], extras=extras))
    with pytest.raises(ValueError, match=f"row 5 of --train-data: .* parts = {found}, must be a list of 4 numbers"):
        rollout.token_numbers("parts")


def test_numbers_for_the_tokens_of_an_episode_of_several_sequences_are_refused(world):
    samples = make_samples([1.0, 1.0], extras=[{"parts": [0.0]}, {"parts": [0.0, 0.0]}])
    samples[1].response.earlier = [Response([3], [-1.0], "stop")]
    with pytest.raises(ValueError, match="an episode must be one sequence, this one has 2"):
        gather_rollout(samples).token_numbers("parts")


# --------------------------------------------------------------------------- the engine's log-probs

class SampledBefore(Engine):
    def __init__(self, policy):
        """An engine that holds the policy's weights, and compares tokens instead of probing in each sleep."""
        self.policy, self._version, self.probe_every, self._sleeps_to_probe = policy, policy.version, 3, 2
        self.config = RolloutConfig(max_probe_diff=0.05)


@pytest.mark.parametrize("stale_first", [False, True])
def test_only_tokens_of_this_step_are_compared_with_the_engine(world, stale_first):
    """Log-probs of stale responses differ because the weights did."""
    policy = SimpleNamespace(version=4)
    samples = make_samples([1.0] * 4)
    for sample in samples:
        sample.step = 6 if (sample.index < 2) == stale_first else 7
    rollout = gather_rollout(samples)

    def check(step, is_off):
        """Before the update of this step; responses where `is_off` is true have other log-probs than the engine's."""
        meter, engine = Meter(), SampledBefore(policy)
        (minibatch,) = deal(rollout, world, step=step)
        for batch in minibatch:
            measure(meter, batch, batch.rollout_logp - 2.0 * batch.to_tokens(torch.tensor(is_off)))
        engine.check_sampled(policy, meter)
        return engine._sleeps_to_probe

    stale = [sample.step == 6 for sample in samples]
    assert check(7, stale) == 2                                            # as it was: tokens were compared
    with pytest.raises(RuntimeError, match="the tokens of this step"):
        check(7, [not is_stale for is_stale in stale])
    with pytest.raises(RuntimeError, match="the tokens of this step"):
        check(6, stale)
    assert check(8, [True] * 4) == 0                                       # nothing to compare: the next sleep probes


def test_the_log_of_the_mean_of_exponentials_by_hand():
    """Of numbers whose exponentials are infinite, or 0, too."""
    x = torch.tensor([0.5, -1.0, 2.0, 1000.0, 1001.0, -2000.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    first = math.log((math.exp(0.5) + math.exp(-1) + math.exp(2)) / 3)
    second = 1000 + math.log((1 + math.e) / 2)
    want = [first] * 3 + [second] * 2 + [-2000.0]
    assert group_log_mean_exp(x, group).tolist() == pytest.approx(want, rel=1e-12)


def test_constant_groups_are_those_without_two_different_scores():
    """Of four groups those of 1 1, of one score beside a lost one, and of lost ones alone."""
    lost = float("nan")
    scores = torch.tensor([1, 1, 0, 1, lost, 1, lost, lost], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 2, 2, 5, 5])                         # numbers of groups that are absent
    ones, flags = torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    sampled = Rollout([], scores, group, group, group, ones, ones, ones, ones, ~flags)
    assert rollout_metrics(sampled, 8, 1.0, 9, 9)["reward/constant_group_frac"] == 0.75
    assert rollout_metrics(sampled, 0, 1.0, 9, 9)["rollout/tokens_per_s"] == 0     # all episodes failed at once


def test_groups_of_one_are_not_called_constant():
    """ppo.py samples one response a prompt by default, and learns from all of them: there is nothing to warn of."""
    ones, number = torch.ones(4, dtype=torch.float64), torch.arange(4)
    sampled = Rollout([], number.double(), number, number, number, ones, ones, ones, ones, ones > 1)
    found = rollout_metrics(sampled, 4, 1.0, 9, 9)
    assert "reward/constant_group_frac" not in found and HealthCheck().look(1, found) == []
    two = Rollout([], number.double(), number // 2, number, number, ones, ones, ones, ones, ones > 1)
    assert rollout_metrics(two, 4, 1.0, 9, 9)["reward/constant_group_frac"] == 0


def test_an_episode_that_its_tools_filled_is_truncated():
    """Of four responses within 9 tokens after the prompt: 3 sampled and 6 of tools, the last reply cut; the same, and
    the environment was done; 9 sampled ones, the last of them a stop token; 3 sampled ones. In verl's words: two
    reach the longest length, and the first one is cut."""
    def of(*numbers):
        return torch.tensor(numbers, dtype=torch.float64)

    group, one = torch.arange(4), of(1, 1, 1, 1)
    sampled = Rollout([], one, group, group, group, one, of(3, 3, 9, 3), of(6, 5, 0, 0), one, of(1, 0, 0, 0) > 0)
    found = rollout_metrics(sampled, 18, 1.0, 9, 9)
    assert found["response_length/clip_ratio"] == 0.5 and found["rollout/truncated_frac"] == 0.25
    assert found["response_length/mean"] == 4.5 and found["prompt_length/clip_ratio"] == 0


def test_a_step_in_which_no_token_was_sampled_has_metrics():
    """Of episodes that ended before their first reply."""
    prompts = [Sample(i, i // 2, 0, DATA[0], Response([], [], "stop", []), score=float(i)) for i in range(4)]
    found = rollout_metrics(gather_rollout(prompts), 0, 2.0, 9, 9)
    assert (found["response_length/mean"], found["rollout/tokens_per_s"], found["prompt_length/mean"]) == (0, 0, 3)
    assert "timing_per_token_ms/gen" not in found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_at_k_is_the_mean_over_all_subsets(k):
    accs = np.array([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0.5, 2, -1, 0.5, 0]])
    want = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in accs]
    assert best_at(accs, k) == pytest.approx(want)
    assert best_at(accs[:1], k)[0] == pytest.approx(1 - np.prod([(3 - i) / (5 - i) for i in range(k)]))   # pass@k


def test_majority_shares_ties():
    assert majority([(1, "4"), (1, "4"), (0, "5")]) == 1
    assert majority([(1, "4"), (0, "5"), (0, "5")]) == 0
    assert majority([(1, "4"), (0, "5"), (0, "6"), (1, "4"), (0, "5")]) == 0.5


def test_validation_metrics_by_hand(world):
    """Two prompts of source0 (rows 0 and 2), one of source1, 4 samples each; acc and pred come with the reward."""
    accs = [1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    preds = ["4", "5", "5", "6", "9", "9", "1", "9", "2", "3", "3", "8"]
    extras = [{"acc": acc, "pred": pred} for acc, pred in zip(accs, preds)]
    samples = make_samples([0.5] * 12, group_size=4, rows=[0, 2, 1], extras=extras)
    got = validation_metrics(samples, greedy=False)
    assert got["val-core/source0/acc/mean@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert got["val-aux/source0/acc/mean@4/stderr"] == pytest.approx(np.std([0.25, 0.75], ddof=1) / 2**0.5)
    assert got["val-core/source0/acc/best@4/mean"] == 1
    assert got["val-aux/source0/acc/best@2/mean"] == pytest.approx((1 / 2 + 1) / 2)
    assert got["val-core/source0/acc/maj@4/mean"] == 0.5 and got["val-core/source1/acc/maj@4/mean"] == 0
    assert Counter(tuple(key.split("/")[1:3]) for key in got) == {
        (source, variable): 6 for source in ("source0", "source1") for variable in ("acc", "reward")}
    assert got["val-aux/source0/reward/mean@4"] == 0.5 and got["val-aux/source0/reward/std@4"] == 0
    plain = validation_metrics(make_samples([0.5, float("nan")], group_size=1), greedy=True)
    assert plain == {
        "val-core/source0/acc/greedy": 0.5, "val-aux/source0/acc/greedy/stderr": 0.0,
        "val-core/source1/acc/greedy": 0.0, "val-aux/source1/acc/greedy/stderr": 0.0,
        "val-aux/source0/reward/greedy": 0.5, "val-aux/source0/reward/greedy/stderr": 0.0,
        "val-aux/source1/reward/greedy": 0.0, "val-aux/source1/reward/greedy/stderr": 0.0,
    }


def by_verls_rule(samples: list[Sample]) -> dict[str, float]:
    """What verl's validation gives (process_validation_metrics and the names of its trainer), written again with loops:
    for each source and prompt all variables that are no text, then means over prompts. In place of its bootstrap draws
    with replacement the mean over all subsets; the majority's value is the mean over the most frequent answers."""
    found = {}
    for source in {sample.prompt.data_source for sample in samples}:
        of_source = [sample for sample in samples if sample.prompt.data_source == source]
        infos = [{"reward": sample.score} | sample.extras for sample in of_source]
        for variable in [name for name, value in infos[0].items() if not isinstance(value, str)]:
            by_prompt = {}
            for sample, info in zip(of_source, infos):
                by_prompt.setdefault(sample.group, []).append((info[variable], info["pred"]))
            results = {}
            for answers in by_prompt.values():
                values, N = [value for value, _ in answers], len(answers)
                mean = sum(values) / N
                of_prompt = {f"mean@{N}": mean, f"std@{N}": (sum((x - mean) ** 2 for x in values) / N) ** 0.5}
                k = 2
                while k < N:
                    of_prompt[f"best@{k}/mean"] = np.mean([max(x) for x in itertools.combinations(values, k)])
                    k *= 2
                of_prompt[f"best@{N}/mean"] = max(values)
                counts = Counter(pred for _, pred in answers)
                top = [value for value, pred in answers if counts[pred] == max(counts.values())]
                of_prompt[f"maj@{N}/mean"] = sum(top) / len(top)
                for name, value in of_prompt.items():
                    results.setdefault(name, []).append(value)
            for name, values in results.items():
                is_core = variable == "acc" and name.startswith(("mean", "maj", "best")) and f"@{N}" in name
                section = "val-core" if is_core else "val-aux"
                found[f"{section}/{source}/{variable}/{name}"] = sum(values) / len(values)
    return found


@pytest.mark.parametrize("N", [2, 3, 4, 5, 8])
def test_the_reward_and_every_number_have_verls_validation_metrics(world, N):
    """Of each source, whatever the order of the responses. Of numbers beside score and acc only the mean."""
    rng = np.random.default_rng(N)
    rows = [0, 2, 1, 3, 4]
    extras = [{"acc": float(rng.integers(2)), "pred": str(rng.integers(3)), "format": float(rng.normal()),
               "a/b": float(rng.normal())} for _ in range(5 * N)]
    samples = make_samples(rng.normal(size=5 * N).tolist(), group_size=N, rows=rows, extras=extras)
    want = {name: value for name, value in by_verls_rule(samples).items()
            if "/acc/" in name or "/reward/" in name or "/mean@" in name}
    rng.shuffle(samples)
    got = {name: value for name, value in validation_metrics(samples, greedy=False).items() if "stderr" not in name}
    assert got == pytest.approx(want, abs=1e-12)
    assert len({abs(value) for value in got.values()}) > 12
    assert f"val-aux/source0/reward/mean@{N}" in got and f"val-aux/source1/a/b/mean@{N}" in got
    assert not any(name.startswith("val-core") and "/acc/" not in name for name in got)


LOST = math.nan


@pytest.mark.parametrize(("scores", "numbers", "reward", "mean"), [
    ([1.0, 3.0, -2.0, 0.0], [1.0, 2.0, 3.0, 6.0], 0.5, 3.0),
    ([LOST, 3.0, 1.0, 0.0], [None, 2.0, 3.0, 7.0], 1.0, 4.0),                  # lost: 0, and without other numbers
    ([LOST] * 4, [None] * 4, 0.0, None), ([-1.0] * 4, [None] * 4, -1.0, None),
    ([1.0, 1.0, 1.0, 2.0], [None, None, None, -5.0], 1.25, -5.0),              # one response alone has it
    ([1.0] * 4, ["1", "2", "x", ""], 1.0, None), ([1.0] * 4, [[1.0], [2.0], [], [3.0]], 1.0, None),
    ([1.0] * 4, ["nan", 4.0, "inf", 2.0], 1.0, 3.0),                            # workers send NaN as text
    ([1.0] * 4, [math.nan, 4.0, math.inf, 2.0], 1.0, 3.0), ([1.0] * 4, [1e100, 1e100, -1e100, -1e100], 1.0, 0.0),
    ([1e9, 1e9, -1e9, 1.0], [0.0, 0.0, 0.0, 0.0], (1e9 + 1) / 4, 0.0),
])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_counts_in_the_reward_and_in_a_number(world, scores, numbers, reward, mean, greedy):
    extras = [{} if number is None else {"x": number, "reward": 77.0} for number in numbers]
    got = validation_metrics(make_samples(scores, 1 if greedy else 2, [0, 2, 4, 0], extras), greedy)
    result = "greedy" if greedy else "mean@2"
    assert got[f"val-aux/source0/reward/{result}"] == pytest.approx(reward)
    assert got.get(f"val-aux/source0/x/{result}") == (None if mean is None else pytest.approx(mean))
    assert got[f"val-core/source0/acc/{result}"] == pytest.approx(reward)                     # there is no acc


def test_a_number_that_one_source_has_is_of_that_source_alone(world):
    extras = [{"x": 1.0}, {"x": 3.0}, {"acc": 1.0}, {"y": 5.0}]
    got = validation_metrics(make_samples([0.25, 0.5, 0.75, 2.0], 2, [0, 1], extras), greedy=False)
    assert {name: value for name, value in got.items() if "/acc/" not in name and name.endswith("/mean@2")} == {
        "val-aux/source0/reward/mean@2": 0.375, "val-aux/source1/reward/mean@2": 1.375,
        "val-aux/source0/x/mean@2": 2.0, "val-aux/source1/y/mean@2": 5.0}
    assert got["val-core/source1/acc/mean@2"] == 1.5


def test_the_majority_is_of_the_samples_that_have_a_score_and_an_answer(world):
    """Three prompts, four samples each: one lost, one without answer; none lost; three lost and one without answer."""
    lost = float("nan")
    answers = [(1, "4"), (1, None), (lost, "5"), (0, "5"),
               (0, "7"), (1, "9"), (0, "7"), (0, "8"),
               (1, None), (lost, "1"), (lost, None), (lost, None)]
    extras = [{"pred": pred} for _, pred in answers]
    samples = make_samples([score for score, _ in answers], group_size=4, rows=[0, 2, 4], extras=extras)
    got = validation_metrics(samples, greedy=False)
    # votes: 4 and 5, a tie of 1 and 0; 7 twice, 0; none, 0. The lost 5 would make 5 the majority
    assert got["val-core/source0/acc/maj@4/mean"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert got["val-core/source0/acc/mean@4"] == pytest.approx((2 + 1 + 1) / 12)
    for sample in samples:
        del sample.extras["pred"]
    assert not any("maj" in name for name in validation_metrics(samples, greedy=False))


@pytest.mark.parametrize("acc", [None, "1", [1], {}, float("nan"), float("inf")], ids=repr)
def test_an_acc_that_is_no_number_leaves_the_score(world, acc):
    samples = make_samples([0.5, 0.25, 0.25], group_size=1, rows=[0, 2, 4], extras=[{"acc": acc}, {"acc": 0.75}, {}])
    got = validation_metrics(samples, greedy=True)
    assert got["val-core/source0/acc/greedy"] == pytest.approx((0.5 + 0.75 + 0.25) / 3)


# --------------------------------------------------------------------------- texts of responses

CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>")
SAID = [  # markers, what is sampled, its end, what rewards see
    (["<think>", "</think>"], "<think>I add.</think><answer>4</answer>", "<|im_end|>", None),
    (["[THINK]", "[/THINK]", "[TOOL_CALLS]"], "[THINK]Hm[/THINK]The answer is 4", "<|im_end|>", None),
    (CHANNELS, "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>4",
     "<|return|>", None),
    (CHANNELS, "<|channel|>commentary<|message|>{}", "<|call|>", None),
    (["<think>"], "<think>and no end<think>", "", None), (["<answer>"], "4<answer>", "<|im_end|>", None),
    (["<pad>"], "<pad><pad>4<pad>", "<|im_end|>", "4"), ([], "a<|im_end|>b", "<|im_end|>", "ab"),
    (["<|box_start|>", "<|box_end|>"], " <|box_start|>(1, 2)<|box_end|>\n", "<|endoftext|>", None),
    (["<0>"], "<0><|im_start|>", "<|im_end|>", "<0>"),  # which begins its sequences
]


@pytest.mark.parametrize(("markers", "text", "end", "seen"), SAID)
def test_what_a_model_says_keeps_its_markers(smollm, markers, text, end, seen):
    """Special tokens that are a part of it, and not those that end or fill it: for rewards, in records and in episodes,
    also where the end is a token of generation_config.json or of a flag alone."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    added = [AddedToken(marker, special=True, normalized=False) for marker in markers]
    tokenizer.add_tokens(added, special_tokens=True)
    if "<pad>" in markers:
        tokenizer.pad_token = "<pad>"
    tokens = tokenizer(text + end, add_special_tokens=False)["input_ids"]
    response = Response(tokens, [0.0] * len(tokens), "stop" if end else "length")
    seen = text if seen is None else seen
    submitted = []
    pool = SimpleNamespace(grouped=False, submit=lambda i, source, text, *_: submitted.append(text))
    judge = SimpleNamespace(pool=pool,
                            advance=lambda: None, tokenizer=tokenizer)
    engine = SimpleNamespace(config=SimpleNamespace(tp=1), tp_rank=0)
    sample = Sample(0, 0, 0, SimpleNamespace(data_source="", ground_truth="", extra_info={}, images=None, tokens=[1]))
    scoring.PendingRollout(engine, judge, [sample], SamplingConfig()).score(0, response)
    assert submitted == [seen]
    assert row_of(tokenizer, sample, 0, 0.0)["response"] == seen
    template = ChatTemplate(tokenizer, {"chat_template": "{{ messages[0].content }}"}, tokens[-1:] if end else [])
    conversation = Conversation(template, "error", [1], [{"role": "user", "content": "x"}])
    assert conversation.add_reply(tokens, response.logp) == seen
    assert tags("", seen, "") == float(text.startswith("<think>I add.</think>"))


def test_a_stop_text_that_is_a_special_token_stays(smollm):
    """As docs say of --rollout.stop; in an episode what the template writes between turns is no part of its text."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    tokenizer.add_tokens([AddedToken("</answer>", special=True, normalized=False)], special_tokens=True)
    tokens = tokenizer("4</answer>", add_special_tokens=False)["input_ids"]
    assert Response(tokens, [0.0] * len(tokens), "stop").text(tokenizer, ("</answer>",)) == "4</answer>"
    assert Response(tokens, [0.0] * len(tokens), "stop").text(tokenizer, (" </answer>", "x")) == "4</answer>"
    assert Response(tokens, [0.0] * len(tokens), "stop").text(tokenizer, ("x",)) == "4"
    parts = [("</answer>a<|im_end|>", True), ("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
             ("c</answer><|im_end|>", True)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    mask = [is_sampled for part, (_, is_sampled) in zip(ids, parts) for _ in part]
    episode = Response([*chain(*ids)], [0.0] * len(mask), "stop", mask)
    assert episode.text(tokenizer) == "</answer>a\nuser\nb\nassistant\nc</answer>"
