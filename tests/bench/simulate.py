"""What a step costs on any machine, from shapes and lengths: FLOPs and bytes of every phase, counted, and their seconds
on a roofline. bench_scale checks it against measured steps and asks it for machines that are not here.

Assumed: an engine's decode step takes the larger of its memory reads (weights and the whole key-value cache) and its
matrix products, plus a fixed time and a time per sequence; a sequence gets a slot in order of arrival and keeps it.
A group's prompt is prefilled once. In the update all ranks wait for the slowest one in every micro-batch (the plan is
`packing.plan_step`'s); FSDP's gathers and reduce-scatters hide behind the products, except a layer's first gather.
A collective over n ranks is a ring: bytes at the slowest link's rate and n - 1 hops. Rewards are ready as generation
ends. With `--rollout.in-flight`, prompts and what is carried over are prefilled at the start of a step. Where ranks are
split, a step takes as long as the slower side. Not in it: logging, validation, checkpoints, stragglers, failures.
"""

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.model.flops import sequence_cost
from common.packing import Sequences, plan_step


@dataclass(frozen=True)
class Machine:
    """Of one rank."""

    name: str
    flops: float                        # bfloat16 matrix products
    bytes_per_s: float                  # of memory
    memory_gb: float
    update_mfu: float                   # share of `flops` that forward and backward reach
    prefill_mfu: float
    memory_frac: float                  # share of `bytes_per_s` that decoding reaches
    layer_s: float                      # fixed time of a layer, forward and backward, in a micro-batch
    decode_step_s: float                # fixed time of a decode step: scheduler, launches
    decode_sequence_s: float            # and per sequence in it: sampling, bookkeeping
    tensor_s: float                     # fixed time of a weight tensor in the sync
    node_bytes_per_s: float = np.inf    # that a rank receives from the others of its node in a ring
    nic_bytes_per_s: float = np.inf     # of a rank's network card
    host_bytes_per_s: float = np.inf    # between a rank and host memory
    hop_s: float = 0.0
    ranks_per_node: int = 8

    def collective_s(self, size: float | np.ndarray, ranks: int, count: int = 1) -> float | np.ndarray:
        """`count` gathers or reduce-scatters, unsharded `size` bytes in all. Rings use all network cards of a node."""
        if ranks == 1:
            return 0.0
        rate = self.node_bytes_per_s
        if ranks > self.ranks_per_node:
            rate = min(rate, self.nic_bytes_per_s * self.ranks_per_node)
        return size * (ranks - 1) / ranks / rate + count * (ranks - 1) * self.hop_s


@dataclass(frozen=True)
class Job:
    prompt_lengths: np.ndarray          # [S] tokens
    response_lengths: np.ndarray        # [S] tokens; response i answers prompt i // samples
    samples: int
    ranks: int = 1
    tp: int = 1
    max_tokens: int = 16384             # of a micro-batch
    minibatches: int = 1
    max_num_seqs: int = 256
    checkpointing: bool = False
    offload: bool = False               # master weights and moments in host memory while the engine is awake
    host_moments: bool = False          # moments in host memory except for the optimizer step (--offload.optimizer)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    config: PretrainedConfig
    layer_weights: int                  # in all layers
    root_weights: int                   # embedding, head, last norm
    num_tensors: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total, layers = ([p.numel() for p in part.parameters()] for part in (model, model.model.layers))
        return cls(config, sum(layers), sum(total) - sum(layers), len(total))

    @property
    def weights(self) -> int:
        return self.layer_weights + self.root_weights

    @property
    def kv_bytes(self) -> int:
        """Of one token, bfloat16."""
        c = self.config
        head_dim = c.to_dict().get("head_dim") or c.hidden_size // c.num_attention_heads
        return c.num_hidden_layers * 2 * c.num_key_value_heads * head_dim * 2

    def head_flops(self, tokens: np.ndarray) -> np.ndarray:
        return 2.0 * self.config.hidden_size * self.config.vocab_size * tokens


