"""The losses of grpo_variants.py: what was published beside PPO and GRPO, each as a function of one signature.

Everything is flat: [T] packed tokens, `cu_seqlens` [S+1]. What stands where `mask` is False (prompt, tool output) is
never read, and a loss is 0 there. Statistics are per token, to be averaged over `mask`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.batch import Batch
from common.segments import expand, segment_mean
from variants.settings import LOSSES as LOSSES
from variants.settings import LossSettings as LossSettings
from variants.settings import PolicyLoss as PolicyLoss


class Tokens:
    """What the loss of a micro-batch's tokens is computed from. `log_ratio` is clamped, so that exp stays finite."""

    def __init__(self, logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, cu_seqlens: Tensor,
                 selected: Tensor | None = None):
        """[T] each; `selected`: bool, for clip_cov and kl_cov. What stands outside the mask becomes 0 first: a NaN
        there would reach the gradient through a later `where`."""
        self.logp, self.old_logp, self.advantage = (torch.where(mask, x, 0) for x in (logp, old_logp, advantage))
        self.log_ratio = (self.logp - self.old_logp).clamp(-20, 20)
        self.mask = mask
        self.cu_seqlens = cu_seqlens
        self.selected = None if selected is None else selected & mask

    def mean(self, x: Tensor) -> Tensor:
        """[T] -> [S]: the mean over each sequence's tokens with mask."""
        return segment_mean(x, self.mask, self.cu_seqlens)


def _stats(tokens: Tokens, ratio: Tensor, high=None, low=None, capped=None) -> dict[str, Tensor]:
    """`high`, `low`: clipped at the upper, lower bound; `capped`: held by the dual clip. ppo_kl: KL(old || current)."""
    mask = tokens.mask
    high, low, capped = (torch.zeros_like(mask) if x is None else x for x in (high, low, capped))
    stats = {"actor/pg_clipfrac": high | low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low,
             "actor/pg_clipfrac_lower": capped, "actor/ppo_kl": -tokens.log_ratio, "actor/ratio": ratio}
    return {name: torch.where(mask, x.detach().to(ratio.dtype), 0) for name, x in stats.items()}


def _clip(ratio, clip_low, clip_high):
    """Bounds are numbers, or tensors [T] with one for each token."""
    return ratio.clamp(min=1 - clip_low).clamp(max=1 + clip_high)


def _surrogate(tokens: Tokens, ratio, clip_low, clip_high, clip_dual):
    """max(-A q, -A clip(q)), where A < 0 at most -A clip_dual; and the statistics."""
    advantage = tokens.advantage
    plain, clipped = -advantage * ratio, -advantage * _clip(ratio, clip_low, clip_high)
    loss, cut = torch.maximum(plain, clipped), clipped > plain
    capped = None
    if clip_dual is not None:
        ceiling = -advantage * clip_dual
        capped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
    return loss, _stats(tokens, ratio, cut & (advantage > 0), cut & (advantage < 0), capped)


