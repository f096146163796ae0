"""What an agent that talks over HTTP costs: `python -m tests.bench.bench_endpoint`. On vLLM and the 135M model, 4 turns
of 48 tokens by OpenAI's SDK over envs/openai_agent.py, against the same turns of a coroutine: seconds of a rollout, CPU
seconds a turn of the episodes' processes, and the share of the rollout in which the engine decodes. Alternating,
medians of rounds.
"""

import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import tyro

from common.metrics import Meter
from common.model.reward_model import RewardModelConfig
from common.parallel import ranks
from common.prompts import Prompt, TemplateConfig
from common.rollouts.episodes import start_episodes
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from rewards.runtime.pool import RewardConfig
from tests.bench.bench_episodes import TOKENS, TURNS, Bench
from tests.bench.record import ROOT, report

AGENT = ROOT / "tests/envs/agents/turns_agent.py"
EPISODES = {"agent": str(ROOT / "envs/openai_agent.py"), "coroutine": str(AGENT)}


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    episodes: tuple[int, ...] = (16, 64)
    rounds: int = 3


def measure(bench: Bench, prompts: list[Prompt], seed: int, episode: str) -> dict[str, float]:
    """One rollout; the start of the processes' parent is not counted."""
    from vllm import SamplingParams

    config = replace(bench.config, episode=episode, episodes_at_once=len(prompts))
    scoring = Scoring(bench.tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [], config.episode)
    scoring.episodes = start_episodes(config, bench.tokenizer, TemplateConfig(), bench.stops, 512, bench.world)
    bench.engine.llm.reset_prefix_cache()
    step, decoding = bench.engine.step, []

    def timed_step():
        start = time.perf_counter()
        found = step()
        decoding.append(time.perf_counter() - start)
        return found

    start = time.perf_counter()
    with mock.patch("vllm.SamplingParams", partial(SamplingParams, ignore_eos=True)), \
            mock.patch.object(bench.engine, "step", timed_step):
        pending = start_rollout(
            RolloutSource(bench.engine, scoring, prompts), RolloutRequest(range(len(prompts)), 1, config, (seed,))
        )
    seconds = time.perf_counter() - start
    rollout = pending.collect(Meter())
    scoring.close()
    assert rollout.response_lengths.tolist() == [TURNS * TOKENS] * len(prompts)
    cpu_s = [sample.extras["cpu_s"] / TURNS for sample in rollout.samples]
    return {"seconds": seconds, "CPU seconds a turn": statistics.mean(cpu_s),
            "share of time that the engine decodes": sum(decoding) / seconds}


def main(args: Args) -> None:
    os.environ["AGENT"] = str(AGENT)
    bench = Bench(args.model)
    rows = {count: [replace(prompt, row=prompt.row | {"prompt": prompt.messages})
                    for prompt in bench.prompts(count, TURNS, TOKENS)] for count in args.episodes}
    measure(bench, rows[args.episodes[0]][:4], 0, EPISODES["agent"])
    figures = {}
    for count in args.episodes:
        found = {name: [] for name in EPISODES}
        for number in range(args.rounds):
            for name in EPISODES if number % 2 else reversed(EPISODES):
                found[name].append(measure(bench, rows[count], number, EPISODES[name]))
        figures[f"{count} episodes"] = {
            name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
            for name, measured in found.items()
        }
    report("endpoint", unit="medians of rounds", **figures)
    bench.engine.close()
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
