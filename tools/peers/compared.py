"""A script's numbers beside those of a peer, in the order in which one follows from the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.peers.numbers import Numbers, Update

EQUAL = 1e-12
"""Of two float64 numbers of the same formula, relative to the larger one or to 1: sums over a batch of a few thousand
tokens in another order differ by less."""
IN_FLOAT32 = 6e-8
"""Half of the distance between two neighbours in float32. What differs by less cannot be seen in a run, which computes
its losses in float32: it is told, and is no difference."""


@dataclass
class Line:
    """One number of the list. `apart`: the largest difference, relative; None: not compared, `text` says why."""

    name: str
    apart: float | None
    text: str

    @property
    def differs(self) -> bool:
        return self.apart is not None and not self.apart <= IN_FLOAT32

    def __str__(self) -> str:
        return f"{self.name:26}{self.text}"


def compare(script: Numbers, peer: Numbers, name: str) -> list[Line]:
    """`name`: the peer's. One line for each number, in the order rewards, statistics of groups, mask, advantages, KL,
    loss of each token, denominators, loss, gradients; of several updates the first one in which it differs."""
    scored = ~script.rewards.isnan()
    responses = script.responses[scored]
    per_response = {
        "rewards": (script.rewards, peer.rewards), "mean of each group": (script.group_mean, peer.group_mean),
        "deviation of each group": (script.group_std, peer.group_std),
    }
    lines = []
    for what, (ours, theirs) in per_response.items():
        if what != "rewards" and (ours is None or theirs is None):
            continue
        lines.append(line_of(what, ours[scored], theirs, [f"response {int(i)}" for i in responses], name))
    per_token = {
        "mask": "mask", "advantages": "advantage", "KL": "kl", "loss of each token": "token_loss",
        "denominators": "weight", "gradient on entropies": "entropy_grad", "loss": "loss",
        "gradient on log-probs": "logp_grad",
    }
    for what, attribute in per_token.items():
        found = [line_of_update(what, attribute, pair, name, f"update {number}, " if len(script.updates) > 1 else "")
                 for number, pair in enumerate(zip(script.updates, peer.updates), 1)]
        shown = [line for line in found if line is not None]
        if shown:
            lines.append(max(shown, key=lambda line: (line.differs, line.apart is None)))
            for line in shown:
                if line.differs:
                    lines[-1] = line
                    break
    return lines


def line_of_update(what: str, attribute: str, pair: tuple[Update, Update], name: str, where: str) -> Line | None:
    """None: neither side has this number."""
    ours, theirs = (getattr(update, attribute) for update in pair)
    if ours is None and theirs is None:
        return None
    if attribute == "entropy_grad" and not ours.nan_to_num().any() and not theirs.nan_to_num().any():
        return None
    if ours is None or theirs is None:
        who = "the script" if ours is None else name
        return Line(what, None, f"not compared: {who} has none that can be seen")
    if attribute == "loss":
        terms = 0.0                                                     # which may cancel in the sum
        if pair[0].token_loss is not None:
            terms = float((pair[0].token_loss * pair[0].weight).nan_to_num().abs().sum())
        return line_of(what, torch.tensor([ours]), torch.tensor([theirs]), [f"{where}mini-batch"], name, terms)
    used = pair[0].mask | pair[1].mask
    if attribute == "mask":
        used = torch.ones_like(used)
    places = [f"{where}response {int(pair[0].responses[i])}, token {int(t)}" for i, t in used.nonzero()]
    return line_of(what, ours[used], theirs[used], places, name)


def line_of(what: str, ours: Tensor, theirs: Tensor, places: list[str], name: str, least_scale: float = 0.0) -> Line:
    """`least_scale`: of what a difference is relative to, if the numbers are smaller."""
    one, two = ours.double().nan_to_num(), theirs.double().nan_to_num()
    size = torch.maximum(one.abs(), two.abs())
    scale = size.clamp(min=1.0)
    if what in ("denominators", "gradient on log-probs", "gradient on entropies", "loss"):
        scale = size.max().clamp(min=max(least_scale, 1e-300))          # all of them shrink with the batch
    apart = (one - two).abs() / scale
    largest = float(apart.max()) if len(apart) else 0.0
    if largest <= EQUAL:
        return Line(what, largest, f"equal (largest difference {largest:.0e})" if largest else "equal")
    if largest <= IN_FLOAT32:
        return Line(what, largest, f"equal in float32 (largest difference {largest:.1e}, relative)")
    first = int((apart > IN_FLOAT32).nonzero()[0])
    count = int((apart > IN_FLOAT32).sum())
    if ours.dtype == torch.bool:
        values = f"{bool(ours[first])}, {name} {bool(theirs[first])}"
    else:
        values = f"{float(one[first]):.10g}, {name} {float(two[first]):.10g}"
    return Line(what, largest, f"DIFFERS in {count} of {len(apart)}, by up to {largest:.2g} (relative); first "
                               f"{places[first]}: script {values}")
