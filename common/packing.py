"""Plan a step: assign its responses to mini-batches, ranks, and micro-batches under a token budget."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from common.layout.shared_prefixes import worth_sharing


def partition(costs: np.ndarray, bins: int) -> list[np.ndarray]:
    """Greedy: most expensive item first, into the emptiest bin (LPT, Graham 1969). `bins` sets of items of nearly equal
    cost, the most expensive set first, items ascending.

    The largest sum is at most 4/3 - 1/(3 bins) of the least possible; the spread is at most the largest item's cost."""
    costs = np.asarray(costs, dtype=np.float64)
    heap: list[tuple[float, int]] = []                          # (sum, bin)
    members: list[list[int]] = []
    for number in range(bins):
        heap.append((0.0, number))                              # of equal sums the lowest bin is the first
        members.append([])
    for item in np.argsort(-costs, kind="stable").tolist():
        total, number = heap[0]
        members[number].append(item)
        heapq.heapreplace(heap, (total + float(costs[item]), number))
    falling = sorted(heap, key=lambda entry: (-entry[0], entry[1]))
    found = []
    for _, number in falling:
        found.append(np.sort(np.array(members[number], dtype=np.int64)))
    return found


def _pack(lengths: np.ndarray, costs: np.ndarray, count: int, max_tokens: int) -> list[np.ndarray]:
    """Returns `count` micro-batches, most expensive first, empty ones last; more if no packing into `count` was found.

    An item that is longer than `max_tokens` is alone in its micro-batch."""
    too_long = np.flatnonzero(lengths > max_tokens)
    rest = np.flatnonzero(lengths <= max_tokens)
    found: list[np.ndarray] = []
    if len(rest):
        for items in partition(costs[rest], count - len(too_long)):
            found.append(rest[items])
    if any(lengths[items].sum() > max_tokens for items in found):
        found = _first_fit(lengths, rest, max_tokens)
    packed = [*too_long[:, None]]
    for items in found:
        if len(items):
            packed.append(items)
    while len(packed) < count:
        packed.append(np.zeros(0, dtype=np.int64))

    def most_expensive_first(items: np.ndarray) -> tuple[float, list[int]]:
        return -math.fsum(costs[items]), items.tolist()

    return sorted(packed, key=most_expensive_first)


def _first_fit(lengths: np.ndarray, items: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """First-fit decreasing: the longest item first, into the first micro-batch that has room for it."""
    members: list[list[int]] = [[] for _ in items]
    room = np.full(len(items), max_tokens)
    for item in items[np.argsort(-lengths[items], kind="stable")]:
        first = int(np.argmax(room >= lengths[item]))
        members[first].append(item)
        room[first] -= lengths[item]
    found = []
    for of_bin in members:
        found.append(np.sort(np.array(of_bin, dtype=np.int64)))
    return found


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
    order: np.ndarray | None = None                 # int64, in which one follows what it has most in common with
    common: np.ndarray | None = None                # int64, tokens that it begins with like the one before it there
    most_keys: float = math.inf                     # that a micro-batch may gather for each token of its budget
    can_watch: np.ndarray | None = None             # bool, may run as a canary, if it does not run anyway; None: none

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.lengths, dtype=np.int64)
        self.costs = np.asarray(self.costs, dtype=np.float64)
        count = len(self.lengths)
        if self.runs is None:
            self.runs = np.ones(count, dtype=bool)
        if self.responses is None:
            self.responses = np.arange(count)
        if self.can_watch is None:
            self.can_watch = np.zeros(count, dtype=bool)
        self.runs = np.asarray(self.runs, dtype=bool)
        self.responses = np.asarray(self.responses)
        self.can_watch = self.can_watch & ~self.runs
        assert self.lengths.shape == self.costs.shape == self.runs.shape == self.responses.shape
        assert (self.lengths > 0).all()
        assert (self.costs >= 0).all()
        assert np.isfinite(self.costs).all()


def plan_step(sequences: Sequences, num_minibatches: int, world_size: int, max_tokens: int, seed: int,
              group_size: int = 1) -> Plan:
    """Assign a step's responses to mini-batches, ranks and micro-batches; the result depends only on the arguments.

    Mini-batches are a seeded permutation in pieces whose sizes differ by at most one; with few responses, some have
    none and consist of dummies. In each, cost is balanced over ranks, and all ranks get the same number of
    micro-batches, the smallest number found that keeps to `max_tokens`. Only a sequence that is longer than that
    exceeds it, alone in its micro-batch. The i-th micro-batch of a rank is its i-th most expensive, because all
    ranks wait for the slowest rank. With `sequences.order`, those that begin alike stay together if they fit, and
    what they begin with is counted once (--policy.share-prompt); all tokens of a micro-batch's sequences, which are the
    keys that it gathers, are at most `sequences.most_keys` times `max_tokens`. Sequences that do not
    run keep their place in a mini-batch; their rank is -1. In each mini-batch one response of `sequences.can_watch`,
    drawn by the seed, runs nevertheless: the canary. A response's sequences are in the same mini-batch. `group_size`
    consecutive ranks run a micro-batch together, of `group_size` times `max_tokens`; each brings some responses
    (--policy.sequence-parallel)."""
    max_tokens *= group_size
    num_responses = int(sequences.responses.max(initial=-1)) + 1
    generator = np.random.default_rng(seed)
    rank_of = np.full(len(sequences.lengths), -1, dtype=np.int64)
    is_canary = np.zeros(len(sequences.lengths), dtype=bool)
    minibatches = []
    left_out = []
    for dealt in np.array_split(generator.permutation(num_responses), num_minibatches):
        members = np.flatnonzero(np.isin(sequences.responses, dealt))
        candidates = np.unique(sequences.responses[members[sequences.can_watch[members]]])
        if len(candidates):
            is_canary |= sequences.responses == generator.choice(candidates)
        runs_here = (sequences.runs | is_canary)[members]
        left_out.append(members[~runs_here])
        minibatches.append(_plan_minibatch(members[runs_here], sequences, world_size, max_tokens, group_size))
        for of_ranks in minibatches[-1]:
            for rank, members_of_rank in enumerate(of_ranks):
                rank_of[members_of_rank] = rank
    return Plan(rank_of, minibatches, left_out, is_canary)


