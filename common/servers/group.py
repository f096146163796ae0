"""Groups of processes that weights go through: the first rank that samples, and the workers of one server.

A group is made for one transfer. A server that dies breaks its own group alone, and joins with a new one when it is
back. NCCL is vLLM's own: `uid_init_process_group` of vllm/distributed/weight_transfer/nccl_common.py (line 162 of vLLM
0.32), as its NCCLWeightTransferEngine has it (nccl_engine.py, lines 112 to 233). Gloo has the same verbs on all
devices.
"""

import base64
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

BACKEND = "trainer"
"""Of vLLM's --weight-transfer-config, for all transfers: tools/vllm_worker.py."""
ASK_AGAIN_S = 0.0005
"""Between two looks at what a GPU does."""


@dataclass
class Meeting:
    """Where the members of a group find each other: the body of /init_weight_transfer_engine."""

    kind: str = "gloo"  # or nccl
    size: int = 0  # members: rank 0 sends, the others are the server's workers
    timeout_s: float = 0.0  # of each tensor, and of the meeting
    host: str = ""  # gloo: where rank 0 listens
    port: int = 0
    nccl_id: str = ""  # NCCL: base64 of its unique id


class Group(Protocol):
    """Methods raise RuntimeError where a member is gone, or silent for too long."""

    def send(self, tensor: Tensor) -> None:
        """To all other members, by rank 0. Returns when they have it."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor that rank 0 sends."""

    def stop(self) -> None:
        """Let what another thread is sending end early, where that is possible."""

    def close(self) -> None:
        """End the connections: the other members see it."""


class GlooGroup:
    def __init__(self, meeting: Meeting, rank: int, store: TCPStore | None):
        """`store`: of rank 0, which listens."""
        limit = timedelta(seconds=meeting.timeout_s)
        if store is None:
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        own_host, _ = own_address(meeting.host)
        gloo: Any = ProcessGroupGloo  # torch's stubs do not have all of it
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=own_host)]  # listens on this address alone
        self.group = gloo(store, rank, meeting.size, options)
        self.store = store  # must live as long as the group
        self.options = BroadcastOptions()
        self.options.rootRank = 0
        self.options.timeout = limit

    def send(self, tensor: Tensor) -> None:
        self._broadcast(tensor.cpu())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            self.group.broadcast([as_bytes(tensor)], self.options).wait()

    def stop(self) -> None:
        """Gloo ends when the other side does, or after the time limit."""

    def close(self) -> None:
        del self.group, self.store


class NCCLGroup:
    """Of GPUs. Not run by the tests here: they have no GPU."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device):
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.rank = rank
        self.device = device
        self.timeout_s = meeting.timeout_s
        self.is_stopped = False
        unique_id = base64.b64decode(meeting.nccl_id)
        torch.cuda.set_device(device)  # of this thread
        self.communicator = uid_init_process_group(unique_id, rank, meeting.size, device)
        # The trainer's own work must not wait for a server. A worker loads on the stream that it receives on.
        self.stream = torch.cuda.Stream(device) if rank == 0 else torch.cuda.current_stream(device)

    def send(self, tensor: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            self._broadcast(tensor.to(self.device))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        self.communicator.broadcast(as_bytes(tensor), src=0, stream=self.stream)
        done = torch.cuda.Event()
        done.record(self.stream)
        end = time.monotonic() + self.timeout_s
        while not done.query():  # NCCL itself waits for ever for a member that is gone
            if self.is_stopped:
                raise RuntimeError("NCCL: the transfer was stopped")
            if time.monotonic() > end:
                raise RuntimeError(f"NCCL: no member took or sent a tensor for {self.timeout_s:g} s")
            time.sleep(ASK_AGAIN_S)

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.communicator.destroy()  # by ncclCommAbort: a broadcast that hangs ends


def open_meeting(kind: str, url: str, size: int, timeout_s: float) -> tuple[Meeting, TCPStore | None]:
    """Of rank 0, which listens, with the server at `url`."""
    if kind == "nccl":
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
        return Meeting(kind, size, timeout_s, nccl_id=base64.b64encode(unique_id).decode()), None
    host, family = own_address(str(urlsplit(url).hostname))
    listener = socket.create_server((host, 0), family=family)  # of this address alone
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
                     master_listen_fd=listener.detach(), use_libuv=False)
    return Meeting(kind, size, timeout_s, host, port), store


def join(meeting: Meeting, rank: int, store: TCPStore | None, device: torch.device) -> Group:
    """Wait for all members. `device`: the GPU of NCCL."""
    if meeting.kind == "nccl":
        return NCCLGroup(meeting, rank, device)
    return GlooGroup(meeting, rank, store)


def own_address(host: str) -> tuple[str, socket.AddressFamily]:
    """The address of this machine that `host` is reached from. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as unused:
        unused.connect(address)  # sends nothing
        found: Any = unused.getsockname()
    return str(found[0]), family


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, of a contiguous tensor, which both backends send whatever its type."""
    return tensor.view(-1).view(torch.uint8)
