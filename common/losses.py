"""Per-token policy losses, KL estimators, the value loss, GAE, and the weights that turn sums into means.

Everything is flat: `[T]` packed tokens, `cu_seqlens [S+1]`. What stands where `mask` is False (prompt, tool output) is
never read, and a loss is 0 there. Statistics are per token, to be averaged over `mask`. The scale of a loss is data:
`token_weights` gives 1 / global denominator, so `(loss * weight).sum()` does not depend on how a mini-batch was cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from common.batch import Batch
from common.parallel.ranks import all_sum
from common.rollout import Minibatch
from common.segments import expand, moments, segment_cumsum, segment_mean, segment_sum

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def token_weights(minibatch: Minibatch, aggregation: str, masks: Sequence[Tensor] | None = None, *,
                  norm_length: float | None = None, counts_left_out: bool | None = None) -> list[Tensor]:
    """The weight of each token in one term of the loss: a list of float32 [T], one a micro-batch. The sum of
    (values * weight).sum() over all micro-batches and ranks is then the mean or sum that `aggregation` names over the
    whole mini-batch, however it was cut. All ranks call it together.

    `masks`: bool [T] for each micro-batch, the tokens of this term; None: every sampled token, `microbatch.mask`.
    token-mean divides by the tokens with mask, the seq-mean-* by the responses with any (an episode of several
    sequences is one response). `norm_length`: the constant by which seq-mean-token-sum-norm divides, too. Where no
    token has a mask (every response was rejected), all weights are 0.

    Responses that were left out of the mini-batch, because no term has a gradient on them, count in the denominators
    of the default mask. With `masks`, `counts_left_out` says whether all their tokens belong to this term.
    Raises ValueError if it must be given and is not, and if a mask is True where the policy sampled nothing."""
    minibatch.check_advantages()
    if masks is not None and minibatch.num_left_out and counts_left_out is None:
        raise ValueError(
            f"token_weights with masks: {minibatch.num_left_out} responses of this mini-batch were left out because "
            f"has_gradient is False for them, and this term may need them: let has_gradient be True for the responses "
            f"of this term in run.to_minibatches, and give counts_left_out=False here (True: this mean counts them)"
        )
    for batch, mask in zip(minibatch, masks or []):
        if (mask & ~batch.mask).any():
            raise ValueError("token_weights: a mask is True on a token that the policy did not sample, whose log-prob "
                             "is 0: combine it with microbatch.mask")
    used = [batch.mask for batch in minibatch] if masks is None else list(masks)
    left_out = minibatch.left_out_lengths * (counts_left_out is not False)
    here = left_out.new_zeros(len(left_out), device=used[0].device)
    for batch, mask in zip(minibatch, used, strict=True):
        here.index_add_(0, batch.index.clamp(min=0), segment_sum(mask.double(), batch.cu_seqlens))
    counts = all_sum(here) + left_out                                                   # [S] tokens of each response
    tokens, responses = int(counts.sum()), int((counts > 0).sum())
    norm = norm_length if aggregation == "seq-mean-token-sum-norm" else 1.0
    denominator = {"token-mean": tokens, "token-sum": 1.0}.get(aggregation, responses * norm)
    weights = []
    for batch, mask in zip(minibatch, used):
        weight = torch.full_like(batch.lengths, 1 / denominator if denominator else 0.0, dtype=torch.float64)
        if aggregation == "seq-mean-token-mean":
            weight /= counts.to(weight.device)[batch.index].clamp(min=1)                # [S']
        weights.append(torch.where(mask, expand(weight, batch.cu_seqlens, len(mask)), 0).float())
    return weights


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


def sapo(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None, *, tau_pos, tau_neg):
    """A soft gate, sigmoid(tau (q - 1)) 4 / tau, instead of clip bounds (Gao et al. 2025)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio = log_ratio.exp()
    tau = torch.where(advantage > 0, torch.full_like(ratio, tau_pos), tau_neg)
    return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, _stats(mask, log_ratio, ratio)


