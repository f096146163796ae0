"""What tools/audit.py found, judged: each check is one line with the value found, the rule and what to do."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from common.rollout import Sample

LARGE = 0.5  # of the distance from the lowest to the highest score: a wrong text that gets more is worth writing
NOISE = 0.1  # of the same distance: the mean difference of two scores of one response
MANY = 0.5  # of the groups, or of the deadline
MANY_TRUNCATED = 0.25
MOST_SHOWN = 60  # characters of a text
LONGEST_TRUTH = 200  # characters of a ground truth that may be an answer, and no list of tests


@dataclass
class Line:
    verdict: Literal["ok", "look", "BAD"]
    check: str
    found: str
    rule: str
    fix: str = ""


@dataclass
class Findings:
    """What was measured. Samples are in the order of their indices; those of a probe have made-up texts."""

    policy: list[Sample]
    max_error_frac: float
    timeout_s: float  # of a reward, or of the code of an episode
    timeout_flag: str = "--reward.timeout-s"
    probes: dict[str, list[Sample]] = field(default_factory=dict)
    derived: dict[str, list[Sample]] = field(default_factory=dict)  # made from the policy's own responses
    again: list[tuple[Sample, Sample]] = field(default_factory=list)
    truth: list[Sample] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_responses: int = 0  # 0: not known
    num_workers: int = 0  # 0: one worker scores many samples at once, or episodes run
    episodes: list[dict[str, Any]] = field(default_factory=list)  # of audited_episode.py
    temporary: list[str] = field(default_factory=list)  # names left in TMPDIR
    working: list[str] = field(default_factory=list)  # names left in the working directory

    def __post_init__(self):
        self.policy_mean = mean_of(self.policy)

    def has_failed(self) -> bool:
        num = num_failed(self.policy)
        return num > self.max_error_frac * len(self.policy) or num == len(self.policy)

    def has_answers(self) -> bool:
        """Whether the ground truths look like answers, and not like tests of code."""
        truths = [str(sample.prompt.ground_truth) for sample in self.truth]
        return bool(truths) and all(len(truth) <= LONGEST_TRUTH and truth[:1] not in "{[" for truth in truths)

    def others(self) -> list[Sample]:
        """All samples that are none of the policy's."""
        return [sample for samples in (*self.probes.values(), *self.derived.values(), self.truth) for sample in samples]

    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest score of all."""
        scores = finite([*self.policy, *self.others()])
        return min(scores, default=math.nan), max(scores, default=math.nan)


def finite(samples: Sequence[Sample]) -> list[float]:
    return [sample.score for sample in samples if math.isfinite(sample.score)]


def mean_of(samples: Sequence[Sample]) -> float:
    scores = finite(samples)
    return statistics.fmean(scores) if scores else math.nan


def num_failed(samples: Sequence[Sample]) -> int:
    return len(samples) - len(finite(samples))


def judge(found: Findings) -> list[Line]:
    """All lines. Where the policy's own responses have no scores, the rest was not tried."""
    lines = [failures(found)]
    if found.has_failed():
        return lines
    lines += [range_of_scores(found), repeats(found)]
    if found.truth:
        lines.append(right_answer(found))
    lines += [exploit(found, name, samples, is_wrong=True) for name, samples in found.probes.items()]
    lines += [exploit(found, name, samples, is_wrong=False) for name, samples in found.derived.items()]
    lines += [constant_groups(found), truncated(found)]
    if found.seconds:
        lines.append(seconds(found))
    lines.append(files(found))
    if found.episodes:
        lines += [processes(found), random_numbers(found)]
    return lines


# --------------------------------------------------------------------------- scores

def failures(found: Findings) -> Line:
    own = num_failed(found.policy)
    made_up = num_failed(found.others())
    verdict: Literal["ok", "look", "BAD"] = "look" if own or made_up else "ok"
    fix = f"standard error shows the first; it raises, hangs (above {found.timeout_flag} {found.timeout_s:g}) or is nan"
    if found.has_failed():
        verdict = "BAD"
        fix += "; the other checks were left out"
    text = f"{own} of {len(found.policy)}, {made_up} of {len(found.others())} made-up texts"
    rule = f"none, and at most --reward.max-error-frac {found.max_error_frac:g}"
    return Line(verdict, "scores that failed", text, rule, fix)


