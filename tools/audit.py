"""Audit the reward, or the environment, of a training command before it runs: is it flaky, slow, or easily gamed?

    python -m tools.audit grpo.py --model models/SmolLM2-135M-Instruct --train-data data/word_problems/train.parquet
    python -m tools.audit mine.py ALL OF ITS FLAGS --audit.rows 16 --audit.samples 8

Takes a script (a fork too) with its flags. The policy answers some rows; its responses are scored twice, and so are
texts that must not score well. With --rollout.episode, the same texts are said to the environment in the model's place.
Each check is a line: ok, look (a person should) or BAD. Exit status 1: something is BAD. Nothing is trained or written.
"""

import tools.command_line  # noqa: F401  # isort: skip  (chooses where compiled code lies, before torch is imported)

import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import tyro

from common.dataset.store import PromptSet, load_prompts
from common.engine.base import Engine, EngineSetup
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.episodes.replies import seed_of_reply
from common.flags.rollout import SamplingConfig
from common.metrics import Meter
from common.model.loading import Weights, load_policy, read_config, read_tokenizer
from common.model.policy import Policy
from common.model.reward_model import RewardModel
from common.parallel import ranks
from common.parallel.ranks import World, seed_of
from common.prompts import Prompt
from common.rollout import Sample
from common.rollouts.episodes import start_episodes
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from common.rollouts.trial import FORMS
from common.rollouts.validation import spread_rows
from envs.runtime.response import Response
from envs.runtime.template import special_tokens
from tools import audited_episode
from tools.audit_verdicts import Findings, judge, table
from tools.flags import exit_with_error, refuse_nan, refuse_others_flags
from tools.plan import load
from tools.terminal import visible

TIMED_S = 30.0  # rewards are timed one by one, for at most this long
GRACE_S = 10.0  # beyond a reward's deadline, for its worker to be replaced

Place = tuple[int, int]
"""The number of a row in the audit, and of a response to it."""
Replies = dict[tuple[int, int], list[int]]
"""Of an episode: (conversation, number of the reply) -> tokens."""


@dataclass
class AuditConfig:
    rows: int = 8
    """Rows of the training data that are answered, spread evenly over the files."""
    samples: int = 4
    """Responses to each of them. At least 2."""


class Speaker(Engine):
    """Says given replies in a model's place. `replies`: the seed of a request -> the tokens of its reply; to any other
    request it says nothing."""

    def __init__(self, setup: EngineSetup, replies: dict[int, list[int]]):
        super().__init__(setup)
        self.awake = True
        self.replies = replies
        self.waiting: list[tuple[int, Response]] = []

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig,
            images: Any = None, schema: Any = None) -> None:
        tokens = self.replies.get(seed, []) if seed is not None else []
        tokens = (tokens or self.stop_token_ids[:1])[: sampling.max_response_length]
        stops = {*self.stop_token_ids, *sampling.stop_token_ids}
        reason = "stop" if tokens[-1] in stops else "length"
        self.waiting.append((request, Response(tokens, [0.0] * len(tokens), reason)))

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def step(self) -> Iterator[tuple[int, Response]]:
        while self.waiting:
            yield self.waiting.pop(0)

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        self.waiting = [(number, response) for number, response in self.waiting if number not in requests]
        return []


