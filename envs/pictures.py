"""Pictures: files that are safe to decode, what the model sees of them, and the forms in which data, tools, users and
agents give them. An episode's process, which has no torch, needs all of it but what reads rows of data.

A message's content is a text, or a list of parts: texts and pictures, in the order in which the model sees them. A
picture is a PIL image, the bytes of a file, or a part in OpenAI's, Anthropic's, MCP's or transformers' form.
"""

import base64
import binascii
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM"]
"""Pillow reads others too: EPS, for which it runs Ghostscript, and AVIF, whose library has ended the process here."""
MAX_PIXELS = 2 * Image.MAX_IMAGE_PIXELS  # of all images that the model sees together; Pillow's own limit for one
MAX_BYTES = 2**28  # of an image's file
MAX_TEXT = 2**22  # bytes of the text of a message
PICTURE_KINDS = ("image_url", "input_image", "image")

Content = str | list[str | bytes]
"""Of a message: a text, or texts and the files of pictures."""


def open_file(file: bytes) -> Image.Image:
    """An image whose size is known, and whose pixels are not decoded yet. Raises ValueError for another format."""
    try:
        return Image.open(BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"a file that begins with {file[:8]!r} is none of {', '.join(FORMATS)}") from None


def check_size(files: Sequence[bytes]) -> None:
    """Raises ValueError if the files have too many pixels in all, before any is decoded."""
    num_pixels = sum(image.width * image.height for image in map(open_file, files))
    if num_pixels > MAX_PIXELS:
        raise ValueError(f"{len(files)} images have {num_pixels} pixels in all, must be at most {MAX_PIXELS}")


def decode(files: Sequence[bytes]) -> list[Image.Image]:
    """The pictures in RGB. Of an animation it is the first one. Raises ValueError before it decodes too many pixels."""
    check_size(files)
    return [to_rgb(open_file(file)) for file in files]


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


@cache
def blank() -> bytes:
    """The file of a small black picture."""
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    return file.getvalue()


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


