"""PyTorch's caching allocator without memory: sizes, pools, splits and merges of c10/cuda/CUDACachingAllocator.cpp,
as its notes on memory management describe them (default settings, no expandable segments)."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

MIB = 2**20
ROUND = 512                                                             # sizes are multiples of it
SMALL = MIB                                                             # requests up to this come from small segments
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB                                                # for requests below 10 MiB
OWN_SEGMENT = 10 * MIB                                                  # from here on a request has its own, rounded up
ROUND_SEGMENT = 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, in use or free. `before` and `after` are its neighbours there."""

    address: int
    size: int
    pool: tuple[bool, int]
    """Whether its segment is a small one, and the stream that it belongs to."""
    requested: int = 0
    """Of its bytes those that were asked for: a rest of up to 1 MiB is not split off."""
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Allocator:
    """All numbers are bytes."""

    def __init__(self):
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.free_blocks: dict[tuple[bool, int], list[tuple[int, int, Block]]] = defaultdict(list)
        """Pool -> (size, address, block), ascending: the first one that is large enough is the best fit."""
        self.end = 0                                                    # of the latest segment

    def take(self, size: int, stream: int = 0) -> Block | None:
        """A block of at least `size` bytes; None for none."""
        if not size:
            return None
        size = round_up(size, ROUND)
        pool = size <= SMALL, stream
        fits = self.free_blocks[pool]
        place = bisect_left(fits, (size, -1))
        block = fits.pop(place)[2] if place < len(fits) else self._new_segment(size, pool)
        rest = block.size - size
        if rest >= ROUND if pool[0] else rest > SMALL:
            self._split(block, size)
        block.is_free, block.requested = False, size
        self.allocated += block.size
        self.requested += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block | None) -> None:
        """Free it, as one with the free blocks beside it."""
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= block.requested
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._remove(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            self._remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        self._add(block)

    def empty_cache(self) -> None:
        """Give whole segments that are free back to the device."""
        for pool, blocks in self.free_blocks.items():
            kept = [entry for entry in blocks if entry[2].before is not None or entry[2].after is not None]
            self.reserved -= sum(size for size, _, _ in blocks) - sum(size for size, _, _ in kept)
            self.free_blocks[pool] = kept

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _new_segment(self, size: int, pool: tuple[bool, int]) -> Block:
        if size <= SMALL:
            size = SMALL_SEGMENT
        else:
            size = LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, ROUND_SEGMENT)
        block = Block(self.end, size, pool)
        self.end += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._add(rest)

    def _add(self, block: Block) -> None:
        block.is_free = True
        insort(self.free_blocks[block.pool], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        blocks = self.free_blocks[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.address))]
