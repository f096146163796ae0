"""How long an engine runs with few responses: what drafts and --rollout.in-flight can shorten."""

from common.parallel.ranks import all_max

SHARE = 0.25
"""Of the responses of a call: the tail is the time in which fewer are unfinished."""


class Tail:
    """Seconds of an engine's tails since the last call of `metrics`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_unfinished = 0
        self.most = 0

    def begin(self) -> None:
        """A call begins, of `complete` or of episodes."""
        self.most = self.num_unfinished

    def add(self) -> None:
        """A response was queued."""
        self.num_unfinished += 1
        self.most = max(self.most, self.num_unfinished)

    def step(self, seconds: float, num_ended: int) -> None:
        """A pass of the engine took so long, and so many responses ended with it."""
        if self.num_unfinished < SHARE * self.most:
            self.seconds += seconds
        self.num_unfinished -= num_ended

    def metrics(self) -> dict[str, float]:
        """Of the engine with the longest tails. All ranks call it together."""
        seconds = all_max([self.seconds]).item()
        self.seconds = 0.0
        return {"timing_s/gen/tail": seconds}
