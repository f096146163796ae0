"""The data's answers to prompts, beside the responses that were sampled: for online_dpo.py and distill.py."""

from typing import Any

import torch

from common.dataset.conversations import encode, pieces_of
from common.dataset.store import template_arguments
from common.rollout import Rollout, Sample, gather_rollout
from envs.runtime.response import Response


def add_answers(rollout: Rollout, run: Any, key: str) -> tuple[Rollout, torch.Tensor]:
    """The responses [S] and after them the data's answers to the prompts [P]; and pairs of answer and response."""
    # with --rollout.tp several ranks hold responses of one group: the rank that holds its first one makes the answer;
    # of several numbers of a group the dict keeps the one that comes last, in reverse the lowest
    firsts = set({group: index for index, group in reversed([*enumerate(rollout.group.tolist())])}.values())
    answers = [answer_of(run, s.group, s.row, key) for s in rollout.samples if s.index in firsts]
    pairs = torch.stack([len(rollout) + rollout.group, torch.arange(len(rollout))], dim=1)[rollout.has_score]
    return rollout.cat(gather_rollout(answers)), pairs.flatten()


def answers_of(run: Any, rows: list[int], key: str) -> Rollout:
    """The data's answers to the prompts of these rows of `run.train_set`, dealt to the ranks."""
    return gather_rollout([answer_of(run, n, rows[n], key) for n in range(run.world.rank, len(rows), run.world.size)])


def answer_of(run: Any, number: int, row: int, key: str) -> Sample:
    """The data's answer as a response without a score and without log-probs: the tokens that the chat template writes
    for it after the prompt, as in sft.py, up to the first that ends a response. So it ends as what is sampled does; the
    model's end of turn may be another token than the tokenizer's eos_token, and templates add text after it."""
    prompt = run.train_set[row]
    text = prompt.extra_info.get(key)
    if not isinstance(text, str):
        raise ValueError(f"row {row} of --train-data has no text in extra_info[{key!r}] (--answer-key)")
    template = template_arguments(run.tokenizer, run.args.data)
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    pieces = pieces_of(messages, len(prompt.messages), run.tokenizer, template)
    tokens, mask = encode(pieces, run.tokenizer, template, run.engine.stop_token_ids)
    tokens = [token for token, is_answer in zip(tokens, mask) if is_answer]
    return Sample(number, number, row, prompt, Response(tokens, [0.0] * len(tokens), "stop"), text)