def _plan_minibatch(members: np.ndarray, sequences: Sequences, world_size: int, max_tokens: int,
                    group_size: int) -> list[list[np.ndarray]]:
    """The micro-batches of a mini-batch of these sequences: [micro-batch][rank] -> sequences."""
    units = _units(members, sequences, max_tokens)                                                # what stays together
    tokens = np.zeros(len(units), dtype=np.int64)
    costs = np.zeros(len(units))
    for number, (num_tokens, unit) in enumerate(units):
        tokens[number] = _taken(num_tokens, int(sequences.lengths[unit].sum()), sequences)
        costs[number] = _cost_of(unit, num_tokens, sequences)
    shares = partition(costs, world_size // group_size)                                         # [group] -> units
    count = 1                                               # the least that all groups of ranks need
    for share in shares:
        # each unit that is too long by itself, and as few micro-batches as the tokens of the others allow
        count = max(count, math.ceil(np.minimum(tokens[share], max_tokens).sum() / max_tokens))
    packed = _pack_shares(shares, tokens, costs, count, max_tokens)             # [group][micro-batch]
    most = max(map(len, packed))
    if most > count:                                        # first-fit needed more; all ranks fit in `most`
        packed = _pack_shares(shares, tokens, costs, most, max_tokens)
    microbatches = []
    for items_of_groups in zip(*packed):
        of_ranks: list[np.ndarray] = []
        for share, items in zip(shares, items_of_groups):
            of_units = [members[:0]]                        # there may be no other
            for number in share[items]:
                _, unit = units[number]
                of_units.append(unit)
            of_group = np.sort(np.concatenate(of_units))
            if group_size == 1:
                of_ranks.append(of_group)
            else:                                           # each rank brings some
                for part in partition(sequences.costs[of_group], group_size):
                    of_ranks.append(of_group[part])
        microbatches.append(of_ranks)
    return microbatches


def _pack_shares(shares: list[np.ndarray], tokens: np.ndarray, costs: np.ndarray, count: int,
                 max_tokens: int) -> list[list[np.ndarray]]:
    """The micro-batches of each share of the units, by `_pack`."""
    packed = []
    for share in shares:
        packed.append(_pack(tokens[share], costs[share], count, max_tokens))
    return packed


def _cost_of(unit: np.ndarray, num_tokens: int, sequences: Sequences) -> float:
    """FLOPs of sequences of which so many tokens run: less than apart, if they begin alike."""
    return math.fsum(sequences.costs[unit]) * num_tokens / math.fsum(sequences.lengths[unit])


def _taken(num_tokens: int, num_keys: int, sequences: Sequences) -> int:
    """How much of a token budget sequences take of which so many tokens run, and which gather so many keys."""
    return max(num_tokens, math.ceil(num_keys / sequences.most_keys))


def _units(members: np.ndarray, sequences: Sequences, max_tokens: int) -> list[tuple[int, np.ndarray]]:
    """The (tokens that run, sequences) that stay together: single sequences, or those that begin alike and fit."""
    lengths = sequences.lengths
    units: list[tuple[int, np.ndarray]] = []
    if sequences.order is None:
        for i in members:
            units.append((int(lengths[i]), np.array([i])))
        return units
    unit: list[int] = []
    tokens = 0
    keys = 0
    for i, shared in _followers(members, sequences):
        length = int(lengths[i])
        if unit and (not shared or _taken(tokens + length - shared, keys + length, sequences) > max_tokens):
            units.append((tokens, np.array(unit)))
            unit = []
        if not unit:
            tokens = 0
            keys = 0
            shared = 0                                              # what it begins with runs with it
        tokens += length - shared
        keys += length
        unit.append(i)
    if unit:
        units.append((tokens, np.array(unit)))
    return units


def _followers(members: np.ndarray, sequences: Sequences) -> list[tuple[int, int]]:
    """These sequences in the order in which they begin alike, and how many tokens each shares with the one before."""
    is_member = np.zeros(len(sequences.lengths), dtype=bool)
    is_member[members] = True
    places = np.flatnonzero(is_member[sequences.order])
    if not len(places):
        return []
    begins = np.append(0, places[:-1] + 1)                          # what is between two members counts, too
    common = np.minimum.reduceat(sequences.common[sequences.order][: places[-1] + 1], begins)
    numbers = sequences.order[places]
    shared = worth_sharing(common, sequences.lengths[numbers])
    return [*zip(numbers.tolist(), shared.tolist())]
