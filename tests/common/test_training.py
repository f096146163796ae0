"""What surrounds a loop, without a loop."""

from contextlib import contextmanager
from types import SimpleNamespace

from common.tracking.profiling import Timer
from common.training import Training


def test_a_stop_signal_is_looked_for_after_every_microbatch():
    """In each pass over micro-batches, also in those of old and reference log-probs: between two of them, once."""
    events = []

    @contextmanager
    def progress(name, total):
        yield lambda: events.append(f"{name} of {total}")

    training = Training(SimpleNamespace())
    training.timer = Timer(events.append)
    training.tracker = SimpleNamespace(progress=progress)
    training.checkpoints = SimpleNamespace(check=lambda: events.append("look for a signal"))
    with training.phase("ref", [["a", "b"], ["c"]]) as microbatches:
        for microbatch in microbatches:
            events.append(microbatch)
    done = ["ref of 3", "look for a signal"]
    assert events == ["ref", "a", *done, "b", *done, "c", *done, "after ref"]
