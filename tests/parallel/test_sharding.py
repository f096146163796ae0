"""Gradients in bfloat16 are averaged over ranks in float32, a part of them at a time. The oracle is the mean in float64
of what the ranks brought; the ranks run tests/parallel/reduce_worker.py."""

from pathlib import Path

import pytest
import torch

from tests.conftest import launch
from tests.parallel import DIVIDES_EXPERTS
from tests.parallel.reduce_worker import Case
from tests.parallel.test_sequence_parallel import save_models

RANKS = 4
CASES = [Case("llama", 100), Case("llama", 2**26), Case("llama", 100, replicas=2), Case("mixture", 1000),
         *[Case("mixture", 100, expert_parallel=2)] * DIVIDES_EXPERTS]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("sharding")
    torch.save({"models": save_models(folder), "cases": CASES}, folder / "todo.pt")
    launch("tests/parallel/reduce_worker.py", folder, ranks=RANKS, warm=True)
    return [torch.load(folder / f"found_{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_means_over_ranks_are_those_of_float32(case, found):
    """A sum in bfloat16 would be off by 2e-3 of the largest number."""
    for of_rank in found:
        for brought, ours, rank in of_rank[case]["sums"]:
            assert brought.dtype == torch.bfloat16 and ours.dtype == torch.float32
            own = brought.double().unflatten(1, (len(brought), -1))[:, rank]
            assert (ours - own.mean(0)).abs().max() <= 1e-6 * own.abs().mean(0).max()


@pytest.mark.parametrize("case", CASES)
def test_no_more_than_a_part_is_float32_at_a_time(case, found):
    for of_rank in found:
        sizes = [size for size, *dtypes in of_rank[case]["sent"] if dtypes == [torch.float32] * 2]
        assert len(sizes) == len(of_rank[case]["sent"]) and max(sizes) <= case.part
        assert sum(sizes) == sum(brought[0].numel() for brought, *_ in of_rank[case]["sums"])
        assert (len(sizes) == len(of_rank[case]["sums"])) == (case.part == 2**26)           # else there are many


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_fsdp(case, found):
    for of_rank in found:
        gradient, plain = of_rank[case]["gradient"], of_rank[case]["plain"]
        assert gradient.keys() == plain.keys()
        assert all(torch.allclose(gradient[name], x, rtol=1e-6, atol=1e-9) for name, x in plain.items())
        assert max(float(x.abs().max()) for x in plain.values()) > 0.1
