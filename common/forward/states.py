"""Layers that carry a state over the tokens, on packed rows: the state is empty where a sequence begins.

These layers (delta nets, Mamba-2, short convolutions) call functions of their own modeling file by name, and tell them
where sequences begin: `cu_seqlens`, `cu_seq_lens_q` or `seq_idx`. Each of these functions is the kernel of an optional
package or, without it, plain torch that drops these arguments and lets the state of one sequence leak into the next.
Kimi's kernel drops them too, because it knows them by another name. So `separate_states` replaces every function that
such a layer calls: one that was left would leak alone. What replaces them

* runs the kernels of flash-linear-attention and mamba-ssm on GPUs, where they are installed;
* otherwise computes the same in torch, all sequences at a time;
* calls transformers' own function if nothing is told of sequences, as in generation.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
"""Tokens of a chunk: inside it all pairs of tokens are computed, and between chunks a state is carried."""
CHUNK_BY_CHANNEL = 16
"""The same where each channel has its own decay: all pairs of tokens are then computed for each channel."""
NORM_EPS = 1e-6
"""Added to the squared norms of queries and keys, as in flash-linear-attention."""


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
    for i, parent in enumerate(parents):
        depth.append(0 if parent == i else depth[parent] + 1)
    return [[i for i, own in enumerate(depth) if own == wanted] for wanted in range(1, max(depth, default=0) + 1)]


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


# ---- in the place of transformers' functions, with their parameters -------------------------------------------------


@dataclass
class Sequences:
    """What a layer tells a function of the packed row."""

    ends: Tensor | None  # [S + 1], cu_seqlens
    numbers: Tensor | None  # [1, T] int32, which sequence a token belongs to; if beginnings are shared [2, T], then
    # also from the end of which one this sequence goes on

    def parents(self) -> tuple[int, ...]:
        """Of each sequence the one from which it goes on, or itself; () if nothing is shared."""
        if self.numbers is None or len(self.numbers) == 1:
            return ()
        number, parent = self.numbers.unique_consecutive(dim=1).tolist()
        assert number == [*range(len(number))]
        return tuple(parent)

    def lengths(self) -> tuple[int, ...]:
        if self.ends is not None:
            return tuple(self.ends.diff().tolist())
        return tuple(self.numbers[0].unique_consecutive(return_counts=True)[1].tolist())

    def cu_seqlens(self) -> Tensor:
        if self.ends is not None:
            return self.ends
        return F.pad(torch.tensor(self.lengths()).cumsum(0), (1, 0)).to(self.numbers.device)


CONVOLUTION = "fla.modules.causal_conv1d.causal_conv1d"
DELTA_RULE = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
KIMI_RULE = "fla.ops.kda.chunk_kda"
MAMBA2_SCAN = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"


def is_installed(kernel: str) -> bool:
    """Whether the package of this function is installed."""
    return importlib.util.find_spec(kernel.partition(".")[0]) is not None


def kernel_for(x: Tensor, kernel: str, sequences: Sequences) -> Callable | None:
    """The function with this full name; None if it is not installed or not for `x`, on CPUs and in float64, or for
    shared prompts, whose states it would not carry into several responses."""
    if not x.is_cuda or x.dtype == torch.float64 or sequences.parents() or not is_installed(kernel):
        return None
    module, _, name = kernel.rpartition(".")
    return getattr(importlib.import_module(module), name)


def causal_conv1d(sequences: Sequences, hidden_states, weight, bias=None, activation=None, **_) -> Tensor:
    """`causal_conv1d_fn`: hidden_states [1, D, T], weight [D, width], bias [D] -> [1, D, T]."""
    run = kernel_for(hidden_states, CONVOLUTION, sequences)
    if run is not None:
        told = {"activation": activation, "cu_seqlens": sequences.cu_seqlens()}
        out, _ = run(hidden_states.transpose(1, 2).contiguous(), weight=weight, bias=bias, **told)
        return out.transpose(1, 2)
    out = convolve(hidden_states.to(weight.dtype), weight, bias, sequences.lengths(), sequences.parents())
    if activation is not None:
        assert activation in ("silu", "swish"), activation
        out = F.silu(out)
    return out.to(hidden_states.dtype)


def delta_rule(sequences: Sequences, query, key, value, g, beta, **told: Any) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule`, or `chunk_kimi_delta_attention` with a decay of each channel: query, key
    [1, T, heads, K], value [1, T, heads, V] -> [1, T, heads, V], and no state after them."""
    assert told["initial_state"] is None and not told["output_final_state"], "a packed row has no state around it"
    normalize = told["use_qk_l2norm_in_kernel"]
    run = kernel_for(query, KIMI_RULE if g.ndim == 4 else DELTA_RULE, sequences)
    if run is not None:
        ends = sequences.cu_seqlens()
        return run(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=normalize, cu_seqlens=ends)
    q = wide(query)
    k = wide(key)
    if normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    size = CHUNK_BY_CHANNEL if g.ndim == 4 else CHUNK
    chunks = make_chunks(sequences.lengths(), size, q.device, sequences.parents())
    out = gated_delta_rule(q[0], k[0], value[0], g[0], beta[0], chunks)
    return out[None].to(query.dtype), None


