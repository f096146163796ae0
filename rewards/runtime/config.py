"""The flags of rewards, --reward.*"""

from dataclasses import dataclass
from typing import Literal

from rewards import json_object


@dataclass
class RewardConfig:
    function: tuple[str, ...] = ()
    """Reward function(s), path/to/file.py:name with verl's signature. Default: the table in rewards/ by data_source.
    Not with --reward-model.alone."""
    weights: tuple[float, ...] = ()
    """One factor per --reward.function; the weighted scores are summed. Default: 1 each. Needs --reward.function."""
    kwargs: str = "{}"
    """Further keyword arguments, a JSON object, e.g. '{"method": "flexible"}': each function gets those that it names.
    For a secret, name an environment variable, '{"key": {"env": "MY_KEY"}}': only the workers read its value. Not with
    --reward-model.alone."""
    num_workers: int = 4
    """Worker processes per rank. 0: score in the trainer's own process (for pdb), without deadline."""
    concurrency: int = 32
    """Most samples that a worker gets at once if a function is `async def` or batched; it gets only queued samples.
    Only for --reward.num-workers above 0."""
    timeout_s: float = 10.0
    """Seconds one sample may take before its worker is killed and replaced. Only for --reward.num-workers above 0."""
    on_error: Literal["drop", "zero", "stop"] = "drop"
    """What to do with a sample without a score (exception, timeout, crash, not a finite number): leave it out (NaN),
    give it reward 0, or stop."""
    max_error_frac: float = 0.5
    """Stop if more than this share of a step's samples, over all ranks, has no score."""


def check_reward(config: RewardConfig) -> None:
    """Refuse what cannot work. Mistyped commands meet it before torch is imported."""
    if config.weights and len(config.weights) != len(config.function):
        raise ValueError(f"--reward.weights has {len(config.weights)} numbers, --reward.function "
                         f"{len(config.function)} names; give one weight per function")
    if config.num_workers < 0 or config.concurrency < 1 or config.timeout_s <= 0:
        raise ValueError(f"--reward.num-workers {config.num_workers} must be at least 0, --reward.concurrency "
                         f"{config.concurrency} at least 1 and --reward.timeout-s {config.timeout_s} above 0")
    json_object("--reward.kwargs", config.kwargs)
