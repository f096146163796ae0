r"""MATH's score: the last \boxed{} against the ground truth, equal as normalised text or by the math-verify library.

For lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500 and numina_*.
"""

import logging
import re

# what changes the look of an answer and not its value; a unit is dropped after a digit only
DROPPED = re.compile(r"(?<=\d)(?:\s|\\[ ,;!])*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\d)?$"
                     r"|\\(?:left|right|displaystyle|degree|[!,;: $%])|[\s$%°]|\^\{?\\circ\}?|(?<=\d),(?=\d{3}(?!\d))")
REPLACED = ((re.compile(r"\\[dt]frac"), r"\\frac"), (re.compile(r"\\frac(\w)(\w)"), r"\\frac{\1}{\2}"),
            (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"), (re.compile(r"(?<!\d)\.(?=\d)"), "0."),
            (re.compile(r"(\.\d*?)0+(?!\d)"), r"\1"), (re.compile(r"\.(?!\d)"), ""),
            (re.compile(r"^[a-zA-Z]=(?=.)"), ""), (re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}"), r"\1"))
# Words that look like units and are none: powers of ten after a number, and halves of the day after a clock's time.
TEXT = r"\\(?:text|textbf|mathrm|mbox)"
POWERS = [(re.compile(rf"(?<=[\d}})])((?:[\s$~]|\\[ ,;:!])*(?:{TEXT}\{{\s*)?){word}s?\b", re.IGNORECASE), power)
          for word, power in (("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))]
DECORATION = re.compile(rf"{TEXT}(?=\{{)|\\[ ,;:!]|[\s{{}}$~]")
CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?([ap])\.?m\.?", re.IGNORECASE)
# Letters and numbers in a type of their own. The library reads none of them behind a number, and drops what follows: it
# took 3+4\mathrm{i} for 7. Upright i and e are no units, other upright letters may be one.
STYLED = re.compile(r"\\(?:mathbf|boldsymbol|bm)\{\s*([a-zA-Z]|\d+)\s*\}|\\(?:mathrm|text|mbox)\{\s*([ei])\s*\}")
MAX_PARSED = 500  # characters given to math-verify: an answer is short, and its parser is not fast


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, its braces balanced; None without one or if it does not close."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for i in range(start + len(r"\boxed"), len(text)) if start >= 0 else ():
        escaped = text[i - 1] == "\\"
        depth += 0 if escaped else (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len(r"\boxed{"):i]
    return None


def normalise(answer: str) -> str:
    answer = DROPPED.sub("", answer.strip())
    for pattern, replacement in REPLACED:
        answer = pattern.sub(replacement, answer)
    return answer


def unstyled(answer: str) -> str:
    r"""3+4\mathrm{i} -> 3+4 i, and LaTeX's other space, 5~\text{cm} -> 5 \text{cm}."""
    return STYLED.sub(lambda found: f" {found[1] or found[2]} ", answer.replace("~", " "))


def in_digits(answer: str) -> str:
    r"""10 million -> 10\cdot10^6, 2 hundred thousand -> 2\cdot10^2\cdot10^3."""
    digits = answer
    for pattern, power in POWERS:
        digits = pattern.sub(rf"\\cdot10^{power}\1", digits)
    if digits == answer:
        return answer
    # the library reads neither commas in a product nor, without its space, the unit after it
    return normalise(re.sub(r"(?<=\d)(?:\s+[a-zA-Z]+)+$", "", digits))


def time_of_day(answer: str) -> tuple[int, int, str] | None:
    """Hours, minutes, and a (a.m.) or p. None if the answer is something else."""
    found = CLOCK.fullmatch(DECORATION.sub("", answer))
    return (int(found[1]), int(found[2] or 0), found[3].lower()) if found else None


def equal(answer: str, truth: str) -> bool:
    if len(answer) > max(MAX_PARSED, 2 * len(truth)):  # the patterns take a time quadratic in the length
        return False
    times = time_of_day(answer), time_of_day(truth)
    if None not in times:
        return times[0] == times[1]
    answer, truth = in_digits(unstyled(answer)), in_digits(unstyled(truth))
    if normalise(answer) == normalise(truth):
        return True
    if len(answer) > MAX_PARSED:
        return False
    from math_verify import parse, verify  # 0.3 s and 60 MB: only where the texts differ

    # without the library's time-outs, which count as "not equal": the pool's deadline holds, and is counted
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of that
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return verify(gold, given, timeout_seconds=None)


def vote_of(answer: str | None) -> str | None:
    """The text that an answer has in maj@N: one for all ways to write it that `normalise` knows."""
    if answer is None or len(answer) > MAX_PARSED:
        return answer
    if time := time_of_day(answer):
        return f"{time[0]}:{time[1]:02}{time[2]}m"
    return normalise(in_digits(unstyled(answer)))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, score=1.0, format_score=0.0) -> dict:
    r"""`score` if the last \boxed{} equals ground_truth (boxed or not), `format_score` if not, 0 without a box.
    A response without a box has no vote in maj@N."""
    answer = last_boxed(solution_str)
    truth = str(ground_truth)
    truth = last_boxed(truth) or truth
    acc = answer is not None and equal(answer, truth)
    return {"score": score if acc else 0.0 if answer is None else format_score, "acc": acc,
            "pred": vote_of(answer)}


def check(**_) -> None:
    """Before training: the library must be there."""
    import math_verify  # noqa: F401
