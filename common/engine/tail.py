"""How long an engine runs with few responses: what drafts and --rollout.in-flight can shorten."""

from common.parallel.ranks import all_max

SHARE = 0.25
"""Of the responses of a call: the tail is the time in which fewer are unfinished."""


class Tail:
    """Seconds of an engine's tails since the last call of `metrics`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.most = 0

    def begin(self) -> None:
        """A call begins, of `complete` or of episodes."""
        self.most = 0

    def measure(self, num_unfinished: int, seconds: float) -> None:
        """A pass of the engine took so long. It began with so many responses, those that wait included."""
        self.most = max(self.most, num_unfinished)
        if num_unfinished < SHARE * self.most:
            self.seconds += seconds

    def metrics(self) -> dict[str, float]:
        """Of the engine with the longest tails. All ranks call it together."""
        seconds = all_max([self.seconds]).item()
        self.seconds = 0.0
        return {"timing_s/gen/tail": seconds}
