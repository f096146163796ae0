"""Run by test_router_replay.py: experts are recorded, or come with the responses as the engine tells them; weights
change; then comes a gradient with these experts."""

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from common.model.loading import load_policy, read_config
from common.parallel import ranks
from common.parallel.exchange import exchange, routing_of
from tests.common.weigh import weigh
from tests.parallel import layout_worker
from tests.parallel.expert_worker import Case, place
from tests.parallel.layout_worker import Step, gradient
from tests.parallel.sequence_worker import config_of, in_float64


def told(step: Step, number: int) -> torch.Tensor:
    """What an engine could tell of all tokens but the last: other experts than any router would choose, the same for
    the prompt of a group."""
    prompt, response = step.prompts[number], step.responses[number]
    rows = [draw(number // step.samples_per_prompt, len(prompt)), draw(100 + number, len(response))]
    return torch.cat(rows)[:-1].short()


def draw(seed: int, num_tokens: int) -> torch.Tensor:
    """Two of the six experts for each token and both layers: [n, 2, 2]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, 2, 6, generator=generator).argsort(-1)[..., :2]


def run(case: Case, folder: str, step: Step, world: ranks.World, budget: int = 20, mode: str = "old-logp") -> dict:
    """The gradient after a change of weights, and of each token, by the number of its response, the share of layers in
    which the router would have chosen other experts. `case.undivided`: nothing is replayed."""
    here, config = place(world, case), replace(config_of(case), router_replay=mode)
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
        weigh(batches, *options)

    def send(batch, destination):
        routing = [told(step, number) for number in batch.number.tolist()]
        batch.routing = routing_of(batch.sequence_lengths.tolist(), routing if mode == "rollout" else [])
        return exchange(batch, destination)

    order = list(range(len(step.prompts)))
    with mock.patch.object(layout_worker, "exchange", send):
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
        found = {(case, mode): run(case, todo["models"][case.model], todo["step"], world, mode=mode)
                 for case, mode in todo["cases"]}
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
