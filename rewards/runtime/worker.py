"""A reward worker, `python -m rewards.runtime.worker`: scores samples that pool.py sends it.

Requests are length-prefixed pickles on fd 0, replies JSON lines on fd 1; reward functions may read and print freely.
The first request is Scorer's arguments, its reply {"concurrency"}; each further one is a list of samples, pickled one
by one, and its reply a list with {"score", "extra", "texts"} of each, or {"failure", "text"} if the sample has no
score; "kind" and "where" beside them are the exception's name, and its place and text. Lists of numbers in "extra"
travel as `packed` writes them. "texts" names the type of each value that became a text or was cut.
"""

import binascii
import ctypes
import faulthandler
import functools
import inspect
import itertools
import json
import numbers
import os
import pickle
import signal
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rewards import find, load_reward, prepare, resolve, takes

Sample = tuple[str, str, Any, dict | None]  # data_source, solution_str, ground_truth, extra_info
MAX_SCORE = 1e9     # larger ones would make sums and squares of float32 infinite
MAX_NUMBER = 1e100  # the other numbers of a reward dict: larger ones would make their mean infinite
MAX_NAMES = 64      # keys of a reward dict, beside its score
MAX_NAME = 100      # characters
MAX_TEXT = 10_000   # characters of a text in a reward dict, and of a traceback
MAX_NUMBERS = 1_000_000  # in the lists of one reward dict: a list of one number a token is whole


def copies(samples: list[Sample]) -> list[Sample]:
    return pickle.loads(pickle.dumps(samples))


class Reward:
    """One reward function. How it wants to be called is read from its signature, once."""

    def __init__(self, name: str, function: Callable, kwargs: dict[str, Any]):
        self.name, self.function, self.kwargs = name, function, kwargs
        self.batched = "solution_strs" in inspect.signature(function).parameters
        self.concurrent = self.batched or inspect.iscoroutinefunction(function)

    def __call__(self, samples: list[Sample], timeout_s: float | None) -> list[dict]:
        if self.batched:
            return self.score_batch(samples)
        if self.concurrent:
            return event_loop().run_until_complete(self.gather(samples, timeout_s))
        return [self.score(sample) for sample in samples]

    def score(self, sample: Sample) -> dict:
        try:
            return self.reply(wait(self.call(sample)))
        except (Exception, SystemExit) as error:
            return failure_of(error)

    def call(self, sample: Sample) -> Any:
        data_source, solution_str, ground_truth, extra_info = sample
        return self.function(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth,
                             extra_info=extra_info, **self.kwargs)

    def score_batch(self, samples: list[Sample]) -> list[dict]:
        """verl's batched form: lists in, list out. A batch that fails is scored one by one, so that
        only the failing sample has no score."""
        again = copies(samples) if len(samples) > 1 else []  # the function may change what it is given
        sources, texts, truths, extras = map(list, zip(*samples))
        try:
            results = list(wait(self.function(data_sources=sources, solution_strs=texts, ground_truths=truths,
                                              extra_infos=extras, **self.kwargs)))
            if len(results) != len(samples):
                raise ValueError(f"{self.name} returned {len(results)} scores for {len(samples)} samples")
            return [self.reply(result) for result in results]
        except (Exception, SystemExit) as error:
            if again:
                return [self.score_batch([sample])[0] for sample in again]
            return [failure_of(error)]

    async def gather(self, samples: list[Sample], timeout_s: float | None) -> list[dict]:
        """All samples of an `async def` at once, each with its own deadline."""
        import asyncio  # only here: it would double a worker's start

        async def one(sample: Sample) -> dict:
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return self.reply(await self.call(sample))
            except (Exception, SystemExit) as error:
                failure = failure_of(error)
                return {"failure": "timeout", "text": failure["text"]} if deadline.expired() else failure

        return await asyncio.gather(*map(one, samples))

    def reply(self, result: Any) -> dict:
        return reply_of(self.name, result)


