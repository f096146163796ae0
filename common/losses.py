"""Per-token policy losses, KL estimators, the value loss, GAE, and the weights that turn sums into means.

Everything is flat: `[T]` packed tokens, `cu_seqlens [S+1]`. What stands where `mask` is False (prompt, tool output) is
never read, and a loss is 0 there. Statistics are per token, to be averaged over `mask`. The scale of a loss is data:
`set_token_weights` writes 1 / global denominator, so `(loss * weight).sum()` does not depend on how it was cut.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.batch import Batch
from common.parallel.ranks import all_max, all_sum
from common.segments import expand, moments, segment_mean, segment_sum

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def set_token_weights(microbatches: list, aggregation: str, norm_length: float | None = None,
                      skipped_lengths: Tensor | None = None) -> tuple[int, int]:
    """Write `microbatch.weight` [T], so that (loss * weight).sum() over all micro-batches and ranks aggregates.

    Returns the global numbers of tokens with mask and of responses with any. Where they are 0 (every response was
    rejected) all weights are 0. `norm_length` is the constant of seq-mean-token-sum-norm; the others ignore it.
    `skipped_lengths` [S]: tokens of this mini-batch's responses that run in no micro-batch, on every rank the same;
    0 for all other responses of the step; None: all run. An episode of several sequences is one response.
    """
    if skipped_lengths is None:
        num_responses = 1 + int(all_max([max(int(batch.index.max()) for batch in microbatches)]))
        skipped_lengths = torch.zeros(num_responses, dtype=torch.float64)
    here = skipped_lengths.new_zeros(len(skipped_lengths), device=microbatches[0].tokens.device)
    for batch in microbatches:
        here.index_add_(0, batch.index.clamp(min=0), segment_sum(batch.mask.double(), batch.cu_seqlens))
    counts = all_sum(here) + skipped_lengths                                            # [S] tokens of each response
    tokens, responses = int(counts.sum()), int((counts > 0).sum())
    norm = norm_length if aggregation == "seq-mean-token-sum-norm" else 1.0
    denominator = {"token-mean": tokens, "token-sum": 1.0}.get(aggregation, responses * norm)
    for batch in microbatches:
        weight = torch.full_like(batch.lengths, 1 / denominator if denominator else 0.0, dtype=torch.float64)
        if aggregation == "seq-mean-token-mean":
            weight /= counts.to(weight.device)[batch.index].clamp(min=1)                # [S']
        batch.weight = torch.where(batch.mask, expand(weight, batch.cu_seqlens, len(batch.mask)), 0).float()
    return tokens, responses


def check_finite(name: str, x: Tensor, batch) -> None:
    """Refuse NaN and infinity in a per-token tensor [T], naming the response."""
    if not torch.isfinite(x).all():                                                     # one read of a GPU's value
        bad = (~torch.isfinite(x)).nonzero()[:, 0].tolist()
        response = int(batch.index[batch.sequence_ids[bad[0]]])
        raise ValueError(f"{name} is {x[bad[0]].item()} for response {response} at its token "
                         f"{int(batch.position_ids[bad[0]])}, {len(bad)} such values in this batch: look at the "
                         f"grad_norm and learning rate of earlier steps, and at this response's text")


def _prepare(mask: Tensor, logp: Tensor, old_logp: Tensor, advantage: Tensor) -> tuple[Tensor, ...]:
    """The three and the log ratio. What stands outside the mask becomes 0 first: a NaN there would reach the gradient
    through a later `where`."""
    logp, old_logp, advantage = (torch.where(mask, x, 0) for x in (logp, old_logp, advantage))
    return logp, old_logp, advantage, (logp - old_logp).clamp(-20, 20)


def _stats(mask, log_ratio, ratio, high=None, low=None, capped=None) -> dict[str, Tensor]:
    """`high`, `low`: clipped at the upper, lower bound; `capped`: held by the dual clip. ppo_kl: KL(old || current)."""
    high, low, capped = (torch.zeros_like(mask) if x is None else x for x in (high, low, capped))
    stats = {"actor/pg_clipfrac": high | low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low,
             "actor/pg_clipfrac_lower": capped, "actor/ppo_kl": -log_ratio, "actor/ratio": ratio}
    return {name: torch.where(mask, x.detach().to(ratio.dtype), 0) for name, x in stats.items()}


def _clip(ratio, clip_low, clip_high):
    """Bounds are numbers, or tensors [T] with one for each token."""
    return ratio.clamp(min=1 - clip_low).clamp(max=1 + clip_high)


def _clipped(ratio, advantage, clip_low, clip_high, clip_dual):
    """max(-A q, -A clip(q)), where A < 0 at most -A clip_dual; and what was clipped: high, low, capped."""
    plain, clipped = -advantage * ratio, -advantage * _clip(ratio, clip_low, clip_high)
    loss, cut = torch.maximum(plain, clipped), clipped > plain
    capped = torch.zeros_like(cut)
    if clip_dual is not None:
        ceiling = -advantage * clip_dual
        capped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
    return loss, (cut & (advantage > 0), cut & (advantage < 0), capped)


def ppo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, clip_dual: float | None = 3.0):
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with dual clip (Ye et al. 2020)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio = log_ratio.exp()
    loss, cut = _clipped(ratio, advantage, clip_low, clip_high, clip_dual)
    return loss, _stats(mask, log_ratio, ratio, *cut)


def gspo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, clip_dual: float | None = None):
    """One ratio a sequence, exp(mean log ratio), whose gradient flows through each token's own logp (GSPO-token)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    mean = expand(segment_mean((logp - old_logp).detach(), mask, cu_seqlens), cu_seqlens, len(logp))
    ratio = (mean + logp - logp.detach()).clamp(-20, 20).exp()
    loss, cut = _clipped(ratio, advantage, clip_low, clip_high, clip_dual)
    return loss, _stats(mask, log_ratio, ratio, *cut)


