"""Log-probs and entropies of sampled tokens from hidden states.

`linear_logp` walks over tiles of (tokens x vocabulary), keeps the running maximum, sum of exponentials and entropy of
each token (an online softmax), and recomputes the tiles in backward. The logits are float32 whatever the input dtype:
rounding them to bfloat16 moves a log-prob by up to 0.06 at |z| = 20.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CPU_TILE = (512, 4096)        # tokens x vocabulary: 8 MB of logits stay in the cache (2x faster than a 100 MB chunk)
CUDA_TILE_BYTES = 256 << 20


class Head(NamedTuple):
    """An output head: logits = cap(hidden @ weight.T * logit_scale). `cap(x) = softcap * tanh(x / softcap)` (Gemma),
    the identity where `softcap` is None."""

    weight: Tensor                                                                      # [V, H]
    softcap: float | None = None
    logit_scale: float = 1.0


def linear_logp(hidden: Tensor, head: Head, targets: Tensor, temperature: float = 1.0,
                with_sum_p2: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of hidden states [N, H] and targets [N]: log softmax(z)[target] and the entropy of softmax(z), z = logits /
    temperature; and `with_sum_p2` the sum of p^2 over the vocabulary, p = softmax(z), without a gradient.

    Results are float32 [N], float64 where the inputs are. The entropy's gradient costs time only where a loss has it.
    """
    settings = (temperature, head.softcap, head.logit_scale, with_sum_p2)
    return _LinearLogp.apply(hidden, head.weight, targets, *settings, tile_shape(hidden, head.weight))


def tile_shape(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    if hidden.device.type == "cpu":
        return CPU_TILE
    tokens = max(1, min(hidden.shape[0], 8192))
    return tokens, CUDA_TILE_BYTES // 4 // max(tokens, weight.shape[1]) // 128 * 128   # logits, and the head's gradient


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, *settings):
        temperature, softcap, logit_scale, with_sum_p2, tile = settings
        top = hidden.new_full(targets.shape, -1e30, dtype=accumulate_dtype(hidden))   # [N] running maximum
        total = torch.zeros_like(top)                                                  # sum of e = exp(z - top)
        moment = torch.zeros_like(top)                                                 # sum of e (z - top)
        squares = torch.zeros_like(top)                                                # sum of e^2
        picked = torch.zeros_like(top)                                                 # the targets' logits
        absorb = _absorb
        if hidden.is_cuda:
            absorb = compiled(_absorb)
        with matmul(hidden, weight) as mm:
            for vocab in slices(weight.shape[0], tile[1]):
                head = mm.operand(weight[vocab])
                for rows in slices(hidden.shape[0], tile[0]):
                    z = _logits(mm, mm.operand(hidden[rows]), head, temperature, softcap, logit_scale)   # a tile
                    here, column = _find(targets[rows], vocab)
                    picked[rows] = torch.where(here, z.gather(1, column[:, None])[:, 0], picked[rows])
                    squares_of_rows = None
                    if with_sum_p2:
                        squares_of_rows = squares[rows]
                    absorb(z, top[rows], total[rows], moment[rows], squares_of_rows)
                    del z                                                              # before the next tile is made
                del head
        log_total = total.log()
        logp = picked - top - log_total
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, targets, top + log_total, entropy)
        ctx.settings = settings
        sum_p2 = None
        if with_sum_p2:
            sum_p2 = squares / total.square()
            ctx.mark_non_differentiable(sum_p2)
        ctx.set_materialize_grads(False)                                               # None for what is in no loss
        return logp, entropy, sum_p2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp, grad_entropy, _):
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        temperature, softcap, logit_scale, _, tile = ctx.settings
        if grad_logp is None:                                                          # a loss of the entropy alone
            grad_logp = torch.zeros_like(entropy)
        want_weight = ctx.needs_input_grad[1]
        dtype = accumulate_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype)
        grad_weight = torch.empty_like(weight) if want_weight else None
        slope_of = _slope
        if hidden.is_cuda:
            slope_of = compiled(_slope)
        with matmul(hidden, weight) as mm:
            for vocab in slices(weight.shape[0], tile[1]):
                head = mm.operand(weight[vocab])
                grad_head = torch.zeros_like(weight[vocab], dtype=dtype) if want_weight else None
                for rows in slices(hidden.shape[0], tile[0]):
                    h = mm.operand(hidden[rows])
                    z = _logits(mm, h, head, temperature, softcap, logit_scale)
                    slope = (1 - (z * (temperature / softcap)).square_()) if softcap else None
                    g = slope_of(z, logsumexp[rows], grad_logp[rows], entropy[rows],
                                 None if grad_entropy is None else grad_entropy[rows])
                    here, column = _find(targets[rows], vocab)
                    g.scatter_add_(1, column[:, None], (grad_logp[rows] * here)[:, None])
                    if softcap:
                        g *= slope
                    if logit_scale != temperature:
                        g *= logit_scale / temperature
                    g = mm.operand(g)
                    mm.add(grad_hidden[rows], g, head)
                    if want_weight:
                        mm.add(grad_head, g.T, h)
                    del z, g                                                           # before the next tile is made
                if want_weight:
                    grad_weight[vocab] = grad_head
                del head, grad_head
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 6


