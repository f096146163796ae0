"""Peak memory and time of `linear_logp` (forward and backward) against naive log_softmax.

    OMP_NUM_THREADS=1 python -m tests.bench.bench_kernels [--tokens 1024 4096] [--vocab 49152] [--dtype float32]

One JSON line a measurement, then a markdown table. Memory on a CPU is the peak of the allocator's live bytes as the
profiler saw every allocation and release, on CUDA `max_memory_allocated`; both count from before the call, gradients
included. The goal for what is beyond the gradients: 1.5 x the hidden states + the logits of one block of tokens. Time
is CPU-seconds (CUDA: events), the best of three.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from common.kernels import linear_logp, tile_shape
from tests.bench.record import report


class Measurement(NamedTuple):
    peak_bytes: int
    seconds: float


def measure(f: Callable[[], object], repeats: int = 1) -> Measurement:
    cuda = torch.cuda.is_available()
    if cuda:
        f()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")                   # the profiler's own notes on stderr
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            f()
        events = sorted((e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"),
                        key=lambda e: e.start_ns())
        peak = max(itertools.accumulate((e.nbytes() for e in events), initial=0))
    return Measurement(peak, min(_seconds(f, cuda) for _ in range(repeats)))


def _seconds(f: Callable[[], object], cuda: bool) -> float:
    if not cuda:
        start = time.process_time()
        f()
        return time.process_time() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    f()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def naive(hidden, weight, targets):
    logps = (hidden @ weight.T).float().log_softmax(dim=-1)
    logp = logps.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(dim=-1)
    return logp, entropy


def rivals(device: str) -> dict[str, Callable]:
    """What stands beside the kernel: naive anywhere, on CUDA compiled naive too."""
    found = {"naive": naive, "linear_logp": linear_logp}
    if device == "cuda":
        found["compiled naive"] = torch.compile(naive)
    return found


def run(tokens: int, vocab: int, width: int, dtype: torch.dtype, repeats: int) -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g, device=device) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=g, device=device)
    up = torch.randn(tokens, generator=g, device=device)
    gradients = hidden.nbytes + weight.nbytes
    rows = []
    for name, function in rivals(device).items():
        def step(function=function):
            logp, *_ = function(hidden, weight, targets)
            return torch.autograd.grad((logp * up).sum(), (hidden, weight))

        m = measure(step, repeats)
        rows.append({"kernel": name, "device": device, "dtype": str(dtype)[6:], "tokens": tokens, "vocab": vocab,
                     "hidden": width, "peak_mb": m.peak_bytes / 2**20, "extra_mb": (m.peak_bytes - gradients) / 2**20,
                     "seconds": m.seconds})
    block = tile_shape(hidden, weight)
    goal = 1.5 * hidden.nbytes + 4 * block[0] * vocab                      # a chunk: these tokens' logits
    for row in rows:
        row |= {"time_ratio": row["seconds"] / rows[0]["seconds"], "memory_ratio": row["peak_mb"] / rows[0]["peak_mb"],
                "goal_extra_mb": goal / 2**20}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384] if cuda else [512, 2048])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936] if cuda else [16384, 49152])
    parser.add_argument("--hidden", type=int, default=896 if cuda else 576)
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = [row for dtype, tokens, vocab in itertools.product(args.dtype, args.tokens, args.vocab)
            for row in run(tokens, vocab, args.hidden, getattr(torch, dtype), args.repeats)]
    columns = ("kernel", "dtype", "T", "V", "peak MB", "beyond the gradients (goal), MB", "seconds", "time / naive",
               "memory / naive")
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for r in rows:
        print(f"| {r['kernel']} | {r['dtype']} | {r['tokens']} | {r['vocab']} | {r['peak_mb']:.0f} "
              f"| {r['extra_mb']:.0f} ({r['goal_extra_mb']:.0f}) "
              f"| {r['seconds']:.3f} | {r['time_ratio']:.2f} | {r['memory_ratio']:.3f} |")
    report("kernels", rows=rows)


if __name__ == "__main__":
    main()