def gmpo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high):
    """Geometric mean of token ratios that are clipped in log space to [-clip_low, clip_high] (Zhao et al. 2025)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    high, low = (advantage > 0) & (log_ratio > clip_high), (advantage < 0) & (log_ratio < -clip_low)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, log_ratio))
    loss = -segment_mean(advantage, mask, cu_seqlens) * segment_mean(clipped, mask, cu_seqlens).exp()   # [S]
    loss = torch.where(mask, expand(loss, cu_seqlens, len(logp)), 0)
    return loss, _stats(mask, log_ratio, log_ratio.exp(), high, low)


def cispo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high):
    """REINFORCE with a clipped, detached importance weight: no token loses its gradient (MiniMax-M1)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio = log_ratio.detach().exp()
    loss = -_clip(ratio, clip_low, clip_high) * advantage * logp
    return loss, _stats(mask, log_ratio, ratio, ratio > 1 + clip_high, ratio < 1 - clip_low)


def sapo(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None, *, tau_pos=1.0, tau_neg=1.05):
    """A soft gate, sigmoid(tau (q - 1)) 4 / tau, instead of clip bounds (Gao et al. 2025)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio = log_ratio.exp()
    tau = torch.where(advantage > 0, torch.full_like(ratio, tau_pos), tau_neg)
    return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, _stats(mask, log_ratio, ratio)


def clip_cov(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, selected: Tensor):
    """PPO without dual clip; the tokens that `select_clip_cov` drew [T] have no gradient (Cui et al. 2025)."""
    loss, stats = ppo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, clip_dual=None)
    return torch.where(selected, 0, loss), stats | {"actor/selected_frac": (selected & mask).to(loss.dtype)}


def kl_cov(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None, *, selected, ppo_kl_coef=1.0):
    """No clip; the tokens that `select_kl_cov` chose [T] also pay for moving away from old_logp (Cui et al. 2025)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio, selected = log_ratio.exp(), selected & mask
    loss = -advantage * ratio + torch.where(selected, ppo_kl_coef * (logp - old_logp).abs(), 0)
    return loss, _stats(mask, log_ratio, ratio) | {"actor/selected_frac": selected.to(loss.dtype)}


