"""Context managers that undo what vLLM changes in the trainer's process."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore what the construction of `LLM()` changes in the trainer's process.

    It seeds every global generator and edits the environment; on CPUs it replaces torch.set_num_threads and pins the
    process to cores; with --rollout.batch-invariant it replaces torch.bmm by a function without a backward.
    """
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    bmm = torch.bmm
    environment = dict(os.environ)
    cores = os.sched_getaffinity(0)
    with unchanged_generators():
        yield
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, cores)
    torch.bmm = bmm
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the state of all global random generators."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
