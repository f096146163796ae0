"""The images of prompts: verl's `images` column and `<image>` placeholders, or content lists; the model's processor."""

import struct
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from common.model.vision import FAMILIES

if not is_torchvision_available():  # then no processor of videos can be made, which nothing here needs
    MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES.pop("video_processor")


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
    return [Image.open(BytesIO(file)).convert("RGB") for file in files]


@cache
def load_processor(model: str) -> tuple[ProcessorMixin, str]:
    """The processor and the text of an image. Raises ValueError for a model that reads no images."""
    family = PretrainedConfig.get_config_dict(model)[0].get("model_type")
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
    return row | {"images": inside if any(inside) else row.get("images") or inside}


def encode_prompt(text: str, files: list[Any], tokenizer: Any, add_special_tokens: bool) -> dict[str, list]:
    """`tokens` of a prompt as the model sees them; with images also `engine_tokens`, and `images` as bytes. `files`:
    {bytes, path} or paths. Raises ValueError for unreadable images, or if the text has another number of `<image>`."""
    if not files:
        return {"tokens": tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}
    processor, marker = load_processor(tokenizer.name_or_path)
    if text.count("<image>") != len(files):
        raise ValueError(f"the prompt has {text.count('<image>')} <image> and images has {len(files)}")
    text = text.replace("<image>", marker)
    try:
        files = [file if isinstance(file, dict) else {"path": file} for file in files]
        files = [file.get("bytes") or Path(file["path"]).read_bytes() for file in files]
        made = processor(text=[text], images=decode(files), add_special_tokens=add_special_tokens)
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"images cannot be read ({type(error).__name__}: {error})") from None
    engine_tokens = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return {"tokens": made["input_ids"][0], "engine_tokens": engine_tokens, "images": files}
