"""The responses that ranks have scored, in a `Rollout` whose numbers every rank knows."""

import math
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from common.parallel.exchange import gather_numbers
from common.rollout import Rollout, Sample


@dataclass
class Numbers:
    """What every rank knows of a response: a field each of `Rollout`, and whether it has a score."""

    has_score: bool
    scores: float  # 0 without one
    group: int
    row: int
    step: int
    prompt_lengths: int
    response_lengths: int
    other_lengths: int
    num_sequences: int
    truncated: bool

    @classmethod
    def of(cls, s: Sample) -> "Numbers":
        num_prompt = 0
        num_sampled = 0
        num_tokens = 0
        for prompt, part in s.sequences:
            num_prompt += len(prompt)
            num_sampled += part.num_sampled
            num_tokens += len(part.tokens)
        return cls(
            has_score=math.isfinite(s.score),
            scores=np.nan_to_num(s.score),
            group=s.group,
            row=s.row,
            step=s.step,
            prompt_lengths=num_prompt,
            response_lengths=num_sampled,
            other_lengths=num_tokens - num_sampled,
            num_sequences=len(s.sequences),
            truncated=s.response.finish_reason == "length",
        )


def gather_rollout(samples: list[Sample]) -> Rollout:
    """The samples of this rank, with the numbers of all ranks' samples on every rank."""
    samples = sorted(samples, key=lambda sample: sample.index)
    names = [f.name for f in fields(Numbers)]
    rows = [astuple(Numbers.of(s)) for s in samples]
    index = torch.tensor([s.index for s in samples], dtype=torch.int64)
    table = gather_numbers(torch.tensor(rows, dtype=torch.float64).view(-1, len(names)), index)     # [S, names]
    found = dict(zip(names, table.unbind(1)))
    has_score = found.pop("has_score") > 0
    found["scores"] = torch.where(has_score, found["scores"], torch.nan)
    found["truncated"] = found["truncated"] > 0
    return Rollout(samples, **found | {name: found[name].long() for name in ("group", "row", "step")})
