"""Parts of a response's text that have scores of their own, such as the steps of a reasoning."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.parallel.ranks import together
from common.rollout import Rollout, Sample
from common.rollouts.record import token_texts
from envs.runtime.response import Response
from envs.runtime.template import special_tokens


@dataclass
class Spans:
    """The spans of all responses with a score: response by response, and in the order of the text. The tensors [K] are
    the same on every rank but for `last_token`."""

    scores: Tensor  # [K] float64
    response: Tensor  # [K] int64, the response's number in the step
    group: Tensor  # [K] int64, the group of that response
    last_token: Tensor  # [K] int64, where the span ends in this rank's `rollout.batch`; -1: on another rank
    of_token: Tensor  # [T] int64 of `rollout.batch`: the span of each sampled token; -1: in none

    def to_tokens(self, values: Tensor) -> Tensor:
        """A number for each span, [K] -> float32 [T] of `rollout.batch`: on each token of the span, 0 elsewhere. A span
        that begins and ends within a token of the next one has none."""
        padded = torch.cat([values, values.new_zeros(1)])  # -1 reads the last one
        return padded[self.of_token].float()

    def on_last_token(self, values: Tensor) -> Tensor:
        """The same on the token with which the span ends, as rewards are for a return-to-go; spans that end with the
        same token are added."""
        mine = self.last_token >= 0                                                                 # [K]
        whole = torch.zeros(len(self.of_token))
        return whole.index_add(0, self.last_token[mine], values[mine].float())


def find_spans(rollout: Rollout, tokenizer: Any, scores: str = "step_scores", ends: str = "step_ends") -> Spans:
    """The spans that the reward function returned: {"score": 1.0, "step_scores": [0.5, 1.0], "step_ends": [12, 80]},
    where `ends` are numbers of characters of the text that it was given, each above the one before. A token belongs to
    the span in which its last character is; tokens after the last end, such as the stop token, to none.

    All ranks call this together. Raises ValueError, naming the row, for other lists, and for an episode of several
    sequences."""
    mine: dict[tuple[int, int], tuple[float, int]] = {}  # (response, number in it) -> score, last token
    of_token = [(-1, -1)] * len(rollout.batch.tokens)  # the same keys, of this rank's tokens

    def find_mine() -> list[tuple[int, int, float]]:
        for start, (_, sample, prompt, response) in zip(rollout.batch.cu_seqlens.tolist(), rollout.sequences()):
            if not math.isfinite(sample.score):
                continue
            check(sample, scores, ends)
            first = start + len(prompt)
            stops = ends_of_tokens(sample, tokenizer, prompt, response)                             # [tokens]
            begins = np.array([0, *stops[:-1]])
            sampled = np.flatnonzero(response.mask or [True] * len(stops))
            bounds = np.array(sample.extras[ends])
            for t in sampled.tolist():
                of_token[first + t] = (sample.index, int(np.searchsorted(bounds, stops[t])))
            for k, (score, end) in enumerate(zip(sample.extras[scores], bounds)):
                reached = sampled[begins[sampled] < end]  # the end may be in what a tool said
                last = sampled[0]
                if len(reached):
                    last = reached[-1]
                mine[sample.index, k] = float(score), first + int(last)
        return [(response, k, score) for (response, k), (score, _) in mine.items()]

    found = sorted(chain(*together(find_mine, ValueError)))
    number: dict[tuple[int, int], int] = {}  # the same keys -> the number of the span
    responses = []
    all_scores = []
    for n, (index, k, score) in enumerate(found):
        number[index, k] = n
        responses.append(index)
        all_scores.append(score)
    last_token = torch.full((len(found),), -1, dtype=torch.int64)
    for key, (_, last) in mine.items():
        last_token[number[key]] = last
    response = torch.tensor(responses, dtype=torch.int64)
    return Spans(
        scores=torch.tensor(all_scores, dtype=torch.float64),
        response=response,
        group=rollout.group[response],
        last_token=last_token,
        of_token=torch.tensor([number.get(key, -1) for key in of_token], dtype=torch.int64),
    )


def check(sample: Sample, scores: str, ends: str) -> None:
    """Raise ValueError if the reward function has not returned two lists of equal length, the second one rising."""
    where = f"row {sample.row} of --train-data: the reward function returned"
    for name in (scores, ends):
        numbers = sample.extras.get(name)
        if not isinstance(numbers, list | tuple) or not all(math.isfinite(x) for x in numbers):
            raise ValueError(f"{where} {name} = {numbers!r:.80}, must be a list of numbers, one a span")
    values = sample.extras[scores]
    at = sample.extras[ends]
    if len(values) != len(at):
        raise ValueError(f"{where} {len(values)} {scores} and {len(at)} {ends}, must be as many: a span has a score "
                         f"and an end")
    bounds = [0, *at]
    if any(b <= a or b % 1 for a, b in zip(bounds, at)) or bounds[-1] > len(sample.text):
        raise ValueError(f"{where} {ends} = {list(at)!r:.80}, must be whole numbers of characters, each above the one "
                         f"before, the last at most {len(sample.text)}, the length of the text")
    if len(sample.sequences) > 1:
        raise ValueError(f"{where} {ends}, and its episode has {len(sample.sequences)} sequences, must be one: "
                         f"--rollout.rewritten-history append")


def ends_of_tokens(sample: Sample, tokenizer: Any, prompt: list[int], response: Response) -> list[int]:
    """The number of characters of `sample.text` up to the end of each token of the response. A special token that the
    text leaves out, such as the stop token, ends beyond the text."""
    special = special_tokens(tokenizer).tokens.values()
    text = sample.text
    at = 0
    found = []
    for token, piece in zip(response.tokens, token_texts(tokenizer, prompt, response.tokens)):
        if not at and not text.startswith(piece):
            piece = piece.lstrip(" ")  # tokenizers like Llama 2's drop the first space of a text
        if text.startswith(piece, at):
            at += len(piece)
            found.append(at)
        elif token in special:
            found.append(len(text) + 1)
        else:
            raise ValueError(f"row {sample.row} of --train-data: the text of its response cannot be cut into those of "
                             f"its tokens, at {text[at : at + 20]!r}: an episode that returned another text, perhaps")
    return found
