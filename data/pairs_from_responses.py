"""Preference pairs from scored responses: python data/pairs_from_responses.py --responses runs/evaluate \\
    --data data/gsm8k/train.parquet --out data/pairs

Reads what evaluate.py wrote with --eval-n above 1 (the folder of --responses) and the prompts that it was given
(--data). Writes train.parquet for dpo.py and rm.py: `prompt`, `chosen` and `rejected`, two responses to the same prompt
of which the chosen one has the higher score, at most --max-pairs of a prompt; and `images`, where prompts have some. A
response is used again only where a prompt has too few others. With --num-test, all pairs of that many prompts are in
test.parquet instead.
"""

import argparse
import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from verl_rows import run, tell_if_left, write

COLUMNS = ["question", "details", "response", "score", "messages"]  # an evaluation of an earlier version has no details
OF_DATA = ["data_source", "prompt", "reward_model", "extra_info", "images"]  # the last two may be absent
PLACES = ("split", "index")


def question_of(row: dict) -> str:
    """What evaluate.py (tools/evaluation.py) identifies the prompt of a row in verl's columns by."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    told = json.dumps([row["data_source"], messages, row["reward_model"]["ground_truth"]], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def details_of(row: dict) -> str:
    """What evaluate.py tells prompts apart by whose `question_of` is the same: their images and extra_info."""
    images = [hashlib.sha256(content_of(file)).hexdigest() for file in row.get("images") or ()]
    extra = row.get("extra_info") or {}
    extra = {name: value for name, value in extra.items() if name not in PLACES and value is not None}
    return hashlib.sha256(json.dumps([images, extra], default=str, sort_keys=True).encode()).hexdigest()[:16]


def content_of(file: dict | str) -> bytes:
    """The content of an image's file, which is {bytes, path} or a path."""
    given = file if isinstance(file, dict) else {"path": file}
    return given.get("bytes") or Path(given["path"]).read_bytes()


def read_prompts(files: Iterable[Path]) -> tuple[dict[str, dict], set[str]]:
    """Each prompt, by question and details, and by the question alone where no two prompts share it; and the questions
    that several share. A prompt is its columns for dpo.py and rm.py. ValueError for what is no parquet file, or has not
    verl's columns."""
    prompts, details = {}, defaultdict(set)
    for file in files:
        try:
            names = [name for name in OF_DATA if name in pq.read_schema(file).names]
            rows = pq.read_table(file, columns=names).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"--data {file} cannot be read as parquet: {error}") from None
        if missing := [name for name in OF_DATA[:3] if name not in names]:
            raise ValueError(f"--data {file} has no column {missing[0]}; it must be a file of evaluate.py's --val-data "
                             f"in verl's columns")
        for row in rows:
            question, of_row = question_of(row), details_of(row)
            columns = ("prompt", "images") if row.get("images") else ("prompt",)
            prompts[question + of_row] = {name: row[name] for name in columns}
            details[question].add(of_row)
    shared = {question for question, found in details.items() if len(found) > 1}
    alone = {question: prompts[question + min(found)] for question, found in details.items() if len(found) == 1}
    return prompts | alone, shared


def read_responses(folder: Path, shared: Collection[str]) -> Iterator[dict]:
    """The rows of the files that evaluate.py wrote, whose `question` identifies the prompt. ValueError if there are
    none, if they are episodes, or if a question that several prompts share (`shared`) has no details."""
    files = sorted(folder.glob("rollouts/val_000000_*.parquet"))
    if not files:
        raise ValueError(f"--responses {folder} holds no rollouts/val_000000_*.parquet; it must be the --run-dir of "
                         f"evaluate.py")
    for file in files:
        try:
            names = [name for name in COLUMNS if name in pq.read_schema(file).names]
            rows = pq.read_table(file, columns=names).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{file} is no file of evaluate.py, or is damaged ({error})") from None
        if missing := {*COLUMNS} - {"details", *names}:
            raise ValueError(f"{file} is no file of evaluate.py: it has no column {min(missing)}")
        if any(row["messages"] for row in rows):
            raise ValueError(f"{file} has episodes of several turns; a pair needs one response to one prompt")
        if "details" not in names and any(row["question"] in shared for row in rows):
            raise ValueError(f"{file} is of an earlier version of evaluate.py, which told no prompts apart that differ "
                             f"in extra_info alone, as some of --data do: evaluate again in another --run-dir")
        for row in rows:
            yield row | {"question": row["question"] + (row.get("details") or "")}


