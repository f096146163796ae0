"""Pictures of coloured shapes, a task for vision-language models: python data/shapes.py --out data/shapes

A picture of random size has one to four circles, squares or triangles of one colour on a grey ground. The question is
their colour or (--question count) their number, and the answer is one word. Writes train.parquet and test.parquet in
verl's columns; no picture is in both. The same seed and Pillow give the same bytes.
"""

import io
import random

from PIL import Image, ImageDraw
from verl_rows import add_sizes, make_row, parser, run, write

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
COUNTS = ["one", "two", "three", "four"]
QUESTIONS = {"colour": "Which colour do the shapes have? Answer with one word.",
             "count": "How many shapes are there? Answer with one word."}
SIDES = range(56, 113, 14)  # pixels


def draw(colour: str, count: int, rng: random.Random) -> bytes:
    """A PNG. Each shape lies in its own quarter of the picture."""
    width, height, grey = rng.choice(SIDES), rng.choice(SIDES), rng.randint(60, 200)
    picture = Image.new("RGB", (width, height), (grey, grey, grey))
    pen = ImageDraw.Draw(picture)
    for quarter in rng.sample(range(4), count):
        side = rng.randint(16, min(width, height) // 2)
        left = quarter % 2 * width // 2 + rng.randint(0, width // 2 - side)
        top = quarter // 2 * height // 2 + rng.randint(0, height // 2 - side)
        box = (left, top, left + side - 1, top + side - 1)
        corners = [(left, box[3]), (box[2], box[3]), (left + side // 2, top)]
        kind = rng.choice(["circle", "square", "triangle"])
        if kind == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif kind == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon(corners, COLOURS[colour])
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


def make_rows(num_train: int, num_test: int, question: str, seed: int) -> dict[str, list[dict]]:
    """Rows of both splits, all pictures different, answers equally frequent."""
    rng, seen = random.Random(seed), set()
    rows: dict[str, list[dict]] = {"test": [], "train": []}
    while len(seen) < num_train + num_test:
        split = "test" if len(seen) < num_test else "train"
        number = len(rows[split])
        colour, count = rng.choice(list(COLOURS)), rng.randint(1, 4)
        if question == "colour":
            colour = list(COLOURS)[number % 4]
        else:
            count = number % 4 + 1
        png = draw(colour, count, rng)
        if png in seen:
            continue
        seen.add(png)
        answer = colour if question == "colour" else COUNTS[count - 1]
        row = make_row("shapes", f"<image>{QUESTIONS[question]}", answer, "vision", split, number)
        rows[split].append(row | {"images": [{"bytes": png, "path": f"{split}_{number}.png"}]})
    return rows


def main() -> None:
    args = parser(__doc__, "shapes")
    add_sizes(args, 2048, 96)
    args.add_argument("--question", choices=list(QUESTIONS), default="colour", help="what is asked (colour)")
    args = args.parse_args()
    if args.num_train < 1 or args.num_test < 1:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1")
    for split, rows in make_rows(args.num_train, args.num_test, args.question, args.seed).items():
        write(rows, args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
