"""Plan a step: assign its responses to mini-batches, ranks, and micro-batches under a token budget."""

import heapq
import math
from dataclasses import dataclass

import numpy as np


def partition(costs: np.ndarray, bins: int) -> list[np.ndarray]:
    """Greedy: most expensive item first, into the emptiest bin (LPT, Graham 1969). `bins` sets of items of nearly equal
    cost, the most expensive set first, items ascending.

    The largest sum is at most 4/3 - 1/(3 bins) of the least possible; the spread is at most the largest item's cost."""
    costs = np.asarray(costs, dtype=np.float64)
    heap = [(0.0, number) for number in range(bins)]            # (sum, bin)
    members: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, number = heap[0]
        members[number].append(item)
        heapq.heapreplace(heap, (total + float(costs[item]), number))
    falling = sorted(heap, key=lambda entry: (-entry[0], entry[1]))
    return [np.sort(np.array(members[number], dtype=np.int64)) for _, number in falling]


def _pack(lengths: np.ndarray, costs: np.ndarray, count: int, max_tokens: int) -> list[np.ndarray]:
    """Returns `count` micro-batches, most expensive first, empty ones last; more if no packing into `count` was found.

    An item that is longer than `max_tokens` is alone in its micro-batch."""
    too_long = np.flatnonzero(lengths > max_tokens)
    rest = np.flatnonzero(lengths <= max_tokens)
    bins = [rest[items] for items in partition(costs[rest], count - len(too_long))] if len(rest) else []
    if any(lengths[items].sum() > max_tokens for items in bins):                                # first-fit decreasing
        bins = [[] for _ in rest]
        room = np.full(len(rest), max_tokens)
        for item in rest[np.argsort(-lengths[rest], kind="stable")]:
            first = int(np.argmax(room >= lengths[item]))
            bins[first].append(item)
            room[first] -= lengths[item]
    bins = [np.sort(np.array(items, dtype=np.int64)) for items in [*bins, *too_long[:, None]] if len(items)]
    bins += [np.zeros(0, dtype=np.int64)] * (count - len(bins))
    return sorted(bins, key=lambda items: (-math.fsum(costs[items]), items.tolist()))


@dataclass
class Plan:
    """Which rank trains on which response; the plan is the same on every rank."""

    rank: np.ndarray                                # [S] int64, the rank that trains on each response; -1: none
    minibatches: list[list[list[np.ndarray]]]       # [mini-batch][micro-batch][rank] -> responses, int64; none: a dummy
    left_out: list[np.ndarray]                      # [mini-batch] -> its sequences that no rank runs
    is_canary: np.ndarray                           # [N] bool, sequences that run though they could be left out


@dataclass
class Sequences:
    """The sequences of a step, [N] each, by their numbers."""

    lengths: np.ndarray                             # int64, tokens of prompt and response, above 0
    costs: np.ndarray                               # float64, FLOPs, at least 0
    runs: np.ndarray | None = None                  # bool, False: it counts, and no rank runs it; None: all run
    responses: np.ndarray | None = None             # int64, the response that it belongs to; None: one each
    groups: np.ndarray | None = None                # int64, its prompt's group, if prompts are shared
    prompt_lengths: np.ndarray | None = None        # int64, tokens of the prompt, if prompts are shared
    can_watch: np.ndarray | None = None             # bool, may run as a canary, if it does not run anyway; None: none

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.lengths, dtype=np.int64)
        self.costs = np.asarray(self.costs, dtype=np.float64)
        self.runs = np.ones(len(self.lengths), dtype=bool) if self.runs is None else np.asarray(self.runs, dtype=bool)
        self.responses = np.arange(len(self.lengths)) if self.responses is None else np.asarray(self.responses)
        self.can_watch = np.zeros_like(self.runs) if self.can_watch is None else self.can_watch & ~self.runs
        assert self.lengths.shape == self.costs.shape == self.runs.shape == self.responses.shape
        assert (self.lengths > 0).all() and (self.costs >= 0).all() and np.isfinite(self.costs).all()


