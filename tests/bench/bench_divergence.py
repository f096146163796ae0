"""Memory and time of `linear_divergence` against all logits at once, and against a teacher's top-64 log-probs.

    OMP_NUM_THREADS=1 python -m tests.bench.bench_divergence [--tokens 32768] [--vocab 151936] [--hidden 4096]

dense: logits [N, V] of both models in float32. top-64: what a server of teachers sends, against the student's logits
[N, V]; the server's own memory is not counted. Memory is that of a GPU, simulated on the stand-in for CUDA
(tests/cuda/fake_cuda.py) with bfloat16 inputs: the most that tensors took beside inputs, gradients included. Seconds
are of a CPU, for fewer tokens and words. Forward and backward together.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from tests.bench.record import ROOT, report


def exact(hidden, weight, other_hidden, other_weight):
    from common.kernels import Head, linear_divergence
    from distill import reverse_kl

    formula = partial(reverse_kl, beta=0.5)
    return linear_divergence((hidden, Head(weight)), (other_hidden, Head(other_weight)), formula)


def dense(hidden, weight, other_hidden, other_weight):
    logp = (hidden @ weight.T).float().log_softmax(-1)
    with torch.no_grad():
        logq = (other_hidden @ other_weight.T).float().log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def top64(hidden, weight, other_hidden, other_weight):
    words = torch.arange(64, device=hidden.device).expand(len(hidden), 64)
    logq = torch.full((len(hidden), 64), -5.0, device=hidden.device)
    logp = (hidden @ weight.T).float().log_softmax(-1).gather(1, words)
    return (logq.exp() * (logq - logp)).sum(-1)


WAYS: dict[str, Callable] = {"dense": dense, "top64": top64, "exact": exact}


def inputs(args: argparse.Namespace, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(args.tokens, args.hidden), (args.vocab, args.hidden)]
    shapes += [(args.tokens, args.teacher_hidden), (args.vocab, args.teacher_hidden)]
    made = [(torch.randn if device == "cpu" else torch.empty)(shape, dtype=dtype, device=device) for shape in shapes]
    return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


def on_stand_in(args: argparse.Namespace) -> None:
    """In a process of its own, which imports the stand-in first. Prints GiB by way."""
    from tests.cuda import fake_cuda

    device = fake_cuda.install()
    device.only_shapes = True
    found = {}
    with device:
        for name, way in WAYS.items():
            given = inputs(args, "cuda", torch.bfloat16)
            device.allocator.reset_peaks()
            before = device.allocator.requested
            way(*given).sum().backward()
            found[name] = (device.allocator.peak_allocated - before) / 2**30
            del given
    print(json.dumps(found))


def seconds(args: argparse.Namespace) -> dict[str, float]:
    """CPU-seconds by way, the best of three, each in turn."""
    from tests.bench.bench_kernels import measure

    given, best = inputs(args, "cpu", torch.float32), dict.fromkeys(WAYS, float("inf"))
    for _ in range(3):
        for name, way in WAYS.items():
            best[name] = min(best[name], measure(lambda way=way: way(*given).sum().backward()).seconds)
    return best


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("tokens", 32768), ("vocab", 151936), ("hidden", 4096), ("teacher-hidden", 5120)):
        args.add_argument(f"--{name}", type=int, default=default)
    args.add_argument("--cpu", type=int, nargs=4, default=[1024, 49152, 576, 960],
                      help="the same four numbers for the seconds")
    args.add_argument("--on-stand-in", action="store_true", help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.on_stand_in:
        on_stand_in(args)
        return
    sizes = ["--tokens", args.tokens, "--vocab", args.vocab, "--hidden", args.hidden]
    command = [sys.executable, "-m", "tests.bench.bench_divergence", "--on-stand-in", *map(str, sizes)]
    command += ["--teacher-hidden", str(args.teacher_hidden)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    gib = json.loads(said.splitlines()[-1])
    args.tokens, args.vocab, args.hidden, args.teacher_hidden = args.cpu
    best = seconds(args)
    print("| way | GiB beside the inputs | of dense | CPU-seconds | of dense |\n| --- | --- | --- | --- | --- |")
    for name in WAYS:
        print(f"| {name} | {gib[name]:.1f} | {gib[name] / gib['dense']:.3f} | {best[name]:.2f} | "
              f"{best[name] / best['dense']:.2f} |")
    report("divergence", gpu_sizes=dict(zip(("tokens", "vocab", "hidden"), map(int, sizes[1::2]))), gib=gib,
           cpu_sizes=args.cpu, cpu_seconds=best)


if __name__ == "__main__":
    main()
