"""Copies of the model (HSDP) sum their gradients once a mini-batch, and the gradient is that of one copy. The ranks,
two copies over two shards each, run tests/parallel/copies_worker.py."""

from pathlib import Path

import pytest
import torch

from tests.conftest import launch
from tests.parallel import DIVIDES_EXPERTS
from tests.parallel.copies_worker import Case
from tests.parallel.test_sequence_parallel import save_models

RANKS = 4
CASES = [Case("llama"), Case("llama", num_microbatches=1), Case("llama", critic=True, recompute=0.5),
         Case("llama", rank=2), Case("llama", bfloat16=True), Case("mixture"),
         *[Case("mixture", expert_parallel=2)] * DIVIDES_EXPERTS]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("copies")
    torch.save({"models": save_models(folder), "cases": CASES}, folder / "todo.pt")
    launch("tests/parallel/copies_worker.py", folder, ranks=RANKS, warm=True)
    return [torch.load(folder / f"found_{rank}.pt", weights_only=False) for rank in range(RANKS)]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, as a share of the norm."""
    assert one.keys() == other.keys()
    parts = [(x.double().flatten(), other[name].double().flatten()) for name, x in one.items()]
    a, b = (torch.cat(side) for side in zip(*parts))
    assert a.norm() > 0.01
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_copy(case, found):
    """With bfloat16 gradients those of several micro-batches are rounded once, where one copy rounds each of their
    sums."""
    tolerance = 0.02 if case.bfloat16 else 5e-7
    for of_rank in found:
        once = of_rank[case]["once"][0]
        assert distance(once, of_rank[case]["single"][0]) < tolerance
        assert distance(once, of_rank[case]["each"][0]) < tolerance
        assert all(torch.equal(x, of_rank[case]["again"][0][name]) for name, x in once.items())
        assert all(torch.equal(x, found[0][case]["once"][0][name]) for name, x in once.items())


@pytest.mark.parametrize("case", CASES)
def test_copies_sum_once_a_mini_batch(case, found):
    """For each of FSDP2's groups of weights, whatever the number of micro-batches."""
    for of_rank in found:
        each, once, single = (of_rank[case][name][1] for name in ("each", "once", "single"))
        assert each == case.num_microbatches * once and once >= 2 and single == 0


@pytest.mark.parametrize("case", CASES)
def test_recomputed_layers_change_no_bit_on_several_ranks(case, found):
    """None of them, half, and all."""
    for of_rank in found:
        kept, *others = of_rank[case]["shares"]
        assert max(float(x.abs().max()) for x in kept.values()) > 0.01
        for other in others:
            assert all(torch.equal(x, other[name]) for name, x in kept.items())


@pytest.mark.parametrize("case", [case for case in CASES if case.num_microbatches > 1])
def test_a_step_before_copies_have_summed_is_refused(case, found):
    for of_rank in found:
        assert "--policy.replicas: the copies of the model have not summed the gradient of" in of_rank[case]["refused"]
