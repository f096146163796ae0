"""Conversations to tokens, with a mask that is True on the assistant's text: the rows of sft.py and dpo.py. The scripts
define a row's conversations and which text is trained on; this module encodes, stores and packs them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from transformers import PretrainedConfig

from common.batch import Batch
from common.dataset.images import embedding_size, with_markers
from common.dataset.loaded import Loaded
from common.dataset.pairs import images_of_pair
from common.dataset.shown import Encoded, RowImages, cut, with_images
from common.dataset.store import RowFormat, load_rows, render, template_arguments
from common.dataset.videos import is_given, is_video
from common.flags import rules
from common.flags.data import ConversationConfig
from common.model.flops import context_length, sequence_cost
from common.model.loading import read_config
from common.packing import Sequences, plan_step
from common.parallel.ranks import World
from common.rollout import Minibatch
from envs.runtime.lengths import lengths_of
from envs.runtime.template import check_tokens, encode_plain, end_of, special_tokens

Piece = tuple[str, bool]
"""Text, and whether it is an answer that is trained on."""
SCHEMA = pa.schema({"tokens": pa.list_(pa.int32()), "mask": pa.list_(pa.bool_()), "margin": pa.float64(),
                    "images": pa.list_(pa.binary()), "images_before": pa.int8(), "label": pa.bool_()})
"""Of a sequence. `margin`, `label`: of its row, where the row has one (rm.py, kto.py). `images`: its files, if the
sequence before it in its row has others. `images_before`: how many sequences before it those are that hold its files;
null: there are none.
"""


def check_supervised(args: Any) -> None:
    """Refuse flags of a script that does not sample and that cannot work with its model. Scripts that check the command
    line before they import torch call the two parts."""
    rules.check_supervised(args)
    check_length(args)


def check_length(args: Any) -> None:
    """Refuse sequences that are longer than the model's context."""
    longest = context_length(read_config(args.model, args.policy))
    if args.data.max_length > longest:
        raise ValueError(f"--data.max-length {args.data.max_length} exceeds the model's context of {longest} tokens")


class ConversationSet:
    """Rows of `per_row` sequences each. Sequence i of row r has the number r * per_row + i."""

    def __init__(self, table: pa.Table, loaded: Loaded, per_row: int, model: str = ""):
        """`model`: the folder or hub name whose processor reads images."""
        self.loaded = loaded
        self.per_row = per_row
        self.model = model
        # by number
        self.tokens, self.mask, self.margin, self.images, self.images_before, self.labels = table.columns
        self.has_images = self.images.null_count < len(self.images)
        self.first = 0
        """The number of its first sequence among those of all sets of the run."""
        self.sequence_lengths = pc.list_value_length(self.tokens).to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return self.num_sequences // self.per_row

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def label(self) -> Tensor:
        """bool [rows]: whether a row's answer is desired (kto.py)."""
        return torch.from_numpy(self.labels.to_numpy().astype(bool)[:: self.per_row].copy())

    def sequences(self, rows: Sequence[int]) -> np.ndarray:
        """The numbers of the sequences of these rows: [len(rows) * per_row]."""
        first = np.array(rows)[:, None] * self.per_row                                          # [rows, 1]
        return (first + np.arange(self.per_row)).flatten()

    def answer_lengths(self, numbers: Sequence[int]) -> Tensor:
        """Tokens of these sequences that are trained on, float64 [len(numbers)]; with prompts: `sequence_lengths`."""
        return torch.tensor([sum(self.mask[number].as_py()) for number in numbers], dtype=torch.float64)

    @property
    def lengths(self) -> NoReturn:
        raise AttributeError("ConversationSet has no lengths: write answer_lengths(numbers) for the tokens of answers, "
                             "sequence_lengths[numbers] for these and the prompts'")

    def minibatch(self, rows: Sequence[int], hf_config: PretrainedConfig, world: World, max_tokens: int) -> Minibatch:
        """This rank's share of these rows, packed. No data travels between ranks: every rank has the files.
        `Batch.index` is the place in `sequences(rows)`."""
        numbers = self.sequences(rows)
        lengths = self.sequence_lengths[numbers]
        sequences = Sequences(lengths, sequence_cost(lengths, hf_config))
        plan = plan_step(sequences, 1, world.size, max_tokens, seed=0, group_size=world.group_size)
        mine = np.flatnonzero(plan.rank == world.rank).tolist()
        prompts: list[list[int]] = []       # a sequence is a prompt of one token and a response
        responses: list[list[int]] = []
        masks: list[list[bool]] = []
        for i in mine:
            tokens = self.tokens[numbers[i]].as_py()
            mask = self.mask[numbers[i]].as_py()
            prompts.append(tokens[:1])
            responses.append(tokens[1:])
            masks.append(mask[1:])
        batch = Batch.build(prompts, responses, index=mine, masks=masks)
        if self.has_images:
            holders = [self.holder_of_images(number) for number in numbers[mine]]
            batch.image_row = torch.tensor(holders, dtype=torch.int64)
        batch = batch.to(world.device)
        microbatches = []
        for shares in plan.minibatches[0]:
            microbatches.append(batch.microbatch(shares[world.rank]))
        return Minibatch(microbatches, torch.zeros(len(numbers), dtype=torch.float64))

    def images_of_all(self, sets: Sequence[Any]) -> RowImages | None:
        """What holds the images that a run's models see, of these sets; None: they see none."""
        images = RowImages(sets, self.model)
        return images if images.has_images else None

    def holder_of_images(self, number: int) -> int:
        """The number, among all sets of the run, of the sequence that holds the images of this one; -1: it has none."""
        num_before = self.images_before[number].as_py()
        if num_before is None:
            return -1
        return self.first + int(number) - num_before


