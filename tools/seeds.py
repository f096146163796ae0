"""Intervals of means over a few seeds: Student's t (Student 1908), and Welch's for two settings (Welch 1947)."""

import math
from collections.abc import Sequence

import numpy as np

ANGLES = 2001
"""Points of the integral: up to 30 degrees of freedom the quantile is right within 1e-5, up to 10,000 within 1e-3."""


def t_quantile(freedom: float, level: float = 0.95) -> float:
    """The t with P(|T| < t) = `level` for `freedom` degrees of freedom, at least 1; they need not be whole."""
    # with x = sqrt(freedom) tan(angle), the density of T is a power of the cosine
    angles = np.linspace(0, math.pi / 2, ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    parts = (density[1:] + density[:-1]) / 2
    share = np.concatenate([[0.0], np.cumsum(parts)]) / parts.sum()
    return math.sqrt(freedom) * math.tan(float(np.interp(level, share, angles)))


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Of the interval of the mean of at least two independent values."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return t_quantile(len(values) - 1, level) * error if error else 0.0


def difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """mean(b) - mean(a) of two independent samples with variances of their own, each of at least two values, and the
    half width of its interval."""
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    middle = float(np.mean(b)) - float(np.mean(a))
    error = sum(parts)
    if not error:
        return middle, 0.0
    freedom = error**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b)))
    return middle, t_quantile(freedom, level) * math.sqrt(error)
