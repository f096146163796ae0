"""What the scoring of samples gave."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Scores:
    """The result of `RewardPool.results`, one entry per sample in ascending order of index."""

    index: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # NaN: no score, and left out
    extras: list[dict[str, Any]] = field(default_factory=list)  # the reward dict's other keys: float, list[float], str
    failures: list[str | None] = field(default_factory=list)  # "exception", "form", "invalid", "crash", "timeout"
    first_failure: str = ""  # the traceback, or what else is known, of the first sample without a score
    wait_s: float = 0.0  # how long `results` had to wait: the scoring time that generation did not hide

    @property
    def num_timeouts(self) -> int:
        return self.failures.count("timeout")

    @property
    def num_errors(self) -> int:
        """Samples without a score for other reasons than a timeout."""
        num_scored = self.failures.count(None)
        return len(self.failures) - num_scored - self.num_timeouts


def check_error_frac(num_failed: int, num_scored: int, limit: float, first_failure: str) -> None:
    """Raises RuntimeError if more than the share `limit` (--reward.max-error-frac) of a step's samples has no score.
    The numbers cover all ranks; `first_failure` is this rank's Scores.first_failure."""
    if num_failed > limit * num_scored:
        raise RuntimeError(
            f"{num_failed / num_scored:.0%} of the samples have no reward ({num_failed} of {num_scored} on all "
            f"ranks), more than --reward.max-error-frac {limit:g}. The first of this rank:\n"
            f"{first_failure or 'none; see the other ranks'}"
        )
