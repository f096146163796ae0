"""Samples -> flat micro-batches under a token budget, balanced over ranks, moved point to point. No padding anywhere.

A response is a whole sequence here: prompt and sampled tokens. `index` numbers the responses of a step, 0 .. S-1.
"""

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PER_TOKEN, PER_RESPONSE = {"per": "token"}, {"per": "response"}


@dataclass
class Batch:
    """Sequences one after another. Each field but `cu_seqlens` says in its metadata whether it is per token or per
    response, so `select`, `cat`, `to` and `exchange` treat all alike. None means absent, on every rank."""

    tokens: Tensor = field(metadata=PER_TOKEN)      # [T] int64
    mask: Tensor = field(metadata=PER_TOKEN)        # [T] bool, True where the policy sampled, stop token included
    cu_seqlens: Tensor                              # [S+1] int32
    index: Tensor = field(metadata=PER_RESPONSE)    # [S] int64, number of the response in the step; a dummy has -1
    rollout_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)   # [T] float32, 0 where mask is False
    old_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)       # [T] float32, as the next six
    ref_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)
    advantage: Tensor | None = field(default=None, metadata=PER_TOKEN)
    weight: Tensor | None = field(default=None, metadata=PER_TOKEN)
    rollout_weight: Tensor | None = field(default=None, metadata=PER_TOKEN)
    value: Tensor | None = field(default=None, metadata=PER_TOKEN)
    returns: Tensor | None = field(default=None, metadata=PER_TOKEN)
    reward: Tensor | None = field(default=None, metadata=PER_RESPONSE)      # [S] float32
    truncated: Tensor | None = field(default=None, metadata=PER_RESPONSE)   # [S] bool

    def __post_init__(self):
        sizes = {"token": len(self.tokens), "response": len(self.cu_seqlens) - 1}
        for name, (tensor, per) in self.present().items():
            if tensor.shape != (sizes[per],):
                raise ValueError(f"Batch.{name} has shape {list(tensor.shape)}, must be [{sizes[per]}]: one per {per}")

    def present(self) -> dict[str, tuple[Tensor, str]]:
        """name -> (tensor, "token" or "response") of every field that is not None, `cu_seqlens` left out."""
        values = {f.name: (vars(self)[f.name], f.metadata["per"]) for f in fields(self) if f.metadata}
        return {name: pair for name, pair in values.items() if pair[0] is not None}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> Tensor:                    # [S] int64, tokens of each sequence, its prompt included
        return self.cu_seqlens.diff().long()

    @property
    def sequence_ids(self) -> Tensor:               # [T] int64, which response a token belongs to
        responses = torch.arange(len(self), device=self.tokens.device)
        return responses.repeat_interleave(self.lengths, output_size=len(self.tokens))

    @property
    def position_ids(self) -> Tensor:               # [T] int64, restarts at 0 with each sequence
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.cu_seqlens[self.sequence_ids]

    @cached_property
    def max_seqlen(self) -> int:                    # cached: reading it waits for a GPU
        return int(self.lengths.max()) if len(self) else 0

    @classmethod
    def build(cls, prompts: list[list[int]], responses: list[list[int]], *, index: list[int] | None = None,
              rollout_logps: list[list[float]] | None = None, masks: list[list[bool]] | None = None,
              truncated: list[bool] | None = None) -> "Batch":
        """From lists, one entry a response; `rollout_logps` and `masks` have a number for each response token. `masks`
        is False on tool output (whose rollout_logp becomes 0); without it the whole response was sampled. A response
        without tokens stays, as its prompt alone with no mask: no loss, in no denominator.
        Raises ValueError, naming the sample, for no responses, empty prompts, wrong lengths, bad ids or log-probs."""
        if not responses:
            raise ValueError("Batch.build got 0 responses, it needs one; a rank that has none uses Batch.empty()")
        per_token = {"rollout_logps": rollout_logps, "masks": masks}
        for name, rows in {"prompts": prompts, "index": index, "truncated": truncated, **per_token}.items():
            if rows is not None and len(rows) != len(responses):
                raise ValueError(f"Batch.build got {len(rows)} {name} for {len(responses)} responses; one each")
        for i, response in enumerate(responses):
            if not len(prompts[i]):
                raise ValueError(f"sample {i}: the prompt is empty; the first response token must follow something")
            for name, rows in per_token.items():
                if rows is not None and len(rows[i]) != len(response):
                    raise ValueError(f"sample {i}: {len(rows[i])} {name} for {len(response)} response tokens; one each")
        index = list(range(len(responses))) if index is None else index
        if min(index) < 0 or len(set(index)) < len(index):
            raise ValueError(f"index must be distinct numbers from 0, got {index}")

        def flat(before: list, after: list, dtype: torch.dtype) -> Tensor:      # [T]
            return torch.tensor(list(chain.from_iterable(chain(*pair) for pair in zip(before, after))), dtype=dtype)

        zeros, masks = [[0] * len(prompt) for prompt in prompts], masks or [[1] * len(row) for row in responses]
        lengths = torch.tensor([len(prompt) + len(response) for prompt, response in zip(prompts, responses)])
        tokens, mask = flat(prompts, responses, torch.int64), flat(zeros, masks, torch.bool)
        batch = cls(tokens, mask, _offsets(lengths), torch.tensor(index))
        checks = [("token id", tokens, tokens < 0)]
        if rollout_logps is not None:
            logp = flat(zeros, rollout_logps, torch.float32)
            batch.rollout_logp = logp.where(mask, 0.0)
            checks.append(("rollout log-prob", logp, mask & ~logp.isfinite()))
        if truncated is not None:
            batch.truncated = torch.tensor(truncated, dtype=torch.bool)
        for name, values, bad in checks:
            for t in bad.nonzero()[:1, 0]:
                where = f"sample {batch.sequence_ids[t]}, token {batch.position_ids[t]}"
                raise ValueError(f"{where}: {name} is {values[t]}; ids are from 0, log-probs finite: check the engine")
        return batch

    @classmethod
    def empty(cls) -> "Batch":
        """No responses: what a rank that has none brings to `exchange`."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none.bool(), torch.zeros(1, dtype=torch.int32), none)

    def dummy(self) -> "Batch":
        """One response of two tokens, none in the mask, every number 0, with the optional fields that this batch has.

        A rank without responses in a micro-batch runs it forward and backward, because FSDP's collectives must match on
        all ranks. Having no mask it is in no denominator and no statistic, and its weight and its gradient are 0."""
        zeros = {name: tensor.new_zeros(1 + (per == "token")) for name, (tensor, per) in self.present().items()}
        zeros["index"] -= 1
        return Batch(**zeros, cu_seqlens=self.cu_seqlens.new_tensor([0, 2]))

    def select(self, responses: Tensor) -> "Batch":
        """The responses at these positions in this order (none, or one twice, is fine)."""
        responses = torch.as_tensor(responses, dtype=torch.int64, device=self.tokens.device)    # [S']
        cu_seqlens = _offsets(self.lengths[responses])                                          # [S'+1]
        shift = (self.cu_seqlens[:-1][responses] - cu_seqlens[:-1]).long()                      # [S'] old - new start
        total = int(cu_seqlens[-1])
        where = shift.repeat_interleave(cu_seqlens.diff(), output_size=total)                   # [T']
        picks = {"token": where + torch.arange(total, device=where.device), "response": responses}
        return Batch(cu_seqlens=cu_seqlens, **{name: x[picks[per]] for name, (x, per) in self.present().items()})

    def microbatch(self, index: np.ndarray | Tensor) -> "Batch":
        """The responses of these global numbers, of a batch sorted by index (as `exchange` gives); of none, a dummy."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.tokens.device)
        missing = index[~torch.isin(index, self.index)]
        if len(missing):
            raise ValueError(f"responses {missing.tolist()} are not in this batch; was it exchanged by this plan?")
        return self.select(torch.searchsorted(self.index, index)) if len(index) else self.dummy()

    def sort(self) -> "Batch":
        """By index, without dummies: `Batch.cat(microbatches).sort()` restores the order."""
        order = self.index.argsort()
        return self.select(order[self.index[order] >= 0])

    @classmethod
    def cat(cls, batches: list["Batch"]) -> "Batch":
        """One after another; all must have the same optional fields."""
        names = {tuple(batch.present()) for batch in batches}
        if len(names) > 1:
            raise ValueError(f"Batch.cat: different fields {names}; fill an optional one in all batches or in none")
        joined = {name: torch.cat([vars(batch)[name] for batch in batches]) for name in names.pop()}
        return cls(**joined, cu_seqlens=_offsets(torch.cat([batch.lengths for batch in batches])))

    def to(self, device: torch.device | str) -> "Batch":
        values = {name: tensor.to(device, non_blocking=True) for name, (tensor, _) in self.present().items()}
        return Batch(**values, cu_seqlens=self.cu_seqlens.to(device, non_blocking=True))


