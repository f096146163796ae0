"""The flags of the engine correction, verl's presets of them, and what is refused of both."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

TOKEN, SEQUENCE, BYPASS = {"weights": "token"}, {"weights": "sequence"}, {"bypass": True}
ICEPOP = {"weights": "token", "lower": 0.5, "upper": 5.0, "outside": "zero"}
GEO = {"reject": ("k1",), "reject_below": (math.log(0.999),), "reject_above": (math.log(1.001),)}
K3 = {"reject": ("k3",), "reject_above": (0.01,)}
SUM = {"reject": ("k1",), "reject_over": ("sum",), "reject_below": (math.log(0.5),), "reject_above": (math.log(2.0),)}
PRESETS: dict[str, dict] = {
    "disabled": {},
    "decoupled-token-is": TOKEN,
    "decoupled-seq-is": SEQUENCE,
    "decoupled-token-icepop": ICEPOP,
    "decoupled-seq-is-rs": SEQUENCE | SUM,
    "decoupled-geo-rs": GEO,
    "decoupled-geo-rs-token-tis": GEO | TOKEN,
    "decoupled-geo-rs-seq-tis": GEO | SEQUENCE,
    "decoupled-k3-rs": K3,
    "decoupled-k3-rs-token-tis": K3 | TOKEN,
    "decoupled-k3-rs-seq-tis": K3 | SEQUENCE,
    "bypass-ppo-clip": BYPASS,
    "bypass-ppo-clip-geo-rs": BYPASS | GEO,
    "bypass-ppo-clip-k3-rs": BYPASS | K3,
    "bypass-pg-is": BYPASS | SEQUENCE,
    "bypass-pg-token-icepop": BYPASS | ICEPOP,
    "bypass-pg-geo-rs": BYPASS | GEO,
    "bypass-pg-geo-rs-token-tis": BYPASS | GEO | TOKEN,
    "bypass-pg-geo-rs-seq-tis": BYPASS | GEO | SEQUENCE,
}
UNSET: dict = {"weights": "none", "upper": 2.0, "lower": 0.0, "outside": "clamp", "reject": (), "bypass": False}
CRITERION: dict = {"reject_over": "mean", "reject_below": -math.inf, "reject_above": math.inf}
"""What a flag is that neither the preset nor the command gives; the second for each estimate of --correction.reject."""
WITHOUT_RATIO = "reinforce", "dro"
"""Losses of -A log p: what --correction.bypass makes the old policy's is no factor of their gradient."""


@dataclass
class CorrectionConfig:
    """Flags that are None come from the preset, see `resolve_correction`."""

    preset: Literal[*PRESETS] = "disabled"  # type: ignore[valid-type]
    """verl's presets; the flags below override them. disabled: measure only. bypass-pg-* are for --loss reinforce."""
    weights: Literal["none", "token", "sequence", "geometric"] | None = None
    """Multiply token losses by p_old / p_rollout: the token's, the whole response's, or that one's geometric mean."""
    upper: float | None = None
    """Truncate larger weights to this (TIS). Default: the preset's, or 2. Without weights only the rollout_is metrics
    use it. Only for --correction.weights or --correction.preset."""
    lower: float | None = None
    """Raise smaller weights to this. Default: the preset's, or 0 (no floor). Needs --correction.weights or
    --correction.preset."""
    outside: Literal["clamp", "zero"] | None = None
    """zero: weights outside [lower, upper] become 0 instead (IcePop, arXiv 2510.18855). Their tokens stay counted.
    Needs --correction.weights or --correction.preset."""
    batch_normalise: bool = False
    """Divide weights by their mean over the mini-batch's tokens (or responses). Costs a forward pass per step."""
    reject: tuple[Literal["none", "k1", "k2", "k3"], ...] | None = None
    """Drop from the loss what is out of bounds in an estimate of KL(rollout || old); d = log p_rollout - log p_old:
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Denominators count what remains. With several estimators, give the
    next three flags one value each."""
    reject_over: tuple[Literal["token", "mean", "max", "sum"], ...] | None = None
    """token: drop tokens. mean, max, sum: drop responses by that of their tokens. Default: the preset's, or mean."""
    reject_below: tuple[float, ...] | None = None
    """Lower bound of the estimate in nats; k1 is negative where the trainer finds likelier what the engine sampled."""
    reject_above: tuple[float, ...] | None = None
    """Upper bound of the estimate in nats: for k1, log of a ratio (0.001 is 1.001, 0.693 is 2)."""
    rejected_leave_group: bool = False
    """Responses that lost all tokens (episodes: of all their sequences) count in no group's mean and standard
    deviation, as if they had no reward."""
    bypass: bool | None = None
    """True: engine log-probs are the old ones: the loss's ratio is p / p_rollout, weights are of the current policy."""

    covers_cut_sampling = False
    """No flag: `resolve_correction` finds out whether the loss is multiplied by p_trainer / p_engine, by weights or by
    a ratio of its own, as sampling with top-p or top-k needs."""

    def needs_old_logp(self, script_needs_it: bool = False) -> bool:
        """True if a separate forward pass of the old policy is needed: for rejection or batch normalisation, or because
        the script asked for it and bypass is off. A script asks with several updates a rollout, because the current
        policy is the old one in the first of them only."""
        return bool(self.reject) or self.batch_normalise or (script_needs_it and not self.bypass)


