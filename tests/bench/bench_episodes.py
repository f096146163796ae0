"""What several turns cost, and what waiting for tools costs: `python -m tests.bench.bench_episodes`. On vLLM and the
135M model: 4 turns of 48 tokens against one of 192, and against one of 192 after a prompt that is longer by what users
write between the 4 turns; then the same 4 turns with tools that take 0.3 s on average (exponential, asleep), against
lockstep and against the longest chain of tools. Alternating, medians of rounds.
"""

import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import tyro
from transformers import AutoTokenizer

from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine, stop_tokens
from common.metrics import Meter
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModelConfig
from common.parallel import ranks
from common.prompts import Prompt, TemplateConfig
from common.rollouts.episodes import start_episodes
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from rewards.runtime.pool import RewardConfig
from tests.bench.record import report
from tests.engine.episode_runs import FILE

TURNS, TOKENS, TOOL_S = 4, 48, 0.3
ANSWER = {"role": "user", "content": "Higher. Try again."}  # of the episode `fixed`


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    episodes: tuple[int, ...] = (16, 64)
    rounds: int = 3


class Bench:
    """One engine, and rows for episodes of a fixed number of turns."""

    def __init__(self, model: str):
        self.world, model_config = ranks.init(), ModelConfig()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stops = stop_tokens(model, self.tokenizer)
        self.config = RolloutConfig(max_response_length=400, max_num_seqs=64, episode=f"{FILE}:fixed")
        hf_config = read_config(model, model_config)
        self.engine = make_engine(EngineSetup(
            model, hf_config, self.config, model_config, self.world, [[1, 2, 3]], self.stops, 512, 0
        ))
        self.engine.stop_token_ids = []
        self.engine.wake(load_policy(model, model_config, self.world))

    def prompts(self, count: int, turns: int, tokens: int, sleeps: list[list[float]] | None = None,
                num_answers: int = 0) -> list[Prompt]:
        """`num_answers`: how many turns with empty replies, and their answers, are a part of the prompt."""
        found = []
        for i in range(count):
            messages = [{"role": "user", "content": f"Game {i}. I think of a number from 1 to 20. Guess it."}]
            messages += [{"role": "assistant", "content": ""}, ANSWER] * num_answers
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            row = {"turns": turns, "tokens": tokens, "sleeps": sleeps[i] if sleeps else [0.0] * turns}
            found.append(Prompt(ids, "bench", "", {}, messages, row))
        return found

    def run(self, prompts: list[Prompt], seed: int, **flags) -> float:
        """Seconds of the rollout; the start of the processes' parent is not counted."""
        from vllm import SamplingParams

        config = replace(self.config, **flags)
        scoring = Scoring(self.tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [], config.episode)
        scoring.episodes = start_episodes(config, self.tokenizer, TemplateConfig(), self.stops, 512, self.world)
        self.engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        with mock.patch("vllm.SamplingParams", partial(SamplingParams, ignore_eos=True)):
            pending = start_rollout(
                RolloutSource(self.engine, scoring, prompts), RolloutRequest(range(len(prompts)), 1, config, (seed,))
            )
        seconds = time.perf_counter() - start
        sampled = pending.collect(Meter()).response_lengths
        assert sampled.tolist() == [prompts[0].row["turns"] * prompts[0].row["tokens"]] * len(prompts)
        scoring.close()
        return seconds


def main(args: Args) -> None:
    bench = Bench(args.model)
    bench.run(bench.prompts(4, 2, 8), 0)
    figures = {}
    for count in args.episodes:
        rows = []
        for number in range(args.rounds):
            rng = random.Random(number)
            sleeps = [[rng.expovariate(1 / TOOL_S) for _ in range(TURNS)] for _ in range(count)]
            jobs = {
                "one turn": partial(bench.run, bench.prompts(count, 1, TURNS * TOKENS), number),
                "one turn, longer prompt": partial(
                    bench.run, bench.prompts(count, 1, TURNS * TOKENS, num_answers=TURNS - 1), number
                ),
                "four turns": partial(bench.run, bench.prompts(count, TURNS, TOKENS), number),
                "with tools": partial(bench.run, bench.prompts(count, TURNS, TOKENS, sleeps), number),
                "lockstep": partial(bench.run, bench.prompts(count, TURNS, TOKENS, sleeps), number, lockstep=True),
            }
            names = list(jobs) if number % 2 else list(reversed(jobs))
            seconds = {name: jobs[name]() for name in names}
            seconds["longest tools"] = max(sum(chain[: TURNS - 1]) for chain in sleeps)
            rows.append(seconds)
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        figures[f"{count} episodes"] = medians | {
            "four turns over one": medians["four turns"] / medians["one turn"],
            "four turns over one, longer prompt": medians["four turns"] / medians["one turn, longer prompt"],
            "lockstep over with tools": medians["lockstep"] / medians["with tools"],
            "tools hidden": 1 - (medians["with tools"] - medians["four turns"]) / medians["longest tools"],
            "rounds": rows,
        }
    report("episodes", unit="seconds of a rollout, medians", **figures)
    bench.engine.close()
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
