"""What a number per token must be where the policy sampled nothing."""

from torch import Tensor


def check_outside_mask(advantage: Tensor, mask: Tensor) -> None:
    """Raises ValueError for an advantage [T] less a mean over all tokens, those of prompts too: where it was 0 before,
    outside the mask, it is then the same number everywhere."""
    outside = advantage[~mask]
    inside = advantage[mask]
    if not len(outside) or not len(inside):
        return
    is_shifted = outside[0] != 0 and (outside == outside[0]).all()
    if is_shifted and (inside != inside[0]).any():
        raise ValueError(f"the advantage is {outside[0]:.4g} on every token that the policy did not sample, as if a "
                         f"mean was taken over these, too: whiten(advantage, batch.mask) is over the others alone")
