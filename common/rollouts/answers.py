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
    infos = (parse_row(json.loads(texts[row].as_py()), run.args.data).extra_info for row in mine)
    missing = [f"row {row}" for row, info in zip(mine, infos) if not isinstance(info.get(key), str)]
    if found := all_names({*missing[:1]}):
        raise ValueError(f"{found[0]} of --train-data has no text in extra_info[{key!r}] (--answer-key); "
                         f"{len(missing)} of this rank's {len(mine)} rows have none")


def add_answers(rollout: Rollout, run: Any, key: str) -> tuple[Rollout, torch.Tensor]:
    """The responses [S] and after them the data's answers to the prompts [P]; and pairs of answer and response."""
    check_answers(run, key)
    # with --rollout.tp several ranks hold responses of one group: the rank that holds its first one makes the answer;
    # of several numbers of a group the dict keeps the one that comes last, in reverse the lowest
    firsts = set({group: index for index, group in reversed([*enumerate(rollout.group.tolist())])}.values())
    answers = [answer_of(run, s.group, s.row, key) for s in rollout.samples if s.index in firsts]
    pairs = torch.stack([len(rollout) + rollout.group, torch.arange(len(rollout))], dim=1)[rollout.has_score]
    return rollout.cat(gather_rollout(answers)), pairs.flatten()


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
    response = Response(kept, [0.0] * len(kept), "stop" if len(kept) == len(tokens) else "length")
    return Sample(number, number, row, prompt, response, text)