class Scorer:
    """The reward functions of a run, loaded once; without any, the table in rewards/ selects by data_source."""

    def __init__(self, function: Sequence[str], weights: Sequence[float], kwargs: dict[str, Any],
                 timeout_s: float | None):
        self.weights = list(weights) or [1.0] * len(function)
        self.kwargs = resolve(kwargs)
        self.timeout_s = timeout_s
        parts = [spec.partition(":") for spec in function]
        names = [f"{Path(file).stem}.{name or 'compute_score'}" for file, _, name in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"--reward.function {' '.join(function)}: two are called {max(names, key=names.count)}, "
                             f"and their numbers could not be told apart; rename a file or a function")
        functions = [load_reward(spec) for spec in function]
        taken = prepare(functions, self.kwargs) if functions else []
        self.rewards = [Reward(*three) for three in zip(names, functions, taken)]
        self.concurrent = any(reward.concurrent for reward in self.rewards)
        self.table: dict[str, Reward] = {}

    def __call__(self, samples: list[Sample]) -> list[dict]:
        if not self.rewards:
            return [self.score_by_source(sample) for sample in samples]
        # each function gets its own, because it may change them
        given = [samples, *(copies(samples) for _ in self.rewards[1:])]
        columns = [reward(mine, self.timeout_s) for reward, mine in zip(self.rewards, given)]
        return [self.combine(replies) for replies in zip(*columns)]

    def score_by_source(self, sample: Sample) -> dict:
        source = sample[0]
        if source not in self.table:
            function = find(source)
            if function is None:
                return failure_of(LookupError(f"no reward for data_source {source!r}"))
            kwargs = {key: value for key, value in self.kwargs.items() if takes(function, key)}
            self.table[source] = Reward(source, function, kwargs)
        return self.table[source]([sample], self.timeout_s)[0]

    def combine(self, replies: Sequence[dict]) -> dict:
        """The weighted sum, or the first failure. With several functions each score and key is kept by its name."""
        for reply in replies:
            if "failure" in reply:
                return reply
        total = sum(weight * reply["score"] for weight, reply in zip(self.weights, replies))
        if not abs(total) <= MAX_SCORE:
            return {"failure": "invalid",
                    "text": f"the weighted sum of the rewards is {total}; the rule is at most {MAX_SCORE:g} in size"}
        if len(replies) == 1:
            return replies[0] | {"score": total}
        extra, texts = {}, {}
        for reward, reply in zip(self.rewards, replies):
            extra |= {reward.name: reply["score"]}
            extra |= {f"{reward.name}/{key}": value for key, value in reply["extra"].items()}
            texts |= {f"{reward.name}/{key}": kind for key, kind in reply["texts"].items()}
        return {"score": total, "extra": extra, "texts": texts}


@functools.cache
def event_loop():
    """One for the life of a worker: clients that a user's functions keep open stay usable."""
    import asyncio

    return asyncio.new_event_loop()


def wait(result: Any) -> Any:
    return event_loop().run_until_complete(result) if inspect.iscoroutine(result) else result


def reply_of(name: str, result: Any) -> dict:
    """What the function `name` returned, a number or a dict with `score`, as this worker's reply."""
    values = dict(result) if isinstance(result, dict) else {"score": result}
    score = plain(values.pop("score", "no key 'score'"))
    if isinstance(score, str) or not abs(score) <= MAX_SCORE:
        return {"failure": "invalid",
                "text": f"{name} returned {result!r:.500}; the rule is a finite number of at most {MAX_SCORE:g} in "
                        f"size, or a dict with such a 'score'"}
    given = ((str(key)[:MAX_NAME], value) for key, value in values.items() if value is not None)
    first = dict(itertools.islice(given, MAX_NAMES))
    found = {key: numbers_of(value) for key, value in first.items()}
    lists = {key: kept for key, kept in found.items() if kept is not None}
    if fault := fault_of(lists):
        return {"failure": "invalid", "text": f"{name} returned {fault}"}
    extra = {key: lists[key] if key in lists else metric_or_text(value) for key, value in first.items()}
    texts = {
        key: type(value).__name__ for key, value in first.items()
        if isinstance(extra[key], str) and not (isinstance(value, str) and len(value) <= MAX_TEXT)
    }
    return {"score": score, "extra": extra, "texts": texts}


