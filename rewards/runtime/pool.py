"""Scores responses in worker processes while generation continues; no reward function can hang, kill or corrupt the
run.

A worker is a plain `python -m rewards.runtime.worker` on two pipes, because the trainer holds torch, vLLM and
collectives: forking it is unsafe, and multiprocessing's spawn imports the training script again (seconds and hundreds
of MB; a plain worker takes 0.1 s and 15 MB). Every sample has a deadline that holds in C code too: the worker's process
group is killed and replaced. `async def` and batched functions get several samples at once; if that ends in a kill,
each sample is scored again alone. Every failure is counted, and the first traceback of each kind is logged.
"""

import contextlib
import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards import json_object
from rewards.runtime.config import RewardConfig, check_reward
from rewards.runtime.groups import of_members
from rewards.runtime.process import WorkerProcess
from rewards.runtime.replies import MAX_NAMES, MAX_TEXT
from rewards.runtime.scores import Scores
from rewards.runtime.worker import Sample, Scorer

log = logging.getLogger(__name__)
GRACE_S = 1.0  # a batch is killed this long after the deadlines that an `async def` has in the worker itself
CLOSE_S = 2.0  # closing waits this long for a thread that is just starting its worker
# names of metrics reward/NAME that are no reward function's
RESERVED = ("error_frac", "form_frac", "timeout_frac", "constant_group_frac", "model", "overlong_penalty",
            "overlong_punishment")


