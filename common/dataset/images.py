"""The images of prompts: verl's `images` column and `<image>` placeholders, or content lists; the model's processor."""

import os
import struct
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from common.model.vision import FAMILIES

if not is_torchvision_available():  # then no processor of videos can be made, which nothing here needs
    MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES.pop("video_processor")

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM"]
"""Pillow reads others too: EPS, for which it runs Ghostscript, and AVIF, whose library has ended the process here."""
MAX_BYTES = 2**28  # of an image's file
MAX_PIXELS = 2 * Image.MAX_IMAGE_PIXELS  # of a prompt's images; Pillow's own limit for one


@dataclass
class Images:
    """The images of a prompt, on the rank that needs them."""

    files: list[bytes]
    engine_tokens: list[int]  # of the prompt, with one placeholder an image
    num_tokens: int  # of the prompt as the model sees it
    model: str  # the folder or hub name that the processor comes from

    def pixels(self) -> dict[str, Tensor]:
        """The model's inputs besides tokens."""
        processor, _ = load_processor(self.model)
        text = processor.image_token * len(self.files)
        made = processor(text=[text], images=decode(self.files), return_tensors="pt")
        return {name: made[name] for name in processor.image_processor.model_input_names}


def decode(files: list[bytes]) -> list[Image.Image]:
    """The pictures in RGB. Of an animation it is the first one. Raises ValueError before it decodes too many pixels."""
    opened = [open_file(file) for file in files]
    num_pixels = sum(image.width * image.height for image in opened)
    if num_pixels > MAX_PIXELS:
        raise ValueError(f"{len(files)} images have {num_pixels} pixels in all, must be at most {MAX_PIXELS}")
    return [to_rgb(image) for image in opened]


def open_file(file: bytes) -> Image.Image:
    """An image whose size is known, and whose pixels are not decoded yet."""
    try:
        return Image.open(BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"a file that begins with {file[:8]!r} is none of {', '.join(FORMATS)}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as people see it: turned as its EXIF data says, on white where it is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):       # `convert` would cut at 255, and the picture would be white
        image = image.convert("I").point(lambda grey: grey / 256).convert("L")
        image.info.pop("transparency", None)
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode}, numbers of 32 bits that say no range; must be 8 or 16 bits a channel")
    if image.has_transparency_data:         # what is behind is often black, as the strokes of a drawing are
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read(file: Any) -> bytes:
    """The file of an image, which is {bytes, path} or a path."""
    match file:
        case {"bytes": bytes(content)} if content:
            return content
        case {"path": str(name)} | str(name):
            if not os.path.isfile(name):    # nor a device or a pipe, which may have no end
                raise ValueError(f"{name!r:.200} is no file; a path is absolute, or starts in the working directory; "
                                 f"URLs are not read")
            if os.path.getsize(name) > MAX_BYTES:
                raise ValueError(f"{name!r:.200} has {os.path.getsize(name)} bytes, at most {MAX_BYTES}")
            return Path(name).read_bytes()
    raise ValueError(f"an image is {file!r:.80}; must be {{bytes, path}} or a path")


@cache
def family_of(model: str) -> str | None:
    return PretrainedConfig.get_config_dict(model)[0].get("model_type")


@cache
def load_processor(model: str) -> tuple[ProcessorMixin, str]:
    """The processor and the text of an image. Raises ValueError for a model that reads no images."""
    family = family_of(model)
    if family not in FAMILIES:
        raise ValueError(f"images is not empty, and {model} is a {family} model; {', '.join(FAMILIES)} read images")
    return AutoProcessor.from_pretrained(model), FAMILIES[family]


def flatten_contents(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with text as the content of all messages: a list of parts becomes its texts, with `<image>` at each
    image's place. Images in such lists become the row's `images`. Raises ValueError for other parts."""
    inside = []
    for message in chain(*(value for value in row.values() if isinstance(value, list))):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            texts = []
            for part in message["content"]:
                match part:
                    case {"type": "text", "text": str(text)}:
                        texts.append(text)
                    case {"type": "image"}:
                        texts.append("<image>")
                        inside.append(part.get("image"))
                    case _:
                        raise ValueError(f"a message's content has {part!r:.80}; a part must be a text or an image")
            message["content"] = "".join(texts)
    images = inside if any(inside) else row.get("images") or inside
    if not isinstance(images, list):
        raise ValueError(f"images is {images!r:.80}; must be a list of {{bytes, path}} or of paths")
    return row | {"images": images}


def encode_prompt(text: str, files: list[Any], tokenizer: Any, add_special_tokens: bool) -> dict[str, list]:
    """`tokens` of a prompt as the model sees them; with images also `engine_tokens`, and `images` as bytes. `files`:
    {bytes, path} or paths. Raises ValueError for unreadable images, or if the text has another number of `<image>`."""
    if not files and not ("<image>" in text and family_of(tokenizer.name_or_path) in FAMILIES):
        return {"tokens": tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}
    processor, marker = load_processor(tokenizer.name_or_path)
    if text.count("<image>") != len(files):
        raise ValueError(f"the prompt has {text.count('<image>')} <image> and images has {len(files)}")
    if processor.image_token in text:
        raise ValueError(f"the prompt has {processor.image_token}, the model's own token of an image: write <image>")
    text = text.replace("<image>", marker)
    try:
        files = [read(file) for file in files]
        made = processor(text=[text], images=decode(files), add_special_tokens=add_special_tokens)
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"images cannot be read ({type(error).__name__}: {error})") from None
    engine_tokens = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return {"tokens": made["input_ids"][0], "engine_tokens": engine_tokens, "images": files}