def dppo_tv(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high):
    """Trust region on the change of the token's probability, p - p_old, instead of on its ratio (DPPO)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    change = logp.detach().exp() - old_logp.exp()
    keep = torch.where(advantage > 0, change <= clip_high, change >= -clip_low)
    return _dppo(keep, logp, log_ratio, advantage, mask)


def dppo_kl(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high):
    """The same with the distance KL(p_old, p) of the split in two, "this token or another"."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    p, p_old = logp.detach().exp(), old_logp.exp()
    other, other_old = ((-torch.expm1(x.detach())).log().clamp(min=-100) for x in (logp, old_logp))   # log(1 - p)
    distance = p_old * (old_logp - logp.detach()) + (1 - p_old) * (other_old - other)
    keep = torch.where(advantage > 0, (distance <= clip_high) | (p <= p_old), (distance <= clip_low) | (p >= p_old))
    return _dppo(keep, logp, log_ratio, advantage, mask)


def _dppo(keep, logp, log_ratio, advantage, mask):
    ratio = log_ratio.detach().exp()
    loss = torch.where(keep, -advantage * ratio.clamp(max=20) * logp, 0)
    return loss, _stats(mask, log_ratio, ratio, ~keep & (advantage > 0), ~keep & (advantage <= 0))


def reinforce(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None):
    """-A logp: the plain policy gradient."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    return -advantage * logp, _stats(mask, log_ratio, log_ratio.exp())

class LossSettings(NamedTuple):
    """Clip bounds and aggregation of a loss. A bound of None: the loss has no such bound."""

    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None
    aggregation: str

    @property
    def bounds(self) -> dict[str, float]:
        """The keyword arguments of the loss function."""
        return {name: x for name, x in self._asdict().items() if name != "aggregation" and x is not None}

    def describe(self) -> str:
        return ", ".join([*(f"{name} {x:g}" for name, x in self.bounds.items()), self.aggregation])


POLICY_LOSSES = {
    "ppo": ppo, "grpo": ppo, "dapo": ppo, "dr_grpo": ppo, "gspo": gspo, "gmpo": gmpo, "cispo": cispo, "sapo": sapo,
    "clip_cov": clip_cov, "kl_cov": kl_cov, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "reinforce": reinforce,
}
LOSS_DEFAULTS = {
    "ppo": LossSettings(0.2, 0.2, 3.0, "token-mean"),
    "grpo": LossSettings(0.2, 0.2, 3.0, "token-mean"),
    "dapo": LossSettings(0.2, 0.28, 3.0, "token-mean"),
    "dr_grpo": LossSettings(0.2, 0.2, 3.0, "seq-mean-token-sum-norm"),
    "gspo": LossSettings(3e-4, 4e-4, None, "seq-mean-token-mean"),
    "gmpo": LossSettings(0.4, 0.4, None, "seq-mean-token-mean"),
    "cispo": LossSettings(1.0, 0.28, None, "token-mean"),
    "sapo": LossSettings(None, None, None, "seq-mean-token-mean"),
    "clip_cov": LossSettings(0.2, 0.2, None, "token-mean"),
    "kl_cov": LossSettings(None, None, None, "token-mean"),
    "dppo_tv": LossSettings(0.15, 0.15, None, "token-mean"),
    "dppo_kl": LossSettings(0.05, 0.05, None, "token-mean"),
    "reinforce": LossSettings(None, None, None, "token-mean"),
}


def resolve_loss(name: str, clip_low: float | None, clip_high: float | None, clip_dual: float | None,
                 aggregation: str | None) -> LossSettings:
    """The flags that were given, and for the others the values of the loss's paper.

    Raises ValueError for a bound that the loss does not have, or one that cannot be meant.
    """
    given = LossSettings(clip_low, clip_high, clip_dual, aggregation)
    default = LOSS_DEFAULTS[name]
    for field, value, own in zip(given._fields, given, default):
        if value is not None and own is None:
            raise ValueError(f"--{field.replace('_', '-')} {value}: the loss {name} has no such bound; leave it out")
    settings = LossSettings(*(own if value is None else value for value, own in zip(given, default)))
    low, high, dual, _ = settings
    if low is not None and not 0 <= low <= 1:
        raise ValueError(f"--clip-low {low} must be in [0, 1]")
    if high is not None and high < (low if low < 1 else 0):
        raise ValueError(f"--clip-high {high} must be at least --clip-low {low} (or 0, if that is 1: no lower bound)")
    if dual is not None and dual <= 1:
        raise ValueError(f"--clip-dual {dual} must be above 1")
    return settings


# --------------------------------------------------------------------------- rewards on tokens, KL, value loss, GAE

def on_last_token(reward: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] -> [T]: each response's number on its last token with mask (a tool's token would lose it); 0 elsewhere."""
    count = mask.long().cumsum(0)                                                       # [T] masked so far
    last = mask & (count == expand(count[cu_seqlens[1:].long() - 1], cu_seqlens, len(mask)))
    return torch.where(last, expand(reward, cu_seqlens, len(mask)), 0)


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimators of KL(pi || ref) from samples of pi (Schulman 2020), per token. A `+` at the end keeps the value and
    takes k2's gradient, which is in expectation the gradient of KL; those of k1 and k3 are not."""
    d, name = logp - ref_logp, kind.removesuffix("+")
    minus_d = (-d).clamp(-20, 20)
    k2, k3 = d.square() / 2, (torch.expm1(minus_d) - minus_d).clamp(-10, 10)
    values = {"k1": d, "abs": d.abs(), "k2": k2, "mse": k2, "k3": k3, "low_var_kl": k3}
    return values[name].detach() + k2 - k2.detach() if kind.endswith("+") else values[name]


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, num_responses: int) -> float:
    """The next coefficient of the KL in the reward, moved so that the KL stays near `target` (Ziegler 2019)."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_responses / horizon)


def mean_kl(kl: Tensor, batch: Batch) -> float:
    """The KL [T] in the reward, averaged over each response and then over the responses of all ranks, as in verl. The
    adaptive controller aims at this number."""
    per_response = segment_mean(kl.double(), batch.mask, batch.cu_seqlens)              # [S]
    has_tokens = segment_sum(batch.mask.double(), batch.cu_seqlens) > 0
    return moments(per_response[has_tokens])[1]


def value_loss(value, old_value, returns, mask, clip: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the larger of the squared errors of the value and of the value clipped around the old one: [T]."""
    value, old_value, returns = (torch.where(mask, x, 0) for x in (value, old_value, returns))
    clipped = torch.minimum(torch.maximum(value, old_value - clip), old_value + clip)
    plain_error, clipped_error = (value - returns).square(), (clipped - returns).square()
    stats = {"critic/vf_clipfrac": (clipped_error > plain_error).to(value.dtype), "critic/vpred_mean": value.detach()}
    return torch.maximum(plain_error, clipped_error) / 2, stats


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - value) / var(returns) over all tokens with mask on all ranks; 0 where returns do not vary."""
    total, left = (moments(x[mask].double())[2] for x in (returns, returns - value))
    return 1 - left / total if total > 0 else 0.0


def gae(reward: Tensor, value: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2015) -> advantage [T] and returns = advantage + value [T].

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; t + 1 is the next token with mask, 0 after
    the last. With value 0 and lam 1, A is the discounted return-to-go.
    """
    counts = segment_sum(mask.double(), cu_seqlens).long()                              # [S] tokens with mask
    ends, (counts, order) = counts.cumsum(0), counts.sort(descending=True)              # longest first
    ends, lengths = ends[order], counts.tolist()                                        # ends: one past each last token
    r, v = reward[mask], value[mask]                                                    # holes closed
    advantage, carried, following = torch.zeros_like(v), v.new_zeros(len(counts)), v.new_zeros(len(counts))
    alive = len(lengths)
    for step in range(max(lengths, default=0)):                                         # from the last token backwards
        while lengths[alive - 1] <= step:
            alive -= 1
        at = ends[:alive] - 1 - step
        carried[:alive] = r[at] + gamma * following[:alive] - v[at] + gamma * lam * carried[:alive]
        advantage[at], following[:alive] = carried[:alive], v[at]
    full = torch.zeros_like(value).masked_scatter(mask, advantage)
    return full, torch.where(mask, full + value, 0)
