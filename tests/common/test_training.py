"""What surrounds a loop, without a loop."""

import itertools
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from common.batch import Batch
from common.checkpoint.manager import Checkpoints
from common.flags.model import ModelConfig
from common.metrics import Meter, Timer
from common.optim import OptimConfig
from common.tracking.phase import MAX_CHECKS, Phase
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
    with training.phase("ref", minibatches) as phase:
        for microbatch in phase:
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


def update_of(minibatches, name="update_actor") -> Phase:
    """A phase of a run of which nothing exists but what a phase asks for."""
    run = SimpleNamespace(
        args=SimpleNamespace(policy=ModelConfig()),
        meter=Meter(), metrics={}, total_steps=1, world=SimpleNamespace(size=1), before_update=lambda model: None,
        optimizers={"policy": None},
        policy=SimpleNamespace(router_changed=None, reported={}, mixture=None, gradient_terms=None),
        checkpoints=Looks())
    run.checkpoints.events = []
    phase = Phase(run, name, minibatches)
    phase.advance = lambda: None
    return phase


def test_a_broken_gradient_names_the_response_whose_output_is_not_finite(monkeypatch):
    monkeypatch.setattr("common.tracking.phase.optimizer_step", lambda *_: math.nan)
    batch = Batch.build([[1]], [[2, 3]], index=[7])
    phase = update_of([[batch], [batch]])
    phase.done(batch, torch.zeros(3))
    phase.optimizer_step(None, None, OptimConfig(), 0)                  # it was the backward pass: counted alone
    assert phase.run.meter.reduce()["actor/skipped_steps"] == 1
    phase.done(batch, torch.tensor([0.0, -1.0, math.nan]))
    with pytest.raises(ValueError, match="the output of the actor is nan for response 7 at its token 2: "):
        phase.optimizer_step(None, None, OptimConfig(), 0)


@pytest.mark.parametrize("name", ["advantage", "returns"])
def test_a_broken_gradient_names_the_response_whose_advantage_or_return_is_not_finite(name, monkeypatch):
    """A factor of a reward that is too large for float32, for example."""
    monkeypatch.setattr("common.tracking.phase.optimizer_step", lambda *_: math.inf)
    batch = Batch.build([[1]], [[2, 3]], index=[7])
    setattr(batch, name, torch.tensor([0.0, -math.inf, 1.0]))
    phase = update_of([[batch]])
    phase.done(batch, torch.zeros(3))
    with pytest.raises(ValueError, match=f"its {name} is -inf for response 7 at its token 1: "):
        phase.optimizer_step(None, None, OptimConfig(), 0)


def test_a_microbatch_keeps_what_the_last_pass_said():
    """For the recorded rollouts, without the graph."""
    microbatch = Batch.build([[1]], [[2]])
    microbatch.old_logp = torch.zeros(2)
    phase = update_of([[microbatch], [microbatch]])
    for entropy in ([1.0, 2.0], [6.0, 7.0]):
        logp = torch.zeros(2, requires_grad=True) - 1
        phase.done(microbatch, logp, torch.tensor(entropy), {"actor/ratio": logp.exp()})
    assert microbatch.last_pass["entropy"].tolist() == [6.0, 7.0] and microbatch.last_pass["logp"].tolist() == [-1, -1]
    assert microbatch.last_pass.keys() == {"actor/ratio", "entropy", "logp"}
    assert not any(values.requires_grad for values in microbatch.last_pass.values())
    assert phase.run.meter.reduce() == pytest.approx({"actor/ratio": math.exp(-1), "actor/entropy": (2 + 7) / 2})
    critic = update_of([[microbatch]], "update_critic")
    critic.done(microbatch, torch.zeros(2))
    assert microbatch.last_pass["logp"].tolist() == [-1, -1]            # the critic's values are not kept


def test_an_update_in_which_a_call_was_forgotten_is_refused(monkeypatch):
    monkeypatch.setattr("common.tracking.phase.optimizer_step", lambda *_: 1.0)
    batch = Batch.build([[1]], [[2]])
    phase = update_of([[batch, batch], [batch]])
    with pytest.raises(RuntimeError, match=r"no micro-batch was reported before this optimizer step: call phase.done"):
        phase.optimizer_step(None, None, OptimConfig(), 0)
    phase.done(batch, torch.zeros(2))
    with pytest.raises(RuntimeError, match="gradients of 1 micro-batches of the phase update_actor were not used"):
        phase.check_complete()
    phase.optimizer_step(None, None, OptimConfig(), 0)
    with pytest.raises(RuntimeError, match="update_actor has 3 micro-batches and 1 were reported"):
        phase.check_complete()
    phase.done(batch, torch.zeros(2))
    phase.optimizer_step(None, None, OptimConfig(), 0)
    phase.check_complete()                                              # ended early, with its first mini-batch
    phase.done(batch, torch.zeros(2))
    phase.optimizer_step(None, None, OptimConfig(), 0)
    phase.check_complete()
    assert phase.run.meter.reduce()["actor/grad_norm"] == 1.0 and phase.run.metrics.keys() == {"actor/lr"}
