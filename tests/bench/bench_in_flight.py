"""Seconds of a rollout with --rollout.in-flight 1.5 and 2 over 1, lengths with a long tail: `python -m
tests.bench.bench_in_flight`. A response ends at a length drawn from a log-normal distribution, whatever its tokens are.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from common.curriculum.sampler import PromptSampler
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.metrics import Meter
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.parallel.ranks import seed_of
from common.prompts import Prompt
from common.rollouts.in_flight import continue_rollout
from common.rollouts.scoring import RolloutRequest, RolloutSource, start_rollout
from tests.bench.record import report
from tests.bench.simulate import InFlight
from tests.engine.engine_models import make_model
from tests.engine.in_flight_runs import NO_SCORERS


@dataclass
class Args:
    model: str = ""
    """Default: a random one of two layers."""
    prompts: int = 8
    samples: int = 4
    median: int = 20
    sigma: float = 1.0
    max_tokens: int = 240
    steps: int = 24
    warm_up: int = 4
    """First steps that are not counted: with more in flight, they are faster than what follows."""


def main(args: Args) -> None:
    world, model_config = ranks.init(), ModelConfig()
    model = args.model or make_model("llama", True, Path(tempfile.mkdtemp()))
    for file in () if args.model else Path(model).glob("*config.json"):         # no token ends a response
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    data = [Prompt([5 + row // 100, 5 + row % 100, 17, 300], "", "", {}, []) for row in range(1000)]
    config = RolloutConfig(max_response_length=args.max_tokens, max_num_seqs=2 * args.prompts * args.samples)
    config.extra = "{}" if args.model else '{"skip_tokenizer_init": true}'
    setup = EngineSetup(model, read_config(model, model_config), config, model_config, world, [data[0].tokens], [],
                        args.max_tokens + 8, 0)
    engine = make_engine(setup)
    policy = load_policy(model, model_config, world)
    add, step = engine.add, engine.step
    num_decoded = 0

    def length_of(prompt, number):
        """Tokens of the response with this number to this prompt, whatever they are."""
        rng = np.random.default_rng(seed_of(*prompt, number % args.samples))
        return min(int(rng.lognormal(np.log(args.median), args.sigma)) + 1, args.max_tokens)

    def add_with_length(request, prompt, seed, sampling, images):
        size = len(data[0].tokens)
        limit = length_of(prompt[:size], request) - (len(prompt) - size)
        add(request, prompt, seed, replace(sampling, max_response_length=min(sampling.max_response_length, limit)))

    def predicted(in_flight):
        """Decoding steps of each rollout by the simulator, with the same prompts and lengths."""
        held, sampler = InFlight(), PromptSampler(len(data), "", 0)
        for _ in range(args.steps):
            taken = [data[row].tokens for row in sampler.take(round(in_flight * args.prompts) - len(held.age))]
            lengths = np.array([[length_of(tokens, k) for k in range(args.samples)] for tokens in taken])
            held.add(np.array([len(tokens) for tokens in taken]), lengths)
            yield held.rollout(args.prompts, config.max_num_seqs, config.max_staleness)[-1]

    def counted_step():
        nonlocal num_decoded
        num_decoded += 1
        return step()

    engine.step = counted_step
    rows = {}
    for in_flight in (1.0, 1.5, 2.0):
        sampling = replace(config, in_flight=in_flight)
        carried, sampler = {}, PromptSampler(len(data), "", 0)
        seconds = []
        decoded = []
        ages = []
        for number in range(args.steps):
            policy.version += 1
            engine.wake(policy)
            engine.add = add_with_length
            num_decoded, start = 0, time.perf_counter()
            meter = Meter()
            source = RolloutSource(engine, NO_SCORERS, data)
            request = RolloutRequest(sampler.take(args.prompts), args.samples, sampling, (0, number))
            if in_flight == 1:
                pending = start_rollout(source, request)
            else:
                pending = continue_rollout(source, request, carried, sampler, meter)
            seconds.append(time.perf_counter() - start)
            decoded.append(num_decoded)
            pending.collect(meter)
            ages.append(meter.reduce().get("rollout/staleness/mean", 0.0))
            engine.add = add
            engine.sleep()
        counted = slice(args.warm_up, None)
        rows[in_flight] = {"s": statistics.mean(seconds[counted]), "decoding_steps": statistics.mean(decoded[counted]),
                           "predicted_steps": statistics.mean([*predicted(in_flight)][counted]),
                           "staleness": statistics.mean(ages[counted])}
        print(in_flight, rows[in_flight], flush=True)
    ratios = {f"ratio_{f:g}": rows[f]["s"] / rows[1.0]["s"] for f in (1.5, 2.0)}
    ratios |= {f"steps_ratio_{f:g}": rows[f]["decoding_steps"] / rows[1.0]["decoding_steps"] for f in (1.5, 2.0)}
    report("in_flight", unit="seconds a rollout", **ratios, runs={f"{f:g}": row for f, row in rows.items()})


if __name__ == "__main__":
    main(tyro.cli(Args))
