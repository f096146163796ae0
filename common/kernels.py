"""The two places where packed rows meet big tensors: log-probs from hidden states, and variable-length attention.

`linear_logp` never holds `[T, V]`. It walks over tiles of (tokens x vocabulary), keeps the running maximum, sum of
exponentials and entropy of each token (an online softmax), and recomputes the tiles in backward. The logits are float32
whatever the input dtype: rounding them to bfloat16 moves a log-prob by up to 0.06 at |z| = 20.

The attention functions see one row of packed sequences and `cu_seq_lens`; sequences never see each other.
"""

import contextlib
import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

# --------------------------------------------------------------------------- log-probs

CPU_TILE = (512, 4096)        # tokens x vocabulary: 8 MB of logits stay in the cache (2x faster than a 100 MB chunk)
CUDA_TILE_BYTES = 256 << 20


def linear_logp(
    hidden: Tensor,                                                                     # [N, H]
    weight: Tensor,                                                                     # [V, H]
    targets: Tensor,                                                                    # [N]
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy_grad: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(z)[target] and the entropy of softmax(z), z = cap(hidden @ weight.T * logit_scale) / temperature.

    `cap(x) = softcap * tanh(x / softcap)` (Gemma), the identity where `softcap` is None. Both results are float32 [N],
    float64 where the inputs are. The entropy has a gradient only `with_entropy_grad`. The chunk sizes are for tests.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(f"linear_logp wants hidden [N, H], weight [V, H] and targets [N], got {list(hidden.shape)}, "
                         f"{list(weight.shape)} and {list(targets.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be positive: log-probs of greedy decoding are not defined")
    if isinstance(weight, DTensor):
        raise ValueError("the output head is still sharded: call linear_logp inside the root module's forward")
    tokens, vocab = tile_shape(hidden, weight)
    tile = (chunk_tokens or tokens, chunk_vocab or vocab)
    settings = temperature, softcap, logit_scale, with_entropy_grad, tile
    return _LinearLogp.apply(hidden, weight, targets, *settings)


def tile_shape(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    if hidden.device.type == "cpu":
        return CPU_TILE
    tokens = max(1, min(hidden.shape[0], 8192))
    return tokens, max(1024, CUDA_TILE_BYTES // 4 // tokens // 128 * 128)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, *settings):
        temperature, softcap, logit_scale, with_entropy_grad, tile = settings
        N = hidden.shape[0]
        top = hidden.new_full((N,), -1e30, dtype=_accumulate_dtype(hidden))            # [N] running maximum
        total, moment, picked = (torch.zeros_like(top) for _ in range(3))              # sum e, sum e (z - top), z[y]
        with _matmul(hidden, weight) as mm:
            for vocab in _slices(weight.shape[0], tile[1]):
                head = mm.operand(weight[vocab])
                for rows in _slices(N, tile[0]):
                    z = _logits(mm, mm.operand(hidden[rows]), head, temperature, softcap, logit_scale)   # a tile
                    here, column = _find(targets[rows], vocab)
                    picked[rows] = torch.where(here, z.gather(1, column[:, None])[:, 0], picked[rows])
                    new_top = torch.maximum(top[rows], z.amax(dim=1))
                    shift = top[rows] - new_top
                    z -= new_top[:, None]
                    e = z.exp()
                    moment[rows] = (moment[rows] + total[rows] * shift) * shift.exp()
                    total[rows] = total[rows] * shift.exp() + e.sum(dim=1)
                    moment[rows] += e.mul_(z).sum(dim=1)
                    top[rows] = new_top
                    del z, e                                                           # before the next tile is made
                del head
        log_total = total.log()
        logp, entropy = picked - top - log_total, log_total - moment / total
        ctx.save_for_backward(hidden, weight, targets, top + log_total, entropy)
        ctx.settings = settings
        if not with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        temperature, softcap, logit_scale, with_entropy_grad, tile = ctx.settings
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        dtype = _accumulate_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        with _matmul(hidden, weight) as mm:
            for vocab in _slices(weight.shape[0], tile[1]):
                head = mm.operand(weight[vocab])
                grad_head = torch.zeros_like(weight[vocab], dtype=dtype) if want_weight else None
                for rows in _slices(hidden.shape[0], tile[0]):
                    h = mm.operand(hidden[rows])
                    z = _logits(mm, h, head, temperature, softcap, logit_scale)
                    slope = (1 - (z * (temperature / softcap)).square_()) if softcap else None
                    z -= logsumexp[rows, None]                                         # log p
                    if with_entropy_grad:                                              # dH/dz = -p (log p + H)
                        g = (z + entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad_logp[rows, None])
                        g *= z.exp_()
                    else:
                        g = z.exp_().mul_(-grad_logp[rows, None])
                    here, column = _find(targets[rows], vocab)
                    g.scatter_add_(1, column[:, None], (grad_logp[rows] * here)[:, None])
                    if softcap:
                        g *= slope
                    g = mm.operand(g.mul_(logit_scale / temperature))
                    if want_hidden:
                        mm.add(grad_hidden[rows], g, head)
                    if want_weight:
                        mm.add(grad_head, g.T, h)
                    del z, g                                                           # before the next tile is made
                if want_weight:
                    grad_weight[vocab] = grad_head
                del head, grad_head
        return grad_hidden.to(hidden.dtype) if want_hidden else None, grad_weight, *[None] * 6


def _accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _slices(length: int, size: int):
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _find(targets: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this slice of the vocabulary, and in which of its columns (0 for the others)."""
    here = (targets >= vocab.start) & (targets < vocab.stop)
    return here, torch.where(here, targets - vocab.start, 0)


def _logits(mm, h, head, temperature, softcap, logit_scale) -> Tensor:
    z = mm(h, head.T)
    if softcap:
        return z.mul_(logit_scale / softcap).tanh_().mul_(softcap / temperature)
    return z.mul_(logit_scale / temperature) if logit_scale != temperature else z


class _Matmul:
    """Products of low-precision operands with a float32 result; plain products for float32 and float64."""

    def __init__(self, dtype: torch.dtype, fused: bool):
        self.dtype, self.fused = dtype, fused

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b, out_dtype=torch.float32) if self.fused else a @ b

    def add(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        if self.fused:
            out += self(a, b)
        else:
            out.addmm_(a, b)


@contextlib.contextmanager
def _matmul(hidden: Tensor, weight: Tensor):
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    low = dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden.device.type, enabled=False):
        if low and hidden.is_cuda:
            yield _Matmul(dtype, fused=True)
        elif dtype == torch.bfloat16 and hidden.device.type == "cpu":
            # CPU products of bfloat16 round their result to bfloat16. Float32 copies of bfloat16 numbers, multiplied in
            # oneDNN's bfloat16 units, are exact products summed in float32, 4x as fast as in float32 (measured, AMX).
            backend = torch.backends.mkldnn.matmul
            before, backend.fp32_precision = backend.fp32_precision, "bf16"
            try:
                yield _Matmul(torch.float32, fused=False)
            finally:
                backend.fp32_precision = before
        else:
            yield _Matmul(torch.float32 if low else dtype, fused=False)


# --------------------------------------------------------------------------- attention

CPU_UPCAST_BELOW = 160        # tokens: there sdpa's bfloat16 backward is up to 4x slower than float32's (measured)


def packed_sdpa(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, key_rows: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of each packed sequence by itself: query [1, heads, T, D], key and value [1, kv_heads, T, D].

    `key_rows` [K]: sequence i's keys and values are the rows `key_rows[cu_seq_lens_k[i] : cu_seq_lens_k[i + 1]]`, its
    queries the last of them (a response that goes on after a prompt which others share)."""
    _check_packed("packed_sdpa", query, cu_seq_lens_q, kwargs)
    lengths = lengths_k = cu_seq_lens_q.diff().tolist()
    if sum(lengths) != query.shape[2]:
        raise ValueError(f"cu_seq_lens cover {sum(lengths)} tokens, the packed row has {query.shape[2]}")
    if key_rows is not None:
        key, value, lengths_k = key[:, :, key_rows], value[:, :, key_rows], cu_seq_lens_k.diff().tolist()
    gqa, dtype = query.shape[1] != key.shape[1], query.dtype
    low = dtype == torch.bfloat16 and query.device.type == "cpu"
    if low and max(lengths_k) < CPU_UPCAST_BELOW:                       # at once: thousands of small casts cost more
        query, key, value = query.float(), key.float(), value.float()
    out = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths_k, 2), value.split(lengths_k, 2), strict=True):
        length, new = k.shape[2], q.shape[2]
        if low and length < CPU_UPCAST_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        windowed = sliding_window is not None and length > sliding_window
        masked = windowed or softcap is not None or new < length
        mask = _causal_mask(length, new, sliding_window, q.device) if masked else None
        if softcap is None:
            out.append(F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, scale=scaling,
                                                      enable_gqa=gqa))
        else:                                                   # Gemma 2: tanh between the scores and the softmax
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            scores = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scaling is None else scaling)
            scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
            weights = F.dropout(scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)), dropout)
            out.append(weights.to(q.dtype) @ v)
    out = torch.cat([x.to(query.dtype) for x in out], dim=2).to(dtype)
    return out.transpose(1, 2), None                                                    # [1, T, heads, D]


