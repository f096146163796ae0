"""The data's answers to prompts, beside the responses that were sampled: the pairs of online_dpo.py."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from common.rollout import Rollout, gather_rollout
from envs.runtime.response import Response


def add_answers(rollout: Rollout, tokenizer, key: str) -> tuple[Rollout, Tensor]:
    """The responses [S] and after them the data's answers to the prompts [P]; and pairs of answer and response."""
    answers = []
    for sample in {sample.group: sample for sample in rollout.samples}.values():
        if not isinstance(sample.prompt.extra_info.get(key), str):
            raise ValueError(f"row {sample.row} of --train-data has no text in extra_info[{key!r}] (--answer-key)")
        tokens = [*tokenizer.encode(sample.prompt.extra_info[key], add_special_tokens=False), tokenizer.eos_token_id]
        answer = Response(tokens, [0.0] * len(tokens), "stop")
        answers.append(replace(sample, index=sample.group, response=answer, score=math.nan, extras={}, step=-1))
    scored = rollout.has_score.nonzero()[:, 0]
    pairs = torch.stack([len(rollout) + rollout.group[scored], scored], dim=1)
    return rollout.cat(gather_rollout(answers)), pairs.flatten()
