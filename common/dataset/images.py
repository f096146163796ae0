"""The images of prompts: verl's `images` column and `<image>` placeholders, or content lists; the model's processor."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING
from transformers.utils import CONFIG_NAME, cached_file, is_torchvision_available

from common.forward.vision import FAMILIES
from envs.pictures import blank, check_size, decode, read
from envs.runtime.template import GUARD, encode_plain, special_tokens

if not is_torchvision_available():  # then no processor of videos can be made, which nothing here needs
    MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES.pop("video_processor")


@dataclass
class Images:
    """The images of a prompt, or of a whole sequence of an episode, in their order, on the rank that needs them."""

    files: list[bytes]
    model: str  # the folder or hub name that the processor comes from

    def pixels(self) -> dict[str, Tensor]:
        """The model's inputs besides tokens."""
        parts: dict[str, list[Tensor]] = {}
        for file in self.files:
            _, inputs = inputs_of(file, self.model)
            for name, values in inputs.items():
                parts.setdefault(name, []).append(values)
        return {name: torch.cat(of_files) for name, of_files in parts.items()}

    def engine_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the model sees them -> with one placeholder an image. Placeholders after the images stay."""
        placeholder, num_before, num_after = frame_of(self.model)
        found: list[int] = []
        at = 0
        for _ in self.files:
            first = tokens.index(placeholder, at)
            end = next(t for t in range(first, len(tokens)) if tokens[t] != placeholder)
            found += [*tokens[at : first - num_before], placeholder]
            at = end + num_after
        return [*found, *tokens[at:]]


@lru_cache(64)  # 5 MB for an image of 1,000 patches
def inputs_of(file: bytes, model: str) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens that the model sees for an image, and its other inputs."""
    processor, _ = load_processor(model)
    made = processor(text=[processor.image_token], images=decode([file]), add_special_tokens=False,
                     return_tensors="pt")
    others = {name: made[name] for name in processor.image_processor.model_input_names}
    return made["input_ids"][0].tolist(), others


@cache
def frame_of(model: str) -> tuple[int, int, int]:
    """The token of which the model sees several for an image, and how many others stand before and after these."""
    processor, _ = load_processor(model)
    placeholder = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    shown, _ = inputs_of(blank(), model)
    return placeholder, shown.index(placeholder), shown[::-1].index(placeholder)


def expand(tokens: Sequence[int], files: Sequence[bytes], model: str) -> list[int]:
    """Tokens with one placeholder an image -> as the model sees them. Raises ValueError for another number of
    placeholders, and for images that have too many pixels in all, before it decodes one."""
    placeholder, *_ = frame_of(model)
    if tokens.count(placeholder) != len(files):
        raise ValueError(f"{tokens.count(placeholder)} places of images in the text, and {len(files)} images")
    check_size(files)
    left = iter(files)
    expanded: list[int] = []
    for token in tokens:
        if token == placeholder:
            of_image, _ = inputs_of(next(left), model)
            expanded += of_image
        else:
            expanded.append(token)
    return expanded


def show(file: bytes, model: str) -> list[int]:
    """The tokens of an image in a text as the model sees them. Raises ValueError for a model that reads no images."""
    processor, marker = load_processor(model)
    return expand(processor.tokenizer(marker, add_special_tokens=False)["input_ids"], [file], model)


def check_sequence(tokens: Sequence[int], files: Sequence[bytes], model: str) -> None:
    """Raises ValueError if the images of an episode's sequence have too many pixels in all, and if the model itself has
    written the token that stands for a part of an image, which others would then take for one."""
    if not files:
        return
    check_size(files)
    num_shown = count_shown(tokens, model)
    if num_shown != len(files):
        raise ValueError(f"the model wrote its own token of an image ({num_shown} places, {len(files)} images): an "
                         f"episode with images cannot go on after it")


def count_shown(tokens: Sequence[int], model: str) -> int:
    """The number of images in tokens as the model sees them: of placeholders that follow each other."""
    placeholder, *_ = frame_of(model)
    num_runs = 0
    for before, token in pairwise([None, *tokens]):
        if token == placeholder and before != placeholder:
            num_runs += 1
    return num_runs


@cache
def tokens_of_pictures(model: str) -> frozenset[int]:
    """The special tokens of which a picture consists in the model's text: its placeholder, and those around it."""
    processor, _ = load_processor(model)
    return frozenset(show(blank(), model)) & {*special_tokens(processor.tokenizer).tokens.values()}


@cache
def family_of(model: str) -> str | None:
    return PretrainedConfig.get_config_dict(model)[0].get("model_type")


@cache
def embedding_size(model: str) -> int | None:
    """The number of tokens that a model embeds; None: there is no config, or none that transformers reads by itself."""
    if not model or cached_file(model, CONFIG_NAME, _raise_exceptions_for_missing_entries=False) is None:
        return None
    try:
        return AutoConfig.from_pretrained(model).get_text_config().vocab_size
    except ValueError:  # its code comes with it
        return None


@cache
def load_processor(model: str) -> tuple[ProcessorMixin, str]:
    """The processor and the text of an image. Raises ValueError for a model that reads no images."""
    family = family_of(model)
    if family not in FAMILIES:
        raise ValueError(f"there are images, and {model} is a {family} model; {', '.join(FAMILIES)} read images")
    return AutoProcessor.from_pretrained(model), FAMILIES[family]


def with_markers(texts: Sequence[str], num_images: int, tokenizer: Any, is_plain: bool, what: str) -> list[str]:
    """The texts of `what` (a prompt, a conversation), with the model's own text of an image in place of each `<image>`,
    if there are images. `texts`: as the chat template rendered them, or plain. Raises ValueError for another number of
    `<image>`, and for the model's own token of an image in a text."""
    special = special_tokens(tokenizer)
    place = "<image>" if is_plain else special.guarded("<image>")       # which is a special token of some tokenizers
    whole = "".join(texts)
    if not num_images and not (place in whole and family_of(tokenizer.name_or_path) in FAMILIES):
        return [*texts]
    processor, marker = load_processor(tokenizer.name_or_path)
    num_places = whole.count(place)
    if num_places != num_images:
        raise ValueError(f"the {what} has {num_places} <image> and images has {num_images}")
    if processor.image_token in whole.replace(GUARD, ""):
        raise ValueError(f"the {what} has {processor.image_token}, the model's own token of an image: write <image>")
    return [text.replace(place, marker) for text in texts]


def expand_files(tokens: Sequence[int], files: Sequence[Any], model: str) -> tuple[list[int], list[bytes]]:
    """`expand`, with files as a row gives them: {bytes, path} or paths; and what is in them. Raises ValueError for what
    cannot be read."""
    try:
        found = [read(file) for file in files]
        return expand(tokens, found, model), found
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"images cannot be read ({type(error).__name__}: {error})") from None


def encode_prompt(text: str, files: list[Any], tokenizer: Any, is_plain: bool) -> dict[str, list]:
    """`tokens` of a prompt as the model sees them; with images also `images` as bytes. `text`: as the chat template
    rendered it, or plain; `files`: {bytes, path} or paths. Raises ValueError for unreadable images, or if the text has
    another number of `<image>`."""
    (text,) = with_markers([text], len(files), tokenizer, is_plain, "prompt")
    tokens = encode_plain(text, tokenizer) if is_plain else special_tokens(tokenizer).encode(text)
    if not files:
        return {"tokens": tokens}
    tokens, images = expand_files(tokens, files, tokenizer.name_or_path)
    return {"tokens": tokens, "images": images}
