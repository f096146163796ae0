"""Weights of a loss for tests that hold micro-batches, not a rollout."""

import torch

from common.batch import Batch
from common.losses import token_weights
from common.rollout import Minibatch


def weigh(microbatches: list[Batch], aggregation: str, norm_length: float | None = None,
          left_out: torch.Tensor | None = None) -> None:
    """Write `extra["weight"]` of each micro-batch. `left_out` [S]: lengths of the responses that were left out; the
    response with the largest number is S - 1."""
    if left_out is None:
        left_out = torch.zeros(1 + max(int(batch.index.max()) for batch in microbatches), dtype=torch.float64)
    norm_length = norm_length if aggregation.endswith("norm") else None
    weights = token_weights(Minibatch(microbatches, left_out), aggregation, norm_length=norm_length)
    for batch, weight in zip(microbatches, weights, strict=True):
        batch.extra["weight"] = weight
