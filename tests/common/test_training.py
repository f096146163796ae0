"""What surrounds a loop, without a loop."""

import itertools
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from common.batch import Batch
from common.checkpoint.manager import MAX_CHECKS, Checkpoints
from common.metrics import Meter, Timer
from common.optim import OptimConfig
from common.training import Training


class Looks(Checkpoints):
    def __init__(self):
        """Without a run."""

    def check(self):
        self.events.append("look for a signal")


def events_of(minibatches):
    """What a pass over these mini-batches does, in order."""
    events = []

    @contextmanager
    def progress(name, total):
        yield lambda: events.append(f"{name} of {total}")

    training = Training(SimpleNamespace())
    training.timer = Timer(events.append)
    training.tracker = SimpleNamespace(progress=progress)
    training.checkpoints = Looks()
    training.checkpoints.events = events
    with training.phase("ref", minibatches) as microbatches:
        for microbatch in microbatches:
            events.append(microbatch)
    return events


def test_a_stop_signal_is_looked_for_after_every_microbatch():
    """In each pass over micro-batches, also in those of old and reference log-probs: between two of them, once."""
    done = ["ref of 3", "look for a signal"]
    assert events_of([["a", "b"], ["c"]]) == ["ref", "a", *done, "b", *done, "c", *done, "after ref"]


@pytest.mark.parametrize("count", [15, 16, 17, 100, 1000])
def test_the_looks_for_a_signal_are_bounded(count):
    """However many micro-batches there are; and none lies far from the next."""
    events = events_of([["x"] * count])
    looks = [events[:n].count("x") for n, event in enumerate(events) if event == "look for a signal"]
    assert len(looks) <= MAX_CHECKS
    assert max(b - a for a, b in itertools.pairwise([0, *looks, count])) <= -(-count // MAX_CHECKS)


def test_a_broken_gradient_names_the_response_whose_output_is_not_finite(monkeypatch):
    monkeypatch.setattr("common.training.optimizer_step", lambda *_: math.nan)
    training = Training(SimpleNamespace())
    training.meter, training.metrics = Meter(), {}
    training.total_steps, training.world = 1, SimpleNamespace(size=1)
    batch = Batch.build([[1]], [[2, 3]], index=[7])
    training.outputs = [(batch, torch.zeros(3))]
    training.optimizer_step("actor", None, None, OptimConfig(), 0)      # it was the backward pass: counted alone
    assert training.meter.reduce()["actor/skipped_steps"] == 1
    training.outputs.append((batch, torch.tensor([0.0, -1.0, math.nan])))
    with pytest.raises(ValueError, match="the output of the actor is nan for response 7 at its token 2: "):
        training.optimizer_step("actor", None, None, OptimConfig(), 0)


def test_a_microbatch_keeps_what_the_last_pass_said():
    """For the recorded rollouts, without the graph."""
    training = Training(SimpleNamespace())
    training.meter = Meter()
    training.policy = SimpleNamespace(router_changed=None)
    training.advance = training.check = lambda: None
    training.outputs = []
    microbatch = SimpleNamespace(mask=torch.tensor([True, False]))
    for entropy in ([1.0, 2.0], [6.0, 7.0]):
        logp = torch.zeros(2, requires_grad=True) - 1
        training.microbatch_done(microbatch, {"actor/ratio": logp.exp().detach()}, logp, torch.tensor(entropy))
    assert microbatch.last_pass["entropy"].tolist() == [6.0, 7.0] and microbatch.last_pass["logp"].tolist() == [-1, -1]
    assert microbatch.last_pass.keys() == {"actor/ratio", "entropy", "logp"}
    assert not any(values.requires_grad for values in microbatch.last_pass.values())