def pairs_of(scores: dict[str, float], max_pairs: int, rng: random.Random) -> list[tuple[str, str]]:
    """(chosen, rejected) from the scores of a prompt's different responses, in each the response first that was used
    least."""
    better = [(a, b) for a, b in product(scores, scores) if scores[a] > scores[b]]
    rng.shuffle(better)
    uses, found = Counter(), []
    while better and len(found) < max_pairs:
        pair = min(better, key=lambda pair: uses[pair[0]] + uses[pair[1]])
        better.remove(pair)
        uses.update(pair)
        found.append(pair)
    return found


def make_rows(responses: Iterable[dict], prompts: dict[str, dict], max_pairs: int, seed: int) -> Iterator[list[dict]]:
    """The rows of each prompt that has pairs, and prints what gave none. `prompts`: see `read_prompts`.
    A text that two responses share counts once; where its scores differ (a judge), their mean counts."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    counts = Counter()
    for row in responses:
        counts["responses"] += 1
        if row["question"] not in prompts:
            counts["of prompts that --data does not hold"] += 1
        elif row["score"] is None or not math.isfinite(row["score"]):
            counts["without a score"] += 1
        elif not row["response"].strip():
            counts["empty"] += 1
        else:
            of_text = scores[row["question"]][row["response"]]
            counts["that repeat another one of the same prompt"] += len(of_text) > 0
            of_text.append(row["score"])
    rng, without, num_pairs = random.Random(seed), 0, 0
    for question, of_text in scores.items():
        means = {text: math.fsum(values) / len(values) for text, values in of_text.items()}
        pairs = pairs_of(means, max_pairs, rng)
        without += not pairs
        num_pairs += len(pairs)
        if pairs:
            yield [{**prompts[question], "chosen": a, "rejected": b} for a, b in pairs]
    print(f"data: {counts.pop('responses', 0)} responses to {len(scores)} prompts gave {num_pairs} pairs; {without} "
          f"prompts have no two different responses with different scores")
    for what, count in counts.items():
        if count:
            print(f"data: {count} responses {what}, left out")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--responses", type=Path, required=True, help="--run-dir of evaluate.py")
    args.add_argument("--data", type=Path, nargs="+", required=True, help="the parquet files of its --val-data")
    args.add_argument("--out", type=Path, default=Path("data/pairs"),
                      help="folder for train.parquet and test.parquet (data/pairs)")
    args.add_argument("--max-pairs", type=int, default=4, help="most pairs of a prompt (4)")
    args.add_argument("--num-test", type=int, default=0, help="prompts whose pairs are in test.parquet (0: no file)")
    args.add_argument("--seed", type=int, default=0, help="random seed of the choice of pairs")
    args = args.parse_args()
    if args.max_pairs < 1 or args.num_test < 0:
        raise ValueError(f"--max-pairs {args.max_pairs} must be at least 1, --num-test {args.num_test} at least 0")
    prompts, shared = read_prompts(args.data)
    groups = list(make_rows(read_responses(args.responses, shared), prompts, args.max_pairs, args.seed))
    if len(groups) <= args.num_test:
        raise ValueError(f"{len(groups)} prompts have pairs; the rule is more than --num-test {args.num_test}. Sample "
                         f"more prompts, or more responses of each (evaluate.py --eval-n), from a model whose "
                         f"responses have different scores")
    random.Random(args.seed).shuffle(groups)
    for split, part in (("test", groups[: args.num_test]), ("train", groups[args.num_test :])):
        rows = [row for rows in part for row in rows]
        schema = None
        if any("images" in row for row in rows):                        # else the first rows would decide the columns
            rows = [row | {"images": row.get("images")} for row in rows]
            schema = pa.Table.from_pylist(rows).schema
        if rows:
            write(rows, args.out / f"{split}.parquet", schema=schema)
        else:
            tell_if_left(args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
