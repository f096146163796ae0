"""Router replay on many ranks: the gradient with given experts is that of one rank, in float64. They were recorded
before (old-logp), or come with the responses (rollout).

The ranks run tests/parallel/replay_worker.py; tests/model/test_router_replay.py compares one rank with a calculation by
hand.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import launch
from tests.parallel import DIVIDES_EXPERTS
from tests.parallel.expert_worker import Case
from tests.parallel.replay_worker import in_float64, run
from tests.parallel.test_sequence_parallel import MODELS, make_step, relative_error

CASES = {
    2: [(Case(1, recompute=True, share_prompt=True), "old-logp"), (Case(1, 2), "old-logp"), (Case(2), "old-logp"),
        (Case(1, undivided=True), "old-logp"), (Case(1, 2, share_prompt=True), "old-logp"),
        (Case(1, share_prompt=True), "rollout"), (Case(1, 2, recompute=True), "rollout")],
    4: [(Case(1, 4), "old-logp"), (Case(2, 4, 2, recompute=True), "old-logp"), (Case(2, share_prompt=True), "old-logp"),
        (Case(2, 4, 2, share_prompt=True), "rollout")],
}
if not DIVIDES_EXPERTS:
    CASES = {ranks: [case for case in cases if case[0].expert_parallel == 1] for ranks, cases in CASES.items()}
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
        return {mode: run(Case(1), model, make_step(), world, 1, mode) for mode in ("old-logp", "rollout")}


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
    for case, mode in CASES[num_ranks]:
        for of_rank in of_ranks:
            found, want = of_rank[case, mode], expected[mode]
            error = relative_error(found["gradient"], want["gradient"])
            if case.undivided:                                          # without a replay it is another gradient
                assert error > 1e-3
                continue
            assert error < TOLERANCE, (case, mode, error)
            for number, share in found["changed"].items():
                assert number < 0 or torch.equal(share, want["changed"][number]), (case, mode, number)
    assert 0.1 < torch.cat([*expected["old-logp"]["changed"].values()]).mean() < 0.9
    assert relative_error(expected["rollout"]["gradient"], expected["old-logp"]["gradient"]) > 1e-3
