"""What a teacher reads where that is not the policy's own sequence: the response after a prompt that says more, or in
the tokens of another tokenizer. These sequences are made where a response was scored, and sent to the rank that
trains on it.

`batch.extra["span"]` says, in both sequences, which tokens are compared with which: tokens with the same number spell
the same text, and those with -1 are compared with none. The response's tokens are the sampled ones, never encoded
again, unless the teacher has others.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from common.batch import Batch
from common.dataset.messages import parse_messages
from common.dataset.store import render_prompt, template_arguments
from common.distillation.alignment import Aligned, align
from common.distillation.spelling import SharedWords, Spelling, end_of_turn
from common.flags.data import DataConfig
from common.model.flops import context_length
from common.model.loading import read_config, read_tokenizer
from common.parallel.exchange import exchange
from common.parallel.ranks import all_max, together
from common.rollout import Minibatch, Rollout, Sample
from envs.runtime.response import Response
from envs.runtime.template import encode_plain, special_tokens
from rewards import load_function

SELF = "self"
"""The path of a teacher that is the policy."""
Messages = list[dict[str, Any]]


class Reader:
    """How one teacher reads: its tokenizer, its chat template, and what it shares with the policy if its tokens are
    others."""

    def __init__(self, run: Any, path: str):
        args = run.args
        if path == SELF:
            path = args.model
        self.tokenizer = run.tokenizer
        self.template = template_arguments(run.tokenizer, args.data)
        self.words: SharedWords | None = None
        self.longest = context_length(read_config(path, args.policy, "--teacher"))
        tokenizer = read_tokenizer(path, args.policy, "--teacher")
        if tokenizer.get_vocab() == run.tokenizer.get_vocab():
            return
        flag = f"--teacher {path}"
        self.ours = Spelling(run.tokenizer, end_of_turn(args.model, run.tokenizer, self.template), flag)
        self.tokenizer = tokenizer
        # the template that --data may name is the policy's
        self.template = template_arguments(tokenizer, DataConfig(template=args.data.template))
        self.theirs = Spelling(tokenizer, end_of_turn(path, tokenizer, self.template), flag)
        self.words = SharedWords(self.ours, self.theirs)

    def prompt(self, messages: Messages) -> list[int]:
        text = render_prompt(messages, self.tokenizer, self.template)
        if self.template is None:
            return encode_plain(text, self.tokenizer)
        return special_tokens(self.tokenizer).encode(text)

    def response(self, response: Response) -> Aligned:
        if self.words is not None:
            return align(response.tokens, self.ours, self.theirs, self.words)
        spans = []
        for number, is_sampled in enumerate(response.mask or [True] * len(response.tokens)):
            spans.append(number if is_sampled else -1)
        return Aligned(response.tokens, spans, spans)


class Lessons:
    """Of all teachers of a run."""

    def __init__(self, run: Any, paths: list[str], context: str = "", max_context_length: int = 0):
        """`paths`: the teachers'. `context`: --context, path/to/file.py:name; a teacher whose prompt then has more than
        `max_context_length` tokens (0: any number) is not asked. Raises ValueError for data with images or episodes
        that a teacher cannot read otherwise than the policy."""
        self.run = run
        self.flag = f"--context {context}"
        self.context: Callable | None = None
        if context:
            self.context = load_function(context, "--context", "context")
        self.max_context = max_context_length or math.inf
        self.readers = [Reader(run, path) for path in paths]
        has_other_tokens = any(reader.words is not None for reader in self.readers)
        self.are_needed = has_other_tokens or self.context is not None
        args = run.args
        what = "--context" if self.context is not None else "a --teacher with other tokens than --model"
        if self.are_needed and args.policy.sequence_parallel > 1:
            raise ValueError(f"{what} needs --policy.sequence-parallel 1, not {args.policy.sequence_parallel}: the "
                             f"ranks of a sequence cut the teacher's elsewhere")
        if self.are_needed and run.train_set.has_images:
            raise ValueError(f"{what} does not go with images in --train-data")
        if has_other_tokens and args.rollout.episode:
            raise ValueError(f"a --teacher with other tokens than --model does not go with --rollout.episode "
                             f"{args.rollout.episode}: it would read what tools said in the policy's chat template")

    @property
    def words(self) -> list[SharedWords | None]:
        return [reader.words for reader in self.readers]

    def write(self, rollout: Rollout) -> Batch | None:
        """The sequences that the teachers read, on the CPU, with the numbers of those of `rollout.batch`, which also
        gets its spans; None: they read those of the policy. All ranks call this together, and raise ValueError for
        messages that are none. `rollout.batch.response_extra["teacher"]` has been written."""
        if not self.are_needed:
            return None
        responses: dict[int, list[dict[str, Any]]] = {}
        if self.context is not None:
            responses = self.responses_of_groups(rollout)
        made: list[tuple[Batch, Tensor]] = []
        together(lambda: made.append(self.lesson(rollout, responses)), ValueError)
        lesson, spans = made[0]
        rollout.batch.extra["span"] = spans
        return lesson

    def responses_of_groups(self, rollout: Rollout) -> dict[int, list[dict[str, Any]]]:
        """What --context is told of all responses to a prompt, in the order of their numbers."""
        mine = []
        for sample in rollout.samples:
            text = sample.text or sample.response.text(self.run.tokenizer, self.run.args.rollout.stop)
            score = sample.score if math.isfinite(sample.score) else None
            mine.append((sample.index, sample.group, sample.extras | {"text": text, "score": score}))
        of_all_ranks = [*chain(*together(lambda: mine, ValueError))]
        of_all_ranks.sort(key=lambda told: told[0])
        found: dict[int, list[dict[str, Any]]] = {}
        for index, group, response in of_all_ranks:
            found.setdefault(group, []).append(response | {"index": index})
        return found

    def lesson(self, rollout: Rollout, responses: dict[int, list[dict[str, Any]]]) -> tuple[Batch, Tensor]:
        """This rank's sequences, and the spans [T] of the policy's."""
        teachers = rollout.batch.response_extra["teacher"]                                      # [S]
        prompts = []
        tokens = []
        masks = []
        numbers = []
        indices = []
        their_spans: list[int] = []
        our_spans: list[int] = []
        for (number, sample, prompt, response), teacher in zip(rollout.sequences(), teachers.tolist()):
            reader = self.readers[teacher]
            aligned = reader.response(response)
            shown = self.shown(reader, sample, prompt, responses)
            is_read = shown is not None and len(shown) + len(aligned.tokens) <= reader.longest
            if not is_read:     # a sequence must be there nevertheless; it is asked about nothing
                shown = [0]
                aligned = Aligned([], [], [-1] * len(response.tokens))
            prompts.append(shown)
            tokens.append(aligned.tokens)
            masks.append([span >= 0 for span in aligned.theirs])
            numbers.append(number)
            indices.append(sample.index)
            their_spans += [-1] * len(shown) + aligned.theirs
            our_spans += [-1] * len(prompt) + aligned.ours
        batch = Batch.build(prompts, tokens, index=indices, number=numbers, masks=masks)
        batch.extra["span"] = torch.tensor(their_spans, dtype=torch.int64)
        batch.response_extra["teacher"] = teachers
        return batch, torch.tensor(our_spans, dtype=torch.int64)

    def shown(self, reader: Reader, sample: Sample, prompt: list[int],
              responses: dict[int, list[dict[str, Any]]]) -> list[int] | None:
        """The tokens before the response, for the teacher. None: it has nothing to say."""
        if self.context is None:
            if reader.words is None:
                return prompt
            return reader.prompt(sample.prompt.messages)
        if len(sample.sequences) > 1 or prompt != sample.prompt.tokens:
            raise ValueError(f"{self.flag}: the episode of row {sample.row} of --train-data does not go on from the "
                             f"row's prompt, or rewrote its history, so no other messages can take the prompt's place: "
                             f"--rollout.rewritten-history append, and no tools in the prompt")
        told = responses[sample.group]
        own = [response for response in told if response["index"] == sample.index]
        siblings = [response for response in told if response["index"] != sample.index]
        row = {
            "prompt": sample.prompt.messages,
            "data_source": sample.prompt.data_source,
            "ground_truth": sample.prompt.ground_truth,
            "extra_info": sample.prompt.extra_info,
        }
        messages = self.context(row, own + siblings)
        if messages is None:
            return None
        shown = reader.prompt(parse_messages(messages, f"{self.flag}: what it returned for row {sample.row}"))
        return shown if len(shown) <= self.max_context else None

    def deliver(self, lesson: Batch | None, minibatches: list[Minibatch]) -> dict[int, Batch]:
        """The teachers' sequences of each micro-batch of this rank, under its `id`. All ranks call this together. Where
        teachers read what the policy does, these are the micro-batches."""
        microbatches = list(chain(*minibatches))
        if lesson is None:
            return {id(microbatch): microbatch for microbatch in microbatches}
        world = self.run.world
        wanted = torch.cat([microbatch.number.cpu() for microbatch in microbatches])
        wanted = wanted[wanted >= 0]                                    # without dummies
        most = int(all_max([max(lesson.number.tolist(), default=-1)])) + 1
        rank_of = torch.full((most,), -1.0)
        rank_of[wanted] = world.rank
        rank_of = all_max(rank_of).long()
        arrived = exchange(lesson, rank_of[lesson.number])
        found = {}
        for microbatch in microbatches:
            number = microbatch.number.cpu()
            found[id(microbatch)] = arrived.microbatch(number[number >= 0]).to(world.device)
        return found


def planned_teachers(model: str, paths: dict[str, str], is_averaged: bool) -> tuple[str, ...]:
    """The models for which memory is planned. An average is in float32, twice as large as what is planned for one; of
    the policy itself the plan counts weights that do not exist, beside the head and the hidden states."""
    planned = []
    for path in paths.values():
        if path == SELF:
            path = model
        planned.append(path)
    if is_averaged:
        planned.append(model)
    return tuple(planned)


def load_teachers(run: Any, paths: dict[str, str], is_averaged: bool) -> list[Any]:
    """The teachers' models, from data_source -> path. The policy has been loaded."""
    teachers = []
    for source, path in paths.items():
        if path != SELF:
            teachers.append(run.load_frozen(f"teacher {source}", path, any_tokens=True))
        elif is_averaged:
            teachers.append(run.load_average("teacher", run.args.model))
        else:
            teachers.append(run.policy)
    return teachers


def teachers_of(rollout: Rollout, sources: list[str]) -> Tensor:
    """The number of the teacher of each sequence of this rank's batch, by its data_source: [S] int64."""
    numbers = []
    for _, sample, *_ in rollout.sequences():
        number = 0
        if len(sources) > 1:
            number = sources.index(sample.prompt.data_source)
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.int64)
