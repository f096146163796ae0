"""verl's presets of the engine correction: a name -> the flags --correction.* that it sets."""

import math

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
