"""The optimal token baseline of rloo.py --baseline otb."""

import torch
from torch import Tensor

from common.batch import Batch
from common.parallel.ranks import all_sum
from common.rollout import Rollout
from common.segments import segment_cumsum


def optimal_token_baseline(returns: Tensor, batch: Batch, rollout: Rollout) -> Tensor:
    """The optimal token baseline: B_t = sum_g G_t W_t / sum_g W_t over a group's responses that have a t-th token. G_t
    are the returns [T]; W_t adds up 1 - 2 p + sum_v p_v^2, the squared gradient by the logits, until token t. Each is
    multiplied by the square of the token's importance weight, because the gradient is multiplied by the weight."""
    # [T]; rounding makes those of tokens with p near 1 negative
    squares = (1 - 2 * batch.old_logp.double().exp() + batch.extra["sum_p2"].double()).clamp(min=0)
    if batch.rollout_weight is not None:
        squares = squares * batch.rollout_weight.double().square()
    weight = segment_cumsum(torch.where(batch.mask, squares, 0), batch.cu_seqlens)[batch.mask]  # [N]
    number = segment_cumsum(batch.mask.long(), batch.cu_seqlens)                                # [T] from 1
    longest = int(rollout.response_lengths.max()) + 1
    cell = (rollout.group[batch.index][batch.sequence_ids] * longest + number)[batch.mask]      # [N]
    sums = torch.zeros(2, (int(rollout.group.max()) + 1) * longest, dtype=torch.float64)
    sums.index_add_(1, cell, torch.stack([returns[batch.mask] * weight, weight]))
    numerator, denominator = all_sum(sums)[:, cell]
    return torch.zeros_like(squares).masked_scatter(batch.mask, numerator / (denominator + 1e-8))
