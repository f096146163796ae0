"""Responses to prompts that are only tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from common.engine.base import Engine, Request, SamplingConfig, Until
from common.prompts import Prompt
from envs.runtime.response import Response


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], seeds: Sequence[int | None], sampling: SamplingConfig,
    on_finish: Callable[[int, Response], Any] = lambda *_: None, stop: Callable[[], bool] = lambda: False,
) -> list[Response]:
    """One response per prompt (token ids), in order; greedy if the seed is None. See `Engine.complete`."""
    rows = [Prompt(list(tokens), "", "", {}, []) for tokens in prompts]
    requests = [Request(row, seed) for row, seed in zip(rows, seeds, strict=True)]
    return engine.complete(requests, sampling, on_finish, Until(stop))