def plan_step(sequences: Sequences, num_minibatches: int, world_size: int, max_tokens: int, seed: int,
              group_size: int = 1) -> Plan:
    """Assign a step's responses to mini-batches, ranks and micro-batches; the result depends only on the arguments.

    Mini-batches are a seeded permutation in pieces whose sizes differ by at most one; with few responses, some have
    none and consist of dummies. In each, cost is balanced over ranks, and all ranks get the same number of
    micro-batches, the smallest number found that keeps to `max_tokens`. Only a sequence that is longer than that
    exceeds it, alone in its micro-batch. The i-th micro-batch of a rank is its i-th most expensive, because all
    ranks wait for the slowest rank. With `sequences.groups`, a group's responses stay together if they fit, and
    their prompt is counted once (--policy.share-prompt). Sequences that do not run keep their place in a mini-batch;
    their rank is -1. In each mini-batch one response of `sequences.can_watch`, drawn by the seed, runs nevertheless:
    the canary. A response's sequences are in the same mini-batch. `group_size` consecutive ranks run a micro-batch
    together, of `group_size` times `max_tokens`; each brings some responses (--policy.sequence-parallel)."""
    max_tokens *= group_size
    lengths, costs, runs = sequences.lengths, sequences.costs, sequences.runs
    num_responses = int(sequences.responses.max(initial=-1)) + 1
    rank_of = np.full(len(lengths), -1, dtype=np.int64)
    generator = np.random.default_rng(seed)
    minibatches, left_out, is_canary = [], [], np.zeros(len(lengths), dtype=bool)
    for dealt in np.array_split(generator.permutation(num_responses), num_minibatches):
        members = np.flatnonzero(np.isin(sequences.responses, dealt))
        candidates = np.unique(sequences.responses[members[sequences.can_watch[members]]])
        if len(candidates):
            is_canary |= sequences.responses == generator.choice(candidates)
        runs_here = (runs | is_canary)[members]
        left_out.append(members[~runs_here])
        members = members[runs_here]
        units = _units(members, sequences, max_tokens)                                          # what stays together
        tokens = np.array([count for count, _ in units], dtype=np.int64)
        cost = np.array([math.fsum(costs[unit]) * count / math.fsum(lengths[unit]) for count, unit in units])
        shares = partition(cost, world_size // group_size)                                      # [group] -> units
        # at least each unit that is too long by itself, and as few as the tokens of the others allow
        count = max(1, *(math.ceil(np.minimum(tokens[share], max_tokens).sum() / max_tokens) for share in shares))
        packed = [_pack(tokens[share], cost[share], count, max_tokens) for share in shares]     # [group][micro-batch]
        most = max(map(len, packed))
        if most > count:                                        # first-fit needed more; all ranks fit in `most`
            packed = [_pack(tokens[share], cost[share], most, max_tokens) for share in shares]
        minibatches.append([])
        for row in zip(*packed):
            of_groups = [np.sort(np.concatenate([members[:0], *(units[number][1] for number in share[items])]))
                         for share, items in zip(shares, row)]
            of_ranks = of_groups if group_size == 1 else [
                group[part] for group in of_groups for part in partition(costs[group], group_size)]
            for rank, members_of_rank in enumerate(of_ranks):
                rank_of[members_of_rank] = rank
            minibatches[-1].append(of_ranks)
    return Plan(rank_of, minibatches, left_out, is_canary)


def _units(members: np.ndarray, sequences: Sequences, max_tokens: int) -> list[tuple[int, np.ndarray]]:
    """The (tokens, responses) that stay together: single responses, or the responses of a group that fit together."""
    lengths, groups = sequences.lengths, sequences.groups
    if groups is None:
        return [(int(lengths[i]), members[n : n + 1]) for n, i in enumerate(members)]
    units: list[tuple[int, list[int]]] = []
    for i in members[np.argsort(groups[members], kind="stable")]:
        own = int(lengths[i] - sequences.prompt_lengths[i])
        if units and groups[i] == groups[units[-1][1][-1]] and units[-1][0] + own <= max_tokens:
            units[-1] = (units[-1][0] + own, [*units[-1][1], i])
        else:
            units.append((int(lengths[i]), [i]))
    return [(tokens, np.array(unit, dtype=np.int64)) for tokens, unit in units]
