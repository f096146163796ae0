"""The images of prompts: verl's `images` column and `<image>` placeholders, or content lists; the model's processor."""

import re
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

from common.dataset.videos import is_given, is_video, pictures_of, video_inputs, video_of
from common.forward.vision import FAMILIES, VIDEO_FAMILIES
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
        """The model's inputs besides tokens, as its `forward` names them."""
        parts: dict[str, list[Tensor]] = {}
        for file in self.files:
            _, inputs = inputs_of(file, self.model)
            for name, values in inputs.items():
                parts.setdefault(name, []).append(values)
        return {name: torch.cat(of_files) for name, of_files in parts.items()}

    def engine_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the model sees them -> with one placeholder an image. Placeholders after the images stay. With
        videos, which vLLM is not given, they are as they are."""
        if any(map(is_video, self.files)):
            return [*tokens]
        placeholder, num_before, num_after = frame_of(self.model)
        found: list[int] = []
        at = 0
        for _ in self.files:
            first = tokens.index(placeholder, at)
            end = next(t for t in range(first, len(tokens)) if tokens[t] != placeholder)
            found += [*tokens[at : first - num_before], placeholder]
            at = end + num_after
        return [*found, *tokens[at:]]


def inputs_of(file: bytes, model: str) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens that the model sees for an image or a video, and its other inputs."""
    if is_video(file):
        return of_video(file, model)
    return of_image(file, model)


@lru_cache(4)  # each as many images as it has frames
def of_video(file: bytes, model: str) -> tuple[list[int], dict[str, Tensor]]:
    processor, _ = load_processor(model)
    return video_inputs(file, family_of(model), model, processor)


@lru_cache(64)  # 5 MB for an image of 1,000 patches
def of_image(file: bytes, model: str) -> tuple[list[int], dict[str, Tensor]]:
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
    places = places_of(tokens, files, model)
    if len(places) != len(files):
        raise ValueError(f"{len(places)} places of images in the text, and {len(files)} images")
    check_size(pictures_of(files))
    left = iter(files)
    expanded: list[int] = []
    for place, token in enumerate(tokens):
        if place in places:
            of_image, _ = inputs_of(next(left), model)
            expanded += of_image
        else:
            expanded.append(token)
    return expanded


def places_of(tokens: Sequence[int], files: Sequence[bytes], model: str) -> list[int]:
    """Where the tokens have a placeholder of an image, or of a video if there are some."""
    processor, _ = load_processor(model)
    shown = {frame_of(model)[0]}
    if any(map(is_video, files)):
        shown.add(processor.tokenizer.convert_tokens_to_ids(processor.video_token))
    return [place for place, token in enumerate(tokens) if token in shown]


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
    """The `model_type` of a folder's or the hub's config; None: a tokenizer that was made by itself has no model."""
    if not model:
        return None
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


def with_markers(texts: Sequence[str], files: Sequence[Any], tokenizer: Any, is_plain: bool,
                 what: str) -> tuple[list[str], list[Any]]:
    """The texts of `what` (a prompt, a conversation), with the model's own text in place of each `<image>` and
    `<video>`, if there are some; and the files in the order of the texts. `texts`: as the chat template rendered them,
    or plain; `files`: images, then videos (`is_given`). Raises ValueError for another number of either, and for the
    model's own token of one in a text."""
    special = special_tokens(tokenizer)
    family = family_of(tokenizer.name_or_path)
    whole = "".join(texts)
    of_kind = {
        "image": [file for file in files if not is_given(file)],
        "video": [file for file in files if is_given(file)],
    }
    kinds = ["image"]
    if family in VIDEO_FAMILIES or of_kind["video"]:
        kinds.append("video")
    places = {}                                                         # some are special tokens of some tokenizers
    for kind in kinds:
        places[kind] = f"<{kind}>" if is_plain else special.guarded(f"<{kind}>")
    asks_for_some = family in FAMILIES and any(place in whole for place in places.values())
    if not files and not asks_for_some:
        return [*texts], []
    if of_kind["video"] and family not in VIDEO_FAMILIES:
        raise ValueError(f"there are videos, and {tokenizer.name_or_path} is a {family} model; "
                         f"{', '.join(VIDEO_FAMILIES)} read videos")
    processor, marker = load_processor(tokenizer.name_or_path)
    own_tokens = {kind: vars(processor)[f"{kind}_token"] for kind in kinds}
    for kind, place in places.items():
        if whole.count(place) != len(of_kind[kind]):
            raise ValueError(f"the {what} has {whole.count(place)} <{kind}> and {kind}s has {len(of_kind[kind])}")
        if own_tokens[kind] in whole.replace(GUARD, ""):
            one = {"image": "an image", "video": "a video"}[kind]
            raise ValueError(f"the {what} has {own_tokens[kind]}, the model's own token of {one}: write <{kind}>")
    kind_at = {place: kind for kind, place in places.items()}
    pattern = re.compile("|".join(map(re.escape, kind_at)))
    left = {kind: iter(of_kind[kind]) for kind in kinds}
    in_order = [next(left[kind_at[place]]) for place in pattern.findall(whole)]
    found = []
    for text in texts:
        for kind, place in places.items():
            text = text.replace(place, marker.replace(processor.image_token, own_tokens[kind]))
        found.append(text)
    return found, in_order


def expand_files(tokens: Sequence[int], files: Sequence[Any], model: str) -> tuple[list[int], list[bytes]]:
    """`expand`, with files as a row gives them: {bytes, path} or paths, or videos; and what is in them. Raises
    ValueError for what cannot be read."""
    try:
        found = [video_of(file) if is_given(file) else read(file) for file in files]
        return expand(tokens, found, model), found
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"images cannot be read ({type(error).__name__}: {error})") from None


def encode_prompt(text: str, files: list[Any], tokenizer: Any, is_plain: bool) -> dict[str, list]:
    """`tokens` of a prompt as the model sees them; with images also `images` as bytes. `text`: as the chat template
    rendered it, or plain; `files`: {bytes, path} or paths, then videos. Raises ValueError for unreadable ones, or if
    the text has another number of `<image>` or `<video>`."""
    (text,), files = with_markers([text], files, tokenizer, is_plain, "prompt")
    tokens = encode_plain(text, tokenizer) if is_plain else special_tokens(tokenizer).encode(text)
    if not files:
        return {"tokens": tokens}
    tokens, images = expand_files(tokens, files, tokenizer.name_or_path)
    return {"tokens": tokens, "images": images}
