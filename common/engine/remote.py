"""Messages and weights between the ranks that train and the ranks that sample (async_grpo.py). Messages go through the
job's store. Trainers ask for one thing at a time and samplers do it, so no number depends on which side is faster."""

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch
from common.engine.base import Engine
from common.parallel.ranks import World, all_gather_objects, all_names, collective_timeout, on_main
from common.sync.checksums import Checksum, as_numbers

PART = 1 << 22  # bytes in one entry of the store, which takes 8 MiB


class Bridge:
    """One side's end. All ranks of the side call the same methods together."""

    def __init__(self, world: World):
        self.world = world
        self.store = dist.PrefixStore("bridge", world.job_store)
        if world.trains:
            self.inbox = "trainers"
            self.outbox = "samplers"
        else:
            self.inbox = "samplers"
            self.outbox = "trainers"
        if world.is_main or world.samples:
            self.group = self._make_group()

    def _make_group(self) -> Any:
        """Of the first trainer, and all samplers after it."""
        rank = 0
        if self.world.samples:
            rank = self.world.rank + 1
        size = 1 + self.world.num_samplers
        if self.world.device.type == "cpu" or self.world.samplers_on_cpu:
            return dist.ProcessGroupGloo(self.store, rank, size, collective_timeout(0))
        return dist.ProcessGroupNCCL(self.store, rank, size, dist.ProcessGroupNCCL.Options())

    def send(self, message: Any) -> None:
        """The first rank sends, and does not wait."""
        if self.world.rank == 0:
            self._push(self.outbox, pickle.dumps(message))

    def send_share(self, share: bytes) -> None:
        """Each sampler sends its own samples, of a rollout whose message follows."""
        self._push(f"share_{self.world.rank}", share)

    def receive_share(self) -> bytes:
        """Each trainer receives the samples of some samplers, after the rollout's message."""
        shares = []
        for sampler in range(self.world.rank, self.world.num_samplers, self.world.size):
            shares.append(self._pop(f"share_{sampler}"))
        return b"".join(shares)

    def _push(self, queue: str, data: bytes) -> None:
        """An empty part ends the data."""
        for start in range(0, len(data) + PART, PART):
            part = data[start : start + PART]
            self.store.queue_push(queue, part)

    def _pop(self, queue: str) -> bytes:
        parts = []
        while part := self.store.queue_pop(queue):
            parts.append(part)
        return b"".join(parts)

    def has_message(self) -> bool:
        """Whether a message has arrived. While samplers sample, it means that the trainers have ended."""
        return self.store.queue_len(self.inbox) > 0

    def receive(self, on_wait: Callable[[], Any] = lambda: None) -> Any:
        """Wait for a message. Meanwhile all ranks call `on_wait`, again and again. If it returns True, on all of them,
        they wait no longer, and None is returned."""
        while not on_main(self.world, self.has_message):
            if on_wait():
                return None
            time.sleep(0.005)
        return on_main(self.world, self._take)

    def _take(self) -> Any:
        return pickle.loads(self._pop(self.inbox))


class RemoteEngine(Engine):
    """The samplers' engines, as the trainers see them."""

    bridge: Bridge  # the script sets it

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Checksum]) -> tuple[int, set[str]]:
        """Tensor by tensor, so that no rank holds a whole layer of them."""
        self.bridge.send(("weights", self.policy.described(self.dtype)))
        for _, tensor in tensors:
            if self.world.is_main:
                if self.world.samplers_on_cpu:
                    tensor = tensor.cpu()
                self.bridge.group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()
        self.bridge.send(as_numbers(sent))
        num_compared, differing, self.probed = self.bridge.receive()
        return num_compared, differing

    def _sample_probe(self) -> Batch:
        """Each trainer scores the samples of some engines, in turns, and so each engine is compared by one of them. A
        trainer without an engine of its own scores those of the first: all ranks run the model as often."""
        mine = self.probed[self.world.rank :: self.world.size]
        if not mine:
            mine = self.probed[:1]
        return Batch.cat(mine).to(self.world.device)


def receive_weights(
    engine: Engine, bridge: Bridge, described: dict[str, Tensor]
) -> tuple[int, list[str], list[Batch]]:
    """The samplers' part of `RemoteEngine._load`. `described`: the tensors that will come, on the meta device. Also
    returns what each engine sampled on the probe."""
    sent: dict[str, Checksum] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, like in described.items():
            tensor = torch.empty(like.shape, dtype=like.dtype, device=engine.world.device)
            bridge.group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
            yield name, tensor
        for name, (total, numel) in bridge.receive().items():
            sent[engine.name_of(name)] = torch.tensor(total, dtype=torch.float64), numel

    engine._wake_weights()
    num_compared, differing = engine._load(tensors(), sent)
    engine._wake_cache()
    engine.awake = True
    all_differing = all_names(differing)
    samples = all_gather_objects(engine._sample_probe().to("cpu"))
    return num_compared, all_differing, samples[:: engine.config.tp]  # all ranks of an engine have the same
