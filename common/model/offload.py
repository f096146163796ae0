"""Room for the engine: the trainer's tensors in host memory while it is awake, and what stays on the GPU."""

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
    """Moves storages, not tensors: every view of a storage (FSDP2 keeps several) stays valid, and empty while away."""

    def __init__(self, config: OffloadConfig, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        """`models`: all that live on the GPU, frozen ones too. On CPUs it works and gains nothing."""
        self.config = config
        self.params = Away(lambda: (p for model in models for p in model.parameters()))
        self.moments = Away(lambda: (x for opt in optimizers for state in opt.state.values() for x in state.values()))
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.moments.wait())
            optimizer.register_state_dict_pre_hook(lambda *_: self.moments.wait())

    @property
    def away_gb(self) -> float:
        return sum(len(buffer) for away in (self.params, self.moments) for _, buffer in away.gone) / 2**30

    def optimizer_out(self) -> None:
        if self.config.optimizer:
            self.moments.out()

    def params_out(self) -> None:
        if self.config.params:
            self.params.out()

    def back(self) -> None:
        """Weights now, moments by the next `optimizer.step()`."""
        if self.config.params:
            self.params.back()
            self.params.wait()
        if self.config.optimizer:
            self.moments.back()


class Away:
    """A set of tensors whose storages can be emptied and filled again."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self.tensors = tensors
        self.host: list[Tensor] = []                    # kept between rounds: pinning host memory is slow
        self.gone: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.arrived: torch.cuda.Event | None = None

    def out(self) -> None:
        self.wait()
        storages = {}
        for tensor in self.tensors():
            if isinstance(tensor, Tensor) and tensor.numel() > 1:                   # Adam's step counts stay
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                storages[storage._cdata] = storage
        storages = list(storages.values())
        if [len(buffer) for buffer in self.host] != [storage.nbytes() for storage in storages]:
            pin = any(storage.device.type == "cuda" for storage in storages)
            self.host = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=pin) for s in storages]
        for storage, buffer in zip(storages, self.host):
            buffer.copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()                    # the copies read what is freed next
        for storage in storages:
            storage.resize_(0)
        self.gone = list(zip(storages, self.host))

    def back(self) -> None:
        """Start the copies, on a stream of their own on GPUs: `wait` before the first use."""
        sizes = [(storage, len(buffer)) for storage, buffer in self.gone]
        for storage, size in sizes:                     # allocated on the caller's stream, which also frees them
            storage.resize_(size)
        if self.gone and self.gone[0][0].device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for storage, buffer in self.gone:
                    _bytes(storage).copy_(buffer, non_blocking=True)
            self.arrived = stream.record_event()
        else:
            for storage, buffer in self.gone:
                _bytes(storage).copy_(buffer)
        self.gone = []

    def wait(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
