"""What --policy.share-prompt saves where sequences repeat a history: `python -m tests.bench.bench_prefixes`.

A random model of SmolLM2's shape with 2 layers and a vocabulary of 8,192, in float32. CPU seconds of forward and
backward pass over one micro-batch, off and on in turns, medians of --rounds; `tokens`: those that run. An
episode of n turns is n sequences, because its chat template drops what earlier turns thought; two episodes are a
group. `single`: one group of n = 8 responses of one turn, 256 tokens each, at three ratios of prompt to response."""

import random
from dataclasses import dataclass

import torch
import tyro
from transformers import AutoModelForCausalLM, LlamaConfig

from common.batch import Batch
from common.forward.sequence_parallel import make_row
from common.model.policy import Policy
from tests.bench.bench_update import alternate
from tests.bench.record import report


@dataclass
class Args:
    layers: int = 2
    rounds: int = 1
    prompt: int = 60
    thought: int = 24
    answer: int = 12
    result: int = 16
    """Tokens of each part of a turn."""


def episode(args: Args, prompt: list[int], num_turns: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts and responses of its sequences."""
    prompts, responses, history = [], [], prompt
    for _ in range(num_turns):
        thought, answer, result = map(draw, (args.thought, args.answer, args.result))
        prompts.append(history)
        responses.append(thought + answer)
        history = history + answer + result
    return prompts, responses


def draw(count: int) -> list[int]:
    return random.choices(range(3, 8192), k=count)


def main(args: Args) -> None:
    random.seed(0)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8192, hidden_size=576, intermediate_size=1536, num_hidden_layers=args.layers,
                         num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa", dtype=torch.float32))
    batches = {}
    for num_turns in (4, 16):
        prompt = draw(args.prompt)
        first, second = episode(args, prompt, num_turns), episode(args, prompt, num_turns)
        batches[f"{num_turns} turns"] = first[0] + second[0], first[1] + second[1]
    for prompt, response in ((1, 4), (1, 1), (8, 1)):
        length = 256 * prompt // (prompt + response)
        batches[f"single {prompt}:{response}"] = [draw(length)] * 8, [draw(256 - length) for _ in range(8)]

    figures = {}
    for name, (prompts, responses) in batches.items():
        def work(share: bool, prompts=prompts, responses=responses):
            def run() -> None:
                policy.share_prompt = share
                policy.zero_grad()
                logp, _ = policy(Batch.build(prompts, responses), 1.0)
                logp.sum().backward()
            return run

        batch = Batch.build(prompts, responses)
        tokens = [len(make_row(batch, share, None).run) for share in (False, True)]
        seconds, ratio = alternate({"off": work(False), "on": work(True)}, args.rounds)
        figures[name] = {"tokens_off": tokens[0], "tokens_on": tokens[1], "ratio": ratio, **seconds}
    report("prefixes", threads=torch.get_num_threads(), **figures)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
