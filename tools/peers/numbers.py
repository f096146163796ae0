"""What a script or a peer made of a recorded batch."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Update:
    """The numbers of one mini-batch, float64 [n, L] padded as `Recorded`, NaN where the script has none."""

    responses: Tensor  # [n] int64, numbers in the recorded batch
    number_of_pass: int
    mask: Tensor  # bool
    advantage: Tensor
    logp_grad: Tensor
    entropy_grad: Tensor
    token_loss: Tensor | None  # None: the loss is no sum over tokens that can be seen
    weight: Tensor | None  # factor of each token in the loss
    kl: Tensor | None  # None: the script computes none by losses.kl_estimate
    loss: float = 0.0
    has_old_logp: bool = True  # False: the policy's own log-probs stand for the old ones


@dataclass
class Numbers:
    """What a script made of a batch. Tensors [n] are in the order of `responses`."""

    responses: Tensor  # [n] int64, of the rollout that the script trained on
    rewards: Tensor
    group_mean: Tensor | None = None  # None: the script computes none by common/segments.py
    group_std: Tensor | None = None
    updates: list[Update] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)  # as dataclass fields, groups as dicts
    unread: list[str] = field(default_factory=list)  # settings of the peer that none of these numbers depends on


class Refused(ValueError):
    """The script does what the replay does not know."""