class RewardPool:
    """`submit` returns at once and may be called while the engine generates; `results` waits for all submitted.

    Takes the fields of RewardConfig: `RewardPool(**vars(args.reward))`. Raises ValueError for mistakes in them, and
    RuntimeError with the worker's traceback if the reward file cannot be loaded. num_workers 0: `submit` scores in this
    process and has no deadline.
    """

    def __init__(self, function: str | Sequence[str] | None = None, weights: Sequence[float] = (), kwargs: str = "{}",
                 num_workers: int = 4, concurrency: int = 32, timeout_s: float = 10.0, on_error: str = "drop",
                 max_error_frac: float = 0.5):
        if isinstance(function, str):
            function = (function,)
        function = tuple(function or ())
        check_reward(RewardConfig(function, tuple(weights), kwargs, num_workers, concurrency, timeout_s))
        for spec in function:
            file = spec
            if ":" in spec:
                file = spec.rpartition(":")[0]
            if not Path(file).is_file():
                raise ValueError(f"--reward.function {spec}: no such file; the form is path/to/file.py:name")
        arguments = json_object("--reward.kwargs", kwargs)
        deadline_s = None
        if num_workers:
            deadline_s = timeout_s
        self.scorer_args = (function, tuple(weights), arguments, deadline_s)
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.on_error = on_error
        self.max_error_frac = max_error_frac
        self.changed = threading.Condition()
        self.pending: set[int] = set()
        self.replies: dict[int, dict] = {}
        self.attempts: dict[int, dict] = {}  # replies to `attempt`, whose indices are below 0
        self.num_attempts = 0
        self.broken = ""  # why no worker can be started
        self.num_ready = 0
        self.grouped = False  # a function gets all responses of a group in one call
        self.closed = False
        self.logged: set[str] = set()
        self.names = {"acc", "pred"}  # keys of reward dicts that are kept
        self.as_text: set[str] = set()  # those of them that became text, and were logged
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.workers: dict[threading.Thread, WorkerProcess] = {}
        self.scorer = None
        if num_workers == 0:
            self.scorer = Scorer(*self.scorer_args)
            self.grouped = self.scorer.grouped
        self.threads: list[threading.Thread] = []
        for _ in range(num_workers):
            thread = threading.Thread(target=self.serve, daemon=True)
            self.threads.append(thread)
            thread.start()
        if num_workers:
            with self.changed:
                self.changed.wait_for(lambda: self.num_ready or self.broken)
        last_line = self.broken.strip().rpartition("\n")[2]
        if last_line.startswith("ValueError: --reward."):  # a mistake in the flags, which says all
            raise ValueError(last_line.removeprefix("ValueError: "))
        self.raise_if_broken()

    def submit(self, index: int, data_source: str, solution_str: str, ground_truth: Any,
               extra_info: dict | None = None) -> None:
        if self.grouped:
            self.submit_group([index], data_source, [solution_str], ground_truth, extra_info)
        else:
            self._submit([index], pickle.dumps((data_source, solution_str, ground_truth, extra_info)))

    def submit_group(self, indices: Sequence[int], data_source: str, solution_strs: list[str], ground_truth: Any,
                     extra_info: dict | None = None) -> None:
        """All responses to a prompt, for functions that get them together (`grouped`)."""
        self._submit(indices, pickle.dumps((data_source, solution_strs, ground_truth, extra_info)))

    def _submit(self, indices: Sequence[int], request: bytes) -> None:
        for index in indices:
            if index in self.pending or index in self.replies:
                raise ValueError(f"sample {index} was submitted twice")
        if self.scorer is not None:
            self.keep(indices, self.scorer([pickle.loads(request)])[0])  # its own copy, as in a worker
            return
        with self.changed:
            self.raise_if_broken()
            self.pending.update(indices)
        self.jobs.put((indices, request))

    def keep(self, indices: Sequence[int], reply: dict) -> None:
        """The reply to a job. The lock is held, or no worker runs."""
        for index, of_one in zip(indices, of_members(reply, len(indices)), strict=True):
            if index >= 0:
                self.replies[index] = of_one
            else:
                self.attempts[index] = of_one
        self.pending.difference_update(indices)

    def attempt(self, sample: Sample, wait_s: float) -> dict | None:
        """A worker's reply to one sample that is in no result, or None if it takes longer than wait_s. With num_workers
        0 by a worker of its own, so that nothing changes in this process."""
        if self.grouped:
            source, text, truth, info = sample
            sample = source, [text, ""], truth, info
        request = pickle.dumps(sample)
        if self.scorer is not None:
            worker = WorkerProcess(self.scorer_args)
            reply = worker.score([request], max(wait_s, 0.0))[0]
            worker.close()
            return of_members(reply, 1)[0]
        self.num_attempts += 2
        index = -self.num_attempts
        self.jobs.put(([index, index + 1][: 1 + self.grouped], request))
        with self.changed:
            self.changed.wait_for(lambda: index in self.attempts or self.broken, max(wait_s, 0.0))
            self.raise_if_broken()
            return self.attempts.get(index)

    def put(self, index: int, reply: dict) -> None:
        """Add a reply that was made elsewhere, in the form of a worker's reply."""
        with self.changed:
            self.replies[index] = reply

    def results(self) -> Scores:
        """Scores of all samples submitted since the last call. Failures are counted, see `check_error_frac`; with
        --reward.on-error stop the first failure raises RuntimeError."""
        start = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: not self.pending or self.broken)
            self.raise_if_broken()
            replies = self.replies
            self.replies = {}
        scores = Scores(wait_s=time.monotonic() - start)
        for index, reply in sorted(replies.items()):
            failure = reply.get("failure")
            scores.index.append(index)
            scores.failures.append(failure)
            if failure:
                score = math.nan
                if self.on_error == "zero":
                    score = 0.0
                scores.scores.append(score)
                scores.extras.append({})
                if not scores.first_failure:
                    scores.first_failure = reply["text"]
                self.report(index, reply)
            else:
                scores.scores.append(reply["score"])
                scores.extras.append(self.keep_names(reply["extra"], reply["texts"]))
        return scores

    def keep_names(self, extra: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
        """A reward dict without names of the trainer's own metrics, and limited to the first MAX_NAMES names.
        Logs which of them became texts."""
        kept = {}
        for name, value in extra.items():
            if not self.may_keep(name):
                if "names" not in self.logged:
                    self.logged.add("names")
                    log.warning("key %r of a reward dict is left out (logged once): at most %d names are kept, and %s "
                                "are the trainer's own", name, MAX_NAMES, ", ".join(RESERVED))
                continue
            self.names.add(name)
            kept[name] = value
            if name in texts and name not in self.as_text:
                self.as_text.add(name)
                log.warning("key %r of a reward dict is kept as text, at most %d characters (type: %s; logged once "
                            "a key): the script gets numbers, flat lists of numbers and short texts as they are", name,
                            MAX_TEXT, texts[name])
        return kept

    def may_keep(self, name: str) -> bool:
        if name in RESERVED:
            return False
        if name in self.names:
            return True
        return len(self.names) < MAX_NAMES

    def report(self, index: int, reply: dict) -> None:
        kind = reply.get("kind", reply["failure"])
        text = reply["text"]
        if kind not in self.logged and len(self.logged) < MAX_NAMES:
            self.logged.add(kind)
            log.error("reward of sample %d failed (%s; more of this kind are only counted):\n%s", index, kind, text)
        if self.on_error == "stop":
            raise RuntimeError(f"reward of sample {index} failed ({kind}) and --reward.on-error is stop:\n{text}")

    def serve(self) -> None:
        """Runs in one thread per worker: start the worker, hand it jobs, replace it when it is dead."""
        worker = None
        jobs = []
        alone = False
        while not self.closed:
            if worker is None or worker.process.poll() is not None:  # also one that died while idle
                if worker is not None:
                    worker.close()
                worker = self.start_worker()
                if worker is None:
                    return
            if not jobs:
                jobs = [self.jobs.get()]
                alone = False
                continue  # look at the worker once more: it may have waited for long
            if worker.concurrent and not alone:
                with contextlib.suppress(queue.Empty):
                    while len(jobs) < self.concurrency and jobs[-1] is not None:
                        jobs.append(self.jobs.get_nowait())
            if jobs[-1] is None:
                break
            now = jobs
            if alone:
                now = jobs[:1]
            indices, samples = zip(*now)
            timeout_s = self.timeout_s
            if worker.concurrent:
                timeout_s += GRACE_S
            replies = worker.score(samples, timeout_s)
            if len(samples) > 1 and worker.process.poll() is not None:
                alone = True  # which of them it was is not known
                self.report_batch(len(samples), replies[0])
                continue
            jobs = jobs[len(samples):]
            with self.changed:
                for of_job, reply in zip(indices, replies):
                    self.keep(of_job, reply)
                self.changed.notify_all()
        self.jobs.put(None)  # for the next thread
        if worker is not None:
            worker.close()

    def start_worker(self) -> WorkerProcess | None:
        """This thread's worker. None, and the pool is broken, if it cannot be started."""
        try:
            worker = WorkerProcess(self.scorer_args)
        except (RuntimeError, OSError) as error:  # OSError: no process or no memory to be had
            with self.changed:
                self.broken = str(error)
                self.changed.notify_all()
            return None
        self.workers[threading.current_thread()] = worker
        with self.changed:
            self.num_ready += 1
            self.grouped = worker.grouped
            self.changed.notify_all()
        return worker

    def report_batch(self, size: int, reply: dict) -> None:
        if "batch" not in self.logged:
            self.logged.add("batch")
            log.warning("a batch of %d samples ended in a %s, they are scored again one by one (logged once; a batch "
                        "has the deadline of one sample, see --reward.timeout-s and --reward.concurrency):\n%s",
                        size, reply["failure"], reply["text"])

    def raise_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def close(self) -> None:
        """End all workers, including busy ones."""
        self.closed = True
        self.jobs.put(None)
        for worker in list(self.workers.values()):
            worker.kill()
        for thread in self.threads:
            thread.join(CLOSE_S)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()
