"""Calls the reward function on rows of the data before a model is loaded: one that cannot score ends the run here.

The texts are none of a model. So any number is fine, and a function may fail on one text or row. Where it fails on
every one, the run would have no rewards.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from rewards.runtime.pool import RewardPool

log = logging.getLogger(__name__)
WAIT_S = 10.0  # for all calls together; a function that needs longer is not judged
MAX_PROMPTS = 16  # looked at, evenly spread; a data source that has none of them is not tried
MAX_SOURCES = 8
# The first has the ground truth in the forms that reward functions look for; the others are tried where it fails.
FORMS = ("<think>\nLet me see.\n</think>\n<answer>{truth}</answer>\n```python\n{truth}\n```\n[[{truth}]]\n"
         "Answer: {truth}\n\\boxed{{{truth}}}\n#### {truth}")
TEXTS = (FORMS, "The answer is {truth}.", "")


def try_function(pool: RewardPool, data: Sequence[Sequence[Any]], may_fail: bool = False) -> None:
    """Score a text for a prompt of each data source; if there is no score, another text for another prompt, three in
    all. Raises ValueError if no text for any source has a score, unless `may_fail` or --reward.max-error-frac 1 allows
    that. These samples are not counted. data: training and validation prompts."""
    sources: dict[str, list[Any]] = {}
    for prompts in data:
        for place in range(min(len(prompts), MAX_PROMPTS)):
            prompt = prompts[place * len(prompts) // min(len(prompts), MAX_PROMPTS)]
            sources.setdefault(prompt.data_source, []).append(prompt)
    end = time.monotonic() + WAIT_S
    failures = {}  # data source -> the last failure
    for source, found in list(sources.items())[:MAX_SOURCES]:
        tried = (found[0], found[len(found) // 2], found[-1])
        for prompt, text in zip(tried, TEXTS):
            truth = ""
            if isinstance(prompt.ground_truth, str | int | float):
                truth = prompt.ground_truth
            sample = (source, text.format(truth=truth), prompt.ground_truth, prompt.extra_info)
            reply = pool.attempt(sample, end - time.monotonic())
            if reply is None or reply.get("failure") == "timeout":
                log.warning("--reward.function: no score within %g s in a call before the start; --reward.timeout-s is "
                            "%g", WAIT_S, pool.timeout_s)
                return
            failures[source] = reply
            if "failure" not in reply:
                break
    told = {}  # data source -> what went wrong, in one line
    for source, reply in failures.items():
        if "failure" in reply:
            told[source] = " ".join(reply.get("where", reply["text"]).split())
    rule = f"--reward.function gave no score for {len(TEXTS)} texts tried on rows of the data"
    must_score = pool.max_error_frac < 1
    if may_fail:
        must_score = False
    if must_score and told and len(told) == len(failures):
        raise ValueError(f"{rule}, before any model is loaded: {next(iter(told.values()))}. Each response needs a "
                         f"finite number, or a dict with one as 'score'; --reward.max-error-frac 1 starts all the same")
    for source, text in told.items():
        log.warning("%s with data_source %r: %s", rule, source, text)
