"""Runs many tiny trainings in one process a rank, so that a test can try every flag.

argv: a JSON file with a list of [script, run folder, flags]. `launch_all` in conftest.py writes it.
"""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed
import tyro
from transformers import AutoTokenizer

from common.parallel import ranks
from common.parallel.ranks import make_groups


def grouped(world: ranks.World, timeout_s: float, *sizes: int) -> ranks.World:
    return replace(world, **make_groups("cpu", ranks.collective_timeout(timeout_s), *sizes))


def count_calls(counts: Counter) -> None:
    """Count the collectives that the project's own code starts, by name. FSDP2's have other names."""
    def counted(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather_object", "all_to_all_single", "broadcast_object_list", "barrier"):
        setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    count_calls(counts)
    world = ranks.init()
    ranks.init = functools.partial(grouped, world)                             # one process group for all runs
    ranks.shutdown = torch.distributed.barrier
    AutoTokenizer.from_pretrained = functools.cache(AutoTokenizer.from_pretrained)
    for script, run_dir, flags in json.loads(Path(sys.argv[1]).read_text()):
        module = importlib.import_module(script)
        counts.clear()
        module.main(tyro.cli(module.Args, args=[*flags, "--run-dir", run_dir]))
        if world.is_main:
            (Path(run_dir) / "collectives.json").write_text(json.dumps(counts))
