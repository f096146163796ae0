"""What is in flight as bytes against JSON: `python -m tests.bench.bench_stored`.

CPU seconds to write and to read the responses of one rank, and bytes a token. JSON is what `json.dumps` makes of the
same fields: the floor of any format in JSON.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

from envs.runtime.response import Response
from envs.stored import pack, unpack
from tests.bench.record import report


@dataclass
class Args:
    responses: int = 2000
    tokens: int = 2000
    """Of each response."""
    turns: int = 1
    """Above 1: episodes, every second turn by tools, which four steps sampled."""
    rounds: int = 1


def make(args: Args) -> list[Response]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(args.responses):
        tokens = rng.integers(150_000, size=args.tokens).tolist()
        response = Response(tokens, (-rng.exponential(size=args.tokens)).astype(np.float32).tolist(), "stop")
        if args.turns > 1:
            response.mask = [turn % 2 == 0 for turn in range(args.turns) for _ in range(args.tokens // args.turns)]
            response.mask += [True] * (args.tokens - len(response.mask))
            response.versions = [4 * i // sum(response.mask) for i in range(sum(response.mask))]
        made.append(response)
    return made


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The median CPU seconds, and the last result."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        found = work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), found


def main(args: Args) -> None:
    responses = make(args)
    rows = {}
    for name, write, read in (
        ("json", lambda: json.dumps([vars(r) for r in responses]).encode(),
         lambda data: [Response(**fields) for fields in json.loads(data)]),
        ("bytes", lambda: pack(responses), unpack),
    ):
        write_s, data = timed(write, args.rounds)
        read_s, found = timed(lambda read=read, data=data: read(data), args.rounds)
        assert found == responses
        num_tokens = args.responses * args.tokens
        rows[name] = {"bytes_per_token": len(data) / num_tokens, "write_s": write_s, "read_s": read_s}
        print(name, rows[name], flush=True)
    report("stored", responses=args.responses, tokens=args.tokens, turns=args.turns, **rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
