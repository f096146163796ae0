"""Offload the trainer's weights and optimizer moments to host memory while the engine samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class OffloadConfig:
    params: bool = False
    """Keep the trainer's weights in pinned host memory while the engine is awake (they go after each weight sync)."""
    optimizer: bool = False
    """Keep the optimizer's moments in pinned host memory while the engine is awake. They come back while the next
    forward and backward passes run."""


class Offload:
    """Offloads the trainer's weights and optimizer moments, as far as the flags ask for it."""

    def __init__(self, config: OffloadConfig, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        """`models`: all that live on the GPU, frozen ones too. On CPUs it works and gains nothing."""
        self.config = config
        self.params = OffloadedTensors(
            lambda: (p for model in models for p in model.parameters()) if config.params else ()
        )
        self.moments = OffloadedTensors(
            lambda: (moment for opt in optimizers for state in opt.state.values() for moment in state.values())
            if config.optimizer else ()
        )
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.moments.wait())
            optimizer.register_state_dict_pre_hook(lambda *_: self.moments.wait())

    def back(self) -> None:
        """Bring back the weights now; the moments travel until the next `optimizer.step()`."""
        self.params.to_device()
        self.params.wait()
        self.moments.to_device()


class OffloadedTensors:
    """Tensors that can be moved to host memory and back.

    It empties and fills their storages and leaves the tensors alone, so every view of a storage (FSDP2 keeps several)
    stays valid; while it is offloaded, the storage has no bytes."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self.tensors = tensors
        self.host: list[Tensor] = []                    # host buffers, kept between rounds: pinning memory is slow
        self.offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []      # emptied storages and their host buffers
        self.arrived: torch.cuda.Event | None = None    # when the copies back to the device are done

    def to_host(self) -> None:
        """Copy the storages to host memory and free them."""
        self.wait()
        storages = {}
        for tensor in self.tensors():
            if isinstance(tensor, Tensor) and tensor.numel() > 1:                   # Adam's step counts stay
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                storage = local.untyped_storage()
                storages[storage._cdata] = storage                                  # each storage once
        storages = list(storages.values())
        if [len(buffer) for buffer in self.host] != [storage.nbytes() for storage in storages]:
            pin = any(storage.device.type == "cuda" for storage in storages)
            self.host = [torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin) for storage in storages]
        for storage, buffer in zip(storages, self.host):
            buffer.copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()                    # the copies read what is freed next
        for storage in storages:
            storage.resize_(0)
        self.offloaded = list(zip(storages, self.host))

    def to_device(self) -> None:
        """Start the copies, on a stream of their own on GPUs: `wait` before the first use."""
        for storage, buffer in self.offloaded:          # allocated on the caller's stream, which also frees them
            storage.resize_(len(buffer))
        if self.offloaded and self.offloaded[0][0].device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for storage, buffer in self.offloaded:
                    _bytes(storage).copy_(buffer, non_blocking=True)
            self.arrived = stream.record_event()
        else:
            for storage, buffer in self.offloaded:
                _bytes(storage).copy_(buffer)
        self.offloaded = []

    def wait(self) -> None:
        """Make the current stream wait for the copies that `to_device` started."""
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