def clip_cov(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, selected: Tensor, **_):
    """PPO without dual clip; the tokens that `select_clip_cov` drew [T] have no gradient (Cui et al. 2025)."""
    loss, stats = ppo(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, clip_dual=None)
    return torch.where(selected, 0, loss), stats | {"actor/fraction": (selected & mask).to(loss.dtype)}


def kl_cov(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None, *, selected, cov_kl_coef, **_):
    """No clip; the tokens that `select_kl_cov` chose [T] also pay for moving away from old_logp (Cui et al. 2025)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    ratio, selected = log_ratio.exp(), selected & mask
    loss = -advantage * ratio + torch.where(selected, cov_kl_coef * (logp - old_logp).abs(), 0)
    return loss, _stats(mask, log_ratio, ratio) | {"actor/fraction": selected.to(loss.dtype)}


def dppo_tv(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, max_ratio):
    """Trust region on the change of the token's probability, p - p_old, instead of on its ratio (DPPO)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    change = logp.detach().exp() - old_logp.exp()
    keep = torch.where(advantage > 0, change <= clip_high, change >= -clip_low)
    return _dppo(keep, logp, log_ratio, advantage, mask, max_ratio)


def dppo_kl(logp, old_logp, advantage, mask, cu_seqlens, clip_low, clip_high, *, max_ratio):
    """The same with the distance KL(p_old, p) of the split in two, "this token or another"."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    p, p_old = logp.detach().exp(), old_logp.exp()
    other, other_old = ((-torch.expm1(x.detach())).log().clamp(min=-100) for x in (logp, old_logp))   # log(1 - p)
    distance = p_old * (old_logp - logp.detach()) + (1 - p_old) * (other_old - other)
    keep = torch.where(advantage > 0, (distance <= clip_high) | (p <= p_old), (distance <= clip_low) | (p >= p_old))
    return _dppo(keep, logp, log_ratio, advantage, mask, max_ratio)


def _dppo(keep, logp, log_ratio, advantage, mask, max_ratio):
    ratio = log_ratio.detach().exp()
    loss = torch.where(keep, -advantage * ratio.clamp(max=max_ratio) * logp, 0)
    return loss, _stats(mask, log_ratio, ratio, ~keep & (advantage > 0), ~keep & (advantage <= 0))


def dro(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None, *, beta):
    """-(A logp - beta / 2 (logp - old_logp)^2): a squared distance from the old policy instead of clip bounds (DRO)."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    return beta / 2 * (logp - old_logp).square() - advantage * logp, _stats(mask, log_ratio, log_ratio.exp())


def reinforce(logp, old_logp, advantage, mask, cu_seqlens, clip_low=None, clip_high=None):
    """-A logp: the plain policy gradient."""
    logp, old_logp, advantage, log_ratio = _prepare(mask, logp, old_logp, advantage)
    return -advantage * logp, _stats(mask, log_ratio, log_ratio.exp())


