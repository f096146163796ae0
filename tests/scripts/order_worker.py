"""Runs a minimal loop with each of the mistakes of test_order.py, all in one process: `order_worker.py JOBS.json`.

JOBS.json: [a list of flags, a folder, name -> the loop's source]. What each one raised is written to FOLDER/said.json.
"""

import functools
import json
import sys
from pathlib import Path

import torch.distributed as dist
import tyro
from transformers import AutoTokenizer

from common import losses
from common.correction import resolve_correction
from common.parallel import ranks
from common.run import Run, RunArgs
from tests.scripts.variant_worker import grouped

if __name__ == "__main__":
    world = ranks.init()
    ranks.init = functools.partial(grouped, world)
    ranks.shutdown = dist.barrier
    AutoTokenizer.from_pretrained = functools.cache(AutoTokenizer.from_pretrained)
    flags, folder, sources = json.loads(Path(sys.argv[1]).read_text())
    said = {}
    for number, (name, source) in enumerate(sources.items()):
        args = tyro.cli(RunArgs, args=[*flags, "--run-dir", f"{folder}/{number}"])
        names = {"args": args, "losses": losses, "Run": Run, "correction": resolve_correction(args.correction)}
        try:
            exec(source, names)
            said[name] = ["", ""]
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
        made = vars(names["run"]) if "run" in names else {}              # after an error a run closes nothing
        if "scoring" in made:
            made["scoring"].close()
        if "watchdog" in made:                                          # its thread in C++ would abort Python's end
            made["watchdog"].leave()
    Path(folder, "said.json").write_text(json.dumps(said))
