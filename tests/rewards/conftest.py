"""A fixture for the tests of the sandbox."""

import os
import time

import pytest

from rewards.runtime.cleaner import own_folder
from tests.rewards.jail_tools import jails


@pytest.fixture
def nothing_is_left():
    """After each test: no process of a jail, no open descriptor."""
    own_folder()  # the pipe to this process's cleaner stays open from its first pool on, until this process ends
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 5
    while (left := jails(os.getpid())) or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline, f"jails that outlived their run: {left}, or a descriptor did"
        time.sleep(0.05)
