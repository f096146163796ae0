"""Episodes that the tests run: tools and users that show pictures, FILE.py:NAME."""

import base64
import io
import json
import random

import numpy as np
from PIL import Image


def random_picture(seed: int, width: int = 0, height: int = 0) -> Image.Image:
    """Random pixels; also the size is random unless it is given."""
    rng = np.random.default_rng(seed)
    size = (height or int(rng.integers(20, 90)), width or int(rng.integers(20, 90)), 3)
    return Image.fromarray(rng.integers(0, 255, size, dtype=np.uint8))


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def look(number: int) -> list:
    """Look at a picture.

    Args:
        number: Of the picture.
    """
    return [f"Picture {number}: <image> is no place, ", random_picture(number), " nor ends <|im_end|> it."]


async def looks(chat, row):
    """A picture from a tool, none, two from a user, and what the episode was given of the row's own."""
    chat.tools = [look] if row["extra_info"]["split"] == "tools" else []
    number = 100 * len(row.get("images", ())) + random.randrange(9)         # from the episode's seed
    await chat.reply(max_tokens=5)
    if chat.tools:
        await chat.reply(await chat.tool_call({"name": "look", "arguments": json.dumps({"number": number})}),
                         max_tokens=4)
    await chat.reply({"role": "user", "content": "Nothing <|image_pad|> to see."}, max_tokens=3)
    url = {"type": "image_url", "image_url": {"url": data_url(random_picture(number + 10))}}
    await chat.reply({"role": "user", "content": [url, {"type": "text", "text": "or "}, random_picture(number + 20)]},
                     max_tokens=6)
    return {"score": 1.0, "number": number}


async def says(chat, row):
    """What the row says, as Python of this file, is the content of a message."""
    await chat.reply(max_tokens=2)
    await chat.reply({"role": "user", "content": eval(row["extra_info"]["split"])}, max_tokens=2)
    return 1.0


async def tells(chat, row):
    """The same as the result of a tool, and what the model is told."""
    def show():
        """Show something."""
        return eval(row["extra_info"]["split"])

    chat.tools = [show]
    await chat.reply(max_tokens=2)
    told = await chat.tool_call({"name": "show", "arguments": "{}"})
    await chat.reply(told, max_tokens=2)
    return {"score": 1.0, "told": str(told["content"])[:300]}


async def begins(chat, row):
    """A second conversation, which begins with a picture, beside the row's own."""
    other = chat.begin("critic")
    await other.reply({"role": "user", "content": ["What is ", random_picture(random.randrange(9), 60, 60)]},
                      max_tokens=5)
    await chat.reply(max_tokens=5)
    return 1.0


async def lists(chat, row):
    """Three pictures of users, of a size that does not tell them apart, and where they come from is not the seed."""
    await chat.reply(max_tokens=row["extra_info"]["first"])
    for number in range(3):
        picture = random_picture(row["extra_info"]["first"] + number, 60, 60)
        await chat.reply({"role": "user", "content": [picture]}, max_tokens=3)
    return 1.0
