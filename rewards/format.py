"""Rewards for the form of a response, whatever the task; combine them with others by --reward.function and weights."""

import re


def soft_overlong(num_tokens: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong penalty (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, then falling linearly to
    -factor at max_tokens, and -factor beyond. A buffer of 0: no penalty. Lengths are in tokens. Raises ValueError
    unless 0 <= buffer <= max_tokens."""
    if not 0 <= buffer <= max_tokens:
        raise ValueError(f"overlong buffer {buffer} must be from 0 to {max_tokens}, the longest response")
    if buffer == 0:
        return 0.0
    expected = max_tokens - buffer
    return factor * max(-1.0, min(0.0, (expected - num_tokens) / buffer))


def last_between(text: str, opening: str, closing: str) -> str | None:
    """What the last opening ... closing holds, None without one: the last match of opening(.*?)closing. The time
    is linear in the length; that of the pattern is quadratic where openings are never closed."""
    found = None
    start = text.find(opening)
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        found = text[start + len(opening):end]
        start = text.find(opening, end + len(closing))
    return found


def tags(data_source, solution_str, ground_truth, extra_info=None, names=("think", "answer")) -> float:
    """1 if the response is <a>...</a> for each of the names, in order, each once, with nothing but white space between
    and around, and none of them empty; else 0. A template that opens the first tag itself may leave it out."""
    text = solution_str.strip()
    first = f"<{names[0]}>"
    text = text if text.startswith(first) else first + text
    each_once = all(text.count(f"<{name}>") == text.count(f"</{name}>") == 1 for name in names)
    pattern = r"\s*".join(rf"<{re.escape(name)}>\s*\S.*?</{re.escape(name)}>" for name in names)
    return float(each_once and re.fullmatch(pattern, text, flags=re.DOTALL) is not None)


def length(data_source, solution_str, ground_truth, extra_info=None, max_chars=4000, buffer_chars=1000) -> float:
    """The soft overlong penalty in characters: 0 up to max_chars - buffer_chars, falling to -1 at max_chars."""
    return soft_overlong(len(solution_str), max_chars, buffer_chars)
