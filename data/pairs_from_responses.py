"""Preference pairs from scored responses: python data/pairs_from_responses.py --responses runs/evaluate \\
    --data data/gsm8k/train.parquet --out data/pairs

Reads what evaluate.py wrote with --eval-n above 1 (the folder of --responses) and the prompts that it was given
(--data). Writes train.parquet for dpo.py and rm.py: `prompt`, `chosen` and `rejected`, two responses to the same prompt
of which the chosen one has the higher score, at most --max-pairs of a prompt. A response is used again only where a
prompt has too few others. With --num-test, all pairs of that many prompts are in test.parquet instead.
"""

import argparse
import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from verl_rows import run, write

COLUMNS = ["question", "response", "score", "messages"]


def question_of(row: dict) -> str:
    """What evaluate.py (tools/evaluation.py) identifies the prompt of a row in verl's columns by."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    told = json.dumps([row["data_source"], messages, row["reward_model"]["ground_truth"]], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def read_responses(folder: Path) -> Iterator[dict]:
    """The rows of the files that evaluate.py wrote. ValueError if there are none, or if they are episodes."""
    files = sorted(folder.glob("rollouts/val_000000_*.parquet"))
    if not files:
        raise ValueError(f"--responses {folder} holds no rollouts/val_000000_*.parquet; it must be the --run-dir of "
                         f"evaluate.py")
    for file in files:
        try:
            rows = pq.read_table(file, columns=COLUMNS).to_pylist()
        except pa.ArrowException as error:
            raise ValueError(f"{file} is no file of evaluate.py, or is damaged ({error})") from None
        if any(row["messages"] for row in rows):
            raise ValueError(f"{file} has episodes of several turns; a pair needs one response to one prompt")
        yield from rows


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


def make_rows(responses: Iterable[dict], prompts: dict[str, list], max_pairs: int, seed: int) -> Iterator[list[dict]]:
    """The rows of each prompt that has pairs, and prints what gave none. `prompts`: from `question_of` to the messages.
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
            yield [{"prompt": prompts[question], "chosen": a, "rejected": b} for a, b in pairs]
    print(f"data: {counts.pop('responses', 0)} responses to {len(scores)} prompts gave {num_pairs} pairs; {without} "
          f"prompts have no two different responses with different scores")
    for what, count in counts.items():
        if count:
            print(f"data: {count} responses {what}, left out")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--responses", type=Path, required=True, help="--run-dir of evaluate.py")
    args.add_argument("--data", type=Path, nargs="+", required=True, help="the parquet files of its --val-data")
    args.add_argument("--out", type=Path, default=Path("data/pairs"), help="folder for train.parquet and test.parquet")
    args.add_argument("--max-pairs", type=int, default=4, help="most pairs of a prompt")
    args.add_argument("--num-test", type=int, default=0, help="prompts whose pairs are in test.parquet")
    args.add_argument("--seed", type=int, default=0, help="random seed of the choice of pairs")
    args = args.parse_args()
    if args.max_pairs < 1 or args.num_test < 0:
        raise ValueError(f"--max-pairs {args.max_pairs} must be at least 1, --num-test {args.num_test} at least 0")
    prompts = {}
    for file in args.data:
        for row in pq.read_table(file, columns=["data_source", "prompt", "reward_model"]).to_pylist():
            prompts[question_of(row)] = row["prompt"]
    groups = list(make_rows(read_responses(args.responses), prompts, args.max_pairs, args.seed))
    if len(groups) <= args.num_test:
        raise ValueError(f"{len(groups)} prompts have pairs; the rule is more than --num-test {args.num_test}. Sample "
                         f"more prompts, or more responses of each (evaluate.py --eval-n), from a model whose "
                         f"responses have different scores")
    random.Random(args.seed).shuffle(groups)
    for split, part in (("test", groups[: args.num_test]), ("train", groups[args.num_test :])):
        if part:
            write([row for rows in part for row in rows], args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
