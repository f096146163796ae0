"""What is logged of answers that are preferred to others, or labelled: their rewards."""

import torch
from torch import Tensor


def preference_metrics(log_ratio: Tensor, beta: float) -> dict[str, float]:
    """Of pairs [2 P]: mean rewards beta log p / p_ref; the share whose chosen answer has the higher (a tie: half)."""
    reward = beta * log_ratio.detach()
    chosen = reward[0::2]
    rejected = reward[1::2]
    return {
        "preference/accuracy": (torch.sign(chosen - rejected) / 2 + 0.5).mean().item(),
        "preference/margin": (chosen - rejected).mean().item(),
        "preference/chosen_reward": chosen.mean().item(),
        "preference/rejected_reward": rejected.mean().item(),
    }


def label_metrics(log_ratio: Tensor, kl: Tensor, label: Tensor, beta: float) -> dict[str, float]:
    """Of single answers [S] with a label: the KL, mean rewards beta log p / p_ref of those desired and not, their
    difference, and the share of answers whose reward is above the KL's where they are desired, below it else. Where all
    labels are equal only the means that there are."""
    reward = beta * log_ratio.detach()
    is_above = reward > beta * kl
    metrics = {
        "preference/kl": kl.item(),
        "preference/accuracy": (is_above == label).double().mean().item(),
    }
    if label.any():
        metrics["preference/chosen_reward"] = reward[label].mean().item()
    if not label.all():
        metrics["preference/rejected_reward"] = reward[~label].mean().item()
    if len(metrics) == 4:
        metrics["preference/margin"] = metrics["preference/chosen_reward"] - metrics["preference/rejected_reward"]
    return metrics
