"""What evaluate.py says of responses: results with intervals by data source, and two evaluations compared in pairs.

Intervals are percentiles of a bootstrap over prompts (Efron and Tibshirani 1993, chapter 13): prompts are what a result
is generalised over, and the responses to one prompt are not independent.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from common.checkpoint.files import read_manifest, write_manifest
from common.flags.secrets import differences, flags_of, redacted
from common.prompts import Prompt
from common.rollout import Sample
from common.rollouts.record import SCHEMA
from common.rollouts.validation import Scored, best_at, majority, metrics_of_all, numbers_of, scored
from tools.model_source import fingerprint
from tools.terminal import visible

OWN = {"row": pa.int32(), "greedy": pa.bool_(), "acc": pa.float64(), "counted_reward": pa.float64(),
       "vote": pa.string(), "num_sampled": pa.int32(), "question": pa.string(), "details": pa.string()}
"""Columns that an evaluation has beside those of RUN/rollouts: the row in the data set, whether the response is greedy,
what validation counts (exactly), the tokens that the model sampled, and what identifies the question: its messages and
ground truth, and its details (images and extra_info)."""
OWN_FILES = ("config.json", "evaluation.json", "metrics.jsonl", "skipped_val.jsonl", "begun", "model", "rollouts")
"""What an evaluation writes in its folder."""
PLACES = ("split", "index")
"""Keys of extra_info that say where a row stands. Copies of a data set differ in them."""
RESAMPLES = 10_000
SUBSETS = 2_000
"""Most subsets of a prompt's responses that maj@k is averaged over."""
FLIPS = 100_000
MOST_EXACT = 16
"""Prompts that differ, up to which the paired test goes through all sign flips."""
MOST_SHOWN = 10
MOST_CHARACTERS = 100
"""Of a question, in a line of the comparison."""
NUM_BINS = 5
"""Bins of the calibration of rewards, over probabilities from 0.5 to 1."""
HOW = (f"intervals: 95%, percentiles of {RESAMPLES:,} bootstrap resamples of the prompts. pass@k: unbiased "
       f"(Chen et al. 2021). maj@k: mean over all subsets of k responses, or over {SUBSETS:,} random ones")


# --------------------------------------------------------------------------- the folder

SCORING = "the code that scores (its hash)"
DAY = "the day that chat templates are told"


def scoring_code(args: Any) -> str:
    """A hash of the files of --reward.function, without it of all in rewards/, and of --rollout.episode: what is on
    disk was scored by these. What they import is not in it."""
    named = [*args.reward.function, *([args.rollout.episode] if args.rollout.episode else ())]
    files = [Path(spec.rpartition(":")[0] or spec) for spec in named]
    if not args.reward.function:
        files += sorted((Path(__file__).parent.parent / "rewards").glob("*.py"))
    found = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def begin(args: Any, source: str, num_ranks: int) -> str:
    """Take the folder for this evaluation, or continue the one in it. `source`: the model, from
    `model_source.resolve`. Returns the day that chat templates are told: the one on which this evaluation began, or
    that with which it is compared. Raises ValueError if the folder has another evaluation, or something else."""
    folder = Path(args.run_dir)
    now = {name: value for name, value in flags_of(args).items() if name not in ("--compare", "--run-dir")}
    now |= {"model": source, "weights": fingerprint(source), "ranks": num_ranks, SCORING: scoring_code(args)}
    before = read_manifest(folder / "begun")
    compared = read_manifest(Path(args.compare) / "begun") if args.compare else {}
    now[DAY] = before.get(DAY) or compared.get(DAY) or date.today().isoformat()
    if before:
        before = {SCORING: now[SCORING], DAY: now[DAY]} | before        # an earlier version did not write them down
    if before and before != now:
        raise ValueError(f"--run-dir {folder} has another evaluation, {'; '.join(differences(before, now))}: choose "
                         f"another folder, or give the flags of before")
    found = [name for name in OWN_FILES if os.path.lexists(folder / name)]
    if not before and found:
        raise ValueError(f"--run-dir {folder} is the folder of something else: it has {found[0]}, which an evaluation "
                         f"would write; choose another one")
    if links := [name for name in found if (folder / name).is_symlink()]:
        raise ValueError(f"--run-dir {folder}: {links[0]} is a symbolic link, whose target would be overwritten; no "
                         f"evaluation makes one: choose another folder")
    write_manifest(folder / "begun", now)
    flags = json.dumps(redacted(dataclasses.asdict(args)), indent=2, default=str)
    (folder / "config.json").write_text(flags + "\n")
    return now[DAY]


