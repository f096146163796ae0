"""From prompts to scored responses: the engine samples groups, and each response goes to the scorers when it ends.

`start_rollout` samples. `PendingRollout.collect` waits for the scores and returns a `Rollout`.
"""

import math
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.dataset.messages import with_response
from common.dataset.shown import JudgedImages
from common.dataset.store import PromptSet
from common.engine.base import Engine, Request, Until
from common.engine.remote import Bridge, RemoteEngine
from common.episodes.metrics import measure_episodes
from common.flags.model import RewardModelConfig
from common.flags.rollout import RolloutConfig
from common.metrics import Meter
from common.model.reward_model import RewardModel
from common.parallel.ranks import all_max, all_sum, seed_of
from common.prompts import Prompt
from common.rollout import Rollout, Sample
from common.rollouts.episodes import Episodes
from common.rollouts.gather import gather_rollout
from common.rollouts.measured import measure_rewards, scores_without_functions
from common.rollouts.trial import try_function
from envs.runtime.response import Response
from envs.stored import pack, unpack
from rewards import lookup
from rewards.runtime.groups import OpenGroups
from rewards.runtime.pool import RewardConfig, RewardPool
from rewards.runtime.replies import MAX_SCORE
from rewards.runtime.scores import Scores, check_error_frac


def images_of_sample(sample: Sample) -> list[bytes]:
    """The files of the images that a response's conversation shows, in their order."""
    files: list[bytes] = []
    if sample.prompt.images and sample.response.prompt is None:
        files = sample.prompt.images.files
    return [*files, *map(b64decode, sample.response.images)]


class Scoring:
    """The scorers of responses: the reward functions' workers, and a reward model where there is one."""

    def __init__(self, tokenizer, config: RewardConfig, model_config: RewardModelConfig, data_sources: Iterable[str],
                 episode: str = "", is_here: bool = True):
        """Starts the workers if `is_here`. Raises ValueError for a data source without a reward function, unless
        episodes (--rollout.episode) may return the scores."""
        if not config.function and not model_config.alone and not episode:
            lookup(set(data_sources), config.kwargs)
        self.tokenizer = tokenizer
        self.config = config
        self.episode = episode
        self.model: RewardModel | None = None
        self.episodes: Episodes | None = None
        self.sampled: dict[tuple[int | str, ...], RolloutConfig] = {}  # seeds of the run's requests
        self.is_collected = True  # the rollout that was begun last
        self.advance: Callable[[], None] = lambda: None
        """Called as each response ends, for a progress bar."""
        self.pool: RewardPool | None = None
        if is_here and not model_config.alone:
            self.pool = RewardPool(**vars(config))

    def try_function(self, data: Iterable[PromptSet]) -> None:
        """Call --reward.function before a model is loaded (trial.py). ValueError if it gives no score.
        With episodes it may fail, because they may return the scores themselves."""
        if self.pool is not None and self.config.function:
            try_function(self.pool, list(data), may_fail=self.episode != "")

    def check_new(self, request: "RolloutRequest") -> None:
        """Raises ValueError for a request that draws the random numbers of an earlier one: with the same flags it gets
        the same responses, with another temperature similar ones. Also before the last rollout is collected, because
        the workers number the responses of each rollout from 0."""
        if self.pool is not None and not self.is_collected:
            raise ValueError("run.sample: the responses of the call before are not collected, and the scores of both "
                             "would be mixed up: call run.collect(pending) before the next run.sample")
        before = self.sampled.get(request.seed)
        if before is not None and (before == request.sampling or (before.temperature and request.sampling.temperature)):
            raise ValueError(f"run.sample was called twice with the seed {request.seed[1:]}: both calls would draw the "
                             f"same random numbers; give it a further number after the step, another in each call")
        self.sampled[request.seed] = request.sampling

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        if self.episodes is not None and self.episodes.processes is not None:
            self.episodes.processes.close()


@dataclass
class RolloutRequest:
    """Which responses to sample."""

    rows: Sequence[int]  # of the prompts in the data set
    num_samples: int  # of each prompt
    sampling: RolloutConfig
    seed: tuple[int | str, ...]  # the run's seed, the step's number, and perhaps more
    with_greedy: bool = False  # one more response a prompt, greedy, numbered after all the others
    first: int = 0  # the number that the first prompt's seeds are made from; above 0 for a later part of some rows


