"""The flags that scripts share."""

from dataclasses import dataclass, field
from typing import Literal

from common.flags.correction import CorrectionConfig
from common.flags.data import DataConfig
from common.flags.model import LoRAConfig, ModelConfig, OffloadConfig, OptimConfig, RewardModelConfig
from common.flags.record import LogConfig, SaveConfig
from common.flags.rollout import RolloutConfig
from rewards.runtime.pool import RewardConfig


@dataclass
class TrainArgs:
    """Flags that every script has."""

    model: str
    """Hugging Face folder or hub name of the policy."""
    train_data: tuple[str, ...]
    """Parquet or JSON-lines files, folders or globs with verl's columns."""
    val_data: tuple[str, ...] = ()
    """Validation files, in the same columns."""
    run_dir: str = "runs/run"
    """Folder for metrics, checkpoints and the trained model."""
    seed: int = 0
    """Random seed of the order of the data, sampling and mini-batches."""
    total_steps: int = 100
    """Training steps; where the policy is sampled from, rollout-and-update rounds."""
    total_epochs: float = 0.0
    """Passes over the training data. Above 0 they decide the number of steps, and --total-steps does not. A step counts
    with the prompts of one rollout, also where dapo.py samples several: then there are more passes."""

    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two. Above 0
    needs --val-data."""
    eval_prompts: int = 512
    """Most validation prompts, spread evenly over the files; 0: all. Above 0 needs --val-data."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass
class SampledArgs(TrainArgs):
    """Flags of sampling and its rewards."""

    eval_n: int = 4
    """Sampled responses per validation prompt (mean@N, best@N, maj@N), besides the greedy response; 0: greedy only.
    Above 0 needs --val-data."""
    eval_temperature: float = 1.0
    """Sampling temperature of these responses. 0: all are greedy. Needs --val-data and --eval-n."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass
class SupervisedArgs(SampledArgs):
    """Flags of scripts that train on rows of data and may sample in validations."""

    eval_by: Literal["loss", "sampling"] = "loss"
    """What a validation is: the loss on rows of --val-data; or responses that the policy samples to its prompts and the
    reward function scores: the files then have the columns of grpo.py (--eval-n, --rollout.*, --reward.*), and the
    engine sleeps between validations. Needs --val-data."""


@dataclass
class RunArgs(SampledArgs):
    """Flags that every script has which samples from its policy."""

    run_zero_advantage: bool = False
    """Run the responses with advantage 0 through the model, too. By default they are left out where no term of the
    loss has a gradient on them: they count in the denominators, so the gradient is the same, but not in actor/
    metrics."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
