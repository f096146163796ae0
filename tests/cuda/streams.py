"""The order that streams, events and waits give to what the device does, with vector clocks (Lamport 1978, Mattern
1989) as race detectors have them. Nothing is delayed: what a GPU could do too early or too late is an error.

Found: two streams on one memory, one of them writing, without a wait between; memory that its own stream takes again
while another one may still use it (a missing `record_stream`); a copy to the host that is read before it has arrived
(until then the host has NaN); memory of the host that is written while a copy from it is under way.

Not seen: streams inside collectives, which here run in the stream that asks for them, and kernels' own order."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

Clock = dict[int, int]
"""Stream -> how many of its operations have been waited for."""


class Race(RuntimeError):
    """On a GPU this access may come before another one that it needs to follow."""


@dataclass
class Use:
    stream: int
    tick: int
    what: str


@dataclass(eq=False)
class Uses:
    """Of one allocation."""

    owner: int
    """The stream that it was allocated in, and that may take it again."""
    writer: Use | None = None
    readers: dict[int, Use] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)
    """Streams of `record_stream`."""

    def by_others(self) -> list[Use]:
        everyone = [*self.readers.values(), *([self.writer] if self.writer else [])]
        return [use for use in everyone if use.stream not in (self.owner, *self.kept_for)]


@dataclass
class Copy:
    """A copy between the host and the device that the host has not waited for."""

    stream: int
    tick: int
    host: torch.Tensor
    numbers: torch.Tensor
    """To the host: what arrives. From it: what was there when the copy was asked for."""
    is_arriving: bool


class Order:
    def __init__(self):
        self.seen: dict[int, Clock] = defaultdict(dict)
        """Stream -> what its next operation comes after."""
        self.host: Clock = {}
        """What the host has waited for."""
        self.copies: list[Copy] = []
        self.freed: dict[int, list[Use]] = defaultdict(list)
        """Owner -> uses by other streams of memory that is free."""

    def launch(self, stream: int, what: str, reads: Iterable[Uses] = (), writes: Iterable[Uses] = ()) -> Use:
        """An operation is put into a stream. Raises Race."""
        seen = self.seen[stream]
        _merge(seen, self.host)                                         # the host asks for it after it has waited
        use = Use(stream, seen.get(stream, 0) + 1, what)
        for memory in reads:
            self._follow(use, memory.writer)
            memory.readers[stream] = use
        for memory in writes:
            self._follow(use, memory.writer)
            for reader in memory.readers.values():
                self._follow(use, reader)
            memory.writer, memory.readers = use, {}
        seen[stream] = use.tick
        return use

    def allocate(self, stream: int) -> Uses:
        """Memory of a stream, which may be what was freed before. Raises Race where others may still use that."""
        for use in self.freed.pop(stream, ()):
            if not self._is_done(use, self.seen[stream]) and not self._is_done(use, self.host):
                raise Race(f"stream {stream} takes memory that stream {use.stream} may still use ({use.what}): it was "
                           f"freed without record_stream or a wait")
        return Uses(stream)

    def free(self, memory: Uses) -> None:
        self.freed[memory.owner] += memory.by_others()

    def wait(self, stream: int, clock: Clock) -> None:
        """All later operations of a stream come after these."""
        _merge(self.seen[stream], clock)

    def now(self, stream: int) -> Clock:
        """What an event says that is recorded in a stream."""
        return dict(self.seen[stream])

    def host_waits(self, clock: Clock | None = None) -> None:
        """For these operations; without a clock for all streams. Raises Race."""
        for each in self.seen.values() if clock is None else [clock]:
            _merge(self.host, each)
        done = [copy for copy in self.copies if self._is_done(copy, self.host)]
        self.copies = [copy for copy in self.copies if copy not in done]
        for copy in done:
            _end(copy)

    def arrive(self, use: Use, host: torch.Tensor, numbers: torch.Tensor) -> None:
        """The host will have these numbers once it has waited."""
        storage = host.untyped_storage()
        same = [copy for copy in self.copies if copy.host.untyped_storage()._cdata == storage._cdata]
        for copy in same:                                               # an earlier one in the same memory
            self._follow(use, Use(copy.stream, copy.tick, "a copy between host and device"))
            _end(copy)
        self.copies = [copy for copy in self.copies if copy not in same]
        self.copies.append(Copy(use.stream, use.tick, host, numbers.clone(), is_arriving=True))
        host.copy_(torch.full_like(host, torch.nan if host.is_floating_point() else 85))

    def depart(self, use: Use, host: torch.Tensor) -> None:
        """A copy from memory of the host will be made at some moment before the host has waited."""
        self.copies.append(Copy(use.stream, use.tick, host, host.clone(), is_arriving=False))

    def _follow(self, use: Use, before: Use | None) -> None:
        if before is not None and not self._is_done(before, self.seen[use.stream]):
            raise Race(f"{use.what} in stream {use.stream} does not wait for {before.what} in stream {before.stream}")

    @staticmethod
    def _is_done(use: Use | Copy, clock: Clock) -> bool:
        return clock.get(use.stream, 0) >= use.tick


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def _end(copy: Copy) -> None:
    if copy.is_arriving:
        copy.host.copy_(copy.numbers)
    elif not copy.host.view(torch.uint8).equal(copy.numbers.view(torch.uint8)):
        raise Race("the host wrote into memory while a copy from it was under way")
