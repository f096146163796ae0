"""The data's answers to prompts, beside the responses that were sampled: for online_dpo.py and distill.py."""

import json
from typing import Any

import torch

from common.dataset.conversations import encode, pieces_of
from common.dataset.images import embedding_size
from common.dataset.messages import parse_row
from common.dataset.store import template_arguments
from common.parallel.ranks import all_names
from common.rollout import Rollout, Sample
from common.rollouts.gather import gather_rollout
from envs.runtime.response import Response
from envs.runtime.template import check_tokens


def check_answers(run: Any, key: str) -> None:
    """In the first step, of all rows: one without an answer would end the run in the step that draws it, and with
    other data a run does not continue. Raises ValueError on all ranks."""
    if run.step > run.first_step:
        return
    texts = run.train_set.table["row"]
    mine = range(run.world.rank, len(texts), run.world.size)
    missing = []
    for row in mine:
        prompt = parse_row(json.loads(texts[row].as_py()), run.args.data)
        if not isinstance(prompt.extra_info.get(key), str):
            missing.append(f"row {row}")
    found = all_names({*missing[:1]})
    if found:
        raise ValueError(f"{found[0]} of --train-data has no text in extra_info[{key!r}] (--answer-key); "
                         f"{len(missing)} of this rank's {len(mine)} rows have none")


def add_answers(rollout: Rollout, run: Any, key: str) -> tuple[Rollout, torch.Tensor]:
    """The responses [S] and after them the data's answers to the prompts [P]; and pairs of answer and response."""
    check_answers(run, key)
    first_of_group: dict[int, int] = {}                                 # group -> index of its first response
    for index, group in enumerate(rollout.group.tolist()):
        first_of_group.setdefault(group, index)
    firsts = {*first_of_group.values()}
    answers = []
    for sample in rollout.samples:
        # with --rollout.tp several ranks hold responses of a group: the one with the first makes the answer
        if sample.index in firsts:
            answers.append(answer_of(run, sample.group, sample.row, key))
    answer_indices = len(rollout) + rollout.group                       # [S]
    pairs = torch.stack([answer_indices, torch.arange(len(rollout))], dim=1)        # [S, 2]
    return rollout.cat(gather_rollout(answers)), pairs[rollout.has_score].flatten()


def answers_of(run: Any, rows: list[int], key: str) -> Rollout:
    """The data's answers to the prompts of these rows of `run.train_set`, dealt to the ranks."""
    check_answers(run, key)
    mine = range(run.world.rank, len(rows), run.world.size)
    return gather_rollout([answer_of(run, n, rows[n], key) for n in mine])


def answer_of(run: Any, number: int, row: int, key: str) -> Sample:
    """The data's answer as a response without a score and without log-probs: the tokens that the chat template writes
    for it after the prompt, as in sft.py, up to the first that ends a response. So it ends as what is sampled does; the
    model's end of turn may be another token than the tokenizer's eos_token, and templates add text after it. It is cut
    where a response would be, at --rollout.max-response-length: memory is planned for no more."""
    prompt = run.train_set[row]
    text = prompt.extra_info[key]
    if prompt.messages[-1]["role"] == "assistant":
        raise ValueError(f"row {row} of --train-data: the prompt ends with a message of the assistant, and the data's "
                         f"answer would be a turn after it: write it without that message, and the answer whole")
    template = template_arguments(run.tokenizer, run.args.data)
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    pieces = pieces_of(messages, len(prompt.messages), run.tokenizer, template)
    limit = run.args.data.max_prompt_length + run.args.rollout.max_response_length
    tokens, mask = encode(pieces, run.tokenizer, template, run.engine.stop_token_ids, limit)
    tokens = [token for token, is_answer in zip(tokens, mask) if is_answer]
    check_tokens(tokens, run.tokenizer, embedding_size(run.tokenizer.name_or_path))
    kept = tokens[: run.args.rollout.max_response_length]
    finish_reason = "length"
    if len(kept) == len(tokens):
        finish_reason = "stop"
    response = Response(kept, [0.0] * len(kept), finish_reason)
    return Sample(number, number, row, prompt, response, text)
