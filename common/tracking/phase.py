"""One walk of a model over mini-batches: its metrics, its progress, and the optimizer steps of an update."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from common.batch import Batch
from common.flags.model import OptimConfig
from common.model.policy import PackedModel
from common.optim import learning_rate, optimizer_step
from common.rollout import Minibatch

MAX_CHECKS = 16
"""Most safe points of a phase: a check is a collective, whose time grows with the number of ranks."""
DONE = "phase.done(microbatch, logp, entropy, stats)"


class Phase:
    """One walk of a model over mini-batches, from `with run.phase(...) as phase:` to the end of that block.

    A phase without a gradient iterates over the phase itself, which gives each micro-batch in turn. An update has loops
    of its own over `phase.minibatches`, and calls `done` after each backward pass and `optimizer_step` after each
    mini-batch. Leaving the block raises RuntimeError where one of these calls was forgotten."""

    advance: Callable[[], None]  # shows the progress of a micro-batch

    def __init__(self, run: Any, name: str, minibatches: list[Minibatch]):
        self.run = run
        self.name = name
        self.model = name.removeprefix("update_")  # "actor" or "critic": how this phase's metrics begin
        self.all_minibatches = minibatches
        self.num_microbatches = sum(len(minibatch) for minibatch in minibatches)
        self.check_every = math.ceil(self.num_microbatches / MAX_CHECKS)
        self.terms: Any = None  # common/tracking/gradient_terms.py, of the policy's updates
        if name == "update_actor" and run.policy.gradient_terms is not None:
            self.terms = run.policy.gradient_terms
            self.terms.begin(run.step)
            self._count_left_out()
        self.outputs: list[tuple[Batch, Tensor]] = []  # what the model returned for the micro-batches of this update
        self.num_done = 0
        self.is_update = True
        self.has_stepped = False
        self.num_passes = len(minibatches) // max(len({id(minibatch) for minibatch in minibatches}), 1)
        self.at_start: dict[int, dict[str, tuple[Tensor, int]]] = {}  # id of a micro-batch -> its fields
        if self.num_passes > 1:
            self.at_start = {id(microbatch): versions_of(microbatch) for microbatch in chain(*minibatches)}
        self.counts_choices = name == "update_actor" and self.run.args.policy.router_aux_coef > 0
        if self.counts_choices and len(minibatches) == 1:  # scripts with one need not iterate over `minibatches`
            self.run.policy.count_choices(minibatches[0])

    @property
    def minibatches(self) -> Iterable[Minibatch]:
        """The mini-batches of the phase, one after the other; each is ready for its update when it is reached."""
        if not self.counts_choices or len(self.all_minibatches) == 1:
            return self.all_minibatches
        return map(self._with_choices, self.all_minibatches)

    def _with_choices(self, minibatch: Minibatch) -> Minibatch:
        self.run.policy.count_choices(minibatch)
        return minibatch

    def __iter__(self) -> Iterator[Batch]:
        self.is_update = False  # it may be left early
        for microbatch in chain(*self.all_minibatches):
            yield microbatch
            self._count()

    def _count(self) -> None:
        self.num_done += 1
        self.advance()
        if self.num_done % self.check_every == 0:
            self.run.checkpoints.check()  # a stop signal takes effect here, unless an optimizer step would be lost

    def _count_left_out(self) -> None:
        """Responses that are left out of the mini-batches have no gradient, and count."""
        per = self.run.world.size  # all ranks know all of them
        for minibatch in self.all_minibatches:
            self.run.meter.total("_signal/tokens_all", float(minibatch.left_out_lengths.sum()), per)
            self.run.meter.total("_signal/sequences_all", float(minibatch.num_left_out), per)

    def term(self, name: str, values: Tensor) -> Tensor:
        """A term of the loss, of any shape, as it is added: `loss = loss + update.term("kl", coef * kl)`. Returns
        `values`. With --log.signal the metrics tell its share of the policy's gradient, in the phase update_actor; what
        has no name is "other"."""
        return values if self.terms is None else self.terms.term(name, values)

    def done(self, microbatch: Batch, output: Tensor, entropy: Tensor | None = None,
             stats: dict[str, Tensor] | None = None) -> None:
        """After the backward pass of a micro-batch. `output` [T]: log-probs or values; the error for one that is not
        finite names its response. `entropy` [T] and `stats`, numbers per token [T] by the metric's name, are averaged
        where the mask is True, canaries left out. In the phase update_actor all of them are kept for the recorded
        rollouts. Raises ValueError for a field of the micro-batch that has a gradient, and for one that this update
        has changed, if it has several passes."""
        self._check_fields(microbatch)
        self._check_passes(microbatch, stats or {})
        if self.terms is not None:
            self.terms.after_backward(microbatch, self.run.meter)
        self.outputs.append((microbatch, output.detach()))
        mask = microbatch.measured
        found = {name: values.detach() for name, values in (stats or {}).items()}
        for name, values in found.items():
            self.run.meter.mean(name, values, mask)
        if entropy is not None:
            self.run.meter.mean(f"{self.model}/entropy", entropy, mask)
            found["entropy"] = entropy.detach()
        if self.model == "actor":
            changed = self.run.policy.router_changed  # by --policy.router-replay
            if changed is not None:
                self.run.meter.mean("actor/router_changed", changed, mask)
            reported = self.run.policy.reported
            if self.counts_choices and "router_aux_loss" not in reported:
                raise RuntimeError("--policy.router-aux-coef: the choices of this mini-batch were not counted: iterate "
                                   "over the `minibatches` of the phase")
            for name, values in reported.items():
                self.run.meter.mean(f"actor/{name}", values, mask)
            microbatch.last_pass = found | {"logp": output.detach()}
        self._count()

    def _check_passes(self, microbatch: Batch, stats: dict[str, Tensor]) -> None:
        """Raises ValueError for numbers that are those of the policy before another optimizer step."""
        if "actor/ratio" in stats and microbatch.old_logp is None and (self.has_stepped or microbatch.last_pass):
            raise ValueError(f"the phase {self.name} comes after an optimizer step on these responses, and "
                             f"microbatch.old_logp is None: the current policy would be taken for the one before, and "
                             f"each ratio be 1: make num_updates the number of optimizer steps on a rollout")
        was_scored = microbatch.old_logp is not None or microbatch.value is not None
        if self.num_passes > 1 and microbatch.fresh is None and was_scored:
            raise ValueError(f"the phase {self.name} has {self.num_passes} passes, and the coefficients of all of them "
                             f"were made from log-probs or rewards of before the first: one phase a pass, and score "
                             f"before each")

    def _check_fields(self, microbatch: Batch) -> None:
        for name, (values, _) in microbatch.present().items():
            if values.requires_grad:
                raise ValueError(f"microbatch.{field_of(name)} has a gradient of its own, which would flow into the "
                                 f"pass that made it: use policy.score(microbatch, temperature) for log-probs, else "
                                 f"with torch.no_grad() or .detach()")
        now = versions_of(microbatch)
        for name, (values, version) in self.at_start.get(id(microbatch), {}).items():
            if name not in now or now[name][0] is not values or now[name][1] != version:
                raise ValueError(f"the phase {self.name} changes microbatch.{field_of(name)}, and each of its "
                                 f"{self.num_passes} passes (--epochs-per-step) would change it again: give the new "
                                 f"numbers a variable of their own")

    def optimizer_step(self, model: PackedModel, optimizer: torch.optim.Optimizer, config: OptimConfig, step: int,
                       first_step: int = 0) -> None:
        """One guarded step at the learning rate of `step`, in a schedule that begins at `first_step`. The rate, the
        gradient norm and skipped steps are logged. Raises ValueError, naming the response, for a log-prob, a value, an
        advantage or a return that is not finite, and for a gradient on a canary. Both are checked only here, so that no
        micro-batch forces a GPU-host sync."""
        if not self.outputs:
            raise RuntimeError(f"no micro-batch was reported before this optimizer step: call {DONE} after each "
                               f"backward pass")
        run = self.run
        if optimizer not in run.optimizers.values():
            raise ValueError(f"the phase {self.name}: no checkpoint holds this optimizer, and a resumed run would "
                             f"begin it anew: use that of run.load_policy, or put yours there before the loop, "
                             f"run.optimizers[\"policy\"] = optimizer")
        run.before_update(model)
        if self.terms is not None:
            run.metrics |= self.terms.close()
        lr = learning_rate(config, step - first_step, run.total_steps - first_step)
        run.metrics[f"{self.model}/lr"] = lr
        grad_norm = optimizer_step(model, optimizer, lr, config)
        if not math.isfinite(grad_norm):
            for microbatch, output in self.outputs:
                microbatch.check_finite(f"the output of the {self.model}", output)
                for name in ("advantage", "returns"):
                    values = getattr(microbatch, name)
                    if values is not None:
                        microbatch.check_finite(f"its {name}", values)
        run.meter.mean(f"{self.model}/grad_norm", torch.tensor([grad_norm], dtype=torch.float64))
        run.meter.total(f"{self.model}/skipped_steps", not math.isfinite(grad_norm), per=run.world.size)
        self.outputs = []
        self.has_stepped = True

    def check_complete(self) -> None:
        """At the end of the block. An update may end early, after any of its optimizer steps."""
        if self.outputs:
            raise RuntimeError(f"the gradients of {len(self.outputs)} micro-batches of the phase {self.name} were not "
                               f"used: call phase.optimizer_step(model, optimizer, config, step) after each mini-batch")
        ends = {*accumulate(map(len, self.all_minibatches)), self.num_microbatches}
        if self.name == "update_actor" and self.run.policy.mixture is not None:
            self.run.metrics |= self.run.policy.mixture.load()
        if self.is_update and self.num_done not in ends:
            raise RuntimeError(f"the phase {self.name} has {self.num_microbatches} micro-batches and {self.num_done} "
                               f"were reported: iterate over the phase, or call {DONE} after each")


def versions_of(microbatch: Batch) -> dict[str, tuple[Tensor, int]]:
    """name -> a field's tensor, and how often that was changed in place, which the device is not asked for."""
    return {name: (values, values._version) for name, (values, _) in microbatch.present().items()}


def field_of(name: str) -> str:
    """A name of `Batch.present`, as a script writes it."""
    holder, _, own = name.partition(".")
    return f"{holder}[{own!r}]" if own else name
