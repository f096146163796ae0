"""Inside the workers of `vllm serve`: a weight transfer engine of vLLM's own factory that reads a shared folder, or
receives the tensors from the trainer by gloo or NCCL.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this repository> vllm serve MODEL --enable-scale-out \\
        --logprobs-mode processed_logprobs --worker-extension-cls tools.vllm_worker.Extension \\
        --weight-transfer-config '{"backend": "trainer"}'

It works on all devices, and compares the trainer's checksums with those of what the worker then holds, as
`common/engine/vllm.py` does in one process.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from common.engine.vllm_changes import start_on_cpu
from common.servers.folder import read_checksums
from common.servers.group import BACKEND, Group, Meeting, join
from common.sync.checksums import differing, engine_name
from common.sync.weights import EngineWeights

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


class Extension:
    """What --worker-extension-cls names: vLLM imports this module before it loads the model, and lets /collective_rpc
    call what is here."""

    model_runner: Any  # of vLLM's worker, whose base this becomes
    weight_transfer_engine: Any

    def describe(self) -> dict[str, Any]:
        """What `common/servers/vllm.py` compares with the needs of training."""
        config = self.model_runner.model_config
        text = config.hf_text_config
        return {
            "logprobs_mode": str(config.logprobs_mode),
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "transfer": None if self.weight_transfer_engine is None else self.weight_transfer_engine.config.backend,
            "sizes": {name: getattr(text, name) for name in SIZES},
        }

    def loaded(self) -> dict[str, Any]:
        """The version of the last update, and how many tensors were compared."""
        engine = self.weight_transfer_engine
        return {"count": engine.num_compared, "version": engine.version}


@dataclass
class TrainerInit(Meeting, WeightTransferInitInfo):
    """Of a transfer by a group."""


@dataclass
class TrainerUpdate(WeightTransferUpdateInfo):
    folder: str = ""  # of `folder.WeightFolder`; "": the group sends what follows, in this order
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)  # as `as_numbers` gives them
    version: str = ""  # the name that the trainer gives these weights


class TrainerEngine(WeightTransferEngine[TrainerInit, TrainerUpdate]):
    init_info_cls = TrainerInit
    update_info_cls = TrainerUpdate
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.held = ("", -1)
        """The run and the version of the weights that were loaded last from a folder."""
        self.group: Group | None = None
        self.num_compared = 0
        self.version = ""  # of the weights that are held; "": none, or a part of some
        self.name_of = engine_name(model)
        self.weights = EngineWeights(model, vllm_config, self.model_config.dtype, device.type == "cpu")

    def init_transfer_engine(self, init_info: TrainerInit) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = join(init_info, rank, None, self.device)

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def receive_weights(self, update_info: TrainerUpdate) -> None:
        """Load all weights of the folder, or of the group, which ends here. Raises ValueError if they are older than
        those that are held, which a request may be that a stopped server reads late, and if this model has other
        weights or then does not hold them. Raises RuntimeError if the trainer is gone."""
        self.version = ""
        try:
            if update_info.folder:
                folder = Path(update_info.folder)
                run, version, sums = read_checksums(folder)
                if run == self.held[0] and version < self.held[1]:
                    raise ValueError(f"weights of version {version} come after those of version {self.held[1]}")
                self._load(tensors_of(folder), sums)
                self.held = (run, version)
            else:
                self._load(self._received(update_info), update_info.sums)
            self.version = update_info.version
        finally:
            self.shutdown()

    def _received(self, update_info: TrainerUpdate) -> Iterator[tuple[str, Tensor]]:
        if self.group is None:
            raise RuntimeError("no trainer has joined: weights come after /init_weight_transfer_engine")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            yield name, self.group.receive(shape, getattr(torch, dtype))

    def _load(self, tensors: Iterator[tuple[str, Tensor]], written: dict[str, tuple[int, int]]) -> None:
        sent = {}
        for name, (total, numel) in written.items():
            sent[self.name_of(name)] = torch.tensor(total, dtype=torch.float64), numel
        missing = sorted(self.weights.load(tensors))
        if missing:
            raise ValueError(f"nothing that the trainer sent goes into {len(missing)} weights of the server "
                             f"({', '.join(missing[:3])}): it serves another model")
        held = self.weights.complete(sent)
        differ = sorted(differing(sent, held))
        if differ:
            raise ValueError(f"checksums differ: the server does not hold the trainer's weights in {len(differ)} "
                             f"tensors: {', '.join(differ[:5])}")
        self.num_compared = len(held)


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                yield name, opened.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, TrainerEngine)
PATCHES = contextlib.ExitStack()
"""For as long as the server runs: its linear layers keep the weights that a sync writes."""
if not torch.cuda.is_available():
    PATCHES.enter_context(start_on_cpu())