def packed_varlen(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None, max_length_k: int | None = None, key_rows: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:
    """The same through torch's FlashAttention-2 kernels (CUDA, float16 or bfloat16, head_dim <= 256, no soft-cap).

    Where a sequence has more keys than queries, the kernel's causal mask lets the last query see all keys."""
    from torch.nn.attention.varlen import varlen_attn
    _check_packed("packed_varlen", query, cu_seq_lens_q, kwargs)
    if softcap is not None or dropout:
        raise ValueError("packed_varlen has neither soft-cap nor dropout: use packed_sdpa")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))                       # [T, heads, D]
    if key_rows is not None:
        k, v = k[key_rows], v[key_rows]                                                 # [K, kv_heads, D]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)                  # (-1, 0): causal, unlimited
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}   # torch >= 2.12
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k), scale=scaling,
                      window_size=window, **gqa)
    return out[None], None


def _check_packed(name: str, query: Tensor, cu_seqlens: Tensor | None, kwargs: dict) -> None:
    if cu_seqlens is None:
        raise ValueError(f"{name} needs cu_seq_lens_q: without it packed sequences would see each other; "
                         "pass cu_seq_lens_q/k and max_length_q/k to the model's forward")
    if query.shape[0] != 1:
        raise ValueError(f"{name} takes one packed row, got a batch of {query.shape[0]}")
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{name} has no attention sinks: this model needs another attention function")