def update_work(shape: Shape, job: Job) -> dict[str, np.ndarray]:
    """FLOPs and tokens [micro-batch, rank]; bytes that a rank receives (gathers, sync) or sends (reduce-scatters,
    exchange) in the whole update. The head runs on response tokens: forward, recomputed, and two backward products."""
    lengths = job.prompt_lengths + job.response_lengths
    costs = sequence_cost(lengths, shape.config)
    plan = plan_step(Sequences(lengths, costs), job.minibatches, job.ranks, job.max_tokens, seed=0)
    layers, head = costs - shape.head_flops(lengths), shape.head_flops(job.response_lengths)
    each = {"flops": (4 if job.checkpointing else 3) * layers + 4 * head, "forward": layers + head, "tokens": lengths}
    microbatches = [ranks for minibatch in plan.minibatches for ranks in minibatch]
    work = {name: np.array([[values[responses].sum() for responses in ranks] for ranks in microbatches])
            for name, values in each.items()}
    others, n = (job.ranks - 1) / job.ranks, len(microbatches)
    home = np.arange(len(lengths)) // job.samples % job.ranks           # the rank that sampled it, at tp 1
    moved = plan.rank != home
    return work | {"all_gather": 2 * (2 * shape.layer_weights + shape.root_weights) * others * n,
                   "reduce_scatter": 4 * shape.weights * others * n, "sync": 2 * shape.weights * others,
                   # bytes a token: its id 8, mask 1, engine log-prob 4; index and number of its response, 8 each
                   "exchange": np.bincount(home[moved], (29.0 * lengths)[moved], minlength=job.ranks)}


def update_seconds(machine: Machine, shape: Shape, job: Job) -> dict[str, float]:
    work, n = update_work(shape, job), job.ranks
    count, num_layers = len(work["flops"]), shape.config.num_hidden_layers
    # weights cast and copied out of the gather, gradients cast into the reduce-scatter and added up
    traffic = shape.weights * (6 + 18 / n) / machine.bytes_per_s
    gather = machine.collective_s(2 * shape.layer_weights, n, num_layers)
    root = machine.collective_s(2 * shape.root_weights, n)
    scatter = machine.collective_s(4 * shape.weights, n, num_layers + 1)
    compute = work["flops"] / (machine.flops * machine.update_mfu) + num_layers * machine.layer_s       # [m, ranks]
    slowest, network = compute.max(1), 2 * gather + root + scatter
    update = np.maximum(slowest, network).sum() + count * (traffic + root + gather / num_layers)
    optimizer = 32 * shape.weights / n / machine.bytes_per_s            # 4 reads for the norm, 16 reads, 12 writes
    optimizer += job.host_moments * 16 * shape.weights / n / machine.host_bytes_per_s       # both moments, in and out
    seconds = {"update_s": update + job.minibatches * optimizer, "imbalance": slowest.sum() / compute.mean(1).sum() - 1,
               "network_bound_frac": float((slowest < network).mean()), "microbatches": count}
    forward = work["forward"] / (machine.flops * machine.update_mfu) + num_layers * machine.layer_s / 3
    return seconds | {"old_log_prob_s": (job.minibatches > 1) * np.maximum(forward.max(1), gather + root).sum()}


def sync_seconds(machine: Machine, shape: Shape, job: Job) -> float:
    """Cast, gather on every rank, copy into the engine, tensor by tensor."""
    copies = (6 * shape.weights / job.ranks + 4 * shape.weights) / machine.bytes_per_s
    gathers = machine.collective_s(2 * shape.weights, job.ranks, shape.num_tensors)
    return copies + gathers + shape.num_tensors * machine.tensor_s


def in_slots(lengths: np.ndarray, slots: int) -> np.ndarray:
    """The decode step [S] in which each sequence of an engine begins, `slots` at once, in order of arrival."""
    start, running = np.zeros(len(lengths), dtype=np.int64), []
    for i, length in enumerate(lengths):
        if len(running) == slots:
            start[i] = heapq.heappop(running)
        heapq.heappush(running, start[i] + length)
    return start


def decode_seconds(machine: Machine, shape: Shape, tp: int, context: np.ndarray, start: np.ndarray,
                   end: np.ndarray) -> float:
    """Of one engine. Sequence i begins with `context[i]` tokens, and is in decode steps start[i] .. end[i] - 1."""
    config = shape.config
    active, offset = np.zeros((2, end.max(initial=0) + 1))
    np.add.at(active, start, 1)
    np.add.at(active, end, -1)
    np.add.at(offset, start, context - start)
    np.add.at(offset, end, start - context)
    active = active.cumsum()                                                                    # [step]
    seen = offset.cumsum() + active * np.arange(len(active))                                    # tokens in the cache
    weight_flops = float(sequence_cost(np.array([1]), config)[0])
    pair_flops = float(sequence_cost(np.array([2]), config)[0]) - 2 * weight_flops              # of one more token seen
    products = (active * weight_flops + seen * pair_flops) / tp / (machine.flops * machine.prefill_mfu)
    reads = (2 * shape.weights + seen * shape.kv_bytes) / tp / (machine.bytes_per_s * machine.memory_frac)
    rings = 4 * config.num_hidden_layers        # of tp ranks: two all-reduces a layer, each scatters and gathers
    between = machine.collective_s(rings * 2 * config.hidden_size * active, tp, rings)
    seconds = np.maximum(products, reads) + between + machine.decode_step_s + machine.decode_sequence_s * active
    return float(seconds[active > 0].sum())


