"""Attention over packed sequences: one row of tokens, cut by `cu_seq_lens` into sequences that never see each other."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as switch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from common.flags.model import ModelConfig
from common.forward.sequence_parallel import gather_keys
from common.forward.vision import FAMILIES

FEWER_KEY_HEADS: dict[str, bool] = {}
"""Lets keys have fewer heads than queries; torch 2.11 needs no argument for it."""
if "enable_gqa" in varlen_attn.__kwdefaults__:
    FEWER_KEY_HEADS["enable_gqa"] = True


BLOCK = 256
"""Queries of a call of sdpa with a mask. Measured on a CPU, forward and backward: 4,000 queries after 96 keys take 1.7
times as long in one block as in blocks of 256."""


class Kernel(NamedTuple):
    """A FlashAttention that can take the place of torch's own, FlashAttention-2."""

    name: str  # of torch's switch
    package: str
    capabilities: tuple[int, ...]  # of cards, the first number
    widest: int  # head, of forward and backward pass


WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
                  "output_router_logits", "return_dict", "is_causal", "seq_idx"}
"""What layers tell attention, and what changes nothing here: models are in `eval`, and `LAYOUT` says where sequences
begin."""
LAYOUT = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
          "key_rows", "num_rows", "sequence_group"}
"""What `make_row` and `cut` of sequence_parallel.py say of a row."""

NEWER_KERNELS = Kernel("FA4", "flash-attn-4", (9, 10), 128), Kernel("FA3", "flash-attn-3", (9,), 256)
ASKED: set[str] = set()
"""What the models of this process can use: names of NEWER_KERNELS, "" for torch's own."""


def packed_sdpa(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **layout,
) -> tuple[Tensor, None]:
    """Causal attention of each packed sequence by itself: query [1, heads, T, D], key and value [1, kv_heads, T, D].
    `s_aux` [heads]: attention sinks (gpt-oss, arXiv 2508.10925), scores that only enlarge the softmax's sum.
    `layout`: `cu_seq_lens_q`, `cu_seq_lens_k`, and where the keys are, see `_take_keys`."""
    _check_arguments(attention_mask, layout)
    key, value = _take_keys(key, value, **layout)
    num_queries = layout["cu_seq_lens_q"].diff().tolist()
    num_keys = layout["cu_seq_lens_k"].diff().tolist()
    has_fewer_key_heads = query.shape[1] != key.shape[1]
    dtype = query.dtype
    # measured: in bfloat16 sdpa and its backward take 3 to 5x as long with AVX2, and with AMX up to 4x below 160 tokens
    if dtype == torch.bfloat16 and query.device.type == "cpu":
        query = query.float()
        key = key.float()
        value = value.float()
    sequences = zip(query.split(num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2), strict=True)
    out = []
    for q, k, v in chain.from_iterable(starmap(_in_blocks, sequences)):
        new = q.shape[2]
        length = k.shape[2]
        window = sliding_window or length
        mask = None
        if window < length or softcap or s_aux is not None or new < length:
            mask = _causal_mask(new, length, window, q.device)
        if s_aux is not None:
            q, k, v = _with_sinks(q, k, v, s_aux, scaling)
            mask = F.pad(mask, (1, 0), value=True)
        if softcap is None:
            out.append(F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=has_fewer_key_heads
            ))
        else:
            out.append(_soft_capped(q, k, v, mask, softcap, scaling))
    # [1, T, heads, D], which some families take a view of
    return torch.cat(out, dim=2).to(dtype).transpose(1, 2).contiguous(), None


def _in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries that continue a longer sequence, in blocks, with the keys up to each: with a mask, sdpa also computes
    what the mask hides. Others as they are."""
    before = k.shape[2] - q.shape[2]
    if not before:
        yield q, k, v
        return
    for start in range(0, q.shape[2], BLOCK):
        block = q[:, :, start : start + BLOCK]
        end = before + start + block.shape[2]
        yield block, k[:, :, :end], v[:, :, :end]


def _causal_mask(new: int, length: int, window: int, device: torch.device) -> Tensor:
    """[new, length]: True where one of the last `new` tokens sees a key, less than `window` tokens before it."""
    mask = torch.ones(new, length, dtype=torch.bool, device=device)
    return mask.tril_(length - new).triu_(length - new + 1 - window)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key first that all queries see: its score is the sink, and its value is 0. D grows by 8, because
    kernels need a multiple of it, and the sink is in the last column."""
    sinks = (s_aux.to(q.dtype) / scaling)[:, None, None].expand(-1, q.shape[2], 1)      # [heads, new, 1]
    q = torch.cat([q, F.pad(sinks, (7, 0))[None]], dim=-1)
    k = F.pad(k, (0, 8, 1, 0))
    k[:, :, 0, -1] = 1
    v = F.pad(v, (0, 0, 1, 0))
    return q, k, v


def _soft_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float, scaling: float | None
) -> Tensor:
    """Attention with a tanh between the scores and the softmax (Gemma 2)."""
    if scaling is None:
        scaling = q.shape[3] ** -0.5
    repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeats, dim=1)
    v = v.repeat_interleave(repeats, dim=1)
    scores = (q @ k.transpose(2, 3)) * scaling
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v


