"""The data's answers to prompts, beside the responses that were sampled: for online_dpo.py and distill.py."""

from typing import Any

import torch
from torch import Tensor

from common.prompts import Prompt
from common.rollout import Rollout, Sample, gather_rollout
from envs.runtime.response import Response


def add_answers(rollout: Rollout, tokenizer, key: str) -> tuple[Rollout, Tensor]:
    """The responses [S] and after them the data's answers to the prompts [P]; and pairs of answer and response."""
    # with --rollout.tp several ranks hold responses of one group: the rank that holds its first one makes the answer
    firsts = set({group: index for index, group in reversed([*enumerate(rollout.group.tolist())])}.values())
    answers = [answer_of(s.group, s.row, s.prompt, tokenizer, key) for s in rollout.samples if s.index in firsts]
    scored = rollout.has_score.nonzero()[:, 0]
    pairs = torch.stack([len(rollout) + rollout.group[scored], scored], dim=1)
    return rollout.cat(gather_rollout(answers)), pairs.flatten()


def answers_of(run: Any, rows: list[int], key: str) -> Rollout:
    """The data's answers to the prompts of these rows of `run.train_set`, dealt to the ranks."""
    mine = range(run.world.rank, len(rows), run.world.size)
    return gather_rollout([answer_of(n, rows[n], run.train_set[rows[n]], run.tokenizer, key) for n in mine])


def answer_of(number: int, row: int, prompt: Prompt, tokenizer, key: str) -> Sample:
    """The data's answer as a response without a score and without log-probs."""
    text = prompt.extra_info.get(key)
    if not isinstance(text, str):
        raise ValueError(f"row {row} of --train-data has no text in extra_info[{key!r}] (--answer-key)")
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Sample(number, number, row, prompt, Response(tokens, [0.0] * len(tokens), "stop"), text)
