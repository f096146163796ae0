"""Seeds that depend on names and numbers only."""

import hashlib
import random

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """A 31-bit seed from names and numbers, the same in every process and Python version."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def seed_everything(*parts: int | str) -> None:
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
