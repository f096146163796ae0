"""Runs many tiny trainings in one process a rank, so that a test can try every flag.

argv: a JSON file with a list of [script, run folder, flags]. `launch_all` in conftest.py writes it.
"""

import functools
import importlib
import json
import sys
from pathlib import Path

import torch.distributed
import tyro
from transformers import AutoTokenizer

from common.parallel import ranks
from common.tracking import profiling

if __name__ == "__main__":
    world = ranks.init()
    ranks.init = lambda *_: world                                              # one process group for all runs
    ranks.shutdown = torch.distributed.barrier
    profiling.matmul_flops = functools.cache(profiling.matmul_flops)            # one measurement, one tokenizer
    AutoTokenizer.from_pretrained = functools.cache(AutoTokenizer.from_pretrained)
    for script, run_dir, flags in json.loads(Path(sys.argv[1]).read_text()):
        module = importlib.import_module(script)
        module.main(tyro.cli(module.Args, args=[*flags, "--run-dir", run_dir]))
