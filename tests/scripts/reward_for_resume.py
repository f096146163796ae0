"""A reward that any text gets something of. Every text is appended to REWARD_LOG, if that is set."""

import os
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "REWARD_LOG" in os.environ:
        with open(os.environ["REWARD_LOG"], "a") as file:
            file.write(f"{solution_str!r}\n")
    return zlib.crc32(solution_str.encode()) % 7 / 6