@dataclass
class RowParser:
    """How a row of the files becomes conversations."""

    columns: dict[str, str]  # to read: our name -> the name in the files
    parse: Callable[[dict[str, Any], Any, dict[str, Any] | None], list[list[Piece]]]
    """A row, the tokenizer and the arguments of the chat template (None: plain) -> the pieces of its conversations."""
    per_row: int = 1  # conversations
    padding: int | None = None
    """A token at which no conversation ends, before the last token of its pieces (rm.py)."""


def load_conversations(files: Sequence[str], tokenizer, stops: list[int], config: ConversationConfig,
                       parser: RowParser) -> ConversationSet:
    """Read and tokenise `files` (parquet or JSON lines; files, folders, globs). `stops`: ids that end an answer. Raises
    ValueError as `load_prompts` does."""
    template = template_arguments(tokenizer, config)
    model = tokenizer.name_or_path
    embedded = embedding_size(model)

    def encode_row(row: dict[str, Any], loaded: Loaded) -> list[dict[str, Any]]:
        parsed = parser.parse(row, tokenizer, template)
        files = [row["images"]]
        if parser.per_row == 2:
            files = images_of_pair(row)
        # in plain texts the end token of an answer is not the row's own
        end = tokenizer.eos_token or ""
        texts = []
        for text, is_answer in chain(*parsed):
            if is_answer:
                text = text.removesuffix(end)
            texts.append(text)
        loaded.note_special("\n".join(texts), tokenizer, is_plain=template is None)
        encoded: list[Encoded] = []
        all_tokens: list[int] = []
        longest = 0
        for pieces, shown in zip(parsed, files, strict=True):
            pieces, shown = marked(pieces, shown, tokenizer, is_plain=template is None)
            # what has a video is not cut
            limit = sys.maxsize if any(map(is_given, shown)) else config.max_length
            one = Encoded(*encode(pieces, tokenizer, template, stops, limit))
            if shown:
                one = with_images(one, shown, model)
            if parser.padding is not None:
                one = without_padding(one, parser.padding)
            encoded.append(one)
            all_tokens += one.tokens
            longest = max(longest, len(one.tokens))
        check_tokens(all_tokens, tokenizer, embedded)
        if longest > config.max_length:
            shortened = truncated(encoded, config.max_length, model)
            if config.on_long_row == "filter" or shortened is None:
                loaded.num_filtered += 1
                return []
            encoded = shortened
            loaded.num_truncated += 1
        rows: list[dict[str, Any]] = []
        for n, (tokens, mask, images) in enumerate(encoded):
            rows.append({"tokens": tokens, "mask": mask, "margin": row.get("margin")})
            if row.get("label") is not None:
                rows[n]["label"] = bool(row["label"])
            if images and n and images == encoded[0].images:
                rows[n]["images_before"] = n
            elif images:
                rows[n] |= {"images": images, "images_before": 0}
        return rows

    form = RowFormat(config, ("--data.max-length", config.max_length), SCHEMA, parser.columns, encode_row)
    return ConversationSet(*load_rows(files, form), parser.per_row, model)


def truncated(encoded: list[Encoded], length: int, model: str) -> list[Encoded] | None:
    """A row's conversations, cut to this length. None: nothing is left of an answer, or of what two differ in, or there
    are videos."""
    found: list[Encoded] = []
    for one in encoded:
        if any(map(is_video, one.images)):
            return None
        found.append(cut(one, length, model))
        if not any(found[-1].mask):
            return None
    are_same = found[1:] == found[:1]
    if are_same:
        return None
    return found


