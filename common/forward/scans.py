"""What layers with a state compute over a packed row, in torch, all sequences at a time: delta nets, Mamba-2, causal
convolutions. The state is empty where a sequence begins, or that at the end of an earlier one from which it goes on."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Chunks(NamedTuple):
    """A packed row of T tokens, cut into N chunks of `size` places. Every sequence begins with a chunk of its own."""

    size: int
    tokens: Tensor  # [N * size] the token at each place, T where there is none
    places: Tensor  # [T] the place of each token
    steps: list[Tensor]  # steps[i]: the numbers of the chunks that are i chunks after the first one of their sequence
    before: list[Tensor | slice]  # before[i]: which chunk of steps[i - 1] is before each one of steps[i]


@lru_cache(maxsize=4)  # the layers of a model ask for the same one
def make_chunks(lengths: tuple[int, ...], size: int, device: torch.device, parents: tuple[int, ...] = ()) -> Chunks:
    """The chunks of packed sequences with these lengths. `parents`: of each sequence the earlier one from whose
    end it goes on, or itself."""
    length = torch.tensor(lengths)
    number = torch.arange(len(lengths))
    parent = torch.tensor(parents) if parents else number
    counts = (length + size - 1) // size
    first_token = length.cumsum(0) - length
    first_chunk = counts.cumsum(0) - counts
    sequence = number.repeat_interleave(length)                                                 # [T]
    places = torch.arange(len(sequence)) + (size * first_chunk - first_token)[sequence]
    tokens = torch.full((size * int(counts.sum()),), len(sequence))
    tokens[places] = torch.arange(len(sequence))
    begin = torch.zeros_like(number)                                                            # the step, [S]
    for i, before_it in enumerate(parent.tolist()):                     # parents come first
        if before_it != i:
            begin[i] = begin[before_it] + counts[before_it]
    longest_first = (begin + counts).argsort(descending=True, stable=True)
    steps = []
    before: list[Tensor | slice] = []
    found = torch.zeros_like(number)                                    # where a sequence is in the step before
    for i in range(int((begin + counts).max())):
        goes_on = (begin <= i) & (i < begin + counts)
        running = longest_first[goes_on[longest_first]]
        steps.append((first_chunk[running] + i - begin[running]).to(device))
        source = found[torch.where(begin[running] == i, parent[running], running)]
        found[running] = torch.arange(len(running))
        if i == 0 or torch.equal(source, found[running]):
            before.append(slice(len(running)))                          # a view, where no prompt is shared
        else:
            before.append(source.to(device))
    return Chunks(size, tokens.to(device), places.to(device), steps, before)


def cut(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, heads, ...] -> [N, heads, size, ...], 0 where there is no token."""
    x = F.pad(x, [0, 0] * (x.ndim - 1) + [0, 1])
    return x[chunks.tokens].unflatten(0, (-1, chunks.size)).transpose(1, 2)


def join(x: Tensor, chunks: Chunks) -> Tensor:
    """The reverse of `cut`: [N, heads, size, ...] -> [T, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)[chunks.places]


def scan(chunks: Chunks, zero: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Carry a state through the chunks of each sequence, all sequences at a time. Each begins with the state `zero`,
    or with that at the end of the sequence from which it goes on.

    `step` gets the numbers [n] of chunks and the states [n, ...] before them. It returns an output of each chunk and
    the states after them. The result is the outputs of all chunks, in their order: [N, ...]."""
    outputs = []
    state = zero.expand(len(chunks.steps[0]), *zero.shape)
    for numbers, before in zip(chunks.steps, chunks.before):
        output, state = step(numbers, state[before])
        outputs.append(output)
    return torch.cat(outputs)[torch.cat(chunks.steps).argsort()]


