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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.forward.scans import convolve, gated_delta_rule, make_chunks, state_space, wide

CHUNK = 64
"""Tokens of a chunk: inside it all pairs of tokens are computed, and between chunks a state is carried."""
CHUNK_BY_CHANNEL = 16
"""The same where each channel has its own decay: all pairs of tokens are then computed for each channel."""
NORM_EPS = 1e-6
"""Added to the squared norms of queries and keys, as in flash-linear-attention."""


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