def _offsets(lengths: Tensor) -> Tensor:            # [S] -> [S+1] int32
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def sequence_cost(lengths: np.ndarray, config) -> np.ndarray:
    """Forward FLOPs of each sequence, float64 [S], from a Hugging Face config (its text part if nested).

    A product of [m, k] and [k, n] is 2mkn. Counted: attention's projections, a gated MLP of three matrices (of a
    mixture the active and the shared experts), the output head on every token, QK^T and PV over the pairs inside the
    causal mask and the layer's sliding window. Not counted: norms, rotary, softmax, routers. Raises ValueError for
    attention it cannot count (latent, linear, chunked)."""
    config = config.get_text_config()
    hidden, heads, num_layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    own = config.to_dict()      # families differ in the keys read from it; absent or None: the model has no such thing
    plain = "sliding_attention" if own.get("sliding_window") else "full_attention"
    kinds = own.get("layer_types") or [plain] * num_layers
    unknown = {"latent_attention"} if "kv_lora_rank" in own else set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"sequence_cost counts full and sliding attention; {config.model_type} has {sorted(unknown)}")

    mlp_widths = [config.intermediate_size] * num_layers
    if "num_experts_per_tok" in own:
        expert = own.get("moe_intermediate_size") or config.intermediate_size
        shared = own.get("shared_expert_intermediate_size") or own.get("n_shared_experts", 0) * expert
        dense = {*(own.get("mlp_only_layers") or ()), *range(own.get("first_k_dense_replace", 0))}
        for layer in range(num_layers):
            if layer not in dense and (layer + 1) % own.get("decoder_sparse_step", 1) == 0:
                mlp_widths[layer] = config.num_experts_per_tok * expert + shared
    head_dim = own.get("head_dim") or hidden // heads
    kv_heads = own.get("num_key_value_heads") or heads
    projections = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads)                            # q and o, k and v
    per_token = num_layers * projections + 6 * hidden * sum(mlp_widths) + 2 * hidden * config.vocab_size
    n = np.asarray(lengths, dtype=np.float64)
    near = np.minimum(n, own.get("sliding_window") or np.inf)
    pairs = {"full_attention": n * (n + 1) / 2, "sliding_attention": near * (near + 1) / 2 + (n - near) * near}
    return n * per_token + 4 * heads * head_dim * sum(kinds.count(kind) * pairs[kind] for kind in pairs)


