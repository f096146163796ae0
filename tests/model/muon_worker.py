"""Run by test_muon.py: `muon_worker.py FOLDER`: each layout of these ranks goes on, with three more steps, from what
one rank has saved of each model."""

import sys
from pathlib import Path

import torch

from common.checkpoint.state import load_parts, tensors_of
from common.parallel import ranks
from tests.checkpoint import shards
from tests.model.adamw_oracle import bytes_of_moments
from tests.model.muon_oracle import CASES, LAYOUTS, start, train, whole

if __name__ == "__main__":
    world, folder = ranks.init(), Path(sys.argv[1])
    found, sizes = {}, {}
    for layout, name in [case[1:] for case in CASES if case[0] == world.size]:
        model, optimizer = start(name, folder, world, **LAYOUTS[world.size][layout])
        load_parts({"policy": (model, optimizer)}, folder / f"{name} saved")
        loaded = whole(model, optimizer)
        train(model, optimizer, range(2, 5))
        shards.save(tensors_of({"policy": (model, optimizer)}), folder / f"{name} {layout} trained")
        found[name, layout] = {"saved": loaded, "trained": whole(model, optimizer)}
        sizes[name, layout] = bytes_of_moments(optimizer)
    torch.save((found, sizes), folder / f"{world.size} {world.rank}.pt")
    ranks.shutdown()
