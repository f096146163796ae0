"""A reward that any text gets something of. After HANG_AFTER calls it hangs, so that a test can kill the run there."""

import os
import time
import zlib
from pathlib import Path

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls > int(os.environ.get("HANG_AFTER", "1000000")):
        Path(os.environ["HANG_MARKER"]).touch()
        time.sleep(600)
    return zlib.crc32(solution_str.encode()) % 7 / 6
