"""A reward worker, `python -m rewards.runtime.worker`: scores samples that pool.py sends it.

Requests are length-prefixed pickles on fd 0, replies JSON lines on fd 1; reward functions may read and print freely.
The first request is Scorer's arguments, its reply {"concurrency"}; each further one is a list of samples, pickled one
by one, and its reply a list with {"score", "extra", "texts"} of each, or {"failure", "text"} if the sample has no
score; "kind" and "where" beside them are the exception's name, and its place and text. Lists of numbers in "extra"
travel as `packed` writes them. "texts" names the type of each value that became a text or was cut.
"""

import ctypes
import faulthandler
import functools
import inspect
import json
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rewards import find, load_reward, prepare, resolve, takes
from rewards.runtime import groups
from rewards.runtime.replies import MAX_SCORE, failure_of, packed, reply_of

Sample = tuple[str, str, Any, dict | None]  # data_source, solution_str, ground_truth, extra_info


def copies(samples: list[Sample]) -> list[Sample]:
    return pickle.loads(pickle.dumps(samples))


class Reward:
    """One reward function. How it wants to be called is read from its signature, once."""

    def __init__(self, name: str, function: Callable, kwargs: dict[str, Any]):
        self.name = name
        self.function = function
        self.kwargs = kwargs
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
        return self.function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **self.kwargs,
        )

    def score_batch(self, samples: list[Sample]) -> list[dict]:
        """verl's batched form: lists in, list out. A batch that fails is scored one by one, so that
        only the failing sample has no score."""
        again = []
        if len(samples) > 1:
            again = copies(samples)  # the function may change what it is given
        sources, texts, truths, extras = map(list, zip(*samples))
        try:
            returned = self.function(
                data_sources=sources,
                solution_strs=texts,
                ground_truths=truths,
                extra_infos=extras,
                **self.kwargs,
            )
            results = list(wait(returned))
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
                if deadline.expired():
                    return {"failure": "timeout", "text": failure["text"]}
                return failure

        return await asyncio.gather(*map(one, samples))

    def reply(self, result: Any) -> dict:
        return reply_of(self.name, result)


class GroupReward(Reward):
    """A function of all responses of a group, whose samples have a list of texts. A reply is {"group": one of each},
    or a failure."""

    def __init__(self, name: str, function: Callable, kwargs: dict[str, Any]):
        super().__init__(name, function, kwargs)
        self.batched = False
        self.concurrent = inspect.iscoroutinefunction(function)

    def call(self, sample: Sample) -> Any:
        data_source, solution_strs, ground_truth, extra_info = sample
        num_responses = len(solution_strs)
        returned = self.function(
            data_source=data_source,
            solution_strs=solution_strs,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **self.kwargs,
        )
        if inspect.iscoroutine(returned):
            return self.awaited(returned, num_responses)
        return self.of_group(returned, num_responses)

    async def awaited(self, returned: Any, num_responses: int) -> list[Any]:
        return self.of_group(await returned, num_responses)

    def of_group(self, returned: Any, num_responses: int) -> list[Any]:
        results = list(returned)
        if len(results) != num_responses:
            raise ValueError(f"{self.name} returned {len(results)} scores for a group of {num_responses} responses")
        return results

    def reply(self, result: Any) -> dict:
        return {"group": [reply_of(self.name, of_one) for of_one in result]}


