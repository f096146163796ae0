"""Runs many tiny trainings in one process a rank, so that a test can try every flag.

argv: a JSON file with a list of [script, run folder, flags]. `launch_all` in conftest.py writes it.
"""

import functools
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed
import tyro
from transformers import AutoTokenizer

from common.parallel import ranks
from common.parallel.mesh import make_mesh, make_sequence_group
from common.tracking import profiling


def grouped(world: ranks.World, timeout_s: float, replicas: int, sequence_parallel: int) -> ranks.World:
    timeout = ranks.collective_timeout(timeout_s)
    groups = make_mesh("cpu", replicas, timeout), make_sequence_group(sequence_parallel, timeout)
    return replace(world, mesh=groups[0], sequence=groups[1])


if __name__ == "__main__":
    world = ranks.init()
    ranks.init = functools.partial(grouped, world)                             # one process group for all runs
    ranks.shutdown = torch.distributed.barrier
    profiling.matmul_flops = functools.cache(profiling.matmul_flops)            # one measurement, one tokenizer
    AutoTokenizer.from_pretrained = functools.cache(AutoTokenizer.from_pretrained)
    for script, run_dir, flags in json.loads(Path(sys.argv[1]).read_text()):
        module = importlib.import_module(script)
        module.main(tyro.cli(module.Args, args=[*flags, "--run-dir", run_dir]))
