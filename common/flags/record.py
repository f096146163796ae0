"""The flags of what a run writes: checkpoints, --save.*, and metrics and responses, --log.*"""

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import tyro

from common.flags.rules import check_at_least


@dataclass
class SaveConfig:
    every: int = 20
    """Steps between checkpoints; the last step is always saved. 0: only the last step."""
    keep: int = 2
    """Number of newest checkpoints that stay on disk."""
    keep_best: bool = False
    """Also keep the checkpoint of the step with the best validation, which is saved even if --save.every does
    not ask for it. RUN_DIR/best.json names it. Of equal values the earlier step stays. Needs --val-data."""
    best_metric: str = ""
    """Metric of the validation that --save.keep-best ranks by, such as val-core/gsm8k/acc/greedy, or the score,
    val-aux/gsm8k/reward/greedy; higher is better, of a loss lower. Default: the first val-core/.../mean@N (sampled) in
    alphabetical order, without one the first val-core/. Needs --save.keep-best."""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Write checkpoints in the background, from a copy in host memory (12 bytes a parameter, over all ranks)."""
    hf: Literal["never", "end"] = "end"
    """When to write RUN_DIR/model, a Hugging Face folder (`python -m tools.checkpoints export` makes one
    later)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of its weights. auto: the type of --policy.compute-dtype. float32: as they were trained."""
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint of the run folder, if there is one. none: start anew.
    Else a run folder or a checkpoint to start from. none and a path need a run folder without checkpoints; a
    restart by torchrun or Slurm continues the run folder in any case."""
    allow_changes: bool = False
    """Continue a run although flags that change its results differ from those of its last start."""
    timeout_s: float = 3600.0
    """Seconds that a phase (model load, rollout, update, validation) may take before all ranks print their
    stacks and end. 0: no limit."""

    def __post_init__(self):
        check_at_least(0, {"--save.every": self.every, "--save.timeout-s": self.timeout_s})
        check_at_least(1, {"--save.keep": self.keep})
        if self.best_metric and not self.keep_best:
            raise ValueError(f"--save.best-metric {self.best_metric} needs --save.keep-best")


Place = Literal["wandb", "tensorboard", "trackio"]
PLACES = get_args(Place)


@dataclass
class LogConfig:
    to: tuple[Place, ...] = ()
    """Where metrics go in addition to the console and metrics.jsonl. wandb: without an account set
    WANDB_MODE=offline. tensorboard: into RUN_DIR/tensorboard. trackio: into its database on this machine, without an
    account (`trackio show`; TRACKIO_DIR is its folder)."""
    wandb_project: str = "rl"
    """Project in Weights & Biases and in Trackio. Needs --log.to wandb or trackio."""
    rollouts_every: int = 5
    """Steps between files of responses, RUN_DIR/rollouts/step_000005.parquet. The first step and each validation
    (val_000010.parquet) have a file too. 0: no files."""
    rollouts_max: int = 64
    """Most responses in such a file: the step's first whole groups, at least one. Needs --log.rollouts-every."""
    signal: int = 0
    """Steps between measurements of what the policy's gradient is made of: the shares of the terms of the loss, in the
    first mini-batch of such a step, which runs backward once more for each. 0: never. Not with
    --policy.router-aux-coef."""
    signal_rewards: tuple[str, ...] = ()
    """Also the shares of these numbers that the reward function returns beside the score, which is their sum, or of
    NAME=FACTOR; what they leave of the score is `rest`. Of responses whose advantage is not 0. Needs --log.signal."""

    def __post_init__(self):
        check_at_least(0, {"--log.rollouts-every": self.rollouts_every, "--log.signal": self.signal})
        check_at_least(1, {"--log.rollouts-max": self.rollouts_max})
        for part in self.signal_rewards:
            name, equals, factor = part.partition("=")
            if not name or (equals and not is_number(factor)) or name == "rest":
                raise ValueError(f"--log.signal-rewards {part}: must be NAME or NAME=FACTOR, and not rest")
        for package in self.to:
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"--log.to {package} needs the package {package}: pip install {package}")
        if "wandb" in self.to and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            import wandb

            if not wandb.login(prompt=False):
                raise ValueError("--log.to wandb finds no account: set WANDB_API_KEY, or WANDB_MODE=offline")


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
