"""For online_dpo.py: the data's answers to prompts, beside the responses that were sampled, and SPPO's baseline."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from common.layout.response import Response
from common.rollout import Rollout, gather_rollout


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


def group_log_mean_exp(rewards: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response log(mean(exp(reward))) over its group, also where exp(reward) is infinite or 0."""
    found = torch.zeros_like(rewards)
    for number in group.unique():
        members = group == number
        found[members] = rewards[members].logsumexp(0) - math.log(members.sum())
    return found
