"""Router replay on many ranks: the gradient with experts that were recorded before is that of one rank, in float64.

The ranks run tests/parallel/replay_worker.py; tests/model/test_router_replay.py compares one rank with a calculation by
hand.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import launch
from tests.parallel.expert_worker import Case
from tests.parallel.replay_worker import in_float64, run
from tests.parallel.test_sequence_parallel import MODELS, make_step, relative_error

CASES = {
    2: [Case(1, recompute=True, share_prompt=True), Case(1, 2), Case(2), Case(1, undivided=True)],
    4: [Case(1, 4), Case(2, 4, 2, recompute=True), Case(2, share_prompt=True)],
}
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("router_replay")


@pytest.fixture(scope="module")
def model(folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS["mixture"]).save_pretrained(folder / "mixture")
    return str(folder / "mixture")


@pytest.fixture(scope="module")
def expected(model, world) -> dict:
    """Of one rank, each response in a micro-batch of its own."""
    with in_float64():
        return run(Case(1), model, make_step(), world, budget=1)


@pytest.fixture(scope="module", params=CASES)
def found(request, model, folder) -> tuple[int, list[dict]]:
    """The number of ranks, and what each found."""
    num_ranks = request.param
    torch.save({"models": {"mixture": model}, "step": make_step(), "cases": CASES[num_ranks]}, folder / "todo.pt")
    launch("tests/parallel/replay_worker.py", folder, ranks=num_ranks, warm=True)
    return num_ranks, [torch.load(folder / f"found_{num_ranks}_{rank}.pt", weights_only=False)
                       for rank in range(num_ranks)]


def test_ranks_record_and_replay_what_one_rank_does(found, expected):
    """The gradient, and which tokens' experts are others than the routers would choose."""
    num_ranks, of_ranks = found
    for case in CASES[num_ranks]:
        for of_rank in of_ranks:
            error = relative_error(of_rank[case]["gradient"], expected["gradient"])
            if case.undivided:                                          # without a replay it is another gradient
                assert error > 1e-3
                continue
            assert error < TOLERANCE, (case, error)
            for number, share in of_rank[case]["changed"].items():
                assert number < 0 or torch.equal(share, expected["changed"][number]), (case, number)
    assert 0.1 < torch.cat([*expected["changed"].values()]).mean() < 0.9
