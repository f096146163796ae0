"""One model's steps on the ranks of a torchrun, measured for bench_scale: `-m tests.bench.scale_worker JOB.json`.

JOB.json: model (a folder), max_tokens, max_num_seqs, repeats, cases (name, prompts, samples, prompt, response), out,
calibrate. Writes what each rank did: tokens, FLOPs as executed (counted at torch's operators), bytes of every
collective; on one rank, where vLLM samples, also the CPU seconds of each phase (of one OpenMP thread).
"""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import grpo
from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.flops import sequence_cost
from common.model.loading import load_policy, read_config
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.packing import Sequences, plan_step
from common.parallel import ranks
from common.parallel.exchange import exchange
from tests.common.weigh import weigh
from tests.generate import generate

aten = torch.ops.aten
COLLECTIVES = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "exchange"}


class Traffic(TorchDispatchMode):
    """Bytes that this rank receives (gathers), sends (reduce-scatters, point to point): its own part left out."""

    def __init__(self, rank: int):
        super().__init__()
        self.bytes, self.rank = Counter(), rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            for part, name in COLLECTIVES.items():
                if part in func.__name__:
                    out, into = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)][:2]
                    if part == "alltoall":                              # (out, in, group, out splits, in splits)
                        splits = args[4] or [args[1].shape[0] // torch.distributed.get_world_size()]
                        own = splits[self.rank] if len(splits) > self.rank else splits[0]
                        self.bytes[name] += into - own * args[1][0].nbytes if args[1].numel() else 0
                    else:
                        self.bytes[name] += abs(out - into)
        return func(*args, **(kwargs or {}))


def attention_flops(q, k, *args, out_shape=None, **kwargs) -> int:
    """QK^T and PV over the pairs inside the causal mask: [1, heads, T, D] shapes."""
    _, heads, length, width = q
    return 4 * heads * width * (length * (length + 1) // 2)


def attention_backward_flops(grad, q, k, *args, out_shape=None, **kwargs) -> int:
    return 2 * attention_flops(q, k)


def in_place_product_flops(out, a, b, *args, out_shape=None, **kwargs) -> int:
    return 2 * a[0] * a[1] * b[1]


# what torch's counter leaves out of the operators that run here
UNCOUNTED = {aten.addmm_: in_place_product_flops,
             aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
             aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops}


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return statistics.median(took)


def main(job: dict) -> None:
    world, model_config = ranks.init(), ModelConfig()
    config, rng = read_config(job["model"], model_config), np.random.default_rng(0)
    engine = None
    if world.size == 1:
        longest = max(case["prompt"] + case["response"] for case in job["cases"])
        rollout = RolloutConfig(max_response_length=longest, max_num_seqs=job["max_num_seqs"], kv_cache_gb=0.5)
        setup = EngineSetup(job["model"], config, rollout, model_config, world, [[5, 6, 7]], [2], longest, 0)
        engine = make_engine(setup)
    policy = load_policy(job["model"], model_config, world)
    optimizer = make_optimizer(policy, OptimConfig())

    def ask(num_prompts: int, samples: int, prompt: int, response: int) -> tuple[list, list, list[float]]:
        """Prompts, responses, CPU seconds of each repeat; without an engine, made up."""
        prompts = [row for row in rng.integers(5, config.vocab_size, (num_prompts, prompt)).tolist()
                   for _ in range(samples)]
        if engine is None:
            return prompts, rng.integers(5, config.vocab_size, (len(prompts), response)).tolist(), []
        seconds = []
        for repeat in range(job["repeats"] + 1):
            engine.llm.reset_prefix_cache()
            start = time.process_time()
            responses = generate(engine, prompts, [repeat * 10**6 + i for i in range(len(prompts))],
                                 SamplingConfig(1.0, response))
            seconds.append(time.process_time() - start)
        return prompts, [r.tokens for r in responses], seconds[1:]

    def backward(microbatches: list[Batch], num_responses: int) -> None:
        weigh(microbatches, "token-mean", left_out=torch.zeros(num_responses, dtype=torch.float64))
        for b in microbatches:
            b.advantage = b.mask.float()
            logp, _ = policy(b, 1.0)
            loss, _ = grpo.clipped_loss(logp, logp.detach(), b.advantage, grpo.Args("", ()))
            (world.size * (loss * b.extra["weight"]).sum()).backward()

    def step() -> None:
        optimizer_step(policy, optimizer, 0.0, OptimConfig())

    def sync(policy: Policy) -> None:
        for _ in policy.full_tensors(torch.bfloat16):
            pass

    def measure(case: dict) -> dict:
        prompts, responses, rollout_s = ask(case["prompts"], case["samples"], case["prompt"], case["response"])
        lengths = np.array([len(p) + len(r) for p, r in zip(prompts, responses)])
        plan = plan_step(Sequences(lengths, sequence_cost(lengths, config)), 1, world.size, job["max_tokens"], seed=0)
        mine = [i for i in range(len(prompts)) if i // case["samples"] % world.size == world.rank]
        batch = Batch.build([prompts[i] for i in mine], [responses[i] for i in mine], index=mine,
                            rollout_logps=[[0.0] * len(responses[i]) for i in mine])
        with Traffic(world.rank) as moved:
            batch = exchange(batch, plan.rank[batch.index.numpy()])
        microbatches = [batch.microbatch(shares[world.rank]) for shares in plan.minibatches[0]]
        backward(microbatches, len(prompts))                                          # the first one also prepares
        step()
        with Traffic(world.rank) as traffic, FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as flops:
            backward(microbatches, len(prompts))
        with Traffic(world.rank) as synced:
            sync(policy)
        row = {"tokens": int(sum(len(b.tokens) for b in microbatches if b.index[0] >= 0)),
               "flops": flops.get_total_flops(), "all_gather": traffic.bytes["all_gather"],
               "reduce_scatter": traffic.bytes["reduce_scatter"], "exchange": moved.bytes["exchange"],
               "sync": synced.bytes["all_gather"]}
        step()
        rows = [None] * world.size
        torch.distributed.all_gather_object(rows, row)
        seconds = {}
        if engine is not None:
            seconds = {"rollout_s": statistics.median(rollout_s),
                       "sync_s": cpu_seconds(lambda: engine._sync(policy), job["repeats"]),
                       "update_s": cpu_seconds(lambda: (backward(microbatches, len(prompts)), step()), job["repeats"])}
        return case | {"response_lengths": [len(r) for r in responses], "microbatches": len(microbatches),
                       "ranks": rows, "seconds": seconds}

    def calibrate() -> dict:
        """Constants of this machine, none taken from the cases. One decode step of 1 and of 32 sequences, a micro-batch
        of two tokens and one of `max_tokens`."""
        n, big = 2048, torch.zeros(2**26)
        a = torch.ones(n, n, dtype=torch.bfloat16)
        into = torch.empty_like(big)
        decode = {}
        for samples in (1, 32):
            _, responses, seconds = ask(1, samples, 32, 32)
            decode[samples] = statistics.median(seconds) / max(map(len, responses))
        length = 128
        full = Batch.build(rng.integers(5, config.vocab_size, (job["max_tokens"] // length, length // 2)).tolist(),
                           rng.integers(5, config.vocab_size, (job["max_tokens"] // length, length // 2)).tolist())
        full.rollout_logp = torch.zeros(len(full.tokens))
        small = full.select(torch.tensor([0])).dummy()
        small.mask[1], small.index[0] = True, 0
        for batch in (small, full):
            backward([batch], len(batch))
        return {"flops": 2 * n**3 / min(cpu_seconds(lambda: a @ a, 1) for _ in range(7)),
                "bytes_per_s": 2 * big.nbytes / min(cpu_seconds(lambda: into.copy_(big), 1) for _ in range(7)),
                "decode_s": decode, "small_s": cpu_seconds(lambda: backward([small], 1), 9),
                "sync_s": cpu_seconds(lambda: engine._sync(policy), 5),
                "full_s": cpu_seconds(lambda: backward([full], len(full)), 5),
                "full_lengths": full.sequence_lengths.tolist()}

    if engine is not None:
        engine.wake(policy)
    calibration = calibrate() if job["calibrate"] else {}
    rows = [measure(case) for case in job["cases"]]
    if world.is_main:
        Path(job["out"]).write_text(json.dumps({"calibration": calibration, "rows": rows}))
    if engine is not None:
        assert math.isfinite(sum(p.sum().item() for p in policy.parameters()))
        engine.sleep()
        engine.close()
    ranks.shutdown()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