@dataclass
class RolloutSource:
    """What samples and scores them. When `stop()` turns true, sampling ends early, and the rollout must not be
    collected."""

    engine: Engine
    scoring: Scoring
    data: PromptSet
    stop: Callable[[], bool] = lambda: False


def start_rollout(source: RolloutSource, request: RolloutRequest) -> "PendingRollout | RemoteRollout":
    """Sample responses to each prompt `data[row]`; scoring of a response starts when it ends.

    Engine e samples prompts e, e + engines, ...; a group never leaves its engine. A response's seed depends only on
    `request.seed`, its prompt's place in the rows (counted from `request.first`) and its number in the group. Responses
    `with_greedy` from samplers on other ranks are waited for here."""
    engine = source.engine
    episodes = source.scoring.episodes
    rows = request.rows
    num_samples = request.num_samples
    if isinstance(engine, RemoteEngine):
        return start_remote_rollout(engine.bridge, source, request)
    samples: list[Sample] = []
    asked: list[Request] = []
    for group in engine.local_prompts(len(rows)):
        prompt = source.data[rows[group]]
        if request.with_greedy:
            samples.append(Sample(len(rows) * num_samples + group, group, rows[group], prompt))
            asked.append(Request(prompt, seed=None))
        for k in range(num_samples):
            samples.append(Sample(group * num_samples + k, group, rows[group], prompt))
            asked.append(Request(prompt, seed_of(*request.seed, request.first + group, k)))
    group_size = num_samples + request.with_greedy
    pending = PendingRollout(engine, source.scoring, samples, request.sampling, group_size)
    if episodes is None:
        engine.complete(asked, request.sampling, pending.score, Until(source.stop))
    else:
        episodes.run(engine, asked, request.sampling, pending.score, Until(source.stop))
    return pending


def start_remote_rollout(bridge: Bridge, source: RolloutSource, request: RolloutRequest) -> "RemoteRollout":
    """Request the rollout from samplers on other ranks; if it is `with_greedy`, wait for it."""
    bridge.send(("rollout", request))
    if not request.with_greedy:
        return RemoteRollout(bridge, source.data)
    answer = bridge.receive(lambda: all_max([source.stop()]).item())
    if answer is None:                                              # stopped
        return RemoteRollout(bridge, source.data)
    made, _ = answer
    return RemoteRollout(bridge, source.data, made | {"samples": bridge.receive_share()})