def flatten_contents(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with text as the content of all messages: a list of parts becomes its texts, with `<image>` at each
    image's place and `<video>` at each video's. What is in such lists becomes the row's `images` and `videos`. Raises
    ValueError for other parts."""
    inside = []
    videos = []
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
                    case {"type": "video"}:
                        texts.append("<video>")
                        videos.append({"video": part.get("video"), "fps": part.get("fps")})
                    case _:
                        raise ValueError(f"a message's content has {part!r:.80}; a part must be a text or an image or "
                                         f"a video")
            message["content"] = "".join(texts)
    images = inside if any(inside) else row.get("images") or inside
    if not isinstance(images, list):
        raise ValueError(f"images is {images!r:.80}; must be a list of {{bytes, path}} or of paths")
    if not any(video["video"] for video in videos):
        videos = row.get("videos") or videos
    if not isinstance(videos, list):
        raise ValueError(f"videos is {videos!r:.80}; must be a list")
    return row | {"images": images, "videos": videos}


def content_of(parts: Any) -> Content:
    """A message's content: a text as it is, a single picture, or a list of parts; a list of texts alone is their text.
    Raises ValueError for other parts, and for pictures that cannot be read or are too large."""
    if isinstance(parts, str):
        return parts
    parts = parts if isinstance(parts, list | tuple) else [parts]
    found = [part_of(part) for part in parts]
    return found if any(isinstance(part, bytes) for part in found) else "".join(found)


def result_of(result: Any) -> Content:
    """What a tool has returned, as the content of a message: pictures, alone or in a list with texts, or else JSON."""
    parts = result if isinstance(result, list | tuple) else [result]
    if isinstance(result, str) or any(map(is_picture, parts)):
        return content_of(result)
    return json.dumps(result, ensure_ascii=False)  # the model reads letters, and pays for \u escapes by the token


def is_picture(part: Any) -> bool:
    return isinstance(part, Image.Image | bytes) or (isinstance(part, dict) and part.get("type") in PICTURE_KINDS)


def part_of(part: Any) -> str | bytes:
    """A text, or a picture's file."""
    match part:
        case str(text) | {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case Image.Image():
            return checked(png_of(part))
        case bytes(file):
            return checked(file)
        case {"type": "image_url", "image_url": {"url": str(url)}}:                 # OpenAI's chat completions
            return checked(file_of(url))
        case {"type": "image_url" | "input_image", "image_url": str(url)}:          # and its responses
            return checked(file_of(url))
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:    # Anthropic's
            return checked(file_of(data))
        case {"type": "image", "data": str(data)}:                                  # MCP's
            return checked(file_of(data))
        case {"type": "image", "image": str(url)}:                                  # transformers' and Qwen's
            return checked(file_of(url))
        case {"type": "image", "image": Image.Image() | bytes() as picture}:
            return part_of(picture)
    shown = {key: value if key == "type" else "..." for key, value in part.items()} if isinstance(part, dict) else part
    raise ValueError(f"a part of a message's content is {shown!r:.200}; it must be a text or a picture: a PIL image, a "
                     f"file's bytes, or a part with a data URL or base64")


def png_of(picture: Image.Image) -> bytes:
    """A file of what the model sees of the picture, without loss."""
    file = BytesIO()
    to_rgb(picture).save(file, "PNG", compress_level=1)  # in half of the time, 4% larger than by default
    return file.getvalue()


def file_of(url: str) -> bytes:
    """The bytes of a data URL or of base64. Raises ValueError for other URLs, which are not read."""
    head, comma, data = url.partition(",")
    is_data = not comma or (head.startswith("data:") and head.endswith(";base64"))
    if not is_data or "://" in url[:20]:
        raise ValueError(f"{url[:60]!r} is no picture: it must be a data URL, data:image/png;base64,..., or base64; "
                         f"other URLs and paths are not read")
    try:
        return base64.b64decode(data if comma else url, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{url[:60]!r} is no picture: its base64 cannot be read ({error})") from None


def checked(file: bytes) -> bytes:
    """The file, if it is a picture that can be decoded."""
    try:
        decode([file])
    except Exception as error:  # Pillow raises many kinds for broken files
        raise ValueError(f"a picture cannot be read ({type(error).__name__}: {error})") from None
    return file


def told_of(message: Any) -> dict[str, Any]:
    """A message of `chat.reply` as the trainer is told it, in JSON: a picture is {"image": base64}. Raises TypeError
    for what is no message, ValueError for what is no content."""
    match message:
        case {"role": str(), "content": str() | list()}:
            pass
        case _:
            raise TypeError(f"chat.reply takes messages like {{'role': 'user', 'content': '...'}}, not {message!r:.80}")
    content = content_of(message["content"])
    num_bytes = sum(len(part.encode(errors="replace")) for part in content if isinstance(part, str))
    if num_bytes > MAX_TEXT:
        raise ValueError(f"the episode sends {num_bytes} bytes of text at once, at most {MAX_TEXT}: shorten what tools "
                         f"return")
    if isinstance(content, str):
        return message | {"content": content}
    return message | {"content": [part if isinstance(part, str) else {"image": base64.b64encode(part).decode()}
                                  for part in content]}


def shortened(content: Content, limit: int) -> tuple[Content, int]:
    """The content with at most `limit` characters of text, the first ones, and how many it has then."""
    parts = [content] if isinstance(content, str) else content
    found, left = [], limit
    for part in parts:
        kept = part[:left] if isinstance(part, str) else part
        left -= len(kept) if isinstance(part, str) else 0
        found.append(kept)
    return (found[0] if isinstance(content, str) else found), limit - left


def joined(messages: Sequence[dict[str, Any]], place: str, shorten: Callable[[str], str],
           ) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The trainer's side of `told_of`: the messages with texts as their contents, in which `place` stands for each
    picture, and the files of all pictures. `shorten` is applied to the texts of tools."""
    found, files = [], []
    for message in messages:
        content, is_tool = message["content"], message["role"] == "tool"
        texts = []
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                texts.append(shorten(part) if is_tool else part)
            else:
                texts.append(place)
                files.append(base64.b64decode(part["image"]))
        found.append(message | {"content": "".join(texts)})
    return found, files
