"""What ends a run from outside: signals that ask it to stop, phases that hang, a launcher or another rank that is gone.

Exit codes: 128 + signal number after a stop that saved (SIGINT 130, SIGUSR1 138, SIGTERM 143); 124 when a phase took
longer than `--save.timeout-s`; 1 when torchrun or another rank of this machine is gone. torchrun's own code is 1 in all
these cases; its report names the ranks' codes.
"""

import faulthandler
import os
import select
import signal
import sys
import tempfile
import threading
import time

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HANG_EXIT_CODE = 124


class Watchdog:
    """Made once, in the main thread, before the process group, which may wait for ranks that never come. Then a thread
    watches until the process ends.

    The thread learns of signals from Python's wake-up pipe, so also while the main thread waits in a collective. The
    first stop signal only sets `signal`: a safe point of the loop acts on it (`Checkpoints.check`). A second SIGINT
    ends the process at once.
    """

    def __init__(self, timeout_s: float):
        """`timeout_s`: seconds a phase may take before all stacks are printed and the process ends; 0: no limit."""
        self.timeout_s = timeout_s
        self.signal = 0
        """The number of the first stop signal, 0: none yet."""
        self.rank = os.environ.get("RANK", "0")
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.phase("setup")
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, args=(pipe,), name="watchdog", daemon=True).start()

    def phase(self, name: str) -> None:
        """Begin a phase and its time limit; a report of a hang prints `name`."""
        self.current = [name, 0.0]

    def _run(self, pipe: int) -> None:
        while True:
            ready, _, _ = select.select([pipe], [], [], 0.5)
            current = self.current
            current[1] += 0.0 if ready else 0.5  # no clock, because Slurm or Ctrl-Z may suspend the whole process
            for number in os.read(pipe, 64) if ready else b"":
                if number in STOP_SIGNALS:
                    self._on_signal(number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self._end(f"torchrun is gone, in phase {self.current[0]!r}", 1)
            if 0 < self.timeout_s < current[1]:
                self._end(f"phase {current[0]!r} takes longer than --save.timeout-s {self.timeout_s:g}", HANG_EXIT_CODE)

    def _on_signal(self, number: int) -> None:
        if self.signal == signal.SIGINT == number:
            os._exit(128 + number)
        by_torchrun = number == signal.SIGTERM and not self.signal and self.launcher is not None
        if by_torchrun and len(psutil.Process(self.launcher).children()) < int(os.environ["LOCAL_WORLD_SIZE"]):
            # It has reaped a rank that ended with an error. Those that are left can reach no safe point.
            self._end(f"another rank ended, in phase {self.current[0]!r}", 1)
        if not self.signal and self.rank == "0":
            sys.stderr.write(f"{signal.Signals(number).name}: stopping at the next micro-batch, to save what is done\n")
        self.signal = self.signal or number

    def _end(self, why: str, code: int) -> None:
        if code == HANG_EXIT_CODE:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                why += f"; all Python stacks:\n{file.read()}"
        print(f"[rank {self.rank}] {why}\n", end="", file=sys.stderr, flush=True)  # one write: reports do not mix
        if code == HANG_EXIT_CODE:
            time.sleep(min(30.0, self.timeout_s))  # so that each rank shows its stacks before one leaves
        os._exit(code)
