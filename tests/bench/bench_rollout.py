"""Rollout tokens/s inside the loop (engine.complete with rewards streamed to their workers, trainer in memory) against
bare vLLM (`LLM.generate`) on the same requests: `python -m tests.bench.bench_rollout`. Alternating, median of pairs."""

import statistics
import time
from dataclasses import dataclass

import tyro
from transformers import AutoTokenizer

from common.dataset.store import load_prompts
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine, stop_tokens
from common.metrics import Meter
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModelConfig
from common.parallel import ranks
from common.parallel.ranks import seed_of
from common.prompts import DataConfig
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from rewards.runtime.pool import RewardConfig
from tests.bench.record import report


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    data: str = "data/word_problems/train.parquet"
    prompts: int = 8
    samples: int = 8
    max_tokens: int = 40
    pairs: int = 5


def main(args: Args) -> None:
    world, model_config = ranks.init(), ModelConfig()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = load_prompts([args.data], tokenizer, DataConfig(max_prompt_length=256))[: args.prompts]
    requests = [prompt for prompt in prompts for _ in range(args.samples)]
    config = RolloutConfig(max_response_length=args.max_tokens, max_num_seqs=len(requests))
    hf_config, stops = read_config(args.model, model_config), stop_tokens(args.model, tokenizer)
    setup = EngineSetup(args.model, hf_config, config, model_config, world, [requests[0].tokens], stops, 512, 0)
    engine = make_engine(setup)
    policy = load_policy(args.model, model_config, world)
    scoring = Scoring(tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [])
    engine.wake(policy)

    from vllm import SamplingParams

    def bare(round_number: int) -> float:
        params = [
            SamplingParams(temperature=1.0, max_tokens=args.max_tokens, stop_token_ids=stops, detokenize=False,
                           logprobs=0, seed=seed_of(round_number, p, g))   # the same tokens as `start_rollout`
            for p in range(len(prompts)) for g in range(args.samples)
        ]
        engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        outs = engine.llm.generate([{"prompt_token_ids": p.tokens} for p in requests], params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs) / (time.perf_counter() - start)

    def loop(round_number: int) -> float:
        engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        sampling = SamplingConfig(1.0, args.max_tokens)
        request = RolloutRequest(range(len(prompts)), args.samples, sampling, (round_number,))
        pending = start_rollout(RolloutSource(engine, scoring, prompts), request)
        rate = sum(len(s.response.tokens) for s in pending.samples) / (time.perf_counter() - start)
        pending.collect(Meter())
        return rate

    for warm in range(3):
        bare(warm), loop(warm)
    rows = []
    for pair in range(args.pairs):
        order = (bare, loop) if pair % 2 else (loop, bare)
        rates = {f.__name__: f(10 + pair) for f in order}
        rows.append(rates | {"ratio": rates["loop"] / rates["bare"]})
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    report("rollout", unit="response tokens/s", **result, pairs=rows)
    scoring.close()
    engine.close()
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