def missing_chunks(args: Any, num_prompts: int, data_hash: str) -> list[int]:
    """The first prompts of the chunks that are not on disk. Raises ValueError if the data were others before."""
    missing = []
    for first in range(0, num_prompts, args.prompts_per_chunk):
        file = file_of(Path(args.run_dir), first)
        if not file.exists():
            missing.append(first)
        elif read_about(file)["data_hash"] != data_hash:
            raise ValueError(f"--run-dir {args.run_dir} has responses to other prompts than --val-data holds now: "
                             f"choose another folder")
    return missing


def report(folder: Path, other: str, data: Sequence[Prompt]) -> list[str]:
    """Write evaluation.json and metrics.jsonl from the responses on disk. Returns the lines to print. `other`: the
    folder to compare with, or empty. `data`: the prompts of the responses."""
    answers, about = read_answers(folder)
    metrics, results = metrics_from(answers), results_from(answers)
    seconds = sum(part["seconds"] for part in about)
    failed = {name: sum(round(part["metrics"].get(f"reward/{name}_frac", 0) * part["responses"]) for part in about)
              for name in ("error", "timeout")}
    written = {"results": results, "metrics": metrics, "seconds": seconds, "failed": failed, "how": HOW,
               "chunks": about}
    lines = [*table_of(results), f"{len(answers):,} responses in {seconds:.1f} s, {failed['error']:,} rewards failed, "
             f"{failed['timeout']:,} timed out", HOW]
    if other:
        written["compared"] = compare(answers, read_answers(Path(other))[0])
        for change in chain(*(found["changed"] for found in written["compared"])):
            change["asked"] = asked_of(data[change["row"]])
        rows = {source: sorted({x.row for x in answers if x.data_source == source})[:MOST_SHOWN] for source in results}
        others = {source: [asked_of(data[row]) for row in of_source] for source, of_source in rows.items()}
        lines += comparison_lines(written["compared"], other, others)
    (folder / "evaluation.json").write_text(json.dumps(written, indent=2) + "\n")
    row = {"step": 0, **metrics, "timing_s/testing": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return lines


# --------------------------------------------------------------------------- files

class Answer(NamedTuple):
    """What is read of a response."""

    data_source: str
    group: int
    acc: float
    vote: str | None
    greedy: bool
    num_sampled: int
    finish_reason: str
    question: str
    row: int
    prompt: str
    details: str | None = None  # an evaluation of an earlier version has none
    reward: float | None = None  # None: it is the acc
    numbers: dict[str, float] | None = None

    @property
    def counted(self) -> Scored:
        reward = self.acc if self.reward is None else self.reward
        return Scored(self.data_source, self.group, self.acc, self.vote, reward, self.numbers or {})


def question_of(sample: Sample) -> str:
    """What two evaluations of the same question share, whatever the model and its chat template."""
    prompt = sample.prompt
    told = json.dumps([prompt.data_source, prompt.messages, prompt.ground_truth], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def details_of(sample: Sample) -> str:
    """What two evaluations of the same question share besides: its images and extra_info, without the row's place."""
    prompt = sample.prompt
    images = [hashlib.sha256(file).hexdigest() for file in (prompt.images.files if prompt.images else ())]
    extra = {name: value for name, value in prompt.extra_info.items() if name not in PLACES and value is not None}
    told = json.dumps([images, extra], default=str, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def own_columns(sample: Sample, greedy: bool) -> dict[str, Any]:
    counted = scored(sample)
    num_sampled = sum(part.num_sampled for _, part in sample.sequences)
    return {"row": sample.row, "greedy": greedy, "acc": counted.acc, "counted_reward": counted.reward,
            "vote": counted.vote, "num_sampled": num_sampled, "question": question_of(sample),
            "details": details_of(sample)}


def schema_with(about: dict[str, Any]) -> pa.Schema:
    """The columns of a file of an evaluation; `about`: what is true of the file as a whole."""
    fields = [*SCHEMA, *(pa.field(name, kind) for name, kind in OWN.items())]
    return pa.schema(fields, {"evaluation": json.dumps(about)})


def file_of(folder: Path, first: int) -> Path:
    """The responses to the prompts from number `first` on."""
    return folder / f"rollouts/val_000000_{first:06d}.parquet"


def read_about(file: Path) -> dict[str, Any]:
    """What `schema_with` was given. Raises ValueError for a file that no evaluation wrote."""
    try:
        return json.loads(pq.read_schema(file).metadata[b"evaluation"])
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"{file} is no file of an evaluation, or is damaged ({error}): delete it, and the same "
                         f"command makes it again") from None


def read_answers(folder: Path) -> tuple[list[Answer], list[dict[str, Any]]]:
    """The responses of an evaluation in the order of prompts, and what is true of each of its files. Raises ValueError
    if there are none."""
    files = sorted((folder / "rollouts").glob("val_000000_*.parquet"))
    if not files:
        raise ValueError(f"{folder} holds no rollouts/val_000000_*.parquet: it must be the --run-dir of evaluate.py")
    about = [read_about(file) for file in files]
    found: list[Answer] = []
    for file in files:
        wanted = {*Answer._fields, "score", "counted_reward", "reward_parts"} - {"reward"}
        names = [name for name in pq.read_schema(file).names if name in wanted]
        found += [answer_of(row) for row in pq.read_table(file, columns=names).to_pylist()]
    return found, about


def answer_of(row: dict[str, Any]) -> Answer:
    """An evaluation of an earlier version has no counted_reward, only the score as float32, which the acc may be."""
    score, parts = row.pop("score"), row.pop("reward_parts")
    rounded = float(np.nan_to_num(score))
    reward = row.pop("counted_reward", row["acc"] if rounded == np.float32(row["acc"]) else rounded)
    return Answer(**row, reward=reward, numbers=numbers_of(json.loads(parts)))


# --------------------------------------------------------------------------- statistics

def bootstrap_interval(values: np.ndarray, seed: int = 0) -> np.ndarray | None:
    """95% interval of the means of `values` [P, M] over prompts -> [2, M]. None for less than 2 prompts."""
    num_prompts = len(values)
    if num_prompts < 2:
        return None
    rng, means, block = np.random.default_rng(seed), [], max(1, 1_000_000 // num_prompts)
    for start in range(0, RESAMPLES, block):
        size = (min(block, RESAMPLES - start), num_prompts)
        means.append(values[rng.integers(num_prompts, size=size)].mean(1))
    return np.percentile(np.concatenate(means), [2.5, 97.5], axis=0)


def majority_at(group: Sequence[tuple[float, str | None]], k: int) -> float:
    """Expected `majority` of k of a prompt's (acc, vote): the mean over all subsets, or over SUBSETS random ones."""
    if math.comb(len(group), k) <= SUBSETS:
        chosen: Iterable[Any] = combinations(range(len(group)), k)
    else:
        rng = np.random.default_rng(0)
        chosen = (rng.choice(len(group), k, replace=False) for _ in range(SUBSETS))
    return float(np.mean([majority([group[i] for i in subset]) for subset in chosen]))


def paired_test(differences: np.ndarray) -> tuple[float, str]:
    """Two-sided p-value of the mean of paired differences [P], and the name of the test. Under the null hypothesis each
    difference could as well have the other sign (Fisher 1935, section 21)."""
    moved = differences[differences != 0]
    observed = abs(moved.sum()) - 1e-9 * abs(moved).sum()  # sums in another order differ in the last digits
    if len(moved) <= MOST_EXACT:
        signs = np.array([*product((-1, 1), repeat=len(moved))]).reshape(2 ** len(moved), len(moved))
        return float((abs(signs @ moved) >= observed).mean()), "paired permutation test, all sign flips"
    rng, count = np.random.default_rng(0), 0
    for _ in range(FLIPS // 1000):
        count += int((abs(rng.choice([-1, 1], (1000, len(moved))) @ moved) >= observed).sum())
    return (count + 1) / (FLIPS + 1), f"paired permutation test, {FLIPS:,} random sign flips"


def calibration(rewards: Tensor) -> dict[str, float]:
    """Whether the probability sigmoid(|difference|) of the preferred answer is the share of pairs in which that answer
    is the chosen one: the expected calibration error (Guo et al. 2017, arXiv 1706.04599) and both numbers by bin."""
    difference = rewards[0::2] - rewards[1::2]
    confidence, correct = difference.abs().sigmoid(), torch.sign(difference) / 2 + 0.5          # a tie: half
    number = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    metrics = {"preference/ece": 0.0}
    for i in range(NUM_BINS):
        if (inside := number == i).any():
            told, found, share = (x.double().mean().item() for x in (confidence[inside], correct[inside], inside))
            name = f"calibration/{0.5 + 0.5 * i / NUM_BINS:.1f}"
            metrics["preference/ece"] += share * abs(told - found)
            metrics |= {f"{name}/confidence": told, f"{name}/accuracy": found, f"{name}/frac": share}
    return metrics


# --------------------------------------------------------------------------- results

def by_group(answers: Iterable[Answer]) -> list[list[Answer]]:
    """The responses of each prompt, in the order of prompts."""
    groups = defaultdict(list)
    for answer in answers:
        groups[answer.group].append(answer)
    return [groups[number] for number in sorted(groups)]


def per_prompt(groups: list[list[Answer]], greedy: bool) -> dict[str, np.ndarray]:
    """Result -> its value for each prompt [P], of the greedy responses or of N sampled ones. pass@k is called best@k
    if an acc is neither 0 nor 1."""
    accs = np.array([sorted(answer.acc for answer in group) for group in groups])               # [P, N]
    if greedy:
        return {"greedy": accs[:, 0]}
    N = accs.shape[1]
    best = "pass" if np.isin(accs, (0, 1)).all() else "best"
    sizes = [2**e for e in range(1, (N - 1).bit_length())] + [N] * (N > 1)
    found = {f"mean@{N}": accs.mean(1)} | {f"{best}@{k}": best_at(accs, k) for k in sizes}
    if any(answer.vote is not None for group in groups for answer in group):
        votes = [[(answer.acc, answer.vote) for answer in group] for group in groups]
        found |= {f"maj@{k}": np.array([majority_at(group, k) for group in votes]) for k in sizes}
    return found


def metrics_from(answers: list[Answer]) -> dict[str, float]:
    """val-core/ and val-aux/ as a validation in training has them."""
    metrics = {}
    for greedy in (True, False):
        metrics |= metrics_of_all([answer.counted for answer in answers if answer.greedy == greedy], greedy)
    return metrics


def results_from(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """Data source -> prompts, lengths, and of each result {value, low, high}; low and high are None for one prompt."""
    results = {}
    for source in sorted({answer.data_source for answer in answers}):
        of_source = [answer for answer in answers if answer.data_source == source]
        values: dict[str, np.ndarray] = {}
        rewards: dict[str, np.ndarray] = {}
        for greedy in (True, False):
            if groups := by_group(answer for answer in of_source if answer.greedy == greedy):
                values |= per_prompt(groups, greedy)
                name = "reward/greedy" if greedy else f"reward/mean@{len(groups[0])}"
                rewards[name] = np.array([[answer.counted.reward for answer in group] for group in groups]).mean(1)
        if any(answer.counted.reward != answer.acc for answer in of_source):
            values |= rewards
        interval = bootstrap_interval(np.stack([*values.values()], axis=1))
        lows, highs = interval.tolist() if interval is not None else [[None] * len(values)] * 2
        results[source] = {"prompts": len(by_group(of_source)), "results": {
            name: {"value": float(of_each.mean()), "low": low, "high": high}
            for (name, of_each), low, high in zip(values.items(), lows, highs)
        }}
        shown = [answer for answer in of_source if not answer.greedy] or of_source
        results[source]["response_length/mean"] = float(np.mean([answer.num_sampled for answer in shown]))
        results[source]["truncated_frac"] = float(np.mean([answer.finish_reason == "length" for answer in shown]))
    return results


def table_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """The results as lines of text."""
    lines = []
    for source, found in results.items():
        lines.append(f"{visible(source)}: {found['prompts']:,} prompts, {found['response_length/mean']:.1f} tokens a "
                     f"response, {found['truncated_frac']:.1%} truncated")
        width = max(12, *map(len, found["results"]))
        for name, result in found["results"].items():
            interval = "" if result["low"] is None else f"   [{result['low']:.4f}, {result['high']:.4f}]"
            lines.append(f"  {name:{width}} {result['value']:.4f}{interval}")
    return lines


# --------------------------------------------------------------------------- two evaluations

def of_questions(answers: list[Answer], source: str, greedy: bool) -> dict[tuple, tuple[float, Answer]]:
    """Question, its details, and which of its occurrences -> its mean acc, and its first response."""
    found, seen = {}, Counter()
    for group in by_group(x for x in answers if x.data_source == source and x.greedy == greedy):
        question = group[0].question, group[0].details
        found[*question, seen[question]] = float(np.mean([answer.acc for answer in group])), group[0]
        seen[question] += 1
    return found


def without_details(answers: list[Answer]) -> list[Answer]:
    """For a comparison with an evaluation of an earlier version, which has no details. Raises ValueError if questions
    differ in these alone."""
    known = {(answer.question, answer.details) for answer in answers}
    if len({question for question, _ in known}) < len(known):
        raise ValueError("--compare: one of the two evaluations is of an earlier version of evaluate.py, which told no "
                         "questions apart that differ in their images or extra_info alone, as some do here: evaluate "
                         "again in another --run-dir")
    return [answer._replace(details=None) for answer in answers]


def compare(here: list[Answer], there: list[Answer]) -> list[dict[str, Any]]:
    """This evaluation minus another one, prompt by prompt, for each data source and way of sampling that both have.
    Raises ValueError if they share no question, and if they cannot be told apart in one of them."""
    if any(answer.details is None for answer in [*here, *there]):
        here, there = without_details(here), without_details(there)
    compared = []
    for source, greedy in product(sorted({answer.data_source for answer in here}), (True, False)):
        ours, theirs = of_questions(here, source, greedy), of_questions(there, source, greedy)
        shared = [key for key in ours if key in theirs]
        if not shared:
            continue
        differences = np.array([ours[key][0] - theirs[key][0] for key in shared])
        p_value, test = paired_test(differences)
        interval = bootstrap_interval(differences[:, None])
        low, high = (None, None) if interval is None else interval[:, 0].tolist()
        changed = sorted(((ours[key], theirs[key][0]) for key in shared if ours[key][0] != theirs[key][0]),
                         key=lambda pair: pair[1] - pair[0][0])
        compared.append({
            "data_source": source, "result": "greedy" if greedy else "mean", "prompts": len(shared),
            "not_shared": len(ours) + len(theirs) - 2 * len(shared),
            "here": float(np.mean([ours[key][0] for key in shared])),
            "there": float(np.mean([theirs[key][0] for key in shared])),
            "difference": float(differences.mean()), "low": low, "high": high, "p_value": p_value, "test": test,
            "changed": [{"row": answer.row, "there": before, "here": after, "prompt": answer.prompt}
                        for (after, answer), before in changed],
        })
    if not compared:
        raise ValueError("--compare: the two evaluations share no question; they need the same --val-data, prompts, "
                         "ground truths, images and extra_info included")
    return compared


def asked_of(prompt: Prompt) -> str:
    """The last message of the user; without one, the last message that has a text."""
    said = [message for message in prompt.messages if message["content"].strip()]
    asked = [message for message in said if message["role"] == "user"] or said
    return asked[-1]["content"] if asked else ""


def told_apart(texts: list[str], others: Sequence[str] = ()) -> list[str]:
    """Each text as one short line. Texts that begin alike, and like the `others`, with an instruction or an example,
    are shown from the word on in which they differ, unless all of a text fits."""
    lines = [" ".join(text.split()) for text in texts]
    known = {*lines, *(" ".join(text.split()) for text in others)}
    shown, start = [], 0
    if len(known) > 1:
        first, last = min(known), max(known)            # all have the beginning that these two share
        num_shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
        start = first.rfind(" ", 0, num_shared) + 1
    for line in lines:
        begin = start if len(line) > MOST_CHARACTERS else 0
        part = line[begin : begin + MOST_CHARACTERS]
        shown.append(f"{'...' if begin else ''}{part}{'...' if begin + len(part) < len(line) else ''}")
    return shown


def comparison_lines(compared: list[dict[str, Any]], other: str, others: dict[str, list[str]]) -> list[str]:
    """`others`: of each data source some questions, which tell what all of them begin with."""
    lines = [f"this evaluation minus {visible(other)}"]
    for found in compared:
        interval = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
        better = sum(change["here"] > change["there"] for change in found["changed"])
        lines.append(f"{visible(found['data_source'])} {found['result']}: {found['there']:.4f} -> {found['here']:.4f}, "
                     f"difference {found['difference']:+.4f}{interval}, p = {found['p_value']:.4g} ({found['test']})")
        lines.append(f"  of {found['prompts']:,} prompts in both, {better:,} are better and "
                     f"{len(found['changed']) - better:,} are worse; {found['not_shared']:,} are only in one of them")
        changed = sorted(found["changed"], key=lambda change: -abs(change["here"] - change["there"]))[:MOST_SHOWN]
        texts = told_apart([change["asked"] for change in changed], others.get(found["data_source"], ()))
        for change, text in zip(changed, texts):
            moved = f"{change['there']:.3f} -> {change['here']:.3f}"
            lines.append(f"  row {change['row']:>6}: {moved}   {visible(text)}")
    return lines
