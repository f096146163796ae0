"""torchrun, as `python slurm/launch.py` with its flags: a stop by a signal is one line, not a traceback, and
`--numa-binding` is left out, with one line, where torchrun would fail for it."""

import shutil
import signal
import sys

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import parse_args, run


def why_unbound(mode: str) -> str:
    """Why the ranks of this machine cannot be bound to the cores beside their GPUs; "": they can."""
    from torch.numa import binding

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if shutil.which("numactl") is None:
        return "numactl is not installed"
    for gpu in range(torch.cuda.device_count()):
        try:
            options = binding.NumaOptions(binding.AffinityMode(mode))
            cores = binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)
        except Exception as error:  # of reading /sys, in any form
            return f"the cores of GPU {gpu} are not found: {error}"
        if not cores:
            return f"none of this job's cores is beside GPU {gpu}"
    return ""


@record
def main() -> None:
    args = parse_args(sys.argv[1:])
    if args.numa_binding:
        reason = why_unbound(args.numa_binding)
        if reason:
            print(f"torchrun: ranks are not bound to cores: {reason}", file=sys.stderr, flush=True)
            args.numa_binding = None
    run(args)


if __name__ == "__main__":
    try:
        main()
    except SignalException as error:
        sys.exit(f"torchrun: stopped by {signal.Signals(error.sigval).name}")
