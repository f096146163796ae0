"""Run by test_router_replay.py: experts are recorded, weights change, and a gradient is taken with what was recorded."""

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
    """The experts of each token by the number of its response, the gradient after a change of weights, and of each
    token the share of layers whose router would have changed its choice. `case.undivided`: nothing is replayed."""
    here, config = place(world, case), replace(config_of(case), router_replay="old-logp")
    policy, routing, changed = load_policy(folder, config, here), {}, {}
    microbatches = []

    def record(batches, *options) -> None:
        for batch in batches:
            policy.score(batch, step.temperature)
            for start, end, number in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.number.tolist()):
                routing[number] = batch.routing[start:end]
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
        for start, end, number in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.number.tolist()):
            changed[number] = torch.zeros(0) if policy.router_changed is None else policy.router_changed[start:end]
    return {"routing": routing, "gradient": found, "changed": changed}


def main(folder: Path) -> None:
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    with in_float64():
        found = {case: run(case, todo["models"][case.model], todo["step"], world) for case in todo["cases"]}
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
