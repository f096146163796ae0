"""What SGLang's server imports on a machine without a GPU, and what its kernels for CPUs compute of it.

tools/setup.sh puts this folder on the path of .venv-sglang, whose processes import this module as they start. It is for
tests alone: on GPUs SGLang runs as it is installed.

- sgl_kernel has no wheel for CPUs. Of its kernels only the hash of SGLang's seeds is used there.
- torchvision and torchaudio are imported for models that tests do not start.
- SGLang takes seeds with --enable-deterministic-inference, which is for GPUs only.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MODULES = ("torchvision", "torchaudio")
LOW = 0xFFFFFFFF


class Anything:
    """Can be called, read and inherited from."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are missing, and changes some of SGLang's when they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name in CHANGES:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                CHANGES[name](module)

            spec.loader.exec_module = exec_module
            return spec
        top = name.partition(".")[0]
        if name == "sgl_kernel" or (top in MODULES and imported_by_sglang(name)):
            return importlib.machinery.ModuleSpec(name, self, is_package=top in MODULES)
        return None

    def create_module(self, spec: Any) -> Any:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def imported_by_sglang(name: str) -> bool:
    """transformers works without these modules, so it should not find them."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return "/sglang/" in file or name.partition(".")[0] in sys.modules


def mixed(state: Tensor, key: Tensor) -> Tensor:
    """One round of MurmurHash3 with 32 bits, on integers of 64 whose low half counts."""
    key = (key * 0xCC9E2D51) & LOW
    key = ((key << 15) | (key >> 17)) & LOW
    state = state ^ ((key * 0x1B873593) & LOW)
    state = ((state << 13) | (state >> 19)) & LOW
    return (state * 5 + 0xE6546B64) & LOW


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 of a seed [n] of 64 bits, a position [n] and a column [m] as four words: uint32 [n, m]."""
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed & LOW, (seed >> 32) & LOW, positions.long() & LOW):
        state = mixed(state, word)
    state = mixed(state[:, None], columns.long()[None])  # [n, m]
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    return (state ^ (state >> 16)).to(torch.uint32)


def allow_attention(choices: Any) -> None:
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def keep_products(operators: Any) -> None:
    """The products that do not depend on the batch are kernels for GPUs."""
    operators.enable_batch_invariant_mode = lambda *_, **__: None


CHANGES = {
    "sglang.srt.arg_groups.choices": allow_attention,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": keep_products,
}
library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
sys.meta_path.insert(0, Finder())