class Audit:
    """What scores: the rows, the engine's setup, the reward's workers or the episodes of one command."""

    def __init__(self, args: Any, world: World, closing: contextlib.ExitStack):
        self.args = args
        self.world = world
        self.tokenizer = read_tokenizer(args.model, args.policy)
        self.hf_config = read_config(args.model, args.policy)
        self.config = args.rollout
        if self.config.episode:
            self.config = replace(self.config, episode=audited_episode.spec_of(args.rollout.episode))
        longest = check_rollout(args.rollout, self.hf_config, world, args.data.max_prompt_length, has_correction=True)
        self.data: PromptSet = load_prompts(args.train_data, self.tokenizer, args.data, bool(self.config.episode))
        print(f"train  {self.data.loaded.summary()}")
        self.rows = spread_rows(len(self.data), args.audit.rows)
        self.prompts: list[Prompt] = [self.data[row] for row in self.rows]
        stops = stop_tokens(args.model, self.tokenizer)
        probe = [prompt.tokens for prompt in self.prompts[:4]]
        self.setup = EngineSetup(args.model, self.hf_config, self.config, args.policy, world, probe, stops, longest,
                                 args.seed)
        # all failures are counted here, and the workers have their deadline
        reward = replace(args.reward, max_error_frac=1.0, on_error="drop", num_workers=max(args.reward.num_workers, 1))
        self.scoring = Scoring(self.tokenizer, reward, args.reward_model, self.data.loaded.data_sources,
                               self.config.episode)
        closing.callback(self.scoring.close)
        self.scoring.episodes = start_episodes(self.config, self.tokenizer, args.data, stops, longest, world)

    def sample(self, policy: Policy, engine: Engine) -> list[Sample]:
        """The policy's own responses, with their scores."""
        request = RolloutRequest(self.rows, self.args.audit.samples, self.config, (self.args.seed, "audit"))
        engine.wake(policy)
        pending = start_rollout(RolloutSource(engine, self.scoring, self.data), request)
        engine.sleep()
        return pending.collect(Meter()).samples

    def say(self, replies: dict[Place, Replies], num_tokens: int = 0) -> list[Sample]:
        """The samples that these replies make. `num_tokens`: the longest response; 0: that of training."""
        if not replies:
            return []
        by_seed = {}
        for (group, k), said in replies.items():
            seed = seed_of(self.args.seed, "audit", group, k)
            for (conversation, number), tokens in said.items():
                by_seed[seed_of_reply(seed, conversation, number, 0) if self.config.episode else seed] = tokens
        num_samples = 1 + max(k for _, k in replies)
        length = num_tokens or self.config.max_response_length
        # greedy requests have no seed
        sampling = replace(self.config, max_response_length=length, temperature=self.config.temperature or 1.0)
        request = RolloutRequest(self.rows, num_samples, sampling, (self.args.seed, "audit"))
        source = RolloutSource(Speaker(self.setup, by_seed), self.scoring, self.data)
        samples = start_rollout(source, request).collect(Meter()).samples
        return [sample for sample in samples if (sample.group, sample.index % num_samples) in replies]

    def say_texts(self, texts: dict[Place, str]) -> list[Sample]:
        """The samples of these texts; in an episode each reply is the text. It may be longer than a response."""
        replies = {}
        for place, text in texts.items():
            tokens = [*special_tokens(self.tokenizer).encode(text), self.setup.stop_token_ids[0]]
            replies[place] = {(0, number): tokens for number in range(self.config.max_turns)}
        return self.say(replies, self.setup.max_model_len)

    def wrong_texts(self) -> dict[str, dict[Place, str]]:
        """Texts that cannot be right: nothing, the prompt's last message, the ground truth of another row."""
        copied = {}
        others = {}
        truths = [text_of_truth(prompt.ground_truth) for prompt in self.prompts]
        for group, prompt in enumerate(self.prompts):
            copied[group, 0] = str(prompt.messages[-1]["content"])
            following = [*truths[group + 1 :], *truths[:group]]
            other = next((truth for truth in following if truth not in ("", truths[group])), "")
            others |= {(group, k): text for k, text in enumerate(answers(other))}
        nothing = {(group, 0): "" for group in range(len(self.prompts))}
        return {"an empty response": nothing, "the prompt, copied": copied, "another row's answer": others}

    def right_texts(self) -> dict[Place, str]:
        """The ground truth of each row that has one which may be an answer."""
        found = {}
        for group, prompt in enumerate(self.prompts):
            texts = answers(text_of_truth(prompt.ground_truth))
            found |= {(group, k): text for k, text in enumerate(texts)}
        return found

    def time_rewards(self, samples: Sequence[Sample]) -> list[float]:
        """Seconds of each score, one after the other."""
        pool = self.scoring.pool
        end = time.monotonic() + TIMED_S
        seconds = []
        for sample in samples:
            if pool is None or time.monotonic() > end:
                break
            prompt = sample.prompt
            start = time.perf_counter()
            pool.attempt((prompt.data_source, sample.text, prompt.ground_truth, prompt.extra_info),
                         pool.timeout_s + GRACE_S)
            seconds.append(time.perf_counter() - start)
        return seconds

    def num_lone_workers(self) -> int:
        """The reward's workers in training; 0 if one scores many samples at once."""
        pool = self.scoring.pool
        if pool is None or any(worker.concurrent for worker in pool.workers.values()):
            return 0
        return self.args.reward.num_workers

    def folders(self) -> list[str]:
        """The working directory, and TMPDIR of the reward's workers and of the episodes."""
        found = ["."]
        if self.scoring.pool is not None:
            found += [worker.folder for worker in list(self.scoring.pool.workers.values())]
        if self.scoring.episodes is not None and self.scoring.episodes.processes is not None:
            found.append(self.scoring.episodes.processes.folder)
        return found


def text_of_truth(truth: Any) -> str:
    """A ground truth that may be an answer, as a text; of several the first one. Empty: it is none."""
    if isinstance(truth, list) and truth:
        truth = truth[0]
    return str(truth) if isinstance(truth, str | int | float) else ""


def answers(truth: str) -> list[str]:
    """An answer alone, and in the forms that rewards look for. None of an empty one."""
    return [truth, f"#### {truth}", f"\\boxed{{{truth}}}", FORMS.format(truth=truth)] if truth else []


