"""Runs cases of launches.py on the stand-in for CUDA and prints what each asks of the device as JSON. With triton and
liger-kernel on the path, Liger's kernels are asked for and not run."""

import contextlib
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

from tests.cuda import fake_cuda

if __name__ == "__main__":
    DEVICE = fake_cuda.install()                                        # before anything asks whether there is a GPU

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from tests.cuda.launches import Asked
from tests.cuda.memory import run
from tests.cuda.memory_worker import join, nothing_read, read

COLLECTIVES = {"gather": "gathers", "reduce-scatter": "reductions", "sum": "reductions"}
LETTERS = {"gathers": "G", "products": "P", "reductions": "R"}
PICKS = ("gather", "scatter", "index", "embedding")
NO_KERNEL = ("empty", "new_empty", "lift", "resize", "set_", "record_stream", "is_pinned", "wait_tensor")


def is_launched(func) -> bool:
    """Whether an operation starts a kernel: views and allocations do not."""
    name = func._schema.name.partition("::")[2]
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.arguments)
    return not is_view and not name.startswith(NO_KERNEL)


def attention_flops(query: torch.Tensor, offsets: torch.Tensor) -> float:
    """Of a causal forward pass of packed sequences, query [T, heads, D]: QK^T and PV under the diagonal."""
    lengths = DEVICE.numbers(offsets).diff().double()
    return float(4 * query.shape[1] * query.shape[2] * (lengths * (lengths + 1) / 2).sum())


def num_bytes(func, args: tuple, out) -> float:
    """What a kernel reads and writes."""
    inputs, outputs = ([x for x in pytree.tree_leaves(xs) if isinstance(x, FakeTensor)] for xs in (args, out))
    if func._schema.name.partition("::")[2].startswith(PICKS):          # of the whole it touches what it picks
        return 3 * min(x.nbytes for x in [*inputs, *outputs] if x.nbytes)
    return sum(x.nbytes for x in {id(x): x for x in inputs}.values()) + sum(x.nbytes for x in outputs)


def add(asked: Asked, func, args: tuple, out) -> None:
    """Count an operation of the device."""
    name = func._schema.name
    if not is_launched(func):
        return
    kind = "others"
    if name in fake_cuda.OPERATIONS:
        kind = COLLECTIVES[fake_cuda.OPERATIONS[name]]
    elif "varlen_attn" in name:
        kind = "attention"
        is_backward = "backward" in name
        query, offsets = (args[1], args[6]) if is_backward else (args[0], args[3])
        asked.attention_flops += attention_flops(query, offsets) * (2.5 if is_backward else 1)
    elif func._overloadpacket in flop_registry:
        kind = "products"
        operands = [x for x in args if isinstance(x, FakeTensor)]
        asked.product_flops += flop_registry[func._overloadpacket](*operands, out_val=out)
    else:
        asked.other_bytes += num_bytes(func, args, out)
    asked.kernels[kind] += 1
    asked.order += LETTERS.get(kind, "")


@contextlib.contextmanager
def without_triton(on_launch: Callable[[tuple], None]) -> Iterator[None]:
    """Liger's kernels are told to `on_launch` with their arguments and compute nothing."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    def launcher(self, grid):
        return lambda *args, **kwargs: on_launch((*args, *kwargs.values()))

    device = mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext())
    with device, mock.patch.object(InterpretedFunction, "__getitem__", launcher):
        yield


def main(path: str) -> list[dict]:
    DEVICE.only_shapes = True
    results = []
    for case in read(path):
        found: dict[str, Asked] = {}

        @contextlib.contextmanager
        def watch(name: str, found=found) -> Iterator[None]:
            asked = found[name] = Asked()
            DEVICE.heard = lambda func, args, out: add(asked, func, args, out)
            yield
            DEVICE.heard = lambda func, args, out: None

        def on_launch(args: tuple, found=found) -> None:
            for asked in list(found.values())[-1:]:
                asked.kernels["others"] += 1
                asked.other_bytes += sum(x.nbytes for x in args if isinstance(x, torch.Tensor))

        with DEVICE, nothing_read(), without_triton(on_launch):
            run(case, join(case), watch)
        torch.distributed.destroy_process_group()
        gc.collect()
        results.append({name: vars(found[name]) for name in ("forward", "backward")})
    return results


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(main(sys.argv[1])))
