"""The weights that turn a loss per token into a mean, KL estimators, rewards on tokens, and GAE.

Everything is flat: `[T]` packed tokens, `cu_seqlens [S+1]`. The scale of a loss is data: `token_weights` gives
1 / global denominator, so `(loss * weight).sum()` does not depend on how a mini-batch was cut. The loss itself stands
in the script that has the paper's name; published variants are in variants/losses.py.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from common.batch import Batch
from common.flags.rules import Aggregation
from common.flags.rules import check_clip as check_clip
from common.flags.rules import check_group as check_group
from common.parallel.ranks import all_sum
from common.rollout import Minibatch
from common.segments import expand, has_any, moments, segment_cumsum, segment_mean, segment_sum


def token_weights(minibatch: Minibatch, aggregation: str, masks: Sequence[Tensor] | None = None, *,
                  norm_length: float | None = None) -> list[Tensor]:
    """The weight of each token in one term of the loss: a list of float32 [T], one a micro-batch. The sum of
    (values * weight).sum() over all micro-batches and ranks is then the mean or sum that `aggregation` names over the
    whole mini-batch, however it was cut. All ranks call it together.

    `masks`: bool [T] for each micro-batch, the tokens of this term; None: every sampled token, `microbatch.mask`.
    token-mean divides by the tokens with mask, the seq-mean-* by the responses with any (an episode of several
    sequences is one response). `norm_length`: the constant by which seq-mean-token-sum-norm divides, too. Where no
    token has a mask (every response was rejected), all weights are 0.

    Responses that were left out of the mini-batch (skip_zero_advantage of run.to_minibatches) count in the denominators
    with all tokens that the policy sampled. Raises ValueError for `masks` where some were, because nobody can ask them
    for theirs, if a mask is True where the policy sampled nothing, and for another `aggregation`."""
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"token_weights: {aggregation!r} must be one of {', '.join(get_args(Aggregation))}")
    if masks is not None and minibatch.num_left_out:
        raise ValueError(
            f"token_weights with masks: {minibatch.num_left_out} responses of this mini-batch were left out because "
            f"their advantage is 0, and this term may need them: give skip_zero_advantage=False to run.to_minibatches"
        )
    divides = aggregation == "seq-mean-token-sum-norm"
    if divides and not (norm_length or 0) > 0:
        raise ValueError(f"token_weights: norm_length is {norm_length}: {aggregation} divides by this constant, which "
                         f"must be above 0, e.g. args.rollout.max_response_length")
    used = [batch.mask for batch in minibatch] if masks is None else list(masks)
    for batch, mask in zip(minibatch, used, strict=True):
        if mask is not batch.mask and (mask & ~batch.mask).any():
            raise ValueError("token_weights: a mask is True on a token that the policy did not sample, whose log-prob "
                             "is 0: combine it with microbatch.mask")
    # one entry more: dummies add their 0 somewhere, also where there are no responses
    left_out = torch.nn.functional.pad(minibatch.left_out_lengths, (0, 1))
    here = left_out.new_zeros(len(left_out), device=used[0].device)
    for batch, mask in zip(minibatch, used):
        here.index_add_(0, batch.index.clamp(min=0), segment_sum(mask.double(), batch.cu_seqlens))
    counts = all_sum(here) + left_out                                                   # [S] tokens of each response
    tokens, responses = int(counts.sum()), int((counts > 0).sum())
    norm = norm_length if divides else 1.0
    denominator = {"token-mean": tokens, "token-sum": 1.0}.get(aggregation, responses * norm)
    weight = 1 / denominator if denominator else 0.0
    of_response = torch.full_like(counts, weight)                                       # [S]
    if aggregation == "seq-mean-token-mean":
        of_response /= counts.clamp(min=1)
    return [torch.where(mask, batch.to_tokens(of_response), 0) for batch, mask in zip(minibatch, used)]


def ratio_stats(log_ratio: Tensor) -> dict[str, Tensor]:
    """What the scripts report of log p - log p_old, [T] each, under verl's names: KL(old || current) and the ratio."""
    log_ratio = log_ratio.clamp(-20, 20)
    return {"actor/ppo_kl": -log_ratio, "actor/ratio": log_ratio.exp()}


