"""The metrics of a step that all scripts log: lengths, memory, seconds, throughput. Names are verl's."""

import math
import resource
import time
from itertools import chain

import numpy as np
import torch

from common.metrics import Meter, Timer, spread
from common.parallel.ranks import World, all_sum
from common.rollout import Minibatch, Rollout
from common.segments import is_constant

PER_TOKEN_PHASES = {"old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"}

# Dense bfloat16 FLOP/s of a chip, from the makers' data sheets, by a part of torch.cuda.get_device_name(): the first
# that fits. A product with several forms (PCIe, SXM) stands here with each.
PEAK_FLOPS = {
    "B300": 2.25e15, "B200": 2.25e15, "B100": 1.75e15, "H200": 9.89e14, "H100 PCIe": 7.56e14, "H100 NVL": 8.35e14,
    "H100": 9.89e14, "H800": 9.89e14, "H20": 1.48e14, "A100": 3.12e14, "A800": 3.12e14, "A40": 1.50e14,
    "A30": 1.65e14, "A10G": 7.0e13, "A10": 1.25e14, "L40S": 3.62e14, "L40": 1.81e14, "L4": 1.21e14,
}

def peak_flops(world: World, dtype: str) -> float | None:
    """Peak FLOP/s of one rank's chip in matrix products of `dtype` ("bfloat16", "float32"). None if the table has no
    entry: on CPUs, on other GPUs and for float32."""
    if world.device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(world.device)
    return next((flops for chip, flops in PEAK_FLOPS.items() if chip in name), None)


def step_metrics(meter: Meter, timer: Timer, world: World, lengths: np.ndarray, minibatches: list[Minibatch],
                 used: tuple[float, float | None, int]) -> dict[str, float]:
    """The step's metrics; the only place where its meter is reduced. All ranks call this together.

    `lengths` [S]: tokens of the sequences in the update. `minibatches`: this rank's micro-batches. `used`: FLOPs of the
    policy's updates on all ranks; the peak FLOP/s of one rank's chip (None: unknown, then there is no MFU); and bytes
    of the engine's own allocator, which are no memory of the trainer."""
    update_flops, peak, engine_bytes = used
    num_tokens = int(lengths.sum())
    here = torch.tensor([float(sum(len(microbatch.tokens) for microbatch in chain(*minibatches)))])
    meter.max("global_seqlen/balanced_max", here)
    meter.min("global_seqlen/balanced_min", here)
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss                        # Linux counts in KiB
    meter.max("perf/cpu_memory_peak_gb", torch.tensor(resident / 2**30))
    if world.device.type == "cuda":
        most = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]) - engine_bytes
        meter.max("perf/max_memory_allocated_gb", most[0] / 2**30)
        meter.max("perf/max_memory_reserved_gb", most[1] / 2**30)
    metrics = meter.reduce() | timer.metrics() | {"timing_s/step": time.perf_counter() - timer.start}
    as_sampled = [int(part.sum()) for part in np.array_split(lengths, world.size)]              # tokens by rank
    metrics |= spread("global_seqlen", torch.tensor(as_sampled)) | {
        "global_seqlen/minmax_diff": max(as_sampled) - min(as_sampled),
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": metrics["timing_s/step"],
        "perf/throughput": num_tokens / metrics["timing_s/step"] / (world.size + world.num_samplers),
    }
    for phase in PER_TOKEN_PHASES & timer.seconds.keys() if num_tokens else set():
        metrics[f"timing_per_token_ms/{phase}"] = 1000 * timer.seconds[phase] / num_tokens
    if "update_actor" in timer.seconds:
        achieved = update_flops / timer.seconds["update_actor"] / world.size
        metrics["perf/update_tflops"] = achieved / 1e12
        if peak is not None:
            metrics["perf/mfu/actor"] = achieved / peak
    return metrics


def sharing_metrics(minibatches: list[Minibatch], share_prompt: bool) -> dict[str, float]:
    """With --policy.share-prompt the share of the tokens of the update, on all ranks, that did not run because others
    begin with them, too. All ranks call this together."""
    if not share_prompt:
        return {}
    num_shared = 0
    num_tokens = 0
    for microbatch in chain(*minibatches):
        num_tokens += len(microbatch.tokens)
        if microbatch.shared_prefixes is not None:
            num_shared += len(microbatch.tokens) - len(microbatch.shared_prefixes.run)
    of_all_ranks, tokens = all_sum([num_shared, num_tokens]).tolist()
    return {"perf/shared_tokens_frac": of_all_ranks / max(tokens, 1)}


def rollout_metrics(sampled: Rollout, num_sampled_tokens: float, gen_s: float, max_prompt_length: int,
                    max_response_length: int) -> dict[str, float]:
    """Metrics of all responses of the step. `num_sampled_tokens`: response tokens that the phase "gen" completed in
    `gen_s` seconds; with --rollout.in-flight earlier steps sampled some of them, and later ones complete others."""
    metrics = spread("prompt_length", sampled.prompt_lengths) | spread("response_length", sampled.response_lengths)
    metrics["rollout/truncated_frac"] = float(sampled.truncated.double().mean())
    metrics["rollout/tokens_per_s"] = num_sampled_tokens / gen_s
    num_groups = len(sampled.group.unique())
    if num_groups < len(sampled):  # a group of one has nothing to be compared with
        constant = is_constant(sampled.scores, sampled.group)                   # lost ones (NaN) left out
        metrics["reward/constant_group_frac"] = len(sampled.group[constant].unique()) / num_groups
    if num_sampled_tokens:  # episodes may end before their first reply
        metrics["timing_per_token_ms/gen"] = 1000 * gen_s / num_sampled_tokens
    # the limit is also of the tokens of tools and users, which are no part of the length
    is_cut = sampled.truncated | (sampled.response_lengths >= max_response_length)
    metrics["prompt_length/clip_ratio"] = float((sampled.prompt_lengths >= max_prompt_length).double().mean())
    metrics["response_length/clip_ratio"] = float(is_cut.double().mean())
    return {name: x for name, x in metrics.items() if not math.isnan(x)}  # of no responses there are no means
