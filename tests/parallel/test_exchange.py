"""Samples between real gloo ranks: everything arrives once, in order, and planning agrees on every rank."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.batch import Batch
from common.packing import Sequences, plan_step
from common.parallel.exchange import exchange, gather_numbers
from tests.common.weigh import weigh
from tests.conftest import launch

FIELDS = ("tokens", "mask", "index", "rollout_logp", "value", "routing", "cu_seqlens")


def make_step(seed: int, num_responses: int) -> Batch:
    """The same on every rank: ragged, with empty responses, tool output and numbers that rounding would change."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2**31) for _ in range(rng.randint(1, 5))] for _ in range(num_responses)]
    responses = [[rng.randrange(2**31) for _ in range(rng.choice([0, 1, 3, 9]))] for _ in range(num_responses)]
    batch = Batch.build(prompts, responses, rollout_logps=[[rng.uniform(-9, 0) for _ in row] for row in responses],
                        masks=[[rng.random() < 0.7 for _ in row] for row in responses])
    routing = torch.tensor([rng.randrange(-1, 2**15) for _ in range(6 * len(batch.tokens))])
    batch.routing = routing.view(-1, 3, 2).short()
    batch.value = torch.tensor([rng.gauss(0, 1) * 10.0 ** rng.randint(-30, 30) for _ in batch.tokens])
    return batch


def assert_same(a: Batch, b: Batch) -> None:
    assert a.present().keys() == b.present().keys()
    for name in FIELDS:
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def check_round_trip(rank: int, world_size: int, seed: int) -> None:
    """One step: dealt to owners, numbers gathered, planned, exchanged, cut to micro-batches, joined, sent back."""
    rng = random.Random(seed)
    num_responses = rng.choice([1, 2, 5, 16])
    whole = make_step(seed, num_responses)
    owners = torch.tensor([rng.randrange(max(1, world_size - 1)) for _ in range(num_responses)])  # the last has none
    mine = (owners == rank).nonzero()[:, 0]
    mine = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))]
    local = whole.select(mine) if len(mine) or seed % 2 else Batch.build([], [])

    reward = torch.tensor([rng.gauss(0, 1) for _ in range(num_responses)])
    gathered = gather_numbers(torch.stack([local.sequence_lengths, reward[local.index]], dim=1), local.index)
    assert gathered.dtype == torch.float64
    assert torch.equal(gathered, torch.stack([whole.sequence_lengths.double(), reward.double()], dim=1))

    lengths = gathered[:, 0].long().numpy()
    plan = plan_step(Sequences(lengths, lengths.astype(float)), min(2, num_responses), world_size, 12, seed)
    plans = [None] * world_size
    random.seed(rank)                                                       # plans must not use global generators
    np.random.seed(rank)
    dist.all_gather_object(plans, [plan.rank.tolist(), [[[share.tolist() for share in m] for m in minibatch]
                                                        for minibatch in plan.minibatches]])
    assert all(other == plans[0] for other in plans)

    arrived = exchange(local, plan.rank[local.index.numpy()])
    assert_same(arrived, whole.select((plan.rank == rank).nonzero()[0]))    # sorted by index
    parts = [arrived.microbatch(microbatch[rank]) for minibatch in plan.minibatches for microbatch in minibatch]
    assert all(part.present().keys() == parts[0].present().keys() for part in parts)
    assert_same(Batch.cat(parts).sort(), arrived)
    assert_same(exchange(arrived, owners[arrived.index]), whole.select(mine.sort().values))


def check_one_gets_all(rank: int, world_size: int) -> None:
    whole = make_step(7, 3 * world_size)
    local = whole.select(range(3 * rank, 3 * rank + 3))
    last = world_size - 1
    assert_same(exchange(local, [last] * 3), whole if rank == last else whole.select([]))
    nothing = exchange(Batch.build([], []), [])
    assert len(nothing) == len(nothing.tokens) == 0


def check_nothing_trained(rank: int, world_size: int) -> None:
    """No rank brings a response: some had responses with log-probs, which nobody trains on, and the last had none."""
    local = Batch.build([], []) if rank == world_size - 1 else make_step(1, 3).select([])
    arrived = exchange(local, [])
    assert len(arrived) == len(arrived.tokens) == 0
    assert list(arrived.present()) == ["tokens", "mask", "index", "number", "rollout_logp", "value", "routing"]
    assert len(arrived.microbatch([])) == 1                                 # a dummy, as on every rank


def check_refusals(rank: int, world_size: int) -> None:
    """All ranks must raise: one that goes on alone would wait forever."""
    with pytest.raises(AssertionError, match="once each"):
        gather_numbers(torch.zeros(1, 2), torch.tensor([rank // 2]))


def check_dummy_under_fsdp(rank: int, world_size: int) -> None:
    """One response for all ranks: the others run dummies, and the gradient is that of one process, to the last bit."""
    from torch.distributed.fsdp import fully_shard

    def loss(model, batch):
        logp = model(batch.tokens).log_softmax(-1).gather(1, batch.tokens[:, None])[:, 0]
        return (logp * batch.extra["weight"]).sum()

    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))

    whole = Batch.build([[1, 2]], [[3, 4, 5]])
    plan = plan_step(Sequences(whole.sequence_lengths.numpy(), np.ones(1)), 1, world_size, 100, 0)
    arrived = exchange(whole if rank == 0 else Batch.build([], []), plan.rank if rank == 0 else [])
    batch = arrived.microbatch(plan.minibatches[0][0][rank])
    assert (batch.index.tolist() == [-1]) == (rank != plan.rank[0])
    weigh([batch], "token-mean", left_out=torch.zeros(1, dtype=torch.float64))
    assert batch.extra["weight"].sum() == pytest.approx((rank == plan.rank[0]) * 1.0)   # a dummy has no weight
    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    (world_size * loss(model, batch)).backward()

    alone = make_model()
    whole.extra["weight"] = whole.mask / 3
    loss(alone, whole).backward()
    for sharded, plain in zip(model.parameters(), alone.parameters()):
        assert torch.equal(sharded.grad.full_tensor(), plain.grad)
        assert plain.grad.any()


def work() -> None:
    """On each rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for seed in range(20):
        check_round_trip(rank, world_size, seed)
    check_one_gets_all(rank, world_size)
    check_nothing_trained(rank, world_size)
    check_refusals(rank, world_size)
    check_dummy_under_fsdp(rank, world_size)
    dist.barrier()                                                          # a rank that leaves first can abort others
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange_between_ranks(world_size):
    launch("tests/parallel/test_exchange.py", ranks=world_size, warm=True)


if __name__ == "__main__":
    work()