def _absorb(z: Tensor, top: Tensor, total: Tensor, moment: Tensor, squares: Tensor | None) -> None:
    """A tile of logits [n, v], which is overwritten, into what its rows have so far, in place."""
    new_top = torch.maximum(top, z.amax(dim=1))
    shift = top - new_top
    e = z.sub_(new_top[:, None]).exp()
    moment.add_(total * shift).mul_(shift.exp())
    total.mul_(shift.exp()).add_(e.sum(dim=1))
    if squares is not None:
        squares.mul_((2 * shift).exp()).add_((e * e).sum(dim=1))
    moment.add_(e.mul_(z).sum(dim=1))
    top.copy_(new_top)


def _slope(z: Tensor, logsumexp: Tensor, grad_logp: Tensor, entropy: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """The gradient by the logits of a tile [n, v], which are overwritten; the targets' own part is still missing."""
    z -= logsumexp[:, None]                                                            # log p
    if grad_entropy is None:
        return z.exp_().mul_(-grad_logp[:, None])
    g = (z + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None])   # dH/dz = -p (log p + H)
    return g.mul_(z.exp_())


@functools.cache
def compiled(function: Callable) -> Callable:
    """Small functions of many operations as one kernel each: on an H100 what is done to tiles was a sixth of a 0.6B
    model's update. The first call takes some seconds. "deterministic": another run must not choose other kernels.
    "compile_threads": a few small kernels need no pool of processes on each rank."""
    return torch.compile(function, dynamic=True, options={"deterministic": True, "compile_threads": 1})


def accumulate_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32


def slices(length: int, size: int):
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _find(targets: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this slice of the vocabulary, and their columns in it (0 for targets outside)."""
    here = (targets >= vocab.start) & (targets < vocab.stop)
    return here, torch.where(here, targets - vocab.start, 0)


def _logits(mm, h, head, temperature, softcap, logit_scale) -> Tensor:
    z = mm(h, head.T)
    if softcap:
        return z.mul_(logit_scale / softcap).tanh_().mul_(softcap / temperature)
    if logit_scale != temperature:
        z.mul_(logit_scale / temperature)
    return z


class _Matmul:
    """Products of low-precision operands with a float32 result; plain products for float32 and float64."""

    def __init__(self, dtype: torch.dtype, fused: bool):
        self.dtype = dtype
        self.fused = fused

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        if self.fused:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a @ b

    def add(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        if self.fused:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(a, b)


@contextlib.contextmanager
def matmul(hidden: Tensor, weight: Tensor):
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    low = dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden.device.type, enabled=False):
        if low and hidden.is_cuda:
            yield _Matmul(dtype, fused=True)
        elif dtype == torch.bfloat16 and hidden.device.type == "cpu":
            # CPU products of bfloat16 round their result to bfloat16. Float32 copies of bfloat16 numbers, multiplied in
            # oneDNN's bfloat16 units, are exact products summed in float32, 4x as fast as in float32 (measured, AMX).
            backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
            before, backend.fp32_precision = backend.fp32_precision, "bf16"
            try:
                yield _Matmul(torch.float32, fused=False)
            finally:
                backend.fp32_precision = before
        else:
            yield _Matmul(torch.float32 if low else dtype, fused=False)
