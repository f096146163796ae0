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
from collections.abc import Callable

import psutil

SILENT_S = 20.0
"""Seconds without a new report after which a rank is gone or stands still."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HANG_EXIT_CODE = 124


def do_nothing(*_: object) -> None:
    """A handler of a signal, without which the signal would end the process."""


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
        self.launcher: int | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self.launcher = os.getppid()
        self.seconds = 0.0  # that this process has run: no clock, because Slurm or Ctrl-Z may suspend it
        self.silent_s = float("inf")                            # without a report a rank is gone after this
        if timeout_s:
            self.silent_s = SILENT_S
        self.on_phase: Callable[[str], None] = lambda name: None
        self.phase("setup")
        self.watched = ["0"]                                    # ranks, as keys of the store
        if self.rank == "0":
            num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
            self.watched = [*map(str, range(num_ranks))]
        self.heard: dict[str, float] = {}
        """The last report of each watched rank that has not left, and `seconds` when it came."""
        self.leaving = threading.Event()
        self.reporter = threading.Thread(target=self._report, name="reporter", daemon=True)
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, do_nothing)                   # the pipe tells of it
        threading.Thread(target=self._run, args=(pipe,), name="watchdog", daemon=True).start()

    def phase(self, name: str) -> None:
        """Begin a phase and its time limit; a report of a hang prints `name`. `on_phase` hears it."""
        self.current = (name, self.seconds)
        self.on_phase(name)

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
            # often, until all have been heard of: a rank may end within the first second
            while not self.leaving.wait(1.0 if self.heard else 0.1):
                self.store.set(self.rank, f"[rank {self.rank}] in phase {self.current[0]!r} at {time.ctime()}")
                if self.store.check(self.watched):  # all of them have begun
                    self._hear(self.store.multi_get(self.watched))
            self.store.multi_set([self.rank, f"left {self.rank}"], [f"rank {self.rank}: {self.last_report}", ""])
            others = []
            for rank in self.watched:
                if rank != "0":
                    others.append(f"left {rank}")
            self.store.wait(others)
        except RuntimeError:
            self.silent_s = 0.0  # the store is gone, with torchrun or rank 0

    def _hear(self, reports: list[bytes]) -> None:
        """Note when each of the reports came: one that is as before came before."""
        heard = {}
        for report in map(bytes.decode, reports):
            if not report.endswith(": left"):
                heard[report] = self.heard.get(report, self.seconds)
        self.heard = heard

    def _run(self, pipe: int) -> None:
        signals = select.poll()  # select() takes no descriptor above 1,023, and many ranks have many sockets
        signals.register(pipe, select.POLLIN)
        while True:
            ready = signals.poll(500)  # ms
            if not ready:
                self.seconds += 0.5
            phase, begin = self.current
            if ready:
                for number in os.read(pipe, 64):
                    if number in STOP_SIGNALS:
                        self._on_signal(number)
            if self.launcher not in (None, os.getppid()):
                self._end(f"torchrun is gone, in phase {phase!r}", 1)
            if 0 < self.timeout_s < self.seconds - begin:
                self._end(f"phase {phase!r} takes longer than --save.timeout-s {self.timeout_s:g}", HANG_EXIT_CODE)
            heard = self._heard_of()
            if heard:
                # the cause comes first: of two that were heard of at the same time, the one that said nothing
                # at its end
                seconds, report = min(zip(heard.values(), heard))
                if self.seconds - seconds > self._limit(report):
                    self._end(f"another rank ended, in phase {phase!r}. Its last report: {report}", 1)

    def _heard_of(self) -> dict[str, float]:
        """`heard`, which the reporter may replace meanwhile; while this rank leaves, it waits for none."""
        if self.leaving.is_set():
            return {}
        return self.heard

    def _limit(self, report: str) -> float:
        """Seconds after which a rank with this last report is gone."""
        if report.startswith("rank"):
            return 4.0  # the process that made a last report has them to end, so that torchrun's own report names it
        if self.silent_s < SILENT_S:
            return self.silent_s
        if "in phase 'setup" in report:
            return 15 * self.silent_s  # the import of a package from a slow disk keeps Python's lock
        return self.silent_s

    def _on_signal(self, number: int) -> None:
        if self.signal:
            if self.signal == signal.SIGINT == number:
                os._exit(128 + number)
            return
        if number == signal.SIGTERM and self._has_lost_a_rank():
            # Those that are left can reach no safe point.
            if not self._heard_of():
                self._end(f"another rank ended, in phase {self.current[0]!r}", 1)
            self.silent_s = 4.0  # then its silence tells which rank it was
            return
        if self.rank == "0":
            sys.stderr.write(f"{signal.Signals(number).name}: stopping at the next micro-batch, to save what is done\n")
        self.signal = number

    def _has_lost_a_rank(self) -> bool:
        """Whether torchrun has reaped a rank that ended with an error."""
        if self.launcher is None:
            return False
        num_left = len(psutil.Process(self.launcher).children())
        return num_left < int(os.environ["LOCAL_WORLD_SIZE"])

    def _end(self, why: str, code: int) -> None:
        if code == HANG_EXIT_CODE:
            why += "; all Python stacks:"
            for frame in sys._current_frames().values():
                why += "\n" + "".join(traceback.format_stack(frame))
        print(f"[rank {self.rank}] {why}\n", end="", file=sys.stderr, flush=True)  # one write: reports do not mix
        if code == HANG_EXIT_CODE:
            time.sleep(min(30.0, self.timeout_s))  # so that each rank shows its stacks before one leaves
        self.leave(why.partition(";")[0], 5.0)
        os._exit(code)
