"""The divergence of policy and teachers in the update: who reads which sequences, and which tokens are compared.

With a teacher of other tokens, at each span of common/distillation/alignment.py both models have seen the same text,
and what they say next is compared as far as both can say it:

    one token each, the same word    over the words that both vocabularies have, and one event "any other word"
    other tokens                     over two events, "this text" and "another one": p(text) is the product of the
                                     probabilities of its tokens (the chain rule, GOLD's "Logprob merging")

GOLD compares the shared words likewise, and sorts the others by probability (ULD, arXiv 2402.12030), though words of
equal rank need not mean the same. Here they are one event, so that the divergence is one between distributions. It is 0
where they are equal, and merging events makes no divergence larger.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.batch import Batch
from common.distillation.served import BestWords, best_words, classes
from common.distillation.spelling import SharedWords
from common.kernels import Head, linear_divergence, linear_logp

LARGEST = -1e-6
"""Log-probs of a span are cut to this one: log(1 - p) must be finite."""
Divergence = Callable[[Tensor, Tensor], Tensor]


class Reading(NamedTuple):
    """Of a model: what it says of the sampled tokens of some sequences, N of them."""

    hidden: Tensor  # [N, H]
    head: Head
    tokens: Tensor  # [N] int64
    spans: Tensor  # [N] int64, of all sequences: tokens with the same number spell the same text

    def take(self, which: Tensor) -> "Reading":
        return self._replace(hidden=self.hidden[which], tokens=self.tokens[which], spans=self.spans[which])


@dataclass
class Comparison:
    """Of the policy with all teachers of a run."""

    teachers: Sequence[Any]  # their models
    words: Sequence[SharedWords | None]  # of each teacher whose tokens are not the policy's
    divergence: Divergence  # log-probs [n, K] of policy and teacher over K events -> [n]
    temperature: float

    def of(self, microbatch: Batch, lesson: Batch, heads: Sequence[Head | None]) -> Callable[[Tensor, Head], Tensor]:
        """Let each teacher, whose head is one of `heads`, read its sequences of `lesson`, which is `microbatch`, or its
        own version of it. Returns the function by which the policy computes the divergence [N] of the sampled tokens
        from its own hidden states [N, H] and its head: 0 on tokens that are compared with none; a span of several
        tokens has it on its first."""
        of_token = microbatch.response_extra["teacher"][microbatch.sequence_ids[microbatch.sampled]]     # [N]
        spans = spans_of(microbatch)[microbatch.sampled]                                        # [N]
        found: list[Reading | BestWords] = []
        for number, (teacher, head) in enumerate(zip(self.teachers, heads)):
            part = lesson
            if len(self.teachers) > 1:
                own = (lesson.response_extra["teacher"] == number).nonzero()[:, 0]              # [S']
                # without a sequence of its own it reads a dummy: FSDP's collectives must match on all ranks
                part = lesson.dummy()
                if len(own):
                    part = lesson.select(own)
            if head is None:                                            # a server has been asked before
                found.append(best_words(part))
                continue
            hidden = teacher.hidden_states(part)
            found.append(Reading(hidden, head, part.tokens[part.sampled], spans_of(part)[part.sampled]))
            teacher.free_unsharded()

        def of_all(hidden: Tensor, head: Head) -> Tensor:                                       # -> [N]
            if len(found) == 1 and lesson is microbatch:
                # sequence parallel may have cut N, and then `of_token` is too long
                return self.of_tokens((hidden, head), found[0])
            whole = Reading(hidden, head, microbatch.tokens[microbatch.sampled], spans)
            parts = []
            places = []
            for number, reading in enumerate(found):
                own = ((of_token == number) & (spans >= 0)).nonzero()[:, 0]                     # [n]
                ours = whole.take(own)
                places.append(own)
                if isinstance(reading, BestWords):
                    parts.append(self.of_tokens((ours.hidden, head), reading))
                    continue
                theirs = reading.take(torch.isin(reading.spans, ours.spans))
                shared = self.words[number]
                if shared is None:
                    parts.append(self.of_tokens((ours.hidden, head), theirs))
                else:
                    parts.append(self.of_spans(ours, theirs, shared))
            values = torch.cat(parts)
            return values.new_zeros(len(hidden)).index_copy(0, torch.cat(places), values)

        return of_all

    def of_tokens(self, student: tuple[Tensor, Head], theirs: Reading | BestWords) -> Tensor:
        """[N], token by token."""
        if isinstance(theirs, BestWords):
            return self.divergence(*classes(student, theirs, self.temperature))
        return linear_divergence(student, (theirs.hidden, theirs.head), self.divergence, self.temperature)

    def of_spans(self, ours: Reading, theirs: Reading, words: SharedWords) -> Tensor:
        """The divergence [n] of tokens that the two models cut otherwise."""
        keys, inverse = torch.cat([ours.spans, theirs.spans]).unique(return_inverse=True)       # [K]
        of_ours = inverse[: len(ours.spans)]                                                    # [n]
        of_theirs = inverse[len(ours.spans) :]                                                  # [m]
        is_single = of_ours.bincount(minlength=len(keys)) == 1                                  # [K]
        is_single &= of_theirs.bincount(minlength=len(keys)) == 1
        first = first_of_each(of_ours, len(keys))                                               # [K] of `ours`
        their_first = first_of_each(of_theirs, len(keys))                                       # [K] of `theirs`
        is_single &= words.partner_of(ours.tokens[first]) == theirs.tokens[their_first]

        def of_words(logp: Tensor, logq: Tensor) -> Tensor:
            return self.divergence(*words.events(logp, logq))

        here = first[is_single]
        there = their_first[is_single]
        student = ours.hidden[here], ours.head
        teacher = theirs.hidden[there], theirs.head
        of_single = linear_divergence(student, teacher, of_words, self.temperature, same_words=False)
        logp = text_events(ours, of_ours, is_single, self.temperature)                          # [K', 2]
        logq = text_events(theirs, of_theirs, is_single, self.temperature)                      # [K', 2]
        whole = of_single.new_zeros(len(ours.spans)).index_copy(0, here, of_single)
        return whole.index_copy(0, first[~is_single], self.divergence(logp, logq).to(whole.dtype))


def spans_of(batch: Batch) -> Tensor:
    """[T]: a number for each span of the batch's sequences, the same in other versions of them. -1: the token is
    compared with none, perhaps because one of its span is no longer in `mask` (--correction.reject)."""
    if "span" not in batch.extra:
        return torch.where(batch.mask, 0, -1)
    span = batch.extra["span"]
    keys = torch.where(span < 0, -1, batch.number[batch.sequence_ids] * 2**32 + span)
    _, of_token, size = keys.unique(return_inverse=True, return_counts=True)                    # [T], [K]
    is_whole = of_token[batch.sampled].bincount(minlength=len(size)) == size                    # [K]
    return torch.where(batch.mask & is_whole[of_token], keys, -1)


def first_of_each(of_token: Tensor, num_spans: int) -> Tensor:
    """The first token of each span: [K] int64."""
    places = torch.arange(len(of_token), device=of_token.device)
    return places.new_zeros(num_spans).scatter_reduce(0, of_token, places, "amin", include_self=False)


def text_events(reading: Reading, of_token: Tensor, is_single: Tensor, temperature: float) -> Tensor:
    """For each span that is not single: log-probs of its text and of any other, [K', 2]."""
    is_text = ~is_single                                                                        # [K]
    part = is_text[of_token].nonzero()[:, 0]
    logp, *_ = linear_logp(reading.hidden[part], reading.head, reading.tokens[part], temperature)
    whole = logp.new_zeros(len(is_single)).index_add(0, of_token[part], logp)[is_text]          # [K']
    whole = whole.clamp(max=LARGEST)
    return torch.stack([whole, torch.log(-torch.expm1(whole))], dim=1)
