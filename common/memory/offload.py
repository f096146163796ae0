"""Offload the trainer's weights and optimizer moments to host memory while the engine samples."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.flags.model import OffloadConfig


class Offload:
    """Offloads the trainer's weights and optimizer moments, as far as the flags ask for it."""

    def __init__(self, config: OffloadConfig, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        """`models`: all that live on the GPU, frozen ones too. On CPUs it works and gains nothing."""
        offloaded: Sequence[nn.Module] = []
        if config.params:
            offloaded = models
        self.params = OffloadedTensors(partial(weights_of, offloaded))
        self.moments: list[OffloadedTensors] = []
        if config.optimizer:
            for optimizer in optimizers:
                self.moments.append(offload_moments(optimizer))


def weights_of(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from state.values()


def offload_moments(optimizer: torch.optim.Optimizer) -> "OffloadedTensors":
    """Keep an optimizer's moments in host memory, except for its steps and a save."""
    moments = OffloadedTensors(partial(moments_of, optimizer))

    def to_device(*_: object) -> None:
        moments.to_device()

    def to_host(*_: object) -> None:
        moments.to_host()

    optimizer.register_step_pre_hook(to_device)
    optimizer.register_step_post_hook(to_host)
    optimizer.register_state_dict_pre_hook(to_device)
    return moments


class OffloadedTensors:
    """Tensors that can be moved to host memory and back.

    It empties and refills their storages but keeps the tensors, so every view of a storage (FSDP2 keeps several) stays
    valid. While a storage is offloaded, it has no bytes."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self.tensors = tensors
        self.host: list[Tensor] = []                    # host buffers, kept between rounds: pinning memory is slow
        self.emptied: list[torch.UntypedStorage] = []   # whose bytes are in `host`

    def to_host(self) -> None:
        """Copy the storages to host memory and free them, if they are not there already."""
        if self.emptied:
            return
        for tensor in self.tensors():
            if isinstance(tensor, DTensor):                                 # Adam's step counts stay
                self.emptied.append(tensor.to_local().untyped_storage())
        sizes = [*map(len, self.emptied)]
        if [*map(len, self.host)] != sizes:
            pin = torch.cuda.is_available()
            self.host = []
            for size in sizes:
                self.host.append(torch.empty(size, dtype=torch.uint8, pin_memory=pin))
        for storage, buffer in zip(self.emptied, self.host):
            buffer.copy_(_bytes(storage))
            storage.resize_(0)

    def to_device(self) -> None:
        """Bring offloaded storages back. A GPU's next kernels wait for the copies; the host does not."""
        for storage, buffer in zip(self.emptied, self.host):
            storage.resize_(len(buffer))
            _bytes(storage).copy_(buffer, non_blocking=True)
        self.emptied = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
