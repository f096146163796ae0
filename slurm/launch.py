"""torchrun, as `python slurm/launch.py` with its flags: a stop by a signal is one line, not a traceback."""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as error:
        sys.exit(f"torchrun: stopped by {signal.Signals(error.sigval).name}")