def range_of_scores(found: Findings) -> Line:
    low, high = found.bounds()
    own = finite(found.policy)
    text = f"{min(own):.3g} to {max(own):.3g}, mean {found.policy_mean:.3g}; of all texts {low:.3g} to {high:.3g}"
    if low == high:
        # without an answer among the texts it may be that none of them is right
        is_bad = found.has_answers() or high > 0
        fix = "every text has the same score: nothing can be learned, unless a right response has another one"
        return Line("BAD" if is_bad else "look", "the policy's scores", text, "differ", fix)
    return Line("ok", "the policy's scores", text, "differ")


def repeats(found: Findings) -> Line:
    """Whether the same response, and in an episode the same replies, have the same score again."""
    low, high = found.bounds()
    differences = []
    num_told = 0
    for first, second in found.again:
        difference = abs(first.score - second.score)
        differences.append(math.inf if math.isnan(first.score) != math.isnan(second.score) else difference)
        if first.response.parts[-1].tokens != second.response.parts[-1].tokens:
            num_told += 1
    changed = [difference for difference in differences if difference > 0]
    text = f"{len(changed)} of {len(differences)} scores differ"
    if num_told:
        text += f", {num_told} episodes went another way"
    rule = "the same text has the same score"
    fix = ("is it random, a judge that samples, or does it remember? Give it temperature 0, a seed made from its "
           "input, or no state")
    if not changed:
        return Line("look" if num_told else "ok", "scored twice", text, rule, fix)
    text += f", by {max(changed):.3g} at most"
    is_noise = statistics.fmean(differences) <= NOISE * (high - low)
    return Line("look" if is_noise else "BAD", "scored twice", text, rule, fix)


def right_answer(found: Findings) -> Line:
    """The ground truth, written in several ways: the best score of each row."""
    low, high = found.bounds()
    mean = best_of_rows(found.truth)
    text = f"{mean:.3g}"
    rule = f"above the policy's {found.policy_mean:.3g}"
    if share_of(mean, low, high) >= LARGE and mean >= found.policy_mean:
        return Line("ok", "the ground truth itself", text, rule)
    if found.has_answers() and max(finite(found.policy)) <= low < high:
        fix = "neither the policy nor the ground truth scores: a wrong column, or a form that the reward does not read"
        return Line("BAD", "the ground truth itself", text, rule, fix)
    fix = "if it is no answer (tests of code), score a right response by hand; else the reward does not read its form"
    return Line("look", "the ground truth itself", text, rule, fix)


def best_of_rows(samples: Sequence[Sample]) -> float:
    """The mean over rows of the best score that one of the row's texts has."""
    best: dict[int, float] = {}
    for sample in samples:
        if math.isfinite(sample.score):
            best[sample.row] = max(best.get(sample.row, -math.inf), sample.score)
    return statistics.fmean(best.values()) if best else math.nan


def share_of(score: float, low: float, high: float) -> float:
    """Where a score lies between the lowest and the highest one of all."""
    return (score - low) / (high - low) if high > low else 0.0


def exploit(found: Findings, name: str, samples: list[Sample], is_wrong: bool) -> Line:
    """Wrong texts against the policy's. `is_wrong`: none of them can be right, as a changed response may be."""
    low, high = found.bounds()
    mean = best_of_rows(samples) if is_wrong else mean_of(samples)
    rule = f"below the policy's {found.policy_mean:.3g}"
    if not finite(samples):
        return Line("ok", name, "none has a score" if samples else "not tried: there is none", rule)
    text = f"{mean:.3g}, {len(samples)} texts"
    share = share_of(mean, low, high)
    is_as_good = mean >= found.policy_mean and mean > low
    fix = f"the policy will find this text: it must score less than a right response; {example(samples)}"
    if is_wrong and is_as_good and share >= LARGE:
        return Line("BAD", name, text, rule, fix)
    if is_as_good or (is_wrong and share >= LARGE):
        if not is_wrong:
            fix = f"fine for keywords and for answers that stand first; {example(samples)}"
        return Line("look", name, text, rule, fix)
    if found.policy_mean <= low:
        text += "; the policy's score no more, so this says little"
    return Line("ok", name, text, rule)


def example(samples: Sequence[Sample]) -> str:
    """The text with the highest score."""
    best = max((sample for sample in samples if math.isfinite(sample.score)), key=lambda sample: sample.score)
    text = best.text if len(best.text) <= MOST_SHOWN else f"{best.text[:MOST_SHOWN]}..."
    return f"row {best.row} gives {best.score:.3g} to {text!r}"