def replies_of(response: Response) -> Replies:
    """What the model said in an episode, or in its only response."""
    found: Replies = {}
    counts: Counter[int] = Counter()
    for part in response.parts:
        mask = part.mask or [True] * len(part.tokens)
        for is_sampled, pairs in groupby(zip(mask, part.tokens, strict=True), key=lambda pair: pair[0]):
            if is_sampled:
                found[part.conversation, counts[part.conversation]] = [token for _, token in pairs]
                counts[part.conversation] += 1
    return found


def changed_texts(samples: dict[Place, Sample]) -> dict[str, dict[Place, str]]:
    """The policy's own responses with their words in another order, and their first halves. Without those that stay
    the same."""
    shuffled = {}
    halves = {}
    for place, sample in samples.items():
        words = sample.text.split()
        random.Random(sample.index).shuffle(words)
        if words != sample.text.split():
            shuffled[place] = " ".join(words)
        half = sample.text[: len(sample.text) // 2]
        if half.strip():
            halves[place] = half
    return {"its words, shuffled": shuffled, "its first half": halves}


def measure(audit: Audit, policy: Policy, engine: Engine, folder: Path) -> Findings:
    """All that is measured. `folder`: in which episodes write what they leave."""
    args = audit.args
    has_episodes = bool(audit.config.episode)
    before = {path: set(os.listdir(path)) for path in audit.folders()}
    samples = audit.sample(policy, engine)
    found = Findings(samples, args.reward.max_error_frac, args.reward.timeout_s)
    if has_episodes:
        found.timeout_s, found.timeout_flag = args.rollout.tool_timeout_s, "--rollout.tool-timeout-s"
        found.episodes = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    if found.has_failed():
        return found
    places: dict[Place, Sample] = {(sample.group, sample.index % args.audit.samples): sample for sample in samples}
    replies = {place: replies_of(sample.response) for place, sample in places.items()}
    # some replies of an episode may be none of the policy's: sampled at another temperature
    complete = {place: said for place, said in replies.items() if len(said) == places[place].response.num_turns}
    found.again = [(places[sample.group, sample.index % args.audit.samples], sample) for sample in audit.say(complete)]
    found.probes = {name: audit.say_texts(texts) for name, texts in audit.wrong_texts().items()}
    found.truth = audit.say_texts(audit.right_texts())
    if has_episodes:
        found.seconds = [sample.response.tools["tool_s"] for sample in samples]
    else:
        found.derived = {name: audit.say_texts(texts) for name, texts in changed_texts(places).items()}
        found.seconds = audit.time_rewards(samples)
        found.step_responses = vars(args).get("prompts_per_step", 0) * vars(args).get("samples_per_prompt", 0)
        found.num_workers = audit.num_lone_workers()
    for path in audit.folders():
        names = sorted({*os.listdir(path)} - before.get(path, set()) - {"__pycache__"})
        (found.working if path == "." else found.temporary).extend(names)
    return found


def read_args(script: str, flags: list[str]) -> Any:
    """The script's own flags, checked as it checks them, and those of the audit."""
    module = load(script)
    refuse_others_flags(module.Args, [flag for flag in flags if not flag.startswith("--audit.")], script)
    own = ("audit", AuditConfig, field(default_factory=AuditConfig))
    args = tyro.cli(dataclasses.make_dataclass("Args", [own], bases=(module.Args,)), args=flags, prog=script)
    refuse_nan(args)
    if args.audit.rows < 2 or args.audit.samples < 2:
        raise ValueError(f"--audit.rows {args.audit.rows} and --audit.samples {args.audit.samples} must be at least 2")
    module.check(args)
    return args


def audit_command(args: Any) -> bool:
    """Print the table. Whether nothing is BAD."""
    world = ranks.init()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        os.environ |= {"AUDIT_EPISODE": args.rollout.episode, "AUDIT_FOLDER": folder}
        audit = Audit(args, world, closing)
        policy = load_policy(args.model, args.policy, world, Weights(frozen=True))
        if args.reward_model.path:
            audit.scoring.model = RewardModel(args.reward_model, args.policy, world)
        engine = make_engine(audit.setup)
        closing.callback(engine.close)
        lines = judge(measure(audit, policy, engine, Path(folder)))
    print("\n" + "\n".join(visible(row) for row in table(lines)))
    ranks.shutdown()
    return all(line.verdict != "BAD" for line in lines)


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    try:
        is_good = audit_command(read_args(arguments[0], arguments[1:]))
    except (ValueError, OSError) as error:
        exit_with_error(error)
    sys.exit(not is_good)


if __name__ == "__main__":
    main(sys.argv[1:])
