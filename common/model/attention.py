"""Attention over packed sequences: one row of tokens, cut by `cu_seq_lens` into sequences that never see each other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from common.model.flops import head_dim
from common.model.policy import ModelConfig
from common.model.sequence_parallel import gather_keys

# Tokens. For shorter sequences the backward of sdpa on CPUs takes up to 4x as long in bfloat16 as in float32 (measured)
CPU_UPCAST_BELOW = 160
FEWER_KEY_HEADS = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}
"""Lets keys have fewer heads than queries; torch 2.11 needs no argument for it."""


def packed_sdpa(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of each packed sequence by itself: query [1, heads, T, D], key and value [1, kv_heads, T, D].
    `kwargs`: where its keys are, see `_take_keys`."""
    key, value = _take_keys(key, value, **kwargs)
    lengths, lengths_k = (cu_seqlens.diff().tolist() for cu_seqlens in (cu_seq_lens_q, cu_seq_lens_k))
    gqa, dtype = query.shape[1] != key.shape[1], query.dtype
    low = dtype == torch.bfloat16 and query.device.type == "cpu"
    if low and max(lengths_k) < CPU_UPCAST_BELOW:               # cast all at once: thousands of small casts cost more
        query, key, value = query.float(), key.float(), value.float()
    out = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths_k, 2), value.split(lengths_k, 2), strict=True):
        length, new = k.shape[2], q.shape[2]
        if low and length < CPU_UPCAST_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        window = sliding_window or length
        mask = None
        if window < length or softcap is not None or new < length:      # True where one of the last queries sees a key
            mask = torch.ones(new, length, dtype=torch.bool, device=q.device)
            mask.tril_(length - new).triu_(length - new + 1 - window)
        if softcap is None:
            out.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling,
                                                      enable_gqa=gqa))
        else:                                                   # Gemma 2: tanh between the scores and the softmax
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            scores = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scaling is None else scaling)
            scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
            weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
            out.append(weights.to(q.dtype) @ v)
    out = torch.cat([x.to(query.dtype) for x in out], dim=2).to(dtype)
    return out.transpose(1, 2), None                                                    # [1, T, heads, D]


def packed_varlen(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None, max_length_k: int | None = None, **kwargs,
) -> tuple[Tensor, None]:
    """The same through torch's FlashAttention-2 kernels (CUDA, float16 or bfloat16, head_dim <= 256, no soft-cap).

    Where a sequence has more keys than queries, the kernel's causal mask lets the last query see all keys."""
    key, value = _take_keys(key, value, **kwargs)
    if softcap is not None:
        raise ValueError("packed_varlen has no soft-cap: use packed_sdpa")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))                       # [T, heads, D]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)                  # (-1, 0): causal, unlimited
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k), scale=scaling,
                      window_size=window, **FEWER_KEY_HEADS)
    return out[None], None


def _take_keys(
    key: Tensor, value: Tensor, key_rows: Tensor | None = None, sequence_group: dist.ProcessGroup | None = None,
    num_rows: int = 0, s_aux: Tensor | None = None, **kwargs,
) -> tuple[Tensor, Tensor]:
    """The keys and values that the queries see. With a `sequence_group`, those of all its ranks, `num_rows` of each.

    `key_rows` [K]: sequence i's keys are the rows `key_rows[cu_seq_lens_k[i] : cu_seq_lens_k[i + 1]]`. Its queries are
    the last of them (a response continues after a prompt that others share)."""
    if s_aux is not None:
        raise ValueError("packed attention has no attention sinks: this model needs another attention function")
    if sequence_group is not None:
        key, value = gather_keys(key, value, sequence_group, num_rows)
    return (key, value) if key_rows is None else (key[:, :, key_rows], value[:, :, key_rows])


# transformers knows both functions by these names. They register no mask function, so transformers builds no mask.
AttentionInterface.register("packed_sdpa", packed_sdpa)
AttentionInterface.register("packed_varlen", packed_varlen)


def choose_attention(device: torch.device | str, hf_config: PretrainedConfig, config: ModelConfig) -> str:
    """The name of the fastest attention for this device and model."""
    if torch.device(device).type != "cuda" or config.compute_dtype == "float32":    # faster kernels take no float32
        return "packed_sdpa"
    gathers_keys = config.share_prompt or config.sequence_parallel > 1      # they do not stand in one piece
    if is_flash_attn_2_available() and not gathers_keys:
        return "flash_attention_2"
    hf_config = hf_config.get_text_config()
    has_softcap = hf_config.to_dict().get("attn_logit_softcapping") is not None
    width = head_dim(hf_config)
    return "packed_sdpa" if has_softcap or width > 256 or width % 8 else "packed_varlen"
