"""What stands in for the package flash-attn 2.8, which needs a GPU: its function for packed sequences, with the
arguments of the package's own, and attention as its README defines it, a loop over sequences in float32."""

import itertools

import torch
from torch import Tensor

CALLS = []
"""What each call was given."""


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:
    """q [tokens, heads, D], k and v [tokens, fewer heads, D]. Query i of a sequence sees the keys from
    i + keys - queries - window_size[0] to i + keys - queries + window_size[1], both included, -1: all."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype, "only support fp16 and bf16"
    assert q.device.type == "cuda", "must be on CUDA"
    assert q.shape[-1] <= 256, "only supports head dimension at most 256"
    assert q.shape[-1] == v.shape[-1] and all(x.stride(-1) == 1 for x in (q, k, v))
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    assert alibi_slopes is None and block_table is None and not return_attn_probs and dropout_p == 0
    CALLS.append({"lengths": cu_seqlens_q.diff().tolist(), "max": [int(max_seqlen_q), int(max_seqlen_k)],
                  "causal": causal, "window": window_size, "softcap": softcap})
    out = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist())):
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        one, keys, values = (x.float().transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        keys, values = (x.repeat_interleave(len(one) // len(x), 0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(b - a, device=q.device)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c, device=q.device)
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = (key > place + right) if right >= 0 else torch.zeros_like(key > place)
        if left >= 0:
            hidden = hidden | (key < place - left)
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out).to(q.dtype)


def _refuse(*_, **__):
    raise AssertionError("packed sequences need flash_attn_varlen_func alone")


flash_attn_func = flash_attn_with_kvcache = pad_input = unpad_input = _refuse
