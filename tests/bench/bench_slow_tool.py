"""A slow tool in one of 64 episodes or so: `python -m tests.bench.bench_slow_tool`. How long a rollout takes, and
the share of it in which the engine decodes, with --rollout.in-flight 1 and 2. 16 groups of 4 episodes of two turns; a
slow tool takes 10 s, and the update between two rollouts, which is slept here, 3 s.
"""

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import tyro

from common.curriculum.sampler import PromptSampler
from common.metrics import Meter
from common.model.reward_model import RewardModelConfig
from common.parallel import ranks
from common.prompts import TemplateConfig
from common.rollouts.episodes import start_episodes
from common.rollouts.in_flight import continue_rollout
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring
from rewards.runtime.pool import RewardConfig
from tests.bench.bench_episodes import Bench
from tests.bench.record import report

TURNS, TOKENS, SLOW_S, UPDATE_S = 2, 24, 10.0, 3.0


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    prompts: int = 16
    samples: int = 4
    steps: int = 6


def main(args: Args) -> None:
    from vllm import SamplingParams

    bench = Bench(args.model)
    engine, decode = bench.engine, bench.engine.step
    decoded_s = 0.0

    def timed_step():
        nonlocal decoded_s
        start = time.perf_counter()
        found = [*decode()]
        decoded_s += time.perf_counter() - start
        return found

    engine.step = timed_step
    count = 2 * args.prompts * args.steps
    slow = [[SLOW_S if i % args.prompts == 0 else 0.0] * TURNS for i in range(count)]
    data = bench.prompts(count, TURNS, TOKENS, slow)
    for prompt in data:
        prompt.row["one_in"] = args.samples
    figures = {}
    for in_flight in (1.0, 2.0):
        config = replace(bench.config, in_flight=in_flight, max_num_seqs=2 * args.prompts * args.samples)
        scoring = Scoring(bench.tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [], config.episode)
        scoring.episodes = start_episodes(config, bench.tokenizer, TemplateConfig(), bench.stops, 512, bench.world)
        state, sampler, rows = {}, PromptSampler(len(data), "", 0), []
        with mock.patch("vllm.SamplingParams", partial(SamplingParams, ignore_eos=True)):
            for step in range(args.steps):
                decoded_s, start, meter = 0.0, time.perf_counter(), Meter()
                request = RolloutRequest(sampler.take(args.prompts), args.samples, config, (0, step))
                pending = continue_rollout(RolloutSource(engine, scoring, data), request, state, sampler, meter)
                seconds = time.perf_counter() - start
                pending.collect(meter)
                rows.append({"s": seconds, "busy": decoded_s / seconds})
                time.sleep(UPDATE_S)
        scoring.close()
        engine.abort(set())
        means = {name: statistics.mean(row[name] for row in rows[1:]) for name in rows[0]}
        figures[f"in flight {in_flight:g}"] = means | {"steps": rows}
    report("slow_tool", unit="seconds of a rollout; share of them in which the engine decodes", **figures)
    engine.close()
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