class PendingRollout:
    """Responses that were sampled and are being scored."""

    def __init__(self, engine: Engine, scoring: Scoring, samples: list[Sample], sampling: RolloutConfig,
                 group_size: int = 1):
        """`samples`: `group_size` of each prompt, one after the other."""
        self.engine = engine
        self.scoring = scoring
        self.samples = samples
        self.sampling = sampling
        self.groups: OpenGroups | None = None
        if scoring.pool is not None and scoring.pool.grouped:
            self.groups = OpenGroups(self._submit_group, group_size)
        self.step = -1
        """The training step in which they were sampled; -1: none."""
        self.rows: Sequence[int] = ()
        """The rows of all groups, as this rank gave them to `run.sample`; none: groups of several steps."""
        scoring.is_collected = False

    def score(self, i: int, response: Response, reply: dict[str, Any] | None = None) -> None:
        """Hand response `i` of this engine to the scorers; each rank of the engine does that for its share. `reply`: an
        episode's own score, in the form of a reward worker's reply; or a text to be scored."""
        number = i
        if self.groups is not None:
            number = i // self.groups.size  # its rank scores a whole group
        if number % self.engine.config.tp != self.engine.tp_rank:
            return
        sample = self.samples[i]
        pool = self.scoring.pool
        sample.response = response
        self.scoring.advance()
        if reply is not None and reply.keys() & {"score", "failure"}:
            if pool is not None:
                pool.put(i, reply)
            if self.groups is not None:
                self.groups.add(i, None, sample.prompt)
            return
        if reply:
            sample.text = reply["text"]
        else:
            stop: tuple[str, ...] = ()
            if self.sampling:
                stop = self.sampling.stop
            sample.text = response.text(self.scoring.tokenizer, stop)
        prompt = sample.prompt
        if self.groups is not None:
            self.groups.add(i, sample.text, prompt)
        elif pool is not None:
            pool.submit(i, prompt.data_source, sample.text, prompt.ground_truth, prompt.extra_info)

    def _submit_group(self, indices: list[int], texts: list[str], prompt: Prompt) -> None:
        self.scoring.pool.submit_group(indices, prompt.data_source, texts, prompt.ground_truth, prompt.extra_info)

    def collect(self, meter: Meter) -> Rollout:
        """Wait for the scores. All ranks call this together.

        Adds to `meter` reward/error_frac, reward/timeout_frac, and reward/NAME for the numbers that a reward function
        returned besides its score. Raises RuntimeError on all ranks if too many samples have no score.
        """
        self.scoring.is_collected = True
        mine = []                                                   # that this rank of the engine has to score
        for sample in self.samples:
            if sample.response is not None:
                mine.append(sample)
        if self.scoring.pool is not None:
            scores = self.scoring.pool.results()
        else:
            scores = scores_without_functions(mine)
        if self.scoring.model is not None:
            self.judge(mine, scores, meter)
        num_failed, num_scored = all_sum([scores.num_errors + scores.num_timeouts, len(mine)]).tolist()
        check_error_frac(int(num_failed), int(num_scored), self.scoring.config.max_error_frac, scores.first_failure)
        for sample, score, extras in zip(mine, scores.scores, scores.extras, strict=True):
            sample.score = score
            sample.extras = extras
            sample.step = self.step
        measure_rewards(meter, mine, scores)
        if self.scoring.episodes is not None:
            measure_episodes(meter, mine, self.sampling)
            for sample in mine:
                if sample.response.end_reason in self.sampling.drop:
                    sample.score = torch.nan
        return gather_rollout(mine)

    def judge(self, mine: list[Sample], scores: Scores, meter: Meter) -> None:
        """Add the reward model's scores to those of the reward functions. All ranks call this together. A sum that is
        no number, or too large, is a failure, to which --reward.on-error applies. What has failed before stays NaN, or
        0."""
        model = self.scoring.model
        on_error = self.scoring.config.on_error
        conversations = []
        for sample in mine:
            messages = sample.response.messages or with_response(sample.prompt.messages, sample.text)
            conversations.append(messages)
        images = None
        if model.reads_images:
            images = JudgedImages([*map(images_of_sample, mine)], model.tokenizer)
        judged = model.score(conversations, images)
        finite = [*filter(math.isfinite, judged)]
        meter.mean("reward/model", torch.tensor(finite, dtype=torch.float64))
        for i, failure in enumerate(scores.failures):
            if failure is not None:
                continue
            scores.scores[i] += model.weight * judged[i]
            if abs(scores.scores[i]) <= MAX_SCORE:                  # False for NaN
                continue
            text = model.unread.get(i) or (
                f"the reward model gave {judged[i]}, times --reward-model.weight {model.weight:g}; the rule is "
                f"a finite number of at most {MAX_SCORE:g} in size, the reward function's score included, and "
                f"an episode that does not fail")
            if on_error == "stop":
                raise RuntimeError(f"reward of sample {i} failed and --reward.on-error is stop: {text}")
            scores.failures[i] = "invalid"
            scores.first_failure = scores.first_failure or text
            scores.scores[i] = math.nan
            if on_error == "zero":
                scores.scores[i] = 0.0


class RemoteRollout:
    """A rollout requested from samplers on other ranks. `made`: their answer, with this rank's share of the samples as
    checkpoints store it."""

    def __init__(self, bridge: Bridge, data: PromptSet, made: dict[str, Any] | None = None):
        self.bridge = bridge
        self.data = data
        self.made = made
        self.rows: Sequence[int] = ()

    def collect(self, meter: Meter) -> Rollout:
        for name, value in self.made["metrics"].items():
            meter.mean(name, torch.tensor([value], dtype=torch.float64))
        return responses_from_state(self.made["samples"], self.data)


def responses_to_state(rollout: Rollout) -> bytes:
    """This rank's samples, for a checkpoint or for another rank."""
    samples = [vars(sample) | {"prompt": None, "text": ""} for sample in rollout.samples]
    return pack(samples)


def responses_from_state(state: bytes, data: PromptSet) -> Rollout:
    """The samples that `responses_to_state` stored, of one rank or of several. All ranks call it, each with others."""
    samples = []
    for saved in unpack(state):
        prompt = data[saved["row"]]
        samples.append(Sample(**saved | {"prompt": prompt}))
    return gather_rollout(samples)