class LossSettings(NamedTuple):
    """A loss, its clip bounds, aggregation and further numbers. A bound of None: the loss has no such bound."""

    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None
    aggregation: str
    numbers: dict[str, float] = {}                                  # noqa: RUF012
    name: str = ""

    @property
    def bounds(self) -> dict[str, float]:
        return {name: x for name, x in self._asdict().items() if name.startswith("clip") and x is not None}

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of the function for a micro-batch, its selected tokens among them."""
        selected = {name: batch.extra[name] for name in ("selected",) if name in batch.extra}
        return self.bounds | self.numbers | selected

    def describe(self) -> str:
        numbers = self.bounds | self.numbers
        return ", ".join([self.name, *(f"{name} {x:g}" for name, x in numbers.items()), self.aggregation])


LOSSES = {                          # docs/from_verl.md has the sources of these numbers; the beta of dro must be given
    "ppo": LossSettings(ppo, 0.2, 0.2, 3.0, "token-mean"),
    "grpo": LossSettings(ppo, 0.2, 0.2, 3.0, "token-mean"),
    "dapo": LossSettings(ppo, 0.2, 0.28, 3.0, "token-mean"),
    "dr_grpo": LossSettings(ppo, 0.2, 0.2, 3.0, "seq-mean-token-sum-norm"),
    "gspo": LossSettings(gspo, 3e-4, 4e-4, None, "seq-mean-token-mean"),
    "gmpo": LossSettings(gmpo, 0.4, 0.4, None, "seq-mean-token-mean"),
    "cispo": LossSettings(cispo, 1.0, 0.28, None, "token-mean"),
    "sapo": LossSettings(sapo, None, None, None, "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "clip_cov": LossSettings(clip_cov, 1.0, 1.0, None, "token-mean", {"fraction": 2e-4, "cov_low": 1, "cov_high": 5}),
    "kl_cov": LossSettings(kl_cov, None, None, None, "token-mean", {"fraction": 2e-4, "cov_kl_coef": 1.0}),
    "dppo_tv": LossSettings(dppo_tv, 0.15, 0.15, None, "token-mean", {"max_ratio": 20.0}),
    "dppo_kl": LossSettings(dppo_kl, 0.05, 0.05, None, "token-mean", {"max_ratio": 20.0}),
    "dro": LossSettings(dro, None, None, None, "token-mean", {"beta": 0.0}),
    "reinforce": LossSettings(reinforce, None, None, None, "token-mean"),
}
PolicyLoss = Literal[*LOSSES]


def resolve_loss(name: str, clip_low: float | None, clip_high: float | None, clip_dual: float | None,
                 aggregation: str | None, numbers: dict[str, float]) -> LossSettings:
    """The flags that were given, and for the others the values of the loss's paper. Raises ValueError for a bound or
    number that the loss does not have, or one that cannot be meant."""
    default = LOSSES[name]
    given = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual, "aggregation": aggregation}
    given = {field: value for field, value in given.items() if value is not None}
    for field, value in given.items():
        if getattr(default, field) is None:
            raise ValueError(f"--{field.replace('_', '-')} {value}: the loss {name} has no such bound; leave it out")
    settings = default._replace(**given, numbers=default.numbers | numbers, name=name)
    for number, value in settings.numbers.items():
        if number not in default.numbers or value <= 0:
            raise ValueError(f"--loss-numbers {number} {value:g}: must be above 0, and --loss {name} has only these: "
                             f"{', '.join(default.numbers) or 'none'}")
    low, high, dual = settings.clip_low, settings.clip_high, settings.clip_dual
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
    count = segment_cumsum(mask.long(), cu_seqlens)                                     # [T] masked so far
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


def mean_kl(kl: Tensor, batch: Batch) -> float:
    """The KL [T] in the reward, averaged over each response and then over the responses of all ranks, as in verl. The
    adaptive controller aims at this number."""
    per_response = segment_mean(kl.double(), batch.mask, batch.cu_seqlens)              # [S]
    has_tokens = segment_sum(batch.mask.double(), batch.cu_seqlens) > 0
    return moments(per_response[has_tokens])[1]


def gae(reward: Tensor, value: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2015) -> advantage [T] and returns = advantage + value [T].

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; t + 1 is the next token with mask, 0 after
    the last. With value 0 and lam 1, A is the discounted return-to-go.
    """
    counts = segment_sum(mask.double(), cu_seqlens).long()                              # [S] tokens with mask
    r, v = reward[mask], value[mask]                                                    # [N] holes closed
    last = (counts.cumsum(0) - 1).repeat_interleave(counts)                             # [N] of the same response
    after = last - torch.arange(len(v), device=v.device)                                # [N] tokens that follow
    advantage = r + gamma * torch.where(after > 0, v.roll(-1), 0) - v                   # delta, the sum's first term
    for k in (2**i for i in range(len(v).bit_length())):                                # of k terms -> of 2 k
        advantage = advantage + (gamma * lam) ** k * torch.where(after >= k, advantage.roll(-k), 0)
    full = torch.zeros_like(value).masked_scatter(mask, advantage)
    return full, torch.where(mask, full + value, 0)