def fault_of(lists: dict[str, list[float]]) -> str:
    """What is wrong with the lists of a reward dict; "" if nothing is."""
    count = 0
    for key, found in lists.items():
        count += len(found)
        if count > MAX_NUMBERS:
            return f"{key!r}, a list of {len(found)} numbers; the rule is at most {MAX_NUMBERS} in all lists of a dict"
        for i, number in enumerate(found):
            if not abs(number) <= MAX_NUMBER:
                return (f"{key!r}, a list of {len(found)} numbers with {number} at place {i}; the rule is finite "
                        f"numbers of at most {MAX_NUMBER:g} in size")
    return ""


def plain(value: Any) -> float | str:
    """A number as float (numpy and torch scalars too), anything else as text. An int or a fraction that is larger than
    any float is infinite."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else str(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def metric_or_text(value: Any) -> float | str:
    """A number that can be averaged as float, anything else as text."""
    value = plain(value)
    return value if isinstance(value, float) and abs(value) <= MAX_NUMBER else str(value)[:MAX_TEXT]


def numbers_of(value: Any) -> list[float] | None:
    """The numbers of a list, a tuple, or an array of one dimension (numpy, torch). None: it is something else."""
    if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return None
    kinds = set(map(type, value))
    if kinds <= {float, bool}:  # the usual case, many times faster
        return list(map(float, value))
    if not all(issubclass(kind, numbers.Real) or hasattr(kind, "item") for kind in kinds):
        return None
    found: list[Any] = [plain(number) for number in value]
    return None if str in map(type, found) else found


def packed(reply: dict) -> dict:
    """A reply for a pipe, as JSON: each list of numbers is {"float64": base64}, some ten times as fast as digits."""
    if "extra" not in reply:
        return reply
    extra = {
        name: {"float64": binascii.b2a_base64(array("d", value), newline=False).decode()}
        if isinstance(value, list) else value for name, value in reply["extra"].items()
    }
    return reply | {"extra": extra}


def unpacked(reply: dict) -> dict:
    """The reply that was `packed`. No other value of "extra" is a dict."""
    if "extra" not in reply:
        return reply
    extra = {
        name: array("d", binascii.a2b_base64(value["float64"])).tolist()
        if isinstance(value, dict) else value for name, value in reply["extra"].items()
    }
    return reply | {"extra": extra}


def failure_of(error: BaseException) -> dict:
    """The exception's name, place and traceback, whose middle is left out if it is long."""
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT // 2]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-MAX_TEXT // 2:]}"
    name = type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))] or frames
    place = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
    return {"failure": "exception", "kind": name, "text": text, "where": f"{place}{name}: {str(error)[:500]}"}


def ignore_stops() -> None:
    """Clusters send these signals to all processes of a job. The trainer acts on them, and needs the scores to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # and no SIG_IGN, which programs would inherit


def main() -> None:
    if sys.platform == "linux":  # die with the trainer even inside an endless loop, and before it if memory runs out
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(sys.argv[1]):
            os._exit(1)
        Path("/proc/self/oom_score_adj").write_text("1000")
    ignore_stops()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.register_at_fork(after_in_child=lambda: os.close(replies.fileno()))  # else a child keeps the pipe open
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR2, file=replies, chain=True)  # in place of a kill: shows where a sample hung
    scorer = None
    while header := requests.read(8):
        request = pickle.loads(requests.read(struct.unpack("Q", header)[0]))
        if scorer is None:
            try:
                scorer = Scorer(*request)
                reply = {"concurrent": scorer.concurrent}
            except (Exception, SystemExit) as error:
                reply = failure_of(error) | {"failure": "start"}
        else:
            samples = [pickle.loads(sample) for sample in request]
            try:
                reply = [packed(scored) for scored in scorer(samples)]
            except KeyboardInterrupt as error:  # a reward function raised it: nobody interrupts a worker
                if len(samples) > 1:
                    raise  # the pool scores them again one by one
                reply = [failure_of(error)]
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
