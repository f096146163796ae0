"""Rewards for the form of a response, whatever the task."""


def soft_overlong(num_tokens: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, then falling linearly to
    -factor at max_tokens, and -factor beyond. Lengths in tokens; raises ValueError unless 0 < buffer <= max_tokens."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"overlong buffer {buffer} must be above 0 and at most {max_tokens}, the longest response")
    expected = max_tokens - buffer
    return factor * max(-1.0, min(0.0, (expected - num_tokens) / buffer))
