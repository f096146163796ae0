"""What stands in for the packages flash-attn-4 and flash-attn-3, which need a GPU: the functions that torch's switch
calls, with the arguments of the packages' own, and attention as their README defines it, a loop over sequences."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CALLS = []
"""What each call was given."""


def _of_each(q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, scale: float | None, causal: bool,
             left: int, right: int) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Of each sequence its rows of queries and of keys, the scores [heads, queries, keys], and query, key and value,
    all with the query's heads. Query i sees the keys from i + keys - queries - left to i + keys - queries + right, both
    included, -1: all."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for (a, b), (c, d) in zip(itertools.pairwise(offsets_q.tolist()), itertools.pairwise(offsets_k.tolist())):
        one, keys, values = (x.float().transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        keys, values = (x.repeat_interleave(len(one) // len(x), 0) for x in (keys, values))
        place = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c)
        hidden = torch.zeros(b - a, d - c, dtype=torch.bool)
        if causal or right >= 0:
            hidden |= key > place + (0 if causal else right)
        if left >= 0:
            hidden |= key < place - left
        scores = (one @ keys.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        yield slice(a, b), slice(c, d), scores, one * scale, keys * scale, values


def _forward(name: str, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, longest: list[int],
             *mask: Any) -> tuple[Tensor, Tensor]:
    """The output [tokens, heads, D], and the logarithms of the softmax's sums [heads, tokens]."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.shape[1] % k.shape[1] == 0
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (offsets_q, offsets_k))
    _, causal, left, right = mask
    CALLS.append({"name": name, "lengths": offsets_q.diff().tolist(), "longest": longest, "causal": causal,
                  "window": [left, right]})
    out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for rows, _, scores, _, _, values in _of_each(q, k, v, offsets_q, offsets_k, *mask):
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
        sums[:, rows] = scores.logsumexp(-1)
    return out, sums


def _backward(name: str, up: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, offsets_q: Tensor,
              offsets_k: Tensor, *mask: Any) -> list[Tensor]:
    CALLS.append({"name": f"{name} backward"})
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    shared = k.shape[1], q.shape[1] // k.shape[1], -1, k.shape[-1]      # several heads of queries have one of keys
    for rows, columns, scores, query, key, value in _of_each(q, k, v, offsets_q, offsets_k, *mask):
        weights = (scores - sums[:, rows, None]).exp()                  # the forward pass returned the sums
        one = up[rows].float().transpose(0, 1)
        slope = one @ value.transpose(1, 2)
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True))
        grads[0][rows] += (slope @ key).transpose(0, 1)
        grads[1][columns] += (slope.transpose(1, 2) @ query).view(shared).sum(1).transpose(0, 1)
        grads[2][columns] += (weights.transpose(1, 2) @ one).view(shared).sum(1).transpose(0, 1)
    return [x.to(q.dtype) for x in grads]


def _or_all(window: int | None) -> int:
    return -1 if window is None else window


def _flash_attn_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                    window_size_left, window_size_right, return_lse, seqused_k=None, page_table=None, num_splits=1,
                    out=None):
    """flash-attn-4 (flash_attn/cute/interface.py)."""
    assert return_lse and seqused_k is page_table is out is None and num_splits == 1
    return _forward("FA4", q, k, v, cu_seqlens_q, cu_seqlens_k, [max_seqlen_q, max_seqlen_k], softmax_scale, causal,
                    _or_all(window_size_left), _or_all(window_size_right))


def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q,
                    cu_seqlens_k, deterministic):
    return _backward("FA4", dout, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal,
                     _or_all(window_size_left), _or_all(window_size_right))


def _fa3_forward(q, k, v, _k, _v, _qv, out, offsets_q, offsets_k, _new, _used, _used_k, max_q, max_k, *others):
    """flash-attn-3 (hopper/flash_api.cpp)."""
    scale, causal, left, right = others[9:13]
    found = _forward("FA3", q, k, v, offsets_q, offsets_k, [max_q, max_k], scale, causal, left, right)
    return *found, torch.empty(0), torch.empty(0)


def _fa3_backward(up, q, k, v, out, sums, dq, dk, dv, offsets_q, offsets_k, _q, _k, max_q, max_k, scale, causal, left,
                  right, *_):
    grads = _backward("FA3", up, q, k, v, sums, offsets_q, offsets_k, scale, causal, left, right)
    for target, found in zip((dq, dk, dv), grads):
        target.copy_(found)


if __name__ == "flash_attn_interface":                                  # the module of flash-attn-3
    LIBRARY = torch.library.Library("flash_attn_3", "DEF")
    LIBRARY.define("fwd(Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor? e, "
                   "Tensor? f, Tensor? g, Tensor? h, Tensor? i, int? j, int? l, Tensor? m, Tensor? n, Tensor? o, "
                   "Tensor? p, Tensor? r, Tensor? s, Tensor? t, Tensor? u, Tensor? w, float? x, bool y, int z, int aa, "
                   "int bb, float cc, bool dd, Tensor? ee, int ff, bool? gg, int hh) -> "
                   "(Tensor, Tensor, Tensor, Tensor)")
    LIBRARY.define("bwd(Tensor up, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor(a!) dq, "
                   "Tensor(b!) dk, Tensor(c!) dv, Tensor? a, Tensor? b, Tensor? c, Tensor? d, int? e, int? f, "
                   "float? g, bool h, int i, int j, float l, bool m, int n) -> ()")
    LIBRARY.impl("fwd", _fa3_forward, "CPU")
    LIBRARY.impl("bwd", _fa3_backward, "CPU")