def train_flops(lengths: np.ndarray, config) -> float:
    """Forward and backward (3x forward) of these sequences, for MFU: what checkpointing recomputes is not counted."""
    return 3 * float(sequence_cost(lengths, config).sum())


def partition(costs: np.ndarray, bins: int) -> list[np.ndarray]:
    """Karmarkar-Karp: `bins` sets of items of nearly equal cost, the dearest set first, items ascending.

    The largest differencing method (1982): of all partial solutions, `bins` sums each, merge the two of largest spread,
    largest sum onto smallest, until one is left. Its spread is at most the largest item's cost."""
    # A partial solution is the ascending list of (sum, node) of its filled bins. Nodes below len(costs) are items, each
    # other one joins two: a merge touches only the bins it changes, and members are read off the tree at the end.
    costs, joins = np.asarray(costs, dtype=np.float64).tolist(), []
    heap = [(-cost if bins > 1 else 0.0, item, [(cost, item)]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    for serial in range(len(costs), 2 * len(costs) - 1):
        big, small = sorted((heapq.heappop(heap)[2], heapq.heappop(heap)[2]), key=len, reverse=True)
        overlap = max(len(big) + len(small) - bins, 0)
        changed = small[overlap:]
        for (sum_a, a), (sum_b, b) in zip(big[:overlap], reversed(small[:overlap])):
            changed.append((sum_a + sum_b, len(costs) + len(joins)))
            joins.append((a, b))
        del big[:overlap]
        for entry in changed:                                   # mostly one: an item into the emptiest bin
            insort(big, entry)
        heapq.heappush(heap, ((big[0][0] if len(big) == bins else 0.0) - big[-1][0], serial, big))
    bin_of = [0] * (len(costs) + len(joins))
    for number, (_, node) in enumerate(reversed(heap[0][2]) if heap else ()):
        bin_of[node] = number
    for node, (a, b) in reversed(list(enumerate(joins, len(costs)))):
        bin_of[a] = bin_of[b] = bin_of[node]
    bin_of = np.array(bin_of[:len(costs)], dtype=np.int64)
    return np.split(bin_of.argsort(kind="stable"), np.bincount(bin_of, minlength=bins).cumsum()[:-1])


def _pack(lengths: np.ndarray, costs: np.ndarray, count: int, max_tokens: int) -> list[np.ndarray]:
    """`count` micro-batches, dearest first and empty ones last; more where no way was found to fit that many."""
    over, rest = np.flatnonzero(lengths > max_tokens), np.flatnonzero(lengths <= max_tokens)    # `over`: each alone
    bins = [rest[items] for items in partition(costs[rest], count - len(over))] if len(rest) else []
    if any(lengths[items].sum() > max_tokens for items in bins):
        bins, room = [[] for _ in rest], np.full(len(rest), max_tokens)
        for item in rest[np.argsort(-lengths[rest], kind="stable")]:
            fit = int(np.argmax(room >= lengths[item]))                                         # first-fit decreasing
            bins[fit].append(item)
            room[fit] -= lengths[item]
    bins = [np.sort(np.array(items, dtype=np.int64)) for items in [*bins, *over[:, None]] if len(items)]
    bins += [over[:0]] * (count - len(bins))
    return sorted(bins, key=lambda items: (-math.fsum(costs[items]), items.tolist()))


@dataclass
class Plan:
    """Who trains on what, the same on every rank."""

    rank: np.ndarray                                # [S] int64, who trains on each response
    minibatches: list[list[list[np.ndarray]]]       # [mini-batch][micro-batch][rank] -> responses, int64; none: a dummy
    idle: list[np.ndarray]                          # [mini-batch] -> responses that no rank runs: they only count


def plan_step(lengths: np.ndarray, costs: np.ndarray, num_minibatches: int, world_size: int, max_tokens: int,
              seed: int, trained: np.ndarray | None = None, groups: np.ndarray | None = None,
              prompt_lengths: np.ndarray | None = None) -> Plan:
    """Deal a step's responses to mini-batches, ranks and micro-batches; depends on nothing but its arguments.

    Mini-batches are a seeded permutation in pieces whose sizes differ by at most one (the caller checks that they do
    not). In each, cost is balanced over ranks, and all ranks get the same number of micro-batches, the fewest found
    that keep to `max_tokens`. Only a sequence longer than that by itself exceeds it, alone in its micro-batch.
    The i-th micro-batch of a rank is its i-th dearest, because in each one all ranks wait for the slowest.
    With `groups` and `prompt_lengths` [S], a group's responses stay together as far as they fit, and their prompt is
    counted once (--policy.share-prompt). Responses where `trained` [S] is False keep their place in a mini-batch, but
    no rank runs them (rank -1)."""
    lengths, costs = np.asarray(lengths, dtype=np.int64), np.asarray(costs, dtype=np.float64)
    if lengths.ndim != 1 or lengths.shape != costs.shape or not 1 <= num_minibatches <= len(lengths):
        raise ValueError(f"lengths {lengths.shape} and costs {costs.shape} must be [S], {num_minibatches=} from 1 to S")
    if min(world_size, max_tokens) < 1:
        raise ValueError(f"{world_size=} and {max_tokens=} must be at least 1")
    for i in np.flatnonzero((lengths < 1) | (costs < 0) | ~np.isfinite(costs))[:1]:
        raise ValueError(f"response {i}: length {lengths[i]} must be at least 1, cost {costs[i]} finite and at least 0")

    trained = np.ones(len(lengths), dtype=bool) if trained is None else np.asarray(trained, dtype=bool)
    rank_of, minibatches, idle = np.full(len(lengths), -1, dtype=np.int64), [], []
    for members in np.array_split(np.random.default_rng(seed).permutation(len(lengths)), num_minibatches):
        members.sort()
        idle.append(members[~trained[members]])
        members = members[trained[members]]
        units = _units(members, lengths, groups, prompt_lengths, max_tokens)                    # what stays together
        tokens = np.array([count for count, _ in units], dtype=np.int64)
        cost = np.array([costs[unit].sum() * count / lengths[unit].sum() for count, unit in units])
        shares = partition(cost, world_size)                                                    # units, by rank
        over = [tokens[share] > max_tokens for share in shares]
        count = max(1, *(int(o.sum() - -tokens[share[~o]].sum() // max_tokens) for share, o in zip(shares, over)))
        packed = [_pack(tokens[share], cost[share], count, max_tokens) for share in shares]     # [rank][micro-batch]
        if (most := max(map(len, packed))) > count:             # then first-fit did not fit, and it fits in `most`
            packed = [_pack(tokens[share], cost[share], most, max_tokens) for share in shares]
        planned = [[_members(units, share[items]) for share, items in zip(shares, row)] for row in zip(*packed)]
        for row in planned:
            for rank, responses in enumerate(row):
                rank_of[responses] = rank
        minibatches.append(planned)
    return Plan(rank_of, minibatches, idle)


def _units(members: np.ndarray, lengths: np.ndarray, groups: np.ndarray | None, prompt_lengths: np.ndarray | None,
           max_tokens: int) -> list[tuple[int, np.ndarray]]:
    """(tokens, responses) of what stays together: each response by itself, or a group as far as it fits the budget."""
    if groups is None:
        return [(int(lengths[i]), members[n : n + 1]) for n, i in enumerate(members)]
    units: list[tuple[int, list[int]]] = []
    last = None
    for i in members[np.argsort(groups[members], kind="stable")]:
        own = int(lengths[i] - prompt_lengths[i])
        if groups[i] == last and units[-1][0] + own <= max_tokens:
            units[-1] = (units[-1][0] + own, [*units[-1][1], i])
        else:
            units.append((int(lengths[i]), [i]))
        last = groups[i]
    return [(tokens, np.array(unit, dtype=np.int64)) for tokens, unit in units]


def _members(units: list[tuple[int, np.ndarray]], chosen: np.ndarray) -> np.ndarray:
    return np.sort(np.concatenate([units[n][1] for n in chosen])) if len(chosen) else np.zeros(0, dtype=np.int64)


def exchange(batch: Batch, destination: np.ndarray | Tensor, group: dist.ProcessGroup | None = None) -> Batch:
    """Send response i of this rank's batch to rank `destination[i]` [S_local]; what arrives here, sorted by index.

    After the sizes, one message from each rank to each. A rank may bring or get nothing; ranks that bring responses
    must bring the same fields. Without a process group it only sorts."""
    destination = torch.as_tensor(destination, dtype=torch.int64).cpu()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    if destination.shape != (len(batch),) or ((destination < 0) | (destination >= world_size)).any():
        raise ValueError(f"destination {destination} must name a rank below {world_size} for {len(batch)} responses")
    if world_size == 1:
        return batch.sort()
    counts = torch.bincount(destination, minlength=world_size).tolist()
    parts = [batch.select(part) for part in destination.argsort(stable=True).split(counts)]     # by rank
    outgoing = [[part.lengths, *(tensor for tensor, _ in part.present().values())] for part in parts]   # [to][column]
    columns = tuple((name, tensor.dtype) for name, (tensor, _) in batch.present().items())
    brought = [None] * world_size
    dist.all_gather_object(brought, columns if len(batch) else None, group=group)
    brought = set(brought) - {None} or {columns}
    if len(brought) > 1:
        raise ValueError(f"exchange: ranks bring different fields {brought}; fill an optional one on all ranks or none")
    columns = brought.pop()
    home = batch.tokens.device
    wire = "cuda" if dist.get_backend(group) == "nccl" else home                    # NCCL takes no CPU tensors
    send = [[len(column) for column in row] if len(batch) else [0] * (1 + len(columns)) for row in outgoing]
    receive = torch.empty(world_size, 1 + len(columns), dtype=torch.int64, device=wire)
    dist.all_to_all_single(receive, torch.tensor(send, device=wire), group=group)
    receive, totals = receive.tolist(), receive.sum(1).tolist()
    # As float64, which holds lengths, token ids, float32 and flags exactly, so that all fit in one message.
    sent = torch.cat([column.double() for row in outgoing for column in row]).to(wire)
    received = sent.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, [sum(row) for row in send], group=group)
    arrived = []
    for message, row in zip(received.to(home).split(totals), receive):
        lengths, *values = message.split(row)
        values = {name: value.to(dtype) for (name, dtype), value in zip(columns, values)}
        arrived.append(Batch(**values, cu_seqlens=_offsets(lengths)))
    return Batch.cat(arrived).sort()


def gather_numbers(numbers: Tensor, index: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A few numbers a response, from all ranks to all: [S_local, k] and index [S_local] -> float64 [S, k] by index.

    Raises ValueError, the same on every rank, unless the indices are 0 .. S-1 once each and all numbers are finite."""
    rows = torch.cat([index[:, None].double(), numbers.double()], dim=1)            # [S_local, 1 + k]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        shares = [None] * dist.get_world_size(group)
        dist.all_gather_object(shares, rows.cpu().numpy(), group=group)
        rows = torch.from_numpy(np.concatenate(shares)).to(numbers.device)
    rows = rows[rows[:, 0].argsort(stable=True)]                                    # [S, 1 + k]
    for i in (rows[:, 0] != torch.arange(len(rows), device=rows.device)).nonzero()[:1, 0]:
        raise ValueError(f"indices must be 0 .. {len(rows) - 1}, once each; {rows[i, 0]:.0f} is in the place of {i}")
    for i, column in (~rows[:, 1:].isfinite()).nonzero()[:1]:
        raise ValueError(f"response {i}: number {column} (length, reward, ...) is {rows[i, 1 + column]}, not finite")
    return rows[:, 1:].contiguous()