def constant_groups(found: Findings) -> Line:
    groups: dict[int, set[float]] = {}
    for sample in found.policy:
        if math.isfinite(sample.score):
            groups.setdefault(sample.group, set()).add(sample.score)
    num_constant = sum(len(scores) == 1 for scores in groups.values())
    is_many = num_constant > MANY * len(groups)
    return Line("look" if is_many else "ok", "groups without a gradient", f"{num_constant} of {len(groups)} constant",
                f"at most {MANY:.0%}", "easier or harder rows, more samples a prompt, or a warm start")


def truncated(found: Findings) -> Line:
    num = sum("length" in (s.response.finish_reason, s.response.end_reason) for s in found.policy)
    is_many = num > MANY_TRUNCATED * len(found.policy)
    return Line("look" if is_many else "ok", "truncated responses", f"{num} of {len(found.policy)}",
                f"at most {MANY_TRUNCATED:.0%}", "raise --rollout.max-response-length, or ask for less in the prompt")


# --------------------------------------------------------------------------- time, and what is left behind

def seconds(found: Findings) -> Line:
    slowest = max(found.seconds)
    text = f"median {in_words(statistics.median(found.seconds))}, slowest {in_words(slowest)}"
    if found.step_responses and found.num_workers:
        of_step = statistics.fmean(found.seconds) * found.step_responses / found.num_workers
        text += f"; of a step {in_words(of_step)}"
    verdict: Literal["ok", "look", "BAD"] = "look" if slowest > MANY * found.timeout_s else "ok"
    if slowest >= found.timeout_s:
        verdict = "BAD"
    name = "seconds of an episode's code" if found.episodes else "seconds of a reward"
    return Line(verdict, name, text, f"slowest below {MANY:.0%} of {found.timeout_flag} {found.timeout_s:g}",
                f"a busy machine takes longer: raise {found.timeout_flag}, or make it faster")


def in_words(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s >= 1 else f"{1000 * time_s:.1f} ms"


def files(found: Findings) -> Line:
    """Names that were not there before. One file in TMPDIR may be a library's cache."""
    text = f"{len(found.temporary)} in TMPDIR, {len(found.working)} in the working directory"
    names = [*found.working, *found.temporary]
    if names:
        text += f" ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
    verdict: Literal["ok", "look", "BAD"] = "ok"
    if names:
        verdict = "BAD" if found.working or len(names) >= MANY * len(found.policy) else "look"
    fix = "remove them in `finally`: the next sample finds them, and a run of days fills the disk"
    return Line(verdict, "files left behind", text, "none", fix)


def processes(found: Findings) -> Line:
    stays: dict[str, str] = {}  # number of a process -> its command; two episodes may see the same one
    killed: dict[str, str] = {}
    for episode in found.episodes:
        stays |= episode["stays"]
        killed |= episode["killed"]
    ports = sorted({port for episode in found.episodes for port in episode["ports"]})
    text = f"{len(stays) + len(killed)} processes, {len(ports)} listening ports"
    details = [*stays.values(), *killed.values()][:1] + [f"port {port}" for port in ports[:1]]
    if details:
        text += f" ({', '.join(details)})"
    verdict: Literal["ok", "look", "BAD"] = "ok"
    if killed or ports:
        verdict = "look"
    if stays:
        verdict = "BAD"
    fix = ("end and wait for them in `finally`; what is in the episode's process group is killed with it, without a "
           "clean-up of its own")
    return Line(verdict, "left running", text, "none at an episode's end", fix)


def random_numbers(found: Findings) -> Line:
    """Numbers that the global generators give after an episode. Each episode has a seed of its own."""
    columns = [*zip(*(episode["numbers"] for episode in found.episodes))]
    num_repeated = max(len(column) - len(set(column)) for column in columns)
    text = f"{num_repeated} of {len(found.episodes)} episodes repeat another's"
    fix = ("the code sets a fixed seed, so that all episodes see the same; leave random and numpy.random as they are "
           "seeded")
    return Line("BAD" if num_repeated else "ok", "random numbers", text, "none repeat", fix)


def table(lines: Sequence[Line]) -> list[str]:
    """A row a line; below one that is not ok, what to do."""
    width = max(len(line.check) for line in lines)
    widest = max(len(line.found) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.verdict:4}  {line.check:{width}}  {line.found:{widest}}  rule: {line.rule}")
        if line.verdict != "ok":
            rows.append(f"{'':4}  {'':{width}}  -> {line.fix}")
    return rows