def clip_stats(advantage: Tensor, is_clipped: Tensor, is_capped: Tensor) -> dict[str, Tensor]:
    """What the scripts report of a clipped loss, [T] each, under verl's names: where the clip acts (`is_clipped`; it is
    the upper bound for positive and the lower one for negative advantages), and where the dual clip does. Raises
    ValueError for an advantage with a gradient of its own, which clipped losses do not mean."""
    if advantage.requires_grad:
        raise ValueError("the advantage has a gradient, which would flow into what it was made of (a log-prob, an "
                         "entropy, a value): write .detach() after that, or add it as a term of the loss")
    return {
        "actor/pg_clipfrac": is_clipped,
        "actor/pg_clipfrac_high": is_clipped & (advantage > 0),
        "actor/pg_clipfrac_low": is_clipped & (advantage < 0),
        "actor/pg_clipfrac_lower": is_capped,
    }


# --------------------------------------------------------------------------- rewards on tokens, KL, value loss, GAE

def on_last_token(reward: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] -> [T]: each response's number on its last token with mask (a tool's token would lose it); 0 elsewhere."""
    count = segment_cumsum(mask.long(), cu_seqlens)                                     # [T] masked so far
    last = mask & (count == expand(count[cu_seqlens[1:].long() - 1], cu_seqlens, len(mask)))
    return torch.where(last, expand(reward, cu_seqlens, len(mask)), 0)


def derivative(loss: Tensor, values: Tensor) -> Tensor:
    """The derivative of a loss [] by the log-probs or rewards of answers [S], of which it is a function: float32 [S].
    Raises ValueError for one that is not finite though the values are: its gradient would be the whole step's."""
    found = torch.autograd.grad(loss, values)[0]
    if values.isfinite().all() and not found.isfinite().all():
        first = int((~found.isfinite()).nonzero()[0])
        raise ValueError(f"the loss's derivative by the log-prob or reward of answer {first} of this step, "
                         f"{values[first]:g}, is {found[first]:g}: the loss must have a finite slope there")
    return found.float()


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimators of KL(pi || ref) from samples of pi (Schulman 2020), per token. A `+` at the end keeps the value and
    takes k2's gradient, which is in expectation the gradient of KL; those of k1 and k3 are not. k3 is at most 10, as in
    verl: where p_ref is more than 14 times p, its value is too small, and it has no gradient."""
    d = logp - ref_logp                                                                 # [T]
    k2 = d.square() / 2
    if kind.endswith("+"):
        return kl_estimate(logp, ref_logp, kind.removesuffix("+")).detach() + k2 - k2.detach()
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind in ("k2", "mse"):
        return k2
    if kind in ("k3", "low_var_kl"):
        minus_d = (-d).clamp(-20, 20)
        return (torch.expm1(minus_d) - minus_d).clamp(-10, 10)
    raise ValueError(f"kl_estimate: {kind!r} must be one of k1, abs, k2 (mse), k3 (low_var_kl), or one of them and +")


def mean_kl(kl: Tensor, batch: Batch) -> float:
    """The KL [T] in the reward, averaged over each response and then over the responses of all ranks, as in verl. The
    adaptive controller aims at this number."""
    per_response = segment_mean(kl.double(), batch.mask, batch.cu_seqlens)              # [S]
    return moments(per_response[has_any(batch.mask, batch.cu_seqlens)])[1]


def gae(reward: Tensor, value: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2015) -> advantage [T] and returns = advantage + value [T].

    Of each response, over its tokens with mask:

        A = next_value = 0.0
        for t in reversed(tokens):
            delta = r[t] + gamma * next_value - V[t]
            A = advantage[t] = delta + gamma * lam * A
            next_value = V[t]

    Here all responses are computed at once, in log2(tokens) passes: after pass k the sum of the recursion has 2^k
    terms. With value 0 and lam 1, the advantage is the discounted return-to-go.
    """
    counts = segment_sum(mask.double(), cu_seqlens).long()                              # [S] tokens with mask
    r = reward[mask]                                                                    # [N] the others closed up
    v = value[mask]                                                                     # [N]
    last = (counts.cumsum(0) - 1).repeat_interleave(counts)                             # [N] of the same response
    after = last - torch.arange(len(v), device=v.device)                                # [N] tokens that follow
    delta = r + gamma * torch.where(after > 0, v.roll(-1), 0) - v
    advantage = delta                                                                   # the sum's first term
    for k in (2**i for i in range(len(v).bit_length())):                                # of k terms -> of 2 k
        advantage = advantage + (gamma * lam) ** k * torch.where(after >= k, advantage.roll(-k), 0)
    full = torch.zeros_like(value).masked_scatter(mask, advantage)
    return full, torch.where(mask, full + value, 0)
