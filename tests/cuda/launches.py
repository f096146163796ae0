"""What an update asks of a GPU, counted on the stand-in for CUDA: kernels, their bytes and FLOPs, and the order of
gathers; and the share of an H100's matrix products that follows.

    python -m tests.cuda.launches Qwen3-0.6B --gpus 8 --tokens 16384

One layer is the difference of two depths. A kernel's bytes are those of the tensors that it reads and writes. The
seconds are arithmetic with `EFFICIENCY`: PREDICTIONS, no GPU was at hand to check them.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from common.model.policy import ModelConfig
from tests.conftest import launch
from tests.cuda.memory import Case
from tests.cuda.shapes import MODELS

SITE = Path(os.environ.get("LIGER", f"{sys.prefix}/liger"))
"""Where triton and liger-kernel are (`tools/setup.sh extras`)."""
DEPTHS = 2, 4
FLOPS, BYTES_PER_S = 989e12, 3.35e12                                    # an H100 SXM: dense bfloat16, HBM3
EFFICIENCY = {"products": 0.70, "attention": 0.40, "others": 0.85}
"""Shares of FLOPS and BYTES_PER_S that kernels reach: large products of cuBLAS, FlashAttention-2, element-wise."""
LAUNCH_S = 5e-6
"""What the host needs for an operation of PyTorch with its autograd."""


@dataclass
class Asked:
    """Of a forward or a backward pass of one micro-batch."""

    kernels: Counter = field(default_factory=Counter)
    """By kind: products, attention, others, gathers, reductions."""
    product_flops: float = 0.0
    attention_flops: float = 0.0
    other_bytes: float = 0.0
    """Bytes that the kernels read and write which are neither product nor attention nor collective."""
    order: str = ""
    """G: a gather, P: a matrix product, R: a reduce-scatter, as the host asks for them."""

    def __sub__(self, other: "Asked") -> "Asked":
        return Asked(self.kernels - other.kernels, self.product_flops - other.product_flops,
                     self.attention_flops - other.attention_flops, self.other_bytes - other.other_bytes)

    def times(self, n: float) -> "Asked":
        return Asked(Counter({kind: n * count for kind, count in self.kernels.items()}), n * self.product_flops,
                     n * self.attention_flops, n * self.other_bytes)

    def __add__(self, other: "Asked") -> "Asked":
        return self - other.times(-1)

    @property
    def num_launches(self) -> float:
        return sum(self.kernels.values())

    @property
    def seconds(self) -> float:
        return (self.product_flops / FLOPS / EFFICIENCY["products"]
                + self.attention_flops / FLOPS / EFFICIENCY["attention"]
                + self.other_bytes / BYTES_PER_S / EFFICIENCY["others"])


Passes = dict[str, Asked]
"""forward and backward"""


def count(cases: list[Case], liger: bool) -> list[Passes]:
    """What each case asks for, as it is, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps([asdict(case) for case in cases]))
        env = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SITE)} if liger else None
        said = launch("-m", "tests.cuda.launches_worker", path, env=env).stdout
    return [{name: Asked(**asked | {"kernels": Counter(asked["kernels"])}) for name, asked in passes.items()}
            for passes in json.loads(said.splitlines()[-1])]


def of_depth(case: Case, num_layers: int) -> Case:
    return replace(case, model=case.model | {"num_hidden_layers": num_layers})


def layer_and_rest(low: Asked, high: Asked) -> tuple[Asked, Asked]:
    """Of one layer, and of a micro-batch without layers."""
    layer = (high - low).times(1 / (DEPTHS[1] - DEPTHS[0]))
    return layer, low - layer.times(DEPTHS[0])


def expected(case: Case, liger: bool) -> dict[str, Any]:
    """What a micro-batch of the whole model asks for, and its MFU (recomputed layers do not count)."""
    low, high = count([of_depth(case, depth) for depth in DEPTHS], liger)
    parts = {name: layer_and_rest(low[name], high[name]) for name in low}
    num_layers, whole = case.model["num_hidden_layers"], Asked()
    for layer, rest in parts.values():
        whole = whole + layer.times(num_layers) + rest
    layer, rest = parts["forward"]
    once = layer.times(num_layers) + rest
    useful = 3 * (once.product_flops + once.attention_flops)
    return {
        "layer": {name: layer for name, (layer, _) in parts.items()},
        "rest": {name: rest for name, (_, rest) in parts.items()},
        "seconds": whole.seconds, "host_s": LAUNCH_S * whole.num_launches, "mfu": useful / whole.seconds / FLOPS,
        "share_of_others": whole.other_bytes / BYTES_PER_S / EFFICIENCY["others"] / whole.seconds,
    }


@dataclass
class Args:
    models: tyro.conf.Positional[tuple[str, ...]] = ("Qwen3-0.6B", "Qwen2.5-7B", "Qwen2.5-32B")
    gpus: int = 8
    tokens: int = 16384
    prompt_length: int = 512
    response_length: int = 1536
    recompute: bool | None = None
    """All layers, or none of them. None: those of models with hidden states above 2,000."""


def main(args: Args) -> None:
    columns = ["model", "Liger", "kernels a layer, forward + backward", "GB a layer moved by others than products",
               "kernels outside layers", "their GB", "ms a micro-batch", "host ms", "MFU"]
    print(f"PREDICTED for H100s, not measured\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name in args.models:
        recompute = MODELS[name]["hidden_size"] > 2000 if args.recompute is None else args.recompute
        case = Case(MODELS[name], args.gpus, args.tokens, args.prompt_length, args.response_length, num_microbatches=1,
                    policy=ModelConfig(gradient_checkpointing=recompute))
        for liger in (False, True):
            found = expected(case, liger)
            kernels = " + ".join(f"{found['layer'][name].num_launches:.0f}" for name in ("forward", "backward"))
            moved = sum(layer.other_bytes for layer in found["layer"].values()) / 1e9
            rest = sum(rest.num_launches for rest in found["rest"].values())
            moved_by_rest = sum(rest.other_bytes for rest in found["rest"].values()) / 1e9
            print(f"| {name}{', layers recomputed' if recompute else ''} | {'on' if liger else 'off'} | {kernels} | "
                  f"{moved:.1f} | {rest:.0f} | {moved_by_rest:.0f} | {1000 * found['seconds']:.0f} | "
                  f"{1000 * found['host_s']:.0f} | {found['mfu']:.0%} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
