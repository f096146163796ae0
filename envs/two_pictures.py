"""A second picture in the conversation, for vision-language models: rows of data/shapes.py.

    python data/shapes.py --out data/shapes
    --rollout.episode envs/two_pictures.py --train-data data/shapes/train.parquet

The row's picture is in its prompt, and the model says the colour of its shapes. Then the user shows another picture,
which is drawn in the episode, and asks the same. Each answer that begins with the right colour is half of the score.
"""

import random

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
QUESTION = "Which colour do the shapes have? Answer with one word."


def draw(colour: str) -> Image.Image:
    """A circle or a square of this colour on grey, of random size and place."""
    width, height, grey = random.choice(range(56, 113, 14)), random.choice(range(56, 113, 14)), random.randint(60, 200)
    picture = Image.new("RGB", (width, height), (grey, grey, grey))
    side = random.randint(24, min(width, height) - 8)
    left, top = random.randint(0, width - side), random.randint(0, height - side)
    pen = ImageDraw.Draw(picture)
    shape = random.choice([pen.ellipse, pen.rectangle])
    shape((left, top, left + side - 1, top + side - 1), COLOURS[colour])
    return picture


async def episode(chat, row):
    """The score, and beside it one number a turn."""
    colours = [row["reward_model"]["ground_truth"], random.choice(list(COLOURS))]  # seeded, so the episode's own
    said = [await chat.reply(max_tokens=8)]
    said.append(await chat.reply({"role": "user", "content": [draw(colours[1]), QUESTION]}, max_tokens=8))
    scores = [float((text or "").strip().lower().startswith(colour)) for text, colour in zip(said, colours)]
    return {"score": sum(scores) / 2, "acc": scores[0], "acc_second": scores[1], "turn_scores": scores[: chat.turns]}
