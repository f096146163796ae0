"""The trainer's end of one reward worker: starts `python -m rewards.runtime.worker`, sends requests, kills it."""

import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from rewards.runtime.cleaner import own_folder, remove
from rewards.runtime.replies import unpacked

ROOT = Path(__file__).resolve().parent.parent.parent
DUMP_S = 2.0     # a worker whose time is up may take this long to write where it hangs
START_S = 120.0  # a worker may take this long to import a user's reward file; no sample's deadline includes it


class WorkerProcess:
    """One worker process; `request` always returns within its deadline, plus a few ms for the kill."""

    def __init__(self, scorer_args: tuple):
        """scorer_args: the arguments of worker.Scorer."""
        env = dict(os.environ)
        env.pop("LD_PRELOAD", None)  # vLLM sets it for its own process
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        env["OMP_NUM_THREADS"] = "1"
        # one folder for all temporary files of this worker: it is removed with it, and its name marks what it started
        env["TMPDIR"] = self.folder = tempfile.mkdtemp(prefix="reward_worker_", dir=own_folder())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewards.runtime.worker", str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True, env=env)
        self.lock = threading.Lock()
        reply = self.request(pickle.dumps(scorer_args), START_S)
        if "failure" in reply:
            self.close()
            raise RuntimeError(f"a reward worker could not start ({reply['failure']}):\n{reply['text']}")
        self.concurrent = reply["concurrent"]  # it takes many samples at once
        self.grouped = reply["grouped"]  # a sample is a group

    def score(self, samples: Sequence[bytes], timeout_s: float) -> list[dict]:
        """A reply for each sample; the same failure for all if the worker had to be killed."""
        reply = self.request(pickle.dumps(samples), timeout_s)
        return [reply] * len(samples) if isinstance(reply, dict) else [unpacked(scored) for scored in reply]

    def request(self, message: bytes, timeout_s: float) -> dict | list[dict]:
        timer = threading.Timer(timeout_s, self.expire)
        timer.daemon = True
        self.busy = True
        self.expired = False
        timer.start()
        line = b""
        try:
            self.process.stdin.write(struct.pack("Q", len(message)) + message)
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass  # it was dead before the request: no reply, a crash
        with self.lock:
            self.busy = False
        timer.cancel()
        if self.expired:
            timer.join()
            where = (line + self.process.stdout.read()).decode(errors="replace")
            return {"failure": "timeout", "text": f"no score after {timeout_s:g} s\n{where}"}
        if line.endswith(b"\n"):
            try:
                return json.loads(line)
            except ValueError:
                self.kill()
                return {"failure": "crash", "text": f"the worker process was killed: its reply was {line!r:.200}"}
        self.kill()
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"failure": "crash", "text": f"the worker process ended with {how} before it gave a score"}

    def expire(self) -> None:
        with self.lock:
            if not self.busy:
                return
            self.expired = True
        self.process.send_signal(signal.SIGUSR2)  # the worker writes where it hangs, and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DUMP_S)
        self.kill()

    def kill(self) -> None:
        """End the worker and all that it started, and remove its temporary files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        remove(self.folder)  # also of processes that left the process group

    def close(self) -> None:
        """`kill`, and close the pipes. Only the thread that sends requests may call it: nobody reads then."""
        self.kill()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what was not flushed
            self.process.stdin.close()