def wide(x: Tensor) -> Tensor:
    """In float32 at least: a state sums over many tokens."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def decay_between(log_decay: Tensor) -> Tensor:
    """exp(sum of log_decay[s] over j < s <= i) for all pairs i >= j of a chunk, 0 for i < j: [..., C] -> [..., C, C].

    The sums are computed one by one. Differences of a single cumulative sum would cancel: the gradient of a head's
    decay rate in float32 is then 70 times as far from float64 (measured)."""
    size = log_decay.shape[-1]
    is_after = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)       # s > j
    steps = log_decay[..., None].expand(*log_decay.shape, size).masked_fill(~is_after, 0)
    return steps.cumsum(-2).exp().tril()


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(g_t) S_{t-1}), o_t = q_t^T S_t, with S = 0 before a sequence
    (Yang et al. 2024, arXiv 2412.06464; in chunks as in its section 3.3).

    q, k [T, heads, K]; v [T, heads, V]; beta [T, heads]; g is a log decay of each head [T, heads], or of each channel
    [T, heads, K] (Kimi, arXiv 2510.26692). Returns [T, heads, V]."""
    dtype = wide(q).dtype
    q, k, v, g, beta = (cut(x.to(dtype), chunks) for x in (q, k, v, g, beta))       # [N, heads, C, ...]
    beta = beta[..., None]
    if g.ndim == 4:
        between = decay_between(g.transpose(2, 3))                                  # [N, heads, K, C, C]
        keys = torch.einsum("nhik,nhjk,nhkij->nhij", k, k, between)
        scores = torch.einsum("nhik,nhjk,nhkij->nhij", q, k, between)
        to_end = between[..., -1, :].transpose(2, 3)                                # [N, heads, C, K]
    else:
        between = decay_between(g)                                                  # [N, heads, C, C]
        keys = k @ k.mT * between
        scores = q @ k.mT * between
        to_end = between[..., -1, :, None]
        g = g[..., None]
    from_start = g.cumsum(2).exp()                                                  # [N, heads, C, 1 or K]
    # what each token writes, if the state before the chunk is S: written - read @ S
    right = torch.cat([v, k * from_start], dim=-1) * beta
    solved = torch.linalg.solve_triangular(keys * beta, right, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = q * from_start
    k = k * to_end
    whole = from_start[:, :, -1, :, None]

    def step(n: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        new = written[n] - read[n] @ state
        return q[n] @ state + scores[n] @ new, state * whole[n] + k[n].mT @ new

    return join(scan(chunks, q.new_zeros(q.shape[1], k.shape[-1], v.shape[-1]), step), chunks)


def state_space(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunks: Chunks) -> Tensor:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 6): S_t = exp(log_decay_t) S_{t-1} + b_t x_t^T and
    y_t = c_t^T S_t, with S = 0 before a sequence.

    x [T, heads, P]; log_decay [T, heads]; b, c [T, groups, N]: consecutive heads share them. Returns [T, heads, P]."""
    dtype = wide(x).dtype
    x, log_decay, b, c = (cut(y.to(dtype), chunks) for y in (x, log_decay, b, c))   # [N, heads, C, ...]
    between = decay_between(log_decay)                                              # [N, heads, C, C]
    heads_of_group = x.shape[1] // b.shape[1]
    scores = (c @ b.mT).repeat_interleave(heads_of_group, 1) * between
    b = b.repeat_interleave(heads_of_group, 1) * between[..., -1, :, None]
    c = c.repeat_interleave(heads_of_group, 1) * log_decay.cumsum(2).exp()[..., None]
    written = b.mT @ x
    whole = log_decay.sum(2).exp()[..., None, None]

    def step(n: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, state * whole[n] + written[n]

    before = scan(chunks, x.new_zeros(written.shape[1:]), step)
    return join(scores @ x + c @ before, chunks)


def by_depth(parents: tuple[int, ...]) -> list[list[int]]:
    """The sequences that go on from others: first from those that do not, then from these, and so on."""
    depth: list[int] = []
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        depth.append(0 if parent == i else depth[parent] + 1)
        if depth[i] > len(found):
            found.append([])
        if depth[i]:
            found[depth[i] - 1].append(i)
    return found


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...],
             parents: tuple[int, ...] = ()) -> Tensor:
    """A causal convolution of each channel by itself: x [1, D, T], weight [D, width], bias [D] -> [1, D, T]. Before
    each sequence are width - 1 zeros, or the last inputs of the one from which it goes on (see `make_chunks`)."""
    gap = weight.shape[1] - 1
    length = torch.tensor(lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(length)
    places = (torch.arange(len(sequence)) + gap * (sequence + 1)).to(x.device)      # [T]
    apart = x.new_zeros(*x.shape[:2], len(sequence) + gap * len(lengths)).index_copy(2, places, x)
    stops = (length + gap).cumsum(0)
    for numbers in by_depth(parents):                                   # a short one also passes on what it got
        last = stops[[parents[i] for i in numbers]][:, None] - gap + torch.arange(gap)
        first = (stops - length)[numbers][:, None] - gap + torch.arange(gap)
        inputs = apart[:, :, last.flatten().to(x.device)]
        apart = apart.index_copy(2, first.flatten().to(x.device), inputs)
    return F.conv1d(apart, weight[:, None], bias, groups=len(weight))[:, :, places - gap]