def without_padding(encoded: Encoded, padding: int) -> Encoded:
    """The same without padding before the last token."""
    tokens, mask, images = encoded
    end = end_of(tokens[:-1], padding)
    return Encoded([*tokens[:end], tokens[-1]], [*mask[:end], mask[-1]], images)


def marked(pieces: list[Piece], files: list[Any], tokenizer, is_plain: bool) -> tuple[list[Piece], list[Any]]:
    """The pieces, with the model's own text in place of each `<image>` and `<video>`, and the files in the order of the
    text. Raises ValueError for another number of either."""
    texts, files = with_markers([text for text, _ in pieces], files, tokenizer, is_plain, "conversation")
    return [(text, is_answer) for text, (_, is_answer) in zip(texts, pieces)], files


def beginning(pieces: list[Piece], limit: int, tokenizer, end: int) -> list[Piece]:
    """The pieces, or their beginning with more than `limit` tokens. An answer that is cut has the token `end`, too."""
    lengths = lengths_of(tokenizer)
    kept: list[Piece] = []
    for text, is_answer in pieces:
        first = lengths.part(text, limit)
        if is_answer and first != text:
            first += tokenizer.decode([end])
        kept.append((first, is_answer))
        limit -= lengths.least_tokens(text)
        if limit < 0:
            break
    return kept


def encode(pieces: list[Piece], tokenizer, template: dict[str, Any] | None, stops: list[int],
           limit: int = sys.maxsize) -> tuple[list[int], list[bool]]:
    """Encodes each piece separately, by `encode_after`. The mask includes an answer's end token, not the template's
    text after it. Of more than `limit` tokens, some at the end may be left out."""
    tokens: list[int] = []
    mask: list[bool] = []
    for text, is_answer in beginning(pieces, limit, tokenizer, stops[0]):
        if tokens:
            new = encode_after(tokens, text, tokenizer)
        elif template is None:
            new = encode_plain(text, tokenizer)
        else:
            new = special_tokens(tokenizer).encode(text)
        num_trained = 0
        if is_answer:
            # up to the first end: there the model would stop, and Phi-3's template adds another one after the
            # conversation
            ends = [n for n, token in enumerate(new) if token in stops]
            if not ends:
                raise ValueError(f"the chat template puts no end token ({tokenizer.decode(stops)}) after an answer: "
                                 f"the model would not learn to stop; --data.chat-template-file FILE names another")
            num_trained = ends[0] + 1
        tokens += new
        mask += [True] * num_trained + [False] * (len(new) - num_trained)
    return tokens, mask


def encode_after(tokens: list[int], text: str, tokenizer) -> list[int]:
    """The tokens of a text that follows these tokens. Tokenizers of SentencePiece's kind write a space before a text
    that is encoded alone (Llama 2, Mistral), so the last token's text comes first here, unless it joins with `text`."""
    last = tokenizer.decode(tokens[-1:])
    encode_text = special_tokens(tokenizer).encode
    first = encode_text(last)
    both = encode_text(last + text)
    if both[: len(first)] != first:
        return encode_text(text)
    return both[len(first) :]


def pieces_of(messages: list[dict[str, str]], num_given: int, tokenizer,
              template: dict[str, Any] | None) -> list[Piece]:
    """The text of a conversation in pieces: what comes before an answer (False), the answer (True), and so on. The
    first `num_given` messages are not trained on. Only what is new is rendered and encoded, as in an episode: what
    stands before an answer must be the beginning of what stands after it. So the tokens are as a model samples them."""
    answers = []
    for i, message in enumerate(messages):
        if i >= num_given and message["role"] == "assistant":
            answers.append(i)
    if not answers or answers[0] == 0:
        raise ValueError("there must be an answer (a message of the role assistant), and a message before it")
    if template is None:
        if answers != [len(messages) - 1]:
            raise ValueError("--data.template plain knows no turns: the last message, and no other, must be an answer")
        prompt = render(messages[:-1], tokenizer, None)
        answer = messages[-1]["content"] + tokenizer.eos_token
        return [(prompt, False), (answer, True)]
    pieces: list[Piece] = []
    done = ""
    for i in answers:
        before = render(messages[:i], tokenizer, template)
        after = render(messages[: i + 1], tokenizer, template, is_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise ValueError(f"the chat template renders what comes before message {i} (from 0) otherwise after it, as "
                             f"those do that drop the thinking of earlier turns: give each answer a row of its own")
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return pieces