def prefill_seconds(machine: Machine, shape: Shape, tp: int, lengths: np.ndarray) -> float:
    """Of one engine, for prompts of these lengths."""
    flops = sequence_cost(lengths, shape.config) - shape.head_flops(lengths)
    return float(flops.sum()) / (tp * machine.flops * machine.prefill_mfu)


def rollout_seconds(machine: Machine, shape: Shape, job: Job, slots: int) -> dict[str, float]:
    """Of the slowest engine and of the mean one. `slots`: sequences that an engine decodes at once."""
    engines = job.ranks // job.tp
    engine_of = np.arange(len(job.response_lengths)) // job.samples % engines
    seconds = np.zeros(engines)
    for engine in range(engines):
        prompts, lengths = (x[engine_of == engine] for x in (job.prompt_lengths, job.response_lengths))
        start = in_slots(lengths, slots)
        seconds[engine] = decode_seconds(machine, shape, job.tp, prompts, start, start + lengths)
        seconds[engine] += prefill_seconds(machine, shape, job.tp, prompts[:: job.samples])
    return {"rollout_s": seconds.max(), "mean_engine_s": seconds.mean()}


@dataclass
class InFlight:
    """One engine's groups that have not ended, as `--rollout.in-flight` carries them from step to step."""

    prompt: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), dtype=np.int64))        # [groups, 1] tokens
    done: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), dtype=np.int64))          # [groups, samples]
    left: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), dtype=np.int64))          # tokens to come
    age: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))                # steps

    def add(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """New groups: prompts [groups] and response lengths [groups, samples]."""
        if not len(self.age):
            self.done = self.left = np.zeros((0, lengths.shape[1]), dtype=np.int64)
        self.prompt = np.concatenate([self.prompt, prompts[:, None]])
        self.done = np.concatenate([self.done, np.zeros_like(lengths)])
        self.left = np.concatenate([self.left, lengths])
        self.age = np.concatenate([self.age, np.zeros(len(prompts), dtype=np.int64)])

    def rollout(self, wanted: int, slots: int, max_staleness: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Decode until `wanted` groups are complete, those that would be too old among them. Returns, of the sequences
        that run, the tokens they begin with [R] and their first and last decode step [R]; and the number of steps."""
        flat = self.left.flatten()
        start = in_slots(flat, slots)
        ends = (start + flat).reshape(self.left.shape).max(1)                                   # [groups]
        order = np.lexsort((ends, self.age < max_staleness))                                    # those due come first
        ended = order[:wanted]
        stop = int(ends[ended].max())
        runs = (flat > 0) & (start < stop)
        context = (self.prompt + self.done).flatten()[runs]
        first, last = start[runs], np.minimum(start + flat, stop)[runs]
        progress = np.clip(stop - start, 0, flat).reshape(self.left.shape)
        keep = np.setdiff1d(np.arange(len(ends)), ended)
        self.ended_ages = self.age[ended]
        self.prompt, self.done = self.prompt[keep], (self.done + progress)[keep]
        self.left, self.age = (self.left - progress)[keep], self.age[keep] + 1
        return context, first, last, stop


def carried_seconds(machine: Machine, shape: Shape, job: Job, slots: int, in_flight: float, max_staleness: int = 4,
                    steps: int = 12, warm_up: int = 4, seed: int = 0) -> dict[str, float]:
    """A rollout with `--rollout.in-flight`, the mean over the steps after `warm_up`: seconds of the slowest engine, its
    decode steps, the share of groups that span steps and the age of the oldest, in steps. Lengths are drawn from the
    job's. Of more than 16 engines, 16 are simulated."""
    rng = np.random.default_rng(seed)
    engines = job.ranks // job.tp
    groups = len(job.response_lengths) // job.samples // engines
    lengths = job.response_lengths.reshape(-1, job.samples)
    held = [InFlight() for _ in range(min(engines, 16))]
    seconds = []
    decoded = []
    ages = []
    for step in range(steps):
        of_engines = []
        for engine in held:
            rows = rng.integers(len(lengths), size=round(in_flight * groups) - len(engine.age))
            engine.add(job.prompt_lengths[:: job.samples][rows], rng.permuted(lengths[rows].flatten()).reshape(
                len(rows), job.samples))
            # a prompt is computed once for its group, and what is carried over for each response
            again = (engine.prompt + engine.done)[engine.done > 0]
            again = np.concatenate([engine.prompt[engine.age == 0, 0], again])
            context, first, last, stop = engine.rollout(groups, slots, max_staleness)
            again = prefill_seconds(machine, shape, job.tp, again)
            of_engines.append((again + decode_seconds(machine, shape, job.tp, context, first, last), stop))
            ages.append(engine.ended_ages if step >= warm_up else [])
        seconds.append(max(s for s, _ in of_engines))
        decoded.append(max(stop for _, stop in of_engines))
    ages = np.concatenate(ages)
    return {"rollout_s": float(np.mean(seconds[warm_up:])), "decode_steps": float(np.mean(decoded[warm_up:])),
            "spanning_frac": float((ages > 0).mean()), "oldest": float(ages.max())}


def memory(machine: Machine, shape: Shape, job: Job, samplers: int = 0) -> dict[str, float]:
    """GiB on one rank: while it trains (masters, gradients, moments, two unsharded layers, the root, activations), and
    what the engine's weights and the trainer leave for the key-value cache. `samplers`: ranks of the job that do
    nothing else, so that the others have no engine beside them."""
    config, n = shape.config, job.ranks - samplers
    layer = shape.layer_weights / config.num_hidden_layers
    width = 8 * config.hidden_size + 3 * config.intermediate_size       # activations of a layer that backward needs
    kept = config.num_hidden_layers * (config.hidden_size if job.checkpointing else width) + width
    states = (8 if job.host_moments else 16) * shape.weights / n
    train = states + 8 * layer + 6 * shape.root_weights + 2 * job.max_tokens * kept
    resident = 0 if job.offload or samplers else 12 * shape.weights / n
    cache = 0.9 * machine.memory_gb * 2**30 - 2 * shape.weights / job.tp - resident
    return {"train_gb": train / 2**30, "cache_gb": cache / 2**30}


def num_slots(machine: Machine, shape: Shape, job: Job, room: dict[str, float]) -> int:
    """Sequences that an engine decodes at once; 0: it does not fit, or the trainer does not."""
    mean_bytes = (job.prompt_lengths + job.response_lengths / 2).mean() * shape.kv_bytes / job.tp
    slots = int(min(job.max_num_seqs, room["cache_gb"] * 2**30 / mean_bytes))
    return 0 if room["train_gb"] > 0.95 * machine.memory_gb else max(slots, 0)


def step_seconds(machine: Machine, shape: Shape, job: Job, in_flight: float = 1.0) -> dict[str, float]:
    """`in_flight`: what `--rollout.in-flight` says."""
    room = memory(machine, shape, job)
    slots = num_slots(machine, shape, job, room)
    if not slots:
        return room | {"fits": False}
    seconds = rollout_seconds(machine, shape, job, slots) | update_seconds(machine, shape, job)
    if in_flight > 1:
        seconds |= carried_seconds(machine, shape, job, slots, in_flight)
    seconds["sync_s"] = sync_seconds(machine, shape, job)
    seconds["offload_s"] = job.offload * 24 * shape.weights / job.ranks / machine.host_bytes_per_s
    total = sum(seconds[name] for name in ("rollout_s", "sync_s", "offload_s", "old_log_prob_s", "update_s"))
    return room | seconds | {"fits": True, "slots": slots, "step_s": total}


def split_seconds(machine: Machine, shape: Shape, job: Job, samplers: int) -> dict[str, float]:
    """A step in which `samplers` ranks make the next rollout while the others train. The weights are gathered
    by the trainers and broadcast from the first of them."""
    room = memory(machine, shape, job, samplers)
    slots = num_slots(machine, shape, job, room)
    if not slots:
        return room | {"fits": False}
    trainers = replace(job, ranks=job.ranks - samplers)
    seconds = rollout_seconds(machine, shape, replace(job, ranks=samplers), slots)
    seconds |= update_seconds(machine, shape, trainers)
    rate = machine.nic_bytes_per_s if job.ranks > machine.ranks_per_node else machine.node_bytes_per_s
    seconds["sync_s"] = sync_seconds(machine, shape, trainers) + 2 * shape.weights / rate
    total = max(seconds["rollout_s"], seconds["old_log_prob_s"] + seconds["update_s"]) + seconds["sync_s"]
    return room | seconds | {"fits": True, "slots": slots, "step_s": total}