def _causal_mask(length: int, new: int, window: int | None, device) -> Tensor:
    """[new, length], True where the last `new` queries may see a key: their own and the `window - 1` before it."""
    make = _small_mask if new * length <= 1 << 16 else _small_mask.__wrapped__          # of the same in every layer
    return make(length, new, window, device)


@functools.lru_cache(maxsize=256)
def _small_mask(length: int, new: int, window: int | None, device) -> Tensor:
    mask = torch.ones(new, length, dtype=torch.bool, device=device).tril_(length - new)
    return mask if window is None else mask.triu_(length - new + 1 - window)


def register_attention() -> None:
    """Make both functions known to transformers. They register no mask function, so transformers builds no mask."""
    AttentionInterface.register("packed_sdpa", packed_sdpa)
    AttentionInterface.register("packed_varlen", packed_varlen)


def choose_attention(
    device: torch.device | str, config, asked: str = "auto", share_prompt: bool = False,
) -> tuple[str, str]:
    """The attention that was asked for, or the fastest for this device and model; registered. And the reason."""
    register_attention()
    text = config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if asked != "auto":
        return asked, "--policy.attention"
    if torch.device(device).type != "cuda":
        return "packed_sdpa", "no CUDA device: sdpa on each packed sequence"
    if is_flash_attn_2_available() and not share_prompt:
        return "flash_attention_2", "the flash-attn package is installed"
    if softcap is not None:
        return "packed_sdpa", f"soft-cap {softcap} needs the flash-attn package; sdpa on each packed sequence is slower"
    if head_dim > 256:
        return "packed_sdpa", f"head_dim {head_dim} > 256 is too wide for torch's varlen kernel"
    why = "it shares prompts" if share_prompt else "flash-attn is not installed"
    return "packed_varlen", f"torch.nn.attention.varlen ({why})"
