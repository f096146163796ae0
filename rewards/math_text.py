r"""Answers in LaTeX as texts, for rewards/math.py: one text for ways to write a value that differ in their look alone,
and numbers that the math-verify library does not read, in a form that it reads.
"""

import re
from dataclasses import dataclass

# what changes the look of an answer and not its value; a unit is dropped after a digit only
CONDITION = r"(?![^{}]*\b(?:or|and|if|when|where|for|mod|more|less|not|base|otherwise)\b)"  # 3 \text{ or more}: no unit
DROPPED = re.compile(rf"(?<=\d)(?:\s|\\[ ,;!])*\\(?:text|mathrm|mbox)\{{{CONDITION}[^{{}}]*\}}(?:\^\d)?$"
                     r"|\\(?:left|right|displaystyle|[!,;: $%])|[$%]|(?<=\d),(?=\d{3}(?!\d))|(?:\\\\)+\s*$")
# 1 000 is one number, 1 2 is none
SPACE = re.compile(r"(?<!\d)\s+|\s+(?=\d{3}(?!\d)|\D|$)")
DEGREE = re.compile(r"\\degree|°|\^\{?\\circ\}?")
REPLACED = ((re.compile(r"\\[dt]frac"), r"\\frac"), (re.compile(r"\\frac(\w)(\w)"), r"\\frac{\1}{\2}"),
            (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
            (re.compile(r"([_^]|mod)\{(\w)\}"), r"\1\2"), (re.compile(r"\\[lc]dots|\.\.\.|\u2026"), r"\\dots"),
            (re.compile(r"(?<!\d)\.(?=\d)"), "0."),
            (re.compile(r"(\.\d*?)0+(?!\d)"), r"\1"), (re.compile(r"\.(?!\d)"), ""),
            (re.compile(r"^[a-zA-Z]=(?=.)"), ""), (re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}"), r"\1"))
# Words that look like units and are none: powers of ten after a number, and halves of the day after a clock's time.
TEXT = r"\\(?:text|textbf|mathrm|mbox)"
POWERS = [(re.compile(rf"(?<=[\d}})])((?:[\s$~]|\\[ ,;:!])*(?:{TEXT}\{{\s*)?){word}s?\b", re.IGNORECASE), power)
          for word, power in (("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))]
DECORATION = re.compile(rf"{TEXT}(?=\{{)|\\[ ,;:!]|[\s{{}}$~]")
CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?([ap])\.?m\.?", re.IGNORECASE)
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
UNICODE = str.maketrans({"\u2212": "-", "\u00d7": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ",
                         "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "∅": r"\emptyset ", "²": "^2",
                         "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u222a": r"\cup ",
                         "∩": r"\cap ", "∈": r"\in "})
EMPTY = ("nosolution", "nosolutions", r"\varnothing", r"\{\}", r"\emptyset")
SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:(?:overline|bar)\{(\d+)\}|dot\{?(\d)\}?)")
# 1\frac{1}{2}, and 1 1/2 where it is the whole answer or has a unit behind it
MIXED = re.compile(r"(?<![\w.^_}])(\d+)\s*\\[dtc]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d))(?!\d)"
                   r"|(?<![^-+])(\d+)\s+(\d+)\s*/\s*(\d+)(?=\s|\\|$)")
NAME = re.compile(r"\s*([a-zA-Z])\s*=(?=.)")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
# Letters and numbers in a type of their own. The library reads none of them behind a number, and drops what follows: it
# took 3+4\mathrm{i} for 7. Upright i and e are no units, other upright letters may be one.
STYLED = re.compile(r"\\(?:mathbf|boldsymbol|bm)\{\s*([a-zA-Z]|\d+)\s*\}|\\(?:mathrm|text|mbox)\{\s*([ei])\s*\}")


@dataclass
class Verdict:
    same: bool
    vote: str | None         # one text for all ways to write an answer, in maj@N
    too_costly: bool = False  # the answer has numbers too large to be computed, or takes too long: it is not equal


def normalise(answer: str) -> str:
    answer = DROPPED.sub("", answer.strip())
    if not TRIGONOMETRIC.search(answer):  # sin 30 is of radians
        answer = DEGREE.sub("", answer)
    answer = SPACE.sub("", answer)
    for pattern, replacement in REPLACED:
        answer = pattern.sub(replacement, answer)
    return EMPTY[-1] if answer.lower() in EMPTY else answer


def written_out(answer: str) -> str:
    r"""What the library does not read, as it does: 1.5e3, 0.1\overline{6}, 1\frac{1}{2}, 1 1/2, x²."""
    answer = re.sub(r"^\{([^{}\\]*)\}$", r"\1", answer.translate(UNICODE).strip())
    if found := SCIENTIFIC.fullmatch(answer):
        return rf"{found[1]}\cdot10^{{{found[2]}}}"
    return MIXED.sub(mixed_number, REPEATING.sub(repeating_decimal, re.sub(r"(?<!\\)\\[ ,;:]", " ", answer)))


def mixed_number(found: re.Match) -> str:
    whole, numerator, denominator = [group for group in found.groups() if group is not None]
    if int(numerator) >= int(denominator):
        return found[0]
    return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"


def repeating_decimal(found: re.Match) -> str:
    whole, start, period = found[1], found[2], found[3] or found[4]
    nines = (10 ** len(period) - 1) * 10 ** len(start)
    return rf"\frac{{{int(whole + start + period) - int(whole + start or '0')}}}{{{nines}}}"


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


def text_of_time(clock: tuple[int, int, str]) -> str:
    return f"{clock[0]}:{clock[1]:02}{clock[2]}m"


def is_word(answer: str, text: str) -> bool:
    """Whether normalised letters are a word, and no product."""
    return text.isalpha() and (len(text) > 3 or re.search(TEXT, answer) is not None or text.isupper())