class Scorer:
    """The reward functions of a run, loaded once; without any, the table in rewards/ selects by data_source."""

    def __init__(self, function: Sequence[str], weights: Sequence[float], kwargs: dict[str, Any],
                 timeout_s: float | None):
        self.weights = list(weights) or [1.0] * len(function)
        self.kwargs = resolve(kwargs)
        self.timeout_s = timeout_s
        names = []
        for spec in function:
            file, _, name = spec.partition(":")
            names.append(f"{Path(file).stem}.{name or 'compute_score'}")
        if len(set(names)) < len(names):
            raise ValueError(f"--reward.function {' '.join(function)}: two are called {max(names, key=names.count)}, "
                             f"and their numbers could not be told apart; rename a file or a function")
        functions = [load_reward(spec) for spec in function]
        self.rewards = []
        if functions:
            of_each = prepare(functions, self.kwargs)  # the keyword arguments that it takes
            for name, of_name, taken in zip(names, functions, of_each):
                kind = GroupReward if groups.is_group_function(of_name) else Reward
                self.rewards.append(kind(name, of_name, taken))
        self.grouped = any(isinstance(reward, GroupReward) for reward in self.rewards)
        self.concurrent = any(reward.concurrent for reward in self.rewards)
        self.table: dict[str, Reward] = {}

    def __call__(self, samples: list[Sample]) -> list[dict]:
        if self.grouped:
            return self.score_groups(samples)
        if not self.rewards:
            return [self.score_by_source(sample) for sample in samples]
        # each function gets its own, because it may change them
        given = [samples]
        given += [copies(samples) for _ in self.rewards[1:]]
        columns = [reward(mine, self.timeout_s) for reward, mine in zip(self.rewards, given)]
        return [self.combine(replies) for replies in zip(*columns)]

    def score_groups(self, samples: list[Sample]) -> list[dict]:
        """Functions of one response score each of a group's."""
        singles: list[Sample] = []
        sizes = []
        for source, texts, truth, info in samples:
            sizes.append(len(texts))
            for text in texts:
                singles.append((source, text, truth, info))
        columns = []
        for reward in self.rewards:
            if isinstance(reward, GroupReward):
                replies_of = reward(copies(samples), self.timeout_s)
                column: list[dict] = []
                for reply, n in zip(replies_of, sizes):
                    column += groups.of_members(reply, n)
                columns.append(column)
            else:
                columns.append(reward(copies(singles), self.timeout_s))
        combined = [self.combine(replies) for replies in zip(*columns, strict=True)]
        found = []
        for n in sizes:
            found.append({"group": combined[:n]})
            combined = combined[n:]
        return found

    def score_by_source(self, sample: Sample) -> dict:
        source = sample[0]
        if source not in self.table:
            function = find(source)
            if function is None:
                return failure_of(LookupError(f"no reward for data_source {source!r}"))
            taken = {key: value for key, value in self.kwargs.items() if takes(function, key)}
            self.table[source] = Reward(source, function, taken)
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
        extra = {}
        texts = {}
        for reward, reply in zip(self.rewards, replies):
            extra[reward.name] = reply["score"]
            for key, value in reply["extra"].items():
                extra[f"{reward.name}/{key}"] = value
            for key, kind in reply["texts"].items():
                texts[f"{reward.name}/{key}"] = kind
        return {"score": total, "extra": extra, "texts": texts}


@functools.cache
def event_loop():
    """One for the life of a worker: clients that a user's functions keep open stay usable."""
    import asyncio

    return asyncio.new_event_loop()


def wait(result: Any) -> Any:
    if inspect.iscoroutine(result):
        return event_loop().run_until_complete(result)
    return result


def ignore_stops() -> None:
    """Clusters send these signals to all processes of a job. The trainer acts on them, and needs the scores to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # and no SIG_IGN, which programs would inherit


def die_with(trainer: int) -> None:
    """Even inside an endless loop, and before it if memory runs out."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != trainer:
        os._exit(1)
    Path("/proc/self/oom_score_adj").write_text("1000")


def score(scorer: Scorer, request: list[bytes]) -> list[dict]:
    """The replies to a list of samples."""
    samples = [pickle.loads(sample) for sample in request]
    try:
        return [packed(scored) for scored in scorer(samples)]
    except KeyboardInterrupt as error:  # a reward function raised it: nobody interrupts a worker
        if len(samples) > 1:
            raise  # the pool scores them again one by one
        return [failure_of(error)]


def main() -> None:
    die_with(trainer=int(sys.argv[1]))
    ignore_stops()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.register_at_fork(after_in_child=lambda: os.close(answers.fileno()))  # else a child keeps the pipe open
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # in place of a kill: shows where a sample hung
    faulthandler.register(signal.SIGUSR2, file=answers, chain=True)
    scorer = None
    while header := requests.read(8):
        (length,) = struct.unpack("Q", header)
        request = pickle.loads(requests.read(length))
        if scorer is None:
            try:
                scorer = Scorer(*request)
                answer = {"concurrent": scorer.concurrent, "grouped": scorer.grouped}
            except (Exception, SystemExit) as error:
                answer = failure_of(error) | {"failure": "start"}
        else:
            answer = score(scorer, request)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
