r"""Geometry3K (Lu et al. 2021), geometry problems with pictures: python data/geo3k.py --out data/geo3k

From hiyouga/geometry3k on the Hugging Face hub: 2,101 train and 601 test problems. A problem has `<image>` where its
picture belongs. The reward (rewards/geo3k.py) wants the reasoning in <think> tags and the answer in \boxed{}.
"""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from verl_rows import download, make_row, parser, run, write

INSTRUCTION = r"First think within <think> </think> tags, then put the final answer within \boxed{}."


def stored(image: Any) -> dict[str, Any]:
    """A picture as the file that it was; one that the library has decoded becomes a PNG."""
    if isinstance(image, dict):
        return {"bytes": image["bytes"], "path": image["path"]}
    png = io.BytesIO()
    image.save(png, "PNG")
    return {"bytes": png.getvalue(), "path": None}


def rows(source_rows: Iterable[dict], split: str) -> Iterator[dict]:
    """{problem, answer, images} -> verl's rows."""
    for index, row in enumerate(source_rows):
        if row["problem"].count("<image>") != len(row["images"]):
            raise ValueError(f"{split} row {index}: the problem {row['problem']!r:.80} must have as many <image> as "
                             f"pictures, {len(row['images'])}")
        made = make_row("hiyouga/geometry3k", f"{row['problem']}\n{INSTRUCTION}", row["answer"], "math", split, index,
                        question=row["problem"], answer=row["answer"])
        yield made | {"images": [stored(image) for image in row["images"]]}


def main() -> None:
    args = parser(__doc__, "geo3k", "hiyouga/geometry3k").parse_args()
    for split in ("train", "test"):
        write(rows(download(args.source, split=split), split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
