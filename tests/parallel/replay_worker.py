"""Run by test_router_replay.py: experts are recorded, weights change, then comes a gradient with what was recorded."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from common import losses
from common.model.loading import load_policy, read_config
from common.parallel import ranks
from tests.parallel.expert_worker import Case, place
from tests.parallel.layout_worker import Step, gradient
from tests.parallel.sequence_worker import config_of, in_float64


def run(case: Case, folder: str, step: Step, world: ranks.World, budget: int = 20) -> dict:
    """The gradient after a change of weights, and of each token, by the number of its response, the share of layers in
    which the router would have chosen other experts. `case.undivided`: nothing is replayed."""
    here, config = place(world, case), replace(config_of(case), router_replay="old-logp")
    policy, microbatches, changed = load_policy(folder, config, here), [], {}

    def record(batches, *options) -> None:
        for batch in batches:
            policy.score(batch, step.temperature)
            if case.undivided:
                batch.routing = None
        microbatches.extend(batches)
        with torch.no_grad():
            for parameter in policy.parameters():
                local = parameter.to_local()
                local.add_(0.05 * (1000 * local).sin())
        losses.set_token_weights(batches, *options)

    order = list(range(len(step.prompts)))
    found, *_ = gradient(policy, here, read_config(folder, config), step, order, budget, "token-mean", weigh=record)
    for batch in microbatches:
        policy.score(batch, step.temperature)
        if not case.undivided:
            changed |= zip(batch.number.tolist(), policy.router_changed.split(batch.host_lengths))
    return {"gradient": found, "changed": changed}


def main(folder: Path) -> None:
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    with in_float64():
        found = {case: run(case, todo["models"][case.model], todo["step"], world) for case in todo["cases"]}
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