def resolve_correction(config: CorrectionConfig, loss: str = "clipped",
                       groups_after_rejection: bool = False) -> CorrectionConfig:
    """Returns the preset under the flags that were given, nothing left at None. `loss`: the policy loss's name; those
    in WITHOUT_RATIO have no ratio. `groups_after_rejection`: the script computes advantages from what
    `reject_and_weight` returns. Raises ValueError, naming the flag, for impossible bounds, flags without effect and
    ratios that count twice."""
    if config.rejected_leave_group and not groups_after_rejection:
        raise ValueError("--correction.rejected-leave-group: this script computes no group's advantages after the "
                         "rejection; grpo_variants.py and rloo.py do")
    given = {name: x for name, x in asdict(config).items() if x is not None}
    if "none" in given.get("reject", ()):
        given["reject"] = ()
    preset = PRESETS[config.preset]
    if any(given.get(name, preset.get(name)) != preset.get(name) for name in ("reject", "reject_over")):
        preset = {name: x for name, x in preset.items() if name not in ("reject_below", "reject_above")}
    num_criteria = len((preset | given).get("reject", ()))                    # bounds are those of one estimate
    found = UNSET | {name: (x,) * num_criteria for name, x in CRITERION.items()} | preset | given
    config = replace(config, **found)
    if not 0 <= config.lower < config.upper:
        raise ValueError(f"--correction.lower {config.lower:g} must be at least 0 and below "
                         f"--correction.upper {config.upper:g}")
    for name in (*CRITERION, "rejected_leave_group"):
        flag = f"--correction.{name.replace('_', '-')}"
        if not num_criteria and given.get(name, False) is not False:
            raise ValueError(f"{flag} does nothing without --correction.reject")
        if name in CRITERION and len(vars(config)[name]) != num_criteria:
            raise ValueError(f"{flag} {vars(config)[name]} must have {num_criteria}, as --correction.reject has")
    for kind, below, above in zip(config.reject, config.reject_below, config.reject_above):
        endless = math.isinf(above) and (math.isinf(below) or kind != "k1")   # k2 and k3 are never negative
        if endless or not below <= 0 <= above:
            raise ValueError(f"--correction.reject-below {below:g} --correction.reject-above {above:g} must keep "
                             f"{kind} = 0, where engine and trainer agree, and reject something")
    if config.batch_normalise and (config.weights == "none" or config.bypass):
        raise ValueError("--correction.batch-normalise needs --correction.weights that are known before the update: "
                         "not none, and without --correction.bypass")
    if config.preset.startswith("bypass") and ("pg" in config.preset) != (loss == "reinforce"):
        raise ValueError(f"--correction.preset {config.preset} does not go with the loss {loss}: bypass-pg-* are made "
                         f"for --loss reinforce (rloo.py, grpo_variants.py), bypass-ppo-clip* for losses with a ratio")
    if config.bypass and config.weights != "none" and loss not in WITHOUT_RATIO:
        raise ValueError(f"--correction.weights {config.weights} would count p / p_rollout twice: with "
                         f"--correction.bypass it is the ratio of the loss {loss}; set --correction.weights none")
    config.covers_cut_sampling = config.weights != "none" or (bool(config.bypass) and loss not in WITHOUT_RATIO)
    return config
