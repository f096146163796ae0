"""What ends a run from outside: signals that ask it to stop, phases that hang, a launcher or another rank that is gone.

Exit codes: 128 + signal number after a stop that saved (SIGINT 130, SIGUSR1 138, SIGTERM 143); 124 when a phase took
longer than `--save.timeout-s`; 1 when torchrun or another rank is gone or stands still. torchrun's own code is 1 in all
these cases; its report names the ranks' codes.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback

import psutil

SILENT_S = 20.0
"""Seconds without a new report after which a rank is gone or stands still."""
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
        self.seconds = 0.0  # that this process has run: no clock, because Slurm or Ctrl-Z may suspend it
        self.silent_s = SILENT_S if timeout_s else float("inf")  # without a report a rank is gone after this
        self.phase("setup")
        self.watched = [*map(str, range(int(os.environ.get("WORLD_SIZE", "1"))))] if self.rank == "0" else ["0"]
        self.heard: dict[str, float] = {}
        """The last report of each watched rank that has not left, and `seconds` when it came."""
        self.leaving = threading.Event()
        self.reporter = threading.Thread(target=self._report, name="reporter", daemon=True)
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, args=(pipe,), name="watchdog", daemon=True).start()

    def phase(self, name: str) -> None:
        """Begin a phase and its time limit; a report of a hang prints `name`."""
        self.current = name, self.seconds

    def watch(self, store) -> None:
        """The ranks have met: from now on each one reports its phase to the job's `store` once a second, and ends if
        one that it watches is silent. Rank 0 watches all ranks, the others watch rank 0, whose last report names the
        rank that was silent. A thread reports: a rank is not silent because its main thread computes or waits."""
        self.store = store.clone()  # a connection of its own: on the other one the main thread may wait
        self.store.set(self.rank, f"[rank {self.rank}] in phase 'setup'")  # it may end before its thread reports
        self.reporter.start()
        sys.excepthook = self._on_error  # torch's would name the rank within its side

    def leave(self, report: str = "left", most_s: float = 10.0) -> None:
        """Report for the last time. Rank 0 stays until all others have left, but at most `most_s`: they read its
        report, and without torchrun the store is in its process."""
        self.last_report = report
        self.leaving.set()
        if self.reporter.is_alive():
            self.reporter.join(most_s)

    def _on_error(self, kind: type, error: BaseException, trace: object) -> None:
        text = "".join(traceback.format_exception(error))
        print(f"[rank {self.rank}] ended by an error:\n{text}", end="", file=sys.stderr, flush=True)
        self.leave(f"ended by an error: {error!r}", 5.0)

    def _report(self) -> None:
        """A thread of its own, because the store may stand still. Then all ranks are silent."""
        try:
            while not self.leaving.wait(1.0):
                self.store.set(self.rank, f"[rank {self.rank}] in phase {self.current[0]!r} at {time.ctime()}")
                if self.store.check(self.watched):  # all of them have begun
                    reports = map(bytes.decode, self.store.multi_get(self.watched))
                    self.heard = {it: self.heard.get(it, self.seconds) for it in reports if not it.endswith(": left")}
            self.store.multi_set([self.rank, f"left {self.rank}"], [f"rank {self.rank}: {self.last_report}", ""])
            self.store.wait([f"left {rank}" for rank in self.watched if rank != "0"])
        except RuntimeError:
            self.silent_s = 0.0  # the store is gone, with torchrun or rank 0

    def _run(self, pipe: int) -> None:
        while True:
            ready, _, _ = select.select([pipe], [], [], 0.5)
            self.seconds += 0.0 if ready else 0.5
            phase, begin = self.current
            for number in os.read(pipe, 64) if ready else b"":
                if number in STOP_SIGNALS:
                    self._on_signal(number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self._end(f"torchrun is gone, in phase {phase!r}", 1)
            if 0 < self.timeout_s < self.seconds - begin:
                self._end(f"phase {phase!r} takes longer than --save.timeout-s {self.timeout_s:g}", HANG_EXIT_CODE)
            # the cause comes first: of two that were heard of at the same time, the one that said nothing at its end
            when, report = min(((when, report) for report, when in self.heard.items()), default=(self.seconds, ""))
            # a rank in a setup may be silent for longer: the import of a package from a slow disk keeps Python's lock
            in_setup = "in phase 'setup" in report and self.silent_s >= SILENT_S
            # the process that made a last report has some seconds to end, so that torchrun's own report names it
            limit = 4.0 if report[:4] == "rank" else 15 * self.silent_s if in_setup else self.silent_s
            if not self.leaving.is_set() and self.seconds - when > limit:
                self._end(f"another rank ended, in phase {phase!r}. Its last report: {report}", 1)

    def _on_signal(self, number: int) -> None:
        if self.signal == signal.SIGINT == number:
            os._exit(128 + number)
        by_torchrun = number == signal.SIGTERM and not self.signal and self.launcher is not None
        if by_torchrun and len(psutil.Process(self.launcher).children()) < int(os.environ["LOCAL_WORLD_SIZE"]):
            # It has reaped a rank that ended with an error. Those that are left can reach no safe point.
            if not self.heard or self.leaving.is_set():
                self._end(f"another rank ended, in phase {self.current[0]!r}", 1)
            self.silent_s = 4.0  # then its silence tells which rank it was
            return
        if not self.signal and self.rank == "0":
            sys.stderr.write(f"{signal.Signals(number).name}: stopping at the next micro-batch, to save what is done\n")
        self.signal = self.signal or number

    def _end(self, why: str, code: int) -> None:
        if code == HANG_EXIT_CODE:
            stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
            why += "; all Python stacks:\n" + "\n".join(stacks)
        print(f"[rank {self.rank}] {why}\n", end="", file=sys.stderr, flush=True)  # one write: reports do not mix
        if code == HANG_EXIT_CODE:
            time.sleep(min(30.0, self.timeout_s))  # so that each rank shows its stacks before one leaves
        self.leave(why.partition(";")[0], 5.0)
        os._exit(code)