def ppo(tokens: Tokens, clip_low, clip_high, clip_dual: float | None = 3.0):
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with dual clip (Ye et al. 2020)."""
    return _surrogate(tokens, tokens.log_ratio.exp(), clip_low, clip_high, clip_dual)


def gspo(tokens: Tokens, clip_low, clip_high, clip_dual: float | None = None):
    """One ratio a sequence, exp(mean log ratio), whose gradient flows through each token's own logp (GSPO-token,
    Zheng et al. 2025, arXiv 2507.18071)."""
    mean = expand(tokens.mean((tokens.logp - tokens.old_logp).detach()), tokens.cu_seqlens, len(tokens.mask))
    ratio = (mean + tokens.logp - tokens.logp.detach()).clamp(-20, 20).exp()
    return _surrogate(tokens, ratio, clip_low, clip_high, clip_dual)


def gmpo(tokens: Tokens, clip_low, clip_high):
    """Geometric mean of token ratios that are clipped in log space to [-clip_low, clip_high] (Zhao et al. 2025,
    arXiv 2507.20673)."""
    log_ratio, advantage = tokens.log_ratio, tokens.advantage
    high, low = (advantage > 0) & (log_ratio > clip_high), (advantage < 0) & (log_ratio < -clip_low)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, log_ratio))
    loss = -tokens.mean(advantage) * tokens.mean(clipped).exp()                                 # [S]
    loss = torch.where(tokens.mask, expand(loss, tokens.cu_seqlens, len(tokens.mask)), 0)
    return loss, _stats(tokens, log_ratio.exp(), high, low)


def cispo(tokens: Tokens, clip_low, clip_high):
    """REINFORCE with a clipped, detached importance weight: no token loses its gradient (MiniMax-M1, arXiv
    2506.13585)."""
    ratio = tokens.log_ratio.detach().exp()
    loss = -_clip(ratio, clip_low, clip_high) * tokens.advantage * tokens.logp
    return loss, _stats(tokens, ratio, ratio > 1 + clip_high, ratio < 1 - clip_low)


def sapo(tokens: Tokens, clip_low=None, clip_high=None, *, tau_pos, tau_neg):
    """A soft gate, sigmoid(tau (q - 1)) 4 / tau, instead of clip bounds (Gao et al. 2025, arXiv 2511.20347)."""
    ratio = tokens.log_ratio.exp()
    tau = torch.where(tokens.advantage > 0, torch.full_like(ratio, tau_pos), tau_neg)
    return -tokens.advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, _stats(tokens, ratio)


def clip_cov(tokens: Tokens, clip_low, clip_high, **_):
    """PPO without dual clip; the tokens that `select_clip_cov` drew [T] have no gradient (Cui et al. 2025, arXiv
    2505.22617)."""
    loss, stats = ppo(tokens, clip_low, clip_high, clip_dual=None)
    return torch.where(tokens.selected, 0, loss), stats | {"actor/fraction": tokens.selected.to(loss.dtype)}


def kl_cov(tokens: Tokens, clip_low=None, clip_high=None, *, cov_kl_coef, **_):
    """No clip; the tokens that `select_kl_cov` chose [T] also pay for moving away from old_logp (Cui et al. 2025)."""
    ratio = tokens.log_ratio.exp()
    penalty = cov_kl_coef * (tokens.logp - tokens.old_logp).abs()
    loss = -tokens.advantage * ratio + torch.where(tokens.selected, penalty, 0)
    return loss, _stats(tokens, ratio) | {"actor/fraction": tokens.selected.to(loss.dtype)}


def dppo_tv(tokens: Tokens, clip_low, clip_high, *, max_ratio):
    """Trust region on the change of the token's probability, p - p_old, instead of on its ratio (DPPO, Qi et al. 2026,
    arXiv 2602.04879)."""
    change = tokens.logp.detach().exp() - tokens.old_logp.exp()
    keep = torch.where(tokens.advantage > 0, change <= clip_high, change >= -clip_low)
    return _dppo(tokens, keep, max_ratio)


def dppo_kl(tokens: Tokens, clip_low, clip_high, *, max_ratio):
    """The same with the distance KL(p_old, p) of the split in two, "this token or another"."""
    logp, old_logp = tokens.logp.detach(), tokens.old_logp
    p, p_old = logp.exp(), old_logp.exp()
    other, other_old = ((-torch.expm1(x.detach())).log().clamp(min=-100) for x in (logp, old_logp))   # log(1 - p)
    distance = p_old * (old_logp - logp) + (1 - p_old) * (other_old - other)
    up = (distance <= clip_high) | (p <= p_old)
    down = (distance <= clip_low) | (p >= p_old)
    return _dppo(tokens, torch.where(tokens.advantage > 0, up, down), max_ratio)


def _dppo(tokens: Tokens, keep: Tensor, max_ratio: float):
    ratio, is_positive = tokens.log_ratio.detach().exp(), tokens.advantage > 0
    loss = torch.where(keep, -tokens.advantage * ratio.clamp(max=max_ratio) * tokens.logp, 0)
    return loss, _stats(tokens, ratio, ~keep & is_positive, ~keep & ~is_positive)


def dro(tokens: Tokens, clip_low=None, clip_high=None, *, beta):
    """-(A logp - beta / 2 (logp - old_logp)^2): a squared distance from the old policy instead of clip bounds. DRO
    (Richemond et al. 2024, arXiv 2405.19107) has log-probs of whole responses here, and a learned baseline in A."""
    distance = (tokens.logp - tokens.old_logp).square()
    return beta / 2 * distance - tokens.advantage * tokens.logp, _stats(tokens, tokens.log_ratio.exp())


def reinforce(tokens: Tokens, clip_low=None, clip_high=None):
    """-A logp: the plain policy gradient."""
    return -tokens.advantage * tokens.logp, _stats(tokens, tokens.log_ratio.exp())


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo": ppo,
    "grpo": ppo,
    "dapo": ppo,
    "dr_grpo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": reinforce,
}
"""--loss -> its function. variants/settings.py has the bounds and numbers."""


def token_loss(settings: LossSettings, logp: Tensor, old_logp: Tensor,
               batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token of a micro-batch [T], and numbers to report of each."""
    tokens = Tokens(logp, old_logp, batch.advantage, batch.mask, batch.cu_seqlens, batch.extra.get("selected"))
    return FUNCTIONS[settings.name](tokens, **settings.bounds, **settings.numbers)
