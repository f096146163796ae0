"""An episode whose process hangs as it is forked, and a service that the file starts for all episodes."""

import os
import subprocess
import time

SERVICE = subprocess.Popen(["sleep", "300"])
os.register_at_fork(after_in_child=lambda: time.sleep(60))


async def episode(chat, row):
    return 1.0
