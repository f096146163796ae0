"""Weights from the memory of the first rank that samples to a server of vLLM, tensor by tensor, through the server's
interface for weight transfer.

Of vLLM 0.32: the routes of vllm/entrypoints/rl/online/api_router.py (lines 163 to 213), which v1/worker/gpu_worker.py
(lines 1484 to 1604) hands to the engine of tools/vllm_worker.py. As in vLLM's own trainer
(vllm/distributed/weight_transfer/nccl_engine.py, lines 294 to 361), a request runs while the group is used.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.servers.client import Client, Gone
from common.servers.group import Group, join, open_meeting

MOST_HANGING = 4
"""Transfers to one server that a library does not let end."""
ANSWER_S = 5.0
"""Seconds for which a server may say why a transfer broke."""
T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """Weights of one version."""

    kind: str  # gloo or nccl
    device: torch.device  # of the group
    tensors: dict[str, Tensor]  # in the host's memory
    sums: dict[str, tuple[int, int]]  # as `as_numbers` gives them


class HeldWeights:
    """A copy of the last weights in the host's memory, for servers that come back while the trainer goes on."""

    def __init__(self, run: str, dtype: torch.dtype, kind: str, device: torch.device):
        """`run`: a name that no other run has. `dtype`: of the copies. `kind`, `device`: of `Held`."""
        self.run = run
        self.dtype = dtype
        self.version = -1
        self.last = Held(kind, device, {}, {})

    @property
    def name(self) -> str:
        """Of the version, at the servers."""
        return f"{self.run}-{self.version:06d}"

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy the tensors of the next version."""
        copies = {name: tensor.detach().to("cpu", self.dtype, copy=True).contiguous() for name, tensor in tensors}
        self.version += 1
        self.last = Held(self.last.kind, self.last.device, copies, {})

    def complete(self, sums: dict[str, tuple[int, int]]) -> None:
        self.last = Held(self.last.kind, self.last.device, self.last.tensors, sums)

    def remove_older(self) -> None:
        """They were let go as the servers were given the last ones."""

    def remove(self) -> None:
        self.last = Held(self.last.kind, self.last.device, {}, {})


async def transfer(client: Client, held: Held, version: str) -> None:
    """In an update that has begun. `version`: its name. Raises Gone; the worker closes its own end, whatever
    happens."""
    thread = f"transfer to {client.url}"
    if sum(one.name == thread for one in threading.enumerate()) >= MOST_HANGING:
        raise Gone(client.line(f"{MOST_HANGING} transfers of weights to it hang: start it with another port"))
    world = await client.call("/get_world_size")
    try:
        meeting, store = open_meeting(held.kind, client.url, 1 + world["world_size"], client.limits.answer_s)
    except OSError as error:
        raise Gone(client.line(f"no group of --rollout.server-transfer {held.kind} with it: {error}")) from None
    request = {"init_info": asdict(meeting)}
    asking = asyncio.create_task(client.call("/init_weight_transfer_engine", request, is_long=True))
    group = await both(client, asking, in_thread(thread, lambda: join(meeting, 0, store, held.device)))
    update = {
        "names": [*held.tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in held.tensors.values()],
        "shapes": [list(tensor.shape) for tensor in held.tensors.values()],
        "sums": held.sums,
        "version": version,
    }
    asking = asyncio.create_task(client.call("/update_weights", {"update_info": update}, is_long=True))
    try:
        await both(client, asking, in_thread(thread, lambda: send_all(group, held.tensors)))
    finally:
        group.stop()


def send_all(group: Group, tensors: dict[str, Tensor]) -> None:
    try:
        for tensor in tensors.values():
            group.send(tensor)
    finally:
        group.close()


async def both(client: Client, asking: asyncio.Task[Any], work: asyncio.Future[T]) -> T:
    """Wait for a request and for the work that belongs to it, until one of them fails. What the server says comes
    first: it knows why a group broke."""
    try:
        await asyncio.wait({asking, work}, return_when=asyncio.FIRST_EXCEPTION)
        if not asking.done():
            await asyncio.wait({asking}, timeout=ANSWER_S)
        if asking.done():
            asking.result()
        return work.result()
    except (RuntimeError, OSError) as error:
        raise Gone(client.line(f"the transfer of weights broke: {error}")) from None
    finally:
        asking.cancel()


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """The work in a thread that the end of the program does not wait for: a library may hang in it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # it is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    found = asyncio.wrap_future(future)
    found.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be awaited no more
    return found
