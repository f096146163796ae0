"""Update FLOP/s against this machine's measured matmul rate in the same dtype, and what packing and sharing a group's
prompt gain: `python -m tests.bench.bench_update`. Everything alternates in one run, medians of --pairs.

Counted FLOPs: `flops.sequence_cost` (three times the forward's matrix products, the head on every token; what the loop
saves by running the head on response tokens only counts as not done, see `head_frac`).

padded_over_packed: CPU seconds of one update, optimizer step included, of responses of log-normal length, with and
without gradient checkpointing. Padded: each response is a row as long as the longest, run by transformers' forward with
its sdpa attention and an attention mask. Both run the head on response tokens only.
unshared_over_shared: the same for one group of n = 8 responses at several prompt : response ratios,
--policy.share-prompt off over on.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

import grpo
from common.batch import Batch
from common.forward.sequence_parallel import Row, make_row
from common.model.flops import sequence_cost
from common.model.loading import load_policy, read_config
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from tests.bench.record import report
from tests.common.weigh import weigh


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    prompt_tokens: int = 100
    response_tokens: int = 27
    tokens: int = 8192
    """Packed tokens of one update."""
    max_tokens: int = 8192
    """Of one micro-batch."""
    pairs: int = 3
    responses: int = 16
    """Of the comparison with padding, 8 in a micro-batch."""
    group_tokens: int = 512
    """Tokens of prompt and response in the comparison of prompt sharing."""


def matmul_rate(dtype: torch.dtype, n: int = 2048) -> float:
    a, b = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 1.0:
        a @ b
        count += 1
    return 2 * n**3 * count / (time.perf_counter() - start)


def padded_hidden(backbone: nn.Module, batch: Batch) -> tuple[Row, Tensor]:
    """`Policy.hidden_before` with rows of equal length."""
    rows = pad_sequence(batch.tokens.split(batch.sequence_lengths.tolist()), batch_first=True)           # [S, longest]
    mask = torch.arange(rows.shape[1]) < batch.sequence_lengths[:, None]                                 # [S, longest]
    hidden = backbone(input_ids=rows, attention_mask=mask.long(), use_cache=False).last_hidden_state
    row = make_row(batch, share_prompt=False, group=None)
    return row, hidden[mask][row.before]


def set_up(policy: Policy, packed: bool = True, checkpointing: bool = False, shared: bool = False) -> None:
    packed_hidden = type(policy).hidden_before.__get__(policy)
    policy.hidden_before = packed_hidden if packed else padded_hidden
    policy.lm.set_attn_implementation("packed_sdpa" if packed else "sdpa")
    policy.share_prompt = shared
    policy.lm.train(checkpointing)                              # transformers recomputes in this mode alone
    if checkpointing:
        policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        policy.lm.gradient_checkpointing_disable()


def alternate(works: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], float]:
    """Median CPU seconds of two kinds of work, done in turns, and the median over rounds of first over second."""
    seconds = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in list(works)[:: -1 if number % 2 else 1]:
            start = time.process_time()
            works[name]()
            if number:                                                                          # the first one warms up
                seconds[name].append(time.process_time() - start)
    first, second = seconds.values()
    medians = {f"{name}_cpu_s": statistics.median(values) for name, values in seconds.items()}
    return medians, statistics.median(a / b for a, b in zip(first, second))


def main(args: Args) -> None:
    world = ranks.init()
    config, rng = read_config(args.model, ModelConfig()), np.random.default_rng(0)

    def numbers(*shape: int) -> list:
        return rng.integers(5, config.vocab_size, shape).tolist()

    def load(compute_dtype: str) -> tuple[Policy, Optimizer]:
        policy = load_policy(args.model, ModelConfig(compute_dtype), world)
        return policy, make_optimizer(policy, OptimConfig())

    def update(microbatches: list[Batch]) -> float:
        start = time.perf_counter()
        weigh(microbatches, "token-mean")
        for b in microbatches:
            b.advantage = b.mask.float()
            logp, _ = policy(b, 1.0)
            loss, _ = grpo.clipped_loss(logp, logp.detach(), b.advantage, grpo.Args("", ()))
            (loss * b.extra["weight"]).sum().backward()
        optimizer_step(policy, optimizer, 0.0, OptimConfig())
        return time.perf_counter() - start

    def work(microbatches: list[Batch], **settings: bool) -> Callable[[], None]:
        def run() -> None:
            set_up(policy, **settings)
            update(microbatches)

        return run

    per_micro = args.max_tokens // (args.prompt_tokens + args.response_tokens)
    microbatches = [Batch.build(numbers(per_micro, args.prompt_tokens), numbers(per_micro, args.response_tokens))
                    for _ in range(args.tokens // args.max_tokens)]
    tokens = sum(len(b.tokens) for b in microbatches)
    lengths = np.concatenate([b.sequence_lengths.numpy() for b in microbatches])
    flops = 3 * sequence_cost(lengths, config).sum()
    head = 3 * 2 * config.hidden_size * config.vocab_size * sum(int((~b.mask).sum()) for b in microbatches)

    def against_matmul(dtype: torch.dtype) -> dict[str, float]:
        update(microbatches)
        rows = []
        for _ in range(args.pairs):
            rate, seconds = matmul_rate(dtype), update(microbatches)
            done = (flops - head) / seconds
            rows.append({"tokens_per_s": tokens / seconds, "seconds": seconds, "matmul_gflops": rate / 1e9,
                         "update_gflops": done / 1e9, "ratio": done / rate})
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    policy, optimizer = load("float32")
    single = against_matmul(torch.float32)
    policy, optimizer = load("bfloat16")
    result = against_matmul(torch.bfloat16)

    response_lengths = np.clip(rng.lognormal(np.log(100), 0.7, args.responses), 4, 400).astype(int)
    mixed = [Batch.build(numbers(len(part), args.prompt_tokens), [numbers(n) for n in part])
             for part in np.array_split(response_lengths, -(-args.responses // 8))]
    computed = sum(len(b) * max(b.host_lengths) for b in mixed)
    padding = {"padding_frac": 1 - sum(len(b.tokens) for b in mixed) / computed}
    logps = []
    for packed in (False, True):
        set_up(policy, packed=packed)
        logps.append(policy.score(mixed[0], 1.0))
    padding["mean_logp_difference"] = float((logps[0] - logps[1])[mixed[0].mask].abs().mean())  # bfloat16's rounding
    for checkpointing in (False, True):
        works = {"padded": work(mixed, packed=False, checkpointing=checkpointing),
                 "packed": work(mixed, checkpointing=checkpointing)}
        medians, ratio = alternate(works, args.pairs)
        padding["checkpointing" if checkpointing else "no_checkpointing"] = {"ratio": ratio, **medians}

    sharing = {}
    for prompt, response in ((1, 4), (1, 1), (4, 1), (8, 1)):
        prompt_tokens = args.group_tokens * prompt // (prompt + response)
        group = [Batch.build(numbers(1, prompt_tokens) * 8, numbers(8, args.group_tokens - prompt_tokens))]
        medians, ratio = alternate({"unshared": work(group), "shared": work(group, shared=True)}, args.pairs)
        tokens_ratio = 8 * args.group_tokens / (prompt_tokens + 8 * (args.group_tokens - prompt_tokens))
        sharing[f"{prompt}:{response}"] = {"ratio": ratio, "tokens_ratio": tokens_ratio, **medians}

    report("update", threads=torch.get_num_threads(), tokens=tokens, **result, float32=single, head_frac=head / flops,
           padded_over_packed=padding, unshared_over_shared=sharing)
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
