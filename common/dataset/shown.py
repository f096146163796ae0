"""The images of conversations that are trained on: where they are in the tokens, which are left after a cut, and the
files of all rows of a run, from which the model makes what it sees."""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from common.dataset.images import (
    count_shown,
    expand_files,
    frame_of,
    inputs_of,
    load_processor,
    places_of,
    tokens_of_pictures,
)
from common.dataset.videos import is_given
from envs.pictures import blank
from envs.runtime.template import special_tokens


class Encoded(NamedTuple):
    """The tokens of a conversation, as the model sees them."""

    tokens: list[int]
    mask: list[bool]  # True on those that are trained on
    images: Sequence[bytes] = ()  # files, in their order


def with_images(encoded: Encoded, files: Sequence[Any], model: str) -> Encoded:
    """A conversation with one placeholder an image, and with the files of its images as a row gives them -> as the
    model sees it. No token of a picture is trained on, in an answer either: a model that samples sees pictures, and
    writes none. A text that was cut has the first of the images. Raises ValueError for what cannot be read."""
    if not any(map(is_given, files)):
        placeholder, *_ = frame_of(model)
        files = files[: encoded.tokens.count(placeholder)]
    if not files:
        return encoded
    tokens, images = expand_files(encoded.tokens, files, model)
    places = places_of(encoded.tokens, images, model)
    of_pictures = tokens_of_pictures(model)
    mask: list[bool] = []
    left = iter(images)
    for place, (token, is_trained) in enumerate(zip(encoded.tokens, encoded.mask)):
        if place in places:
            shown, _ = inputs_of(next(left), model)
            mask += [False] * len(shown)
        else:
            mask.append(is_trained and token not in of_pictures)
    return Encoded(tokens, mask, images)


def cut(encoded: Encoded, length: int, model: str) -> Encoded:
    """The first tokens of a conversation, at most `length`, without a part of a picture at their end."""
    tokens, mask, images = encoded
    if not images or len(tokens) <= length:
        return Encoded(tokens[:length], mask[:length], images)
    of_pictures = tokens_of_pictures(model)
    while length and {*tokens[length - 1 : length + 1]} <= of_pictures:
        length -= 1
    return Encoded(tokens[:length], mask[:length], images[: count_shown(tokens[:length], model)])


class RowImages:
    """The images of a run's conversations: of those to train on and to validate with, numbered in this order."""

    def __init__(self, sets: Sequence[Any], model: str):
        """`sets`: of ConversationSet."""
        self.sets = sets
        self.model = model
        first = 0
        for data in sets:
            data.first = first
            first += data.num_sequences

    @property
    def has_images(self) -> bool:
        return any(data.has_images for data in self.sets)

    def images_of(self, number: int, row: int) -> list[bytes]:
        """The files of a sequence, by what `ConversationSet.minibatch` wrote into `Batch.image_row`. Below 0: none."""
        if row < 0:
            return []
        for data in reversed(self.sets):
            if row >= data.first:
                return data.images[row - data.first].as_py()
        raise IndexError(row)

    def inputs_of(self, file: bytes | None) -> tuple[list[int], dict[str, Tensor]]:
        """As PromptSet's."""
        return inputs_of(file or blank(), self.model)


class JudgedImages:
    """The images of conversations that a reward model reads with its own processor."""

    def __init__(self, files: Sequence[list[bytes]], tokenizer: Any):
        """`files`: of each conversation, in their order. `tokenizer`: the reward model's."""
        self.files = files
        self.tokenizer = tokenizer
        self.place = f"@@{secrets.token_hex(8)}"

    def marked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with `place` where an image is shown. What the policy wrote stays as it is."""
        found = []
        for message in messages:
            if message["role"] != "assistant":
                message = message | {"content": message["content"].replace("<image>", self.place)}
            found.append(message)
        return found

    def encode(self, number: int, text: str) -> list[int]:
        """The tokens of a rendered conversation as the model sees them. Raises ValueError for another number of places
        than images, and for images that cannot be read."""
        _, marker = load_processor(self.tokenizer.name_or_path)
        tokens = special_tokens(self.tokenizer).encode(text.replace(self.place, marker))
        files = [{"bytes": file} for file in self.files[number]]
        expanded, _ = expand_files(tokens, files, self.tokenizer.name_or_path)
        return expanded

    def images_of(self, number: int, row: int) -> list[bytes]:
        """The files of a sequence by `Batch.image_row`: the number of its conversation; below 0: none."""
        return self.files[row] if row >= 0 else []

    def inputs_of(self, file: bytes | None) -> tuple[list[int], dict[str, Tensor]]:
        """As PromptSet's."""
        return inputs_of(file or blank(), self.tokenizer.name_or_path)