def mamba2_scan(sequences: Sequences, hidden_states, dt, A, B, C, **told: Any) -> Tensor:
    """`mamba2_chunk_scan`: hidden_states [1, T, heads, P], dt [1, T, heads], A [heads], B, C [1, T, groups, N], and in
    `told` D and dt_bias [heads] -> [1, T, heads, P]."""
    assert told["initial_states"] is None and not told["return_final_states"], "a packed row has no state around it"
    assert told["z"] is None and told["dt_softplus"], "a gate in the scan, or steps that may be negative"
    run = kernel_for(hidden_states, MAMBA2_SCAN, sequences)
    if run is not None:
        options = {name: told[name] for name in ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")}
        return run(hidden_states, dt, A, B, C, seq_idx=sequences.numbers, **options)
    step = F.softplus(wide(dt)[0] + told["dt_bias"]).clamp(*told["dt_limit"])       # [T, heads]
    x = wide(hidden_states)[0]
    chunks = make_chunks(sequences.lengths(), CHUNK, x.device, sequences.parents())
    out = state_space(x * step[..., None], A * step, B[0], C[0], chunks)
    return (out + told["D"][:, None] * x)[None]


FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": causal_conv1d,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
"""The functions that layers call by these names -> what replaces them: it gets the packed sequences first."""
MAMBA_1 = "mamba_selective_scan"
"""A function that is in the modeling files of Mamba-1: its kernels know no sequences."""


@dataclass
class Told:
    """A function of a modeling file, for packed rows and for others."""

    own: Callable  # transformers'
    packed: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ends = kwargs.get("cu_seqlens")
        if ends is None:
            ends = kwargs.get("cu_seq_lens_q")
        numbers = kwargs.get("seq_idx")
        if ends is None and numbers is None:
            return self.own(*args, **kwargs)
        return self.packed(Sequences(ends, numbers), *args, **kwargs)


def layers_with_state(decoder: nn.Module) -> list[nn.Module]:
    """The layers that carry a state over tokens: all that transformers has here begin with a convolution."""
    found = []
    for layer in decoder.modules():
        if any(isinstance(part, nn.Conv1d) for part in layer.children()):
            found.append(layer)
    return found


def state_shape(layer: nn.Module) -> tuple[int, int, int] | None:
    """Heads, rows and columns of the state of a delta net, or of Mamba-2 (which has `ssm_state_size`); None: the layer
    is a convolution alone, or one that is not known here."""
    names = vars(layer)
    if "num_v_heads" in names:
        return layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    if not {"num_heads", "head_dim"} <= names.keys():
        return None
    if "ssm_state_size" in names:
        return layer.num_heads, layer.ssm_state_size, layer.head_dim
    return layer.num_heads, layer.head_dim, layer.head_dim                          # Kimi


def state_flops(layer: nn.Module) -> int:
    """Forward FLOPs of a token by its products with the state: a delta net reads what it predicts, writes, and reads
    its output, and Mamba-2 does not predict."""
    shape = state_shape(layer)
    if shape is None:
        return 0
    products = 2 if "ssm_state_size" in vars(layer) else 3
    return 2 * products * math.prod(shape)


def separate_states(decoder: nn.Module) -> bool:
    """Make the layers that carry a state over tokens begin each packed sequence without one. Returns whether there are
    any. A layer whose functions are not known here runs one sequence at a time.

    Raises ValueError for Mamba-1, whose layers are not told where sequences begin."""
    layers = layers_with_state(decoder)
    for layer in layers:
        if not replace_functions(sys.modules[type(layer).__module__]):
            layer.forward = for_each_sequence(layer.forward)
    return bool(layers)


def replace_functions(modeling: Any) -> bool:
    """Replace the functions of a modeling file; False if it has none that are known here."""
    if hasattr(modeling, MAMBA_1):
        raise ValueError("its layers are Mamba-1, which are not told where packed sequences begin")
    found = FUNCTIONS.keys() & vars(modeling).keys()
    for name in found:
        own = getattr(modeling, name)
        if not isinstance(own, Told):
            setattr(modeling, name, Told(own, FUNCTIONS[name]))
    return bool(found)


def for_each_sequence(forward: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The forward of a layer with a state, run for one packed sequence after the other."""

    def run(hidden_states: Tensor, seq_idx: Tensor, **others: Any) -> Tensor:
        """[1, t, H] -> [1, t, H]. `seq_idx` [1, t]: which sequence a token belongs to."""
        if len(seq_idx) > 1:
            raise ValueError("its layers carry a state that is not known here, omit --policy.share-prompt")
        parts = hidden_states.split(Sequences(None, seq_idx).lengths(), dim=1)
        return torch.cat([forward(part) for part in parts], dim=1)

    return run