def packed_varlen(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **layout,
) -> tuple[Tensor, None]:
    """The same through torch's FlashAttention-2 kernels, or those that `use_kernel` puts in their place (CUDA, float16
    or bfloat16, head_dim <= 256, no soft-cap, no sinks).

    Where a sequence has more keys than queries, the kernel's causal mask lets the last query see all keys."""
    _check_arguments(attention_mask, layout)
    key, value = _take_keys(key, value, **layout)
    assert softcap is None and s_aux is None, "packed_varlen has no soft-cap and no attention sinks: use packed_sdpa"
    # the kernels want values as wide as keys, and those of latent attention are narrower
    width = value.shape[3]
    padded = F.pad(value, (0, key.shape[3] - width))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, padded))                      # [T, heads, D]
    keys_before = -1                                                                    # unlimited
    if sliding_window is not None:
        keys_before = sliding_window - 1
    out = varlen_attn(
        q, k, v,
        layout["cu_seq_lens_q"],
        layout["cu_seq_lens_k"],
        int(layout["max_length_q"]),
        int(layout["max_length_k"]),
        scale=scaling,
        window_size=(keys_before, 0),                                                  # no key after it: causal
        **FEWER_KEY_HEADS,
    )
    return out[None, :, :, :width].contiguous(), None


def _check_arguments(attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """Raise ValueError for what a family's layers tell attention, and what would have no effect here."""
    if attention_mask is not None:                      # Doge's and DeepSeek-V3.2's layers make their own
        raise ValueError("its layers make a mask of their own for attention, which packed sequences do not take")
    if "cu_seq_lens_q" not in others:                   # Nemotron's and StableLM's layers drop what they are told
        raise ValueError("its layers do not tell attention where packed sequences begin")
    if others.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    for name in others.keys() - LAYOUT - WITHOUT_EFFECT:
        if others[name] is not None:
            raise ValueError(f"its layers tell attention {name}, which packed sequences do not take")


def _take_keys(key: Tensor, value: Tensor, key_rows: Tensor | None = None, num_rows: int = 0,
               sequence_group: dist.ProcessGroup | None = None, **others) -> tuple[Tensor, Tensor]:
    """The keys and values that the queries see. With a `sequence_group`, those of all its ranks, `num_rows` of each.

    `key_rows` [K]: sequence i's keys are the rows `key_rows[cu_seq_lens_k[i] : cu_seq_lens_k[i + 1]]`. Its queries are
    the last of them (a sequence continues after what others begin with, too)."""
    if sequence_group is not None:
        key, value = gather_keys(key, value, sequence_group, num_rows)
    if key_rows is not None:
        key = key[:, :, key_rows]
        value = value[:, :, key_rows]
    return key, value


# transformers knows the functions by these names. They register no mask function, so transformers builds no mask.
# gpt-oss refuses names with `sdpa`, because transformers' own function of that name has no sinks.
AttentionInterface.register("packed_sdpa", packed_sdpa)
AttentionInterface.register("packed_sinks", packed_sdpa)
AttentionInterface.register("packed_varlen", packed_varlen)


def head_dims(config: PretrainedConfig) -> tuple[int, int]:
    """The width of a head's queries and keys, and of its values."""
    fields = config.to_dict()
    if "kv_lora_rank" in fields:                                                    # latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = fields.get("head_dim")
    if not width:
        width = config.hidden_size // config.num_attention_heads
    return width, width


def choose_attention(device: torch.device | str, hf_config: PretrainedConfig, config: ModelConfig) -> str:
    """The name of the fastest attention for this device and model."""
    # They have sinks, without which transformers would run FlashAttention-2, and would not say so.
    if hf_config.model_type in ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"):
        return "packed_sinks"
    if torch.device(device).type != "cuda" or config.compute_dtype == "float32":    # faster kernels take no float32
        return "packed_sdpa"
    newer = newer_kernel(device, hf_config)
    hf_config = hf_config.get_text_config()
    width = head_dims(hf_config)[0]
    has_softcap = hf_config.to_dict().get("attn_logit_softcapping") is not None
    fits = not has_softcap and width <= 256 and width % 8 == 0
    if fits and newer:
        return "packed_varlen"
    if is_flash_attn_2_available() and width <= 256 and not config.share_prompt and config.sequence_parallel == 1:
        return "flash_attention_2"                              # it needs the keys in one piece
    return "packed_varlen" if fits else "packed_sdpa"


def newer_kernel(device: torch.device | str, hf_config: PretrainedConfig) -> str:
    """The newest FlashAttention that is installed and runs this model on this card ("FA4" or "FA3"), or "".

    Not for models that read images: the switch holds for sdpa too, with whose heads their towers run."""
    if hf_config.model_type in FAMILIES or not hasattr(switch, "activate_flash_attention_impl"):
        return ""
    width = head_dims(hf_config.get_text_config())[0]
    for kernel in NEWER_KERNELS:
        if width > kernel.widest or not is_installed(kernel.package):
            continue
        major, _ = torch.cuda.get_device_capability(device)
        if major in kernel.capabilities:
            return kernel.name
    return ""


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def use_kernel(device: torch.device, hf_config: PretrainedConfig, config: ModelConfig) -> None:
    """Put the newest FlashAttention into the place of torch's own, while all models that this process has loaded on a
    GPU can use it. Those in float32 use none. Raises ValueError if it is installed and cannot be loaded."""
    if device.type != "cuda" or config.compute_dtype == "float32":
        return
    name = ""
    if choose_attention(device, hf_config, config) == "packed_varlen":
        name = newer_kernel(device, hf_config)
    ASKED.add(name)
    if not any(ASKED):
        return
    if len(ASKED) > 1:
        switch.restore_flash_attention_impl(_raise_warn=False)
        return
    try:
        switch.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        packages = {kernel.name: kernel.package for kernel in NEWER_KERNELS}
        raise ValueError(f"{packages[name]} is installed and cannot be used ({error}): repair it, or uninstall it to "
                         f"run torch's own FlashAttention 2") from error


def kernel_in_use() -> str:
    """The FlashAttention that `packed_varlen` runs, as the start of a run prints it."""
    name = None
    if any(ASKED):
        name = switch.current_flash_attention_impl()
    return (name or "FA2").replace("FA", "FlashAttention ")
