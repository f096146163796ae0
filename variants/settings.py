"""The bounds and numbers of the losses of grpo_variants.py. Nothing here imports torch, so that a mistyped command can
be refused before it is."""

from typing import Literal, NamedTuple


class LossSettings(NamedTuple):
    """A loss: its clip bounds, aggregation and further numbers. A bound of None: the loss has no such bound."""

    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None
    aggregation: str
    numbers: dict[str, float] = {}                                  # noqa: RUF012
    name: str = ""

    @property
    def bounds(self) -> dict[str, float]:
        return {name: x for name, x in self._asdict().items() if name.startswith("clip") and x is not None}

    def describe(self) -> str:
        numbers = self.bounds | self.numbers
        return ", ".join([self.name, *(f"{name} {x:g}" for name, x in numbers.items()), self.aggregation])


LOSSES = {                          # docs/from_verl.md has the sources of these numbers; the beta of dro must be given
    "ppo": LossSettings(0.2, 0.2, 3.0, "token-mean"),
    "grpo": LossSettings(0.2, 0.2, 3.0, "token-mean"),
    "dapo": LossSettings(0.2, 0.28, 3.0, "token-mean"),
    "dr_grpo": LossSettings(0.2, 0.2, 3.0, "seq-mean-token-sum-norm"),
    "gspo": LossSettings(3e-4, 4e-4, None, "seq-mean-token-mean"),
    "gmpo": LossSettings(0.4, 0.4, None, "seq-mean-token-mean"),
    "cispo": LossSettings(1.0, 0.28, None, "token-mean"),
    "sapo": LossSettings(None, None, None, "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "clip_cov": LossSettings(1.0, 1.0, None, "token-mean", {"fraction": 2e-4, "cov_low": 1, "cov_high": 5}),
    "kl_cov": LossSettings(None, None, None, "token-mean", {"fraction": 2e-4, "cov_kl_coef": 1.0}),
    "dppo_tv": LossSettings(0.15, 0.15, None, "token-mean", {"max_ratio": 20.0}),
    "dppo_kl": LossSettings(0.05, 0.05, None, "token-mean", {"max_ratio": 20.0}),
    "dro": LossSettings(None, None, None, "token-mean", {"beta": 0.0}),
    "reinforce": LossSettings(None, None, None, "token-mean"),
}
PolicyLoss = Literal[*LOSSES]  # type: ignore[valid-type]
