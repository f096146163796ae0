"""What is replaced in the process of a script that is replayed, and what is noted there.

Nothing is sampled, scored or run through a model: log-probs, entropies and scores are those of the recorded batch, and
optimizer steps change nothing. So advantages, loss and denominators are computed by the script's own functions.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common import losses, segments
from common.batch import Batch
from common.engine.base import Engine
from common.model.policy import Critic, PackedModel, Policy
from common.prompts import Prompt
from common.rollout import Rollout, Sample
from common.run import Run
from common.tracking.phase import Phase
from envs.runtime.response import Response
from tools.peers.numbers import Numbers, Refused, Update
from tools.peers.recorded import Recorded
from tools.peers.watch import Watch

FIRST = 3  # the only prompt token of response 0: so responses are known wherever a script sends them
BATCHES = 4  # longest responses in a micro-batch: so a mini-batch has several, and a mean over one of them shows


class Stage:
    """What is replaced in the process of the script, and what is noted there."""

    def __init__(self, recorded: Recorded, out: Path):
        self.recorded = recorded
        self.out = out
        self.watch = Watch()
        self.updates: list[Update] = []
        self.noted: list[dict[str, Any]] = []  # of each micro-batch of this mini-batch
        self.means: dict[str, list[Tensor]] = {"group_mean": [], "group_std": []}
        self.passes = [0] * len(recorded)
        self.depth = 0
        self.has_begun = False  # the script has sampled
        self.is_update = False  # the phase that began last

    def install(self) -> None:
        """Before the script is imported: names that it imports are then these."""
        stage = self
        estimate, load_frozen = losses.kl_estimate, Run.load_frozen
        to_minibatches, begin = Run.to_minibatches, Phase.__init__
        budget = BATCHES * (1 + int(self.recorded.lengths.max()))

        def cut(run: Run, rollout: Rollout, in_loss: Tensor, num_minibatches: int, max_tokens: int, *args: Any,
                **kwargs: Any) -> Any:
            return to_minibatches(run, rollout, in_loss, num_minibatches, min(budget, max_tokens), *args, **kwargs)

        def begin_phase(phase: Phase, run: Run, name: str, *args: Any, **kwargs: Any) -> None:
            stage.is_update = name.startswith("update_")
            begin(phase, run, name, *args, **kwargs)

        def sample(run: Run, rows: Any, num_samples: int, sampling: Any, *seed: Any) -> Any:
            return stage.sample(run, list(rows), num_samples)

        def collect(run: Run, pending: Any, meter: Any = None) -> Rollout:
            return pending.rollout

        def frozen(run: Run, name: str, path: str, *args: Any, **kwargs: Any) -> Any:
            model = load_frozen(run, name, path, *args, **kwargs)
            model.recorded_name = name
            return model

        def wake(engine: Engine, policy: Policy) -> dict[str, float]:
            engine.must_be(False, "awake already: call engine.sleep() first")
            engine.policy, engine.awake = policy, True
            return {}

        def sleep(engine: Engine) -> dict[str, float]:
            engine.must_be(True, "asleep already: call engine.wake(policy) first")
            engine.awake = False
            return {}

        def call(model: PackedModel, batch: Batch, *args: Any, **kwargs: Any) -> Any:
            if not stage.has_begun:                                     # what is checked when a model is loaded
                return torch.nn.Module.__call__(model, batch, *args, **kwargs)
            return stage.forward(model, batch, kwargs)

        def no_states(model: PackedModel, *args: Any, **kwargs: Any) -> Any:
            raise Refused("it reads hidden states of a model, and a recorded batch has log-probs and entropies alone")

        def step(phase: Phase, model: PackedModel, *args: Any, **kwargs: Any) -> None:
            phase.outputs = []
            if isinstance(model, Policy):
                stage.end_minibatch()

        def end(run: Run, step: int, rollout: Rollout, minibatches: Any, rewards: Tensor, *args: Any,
                **kwargs: Any) -> None:
            stage.end(run, rollout, rewards)

        def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
            stage.depth += 1
            kl = estimate(logp, ref_logp, kind)
            stage.depth -= 1
            if not stage.depth and kl.requires_grad and stage.noted:
                stage.noted[-1]["kl"] = kl.detach()
            return kl

        for name in self.means:
            setattr(segments, name, noting(getattr(segments, name), self.means[name]))
        replaced: dict[Any, dict[str, Any]] = {
            losses: {"kl_estimate": kl_estimate},
            Run: {"sample": sample, "collect": collect, "finish": end, "load_frozen": frozen, "to_minibatches": cut},
            Phase: {"__init__": begin_phase, "optimizer_step": step},
            Engine: {"wake": wake, "sleep": sleep},
            Policy: {"__call__": call, "hidden_states": no_states, "count_choices": no_states},
            Critic: {"__call__": call},
        }
        for owner, functions in replaced.items():
            for name, function in functions.items():
                setattr(owner, name, function)

    def sample(self, run: Run, rows: list[int], num_samples: int) -> Any:
        """Stands for the engine: the recorded responses. `num_samples` 1 is the greedy response of --baseline remax."""
        recorded = self.recorded
        if run.world.size > 1:
            raise Refused("it runs on several ranks here: start same_as without torchrun")
        if num_samples not in (1, recorded.samples_per_prompt) or len(rows) != recorded.num_groups:
            raise Refused(f"it samples {num_samples} responses for {len(rows)} prompts, and the batch has "
                          f"{recorded.samples_per_prompt} for {recorded.num_groups}")
        if not self.has_begun:
            self.has_begun = True
            self.watch.__enter__()
            torch.set_default_dtype(torch.float64)
        is_greedy = num_samples == 1 and recorded.samples_per_prompt > 1
        chosen = [*range(len(recorded))]
        if is_greedy:
            chosen = (recorded.group.bincount().cumsum(0) - 1).tolist()
        samples = []
        for index, i in enumerate(chosen):
            count = int(recorded.lengths[i])
            response = Response([FIRST] * count, recorded.rollout_logp[i, :count].tolist(), "stop")
            if recorded.truncated[i]:
                response.finish_reason = "length"
            if not recorded.mask[i, :count].all():
                response.mask = recorded.mask[i, :count].tolist()
            group = int(recorded.group[i])
            score = recorded.greedy[group] if is_greedy else recorded.score[i]
            prompt = Prompt([FIRST + i], "same_as", "", {}, [])
            samples.append(Sample(index, group, rows[group], prompt, response, "", float(score),
                                  recorded.extras[i], run.step))
        own = recorded.mask[chosen].sum(1).double()
        rollout = Rollout(
            samples, torch.tensor([sample.score for sample in samples]), recorded.group[chosen],
            torch.tensor(rows)[recorded.group[chosen]], torch.full((len(chosen),), run.step),
            torch.ones(len(chosen)), own, recorded.lengths[chosen] - own, torch.ones(len(chosen)),
            recorded.truncated[chosen],
        )
        return SimpleNamespace(rollout=rollout, rows=rows, step=run.step)

    def forward(self, model: PackedModel, batch: Batch, others: dict[str, Any]) -> Any:
        """Stands for a pass of a model: log-probs and entropies of the batch."""
        if isinstance(model, Critic):
            raise Refused("it has a critic, and a recorded batch has no values")
        if any(value is not None for value in others.values()):
            raise Refused(f"it asks the policy for {', '.join(others)}, and a recorded batch has log-probs and "
                          f"entropies alone")
        if model.keeps_sum_p2:
            raise Refused("it needs the sum of squared probabilities, and a recorded batch has none")
        recorded = self.recorded
        name = getattr(model, "recorded_name", "policy")
        if name not in ("policy", "reference"):
            raise Refused(f"it has a model {name!r}, and a recorded batch has a policy and a reference")
        numbers = numbers_of(batch)
        now = max((self.passes[i] for i in numbers), default=0)
        current = recorded.logp[min(now, len(recorded.logp) - 1)]
        if name == "reference" or not torch.is_grad_enabled():
            of_policy = current if self.is_update else recorded.old_logp
            source = recorded.ref_logp if name == "reference" else of_policy
            return unpadded(source, batch), unpadded(recorded.entropy, batch)
        for i in numbers:
            self.passes[i] += 1
        logp = unpadded(current, batch).requires_grad_()
        entropy = unpadded(recorded.entropy, batch).requires_grad_()
        self.noted.append({"batch": batch, "logp": logp, "entropy": entropy, "pass": now, "mask": batch.mask.clone()})
        self.watch.begin(tuple(logp.shape))
        return logp, entropy

    def end_minibatch(self) -> None:
        """At an optimizer step: the numbers of its micro-batches become one `Update`."""
        found = self.watch.end()
        if len(found) != len(self.noted):
            raise Refused(f"it calls backward on {len(found)} numbers for {len(self.noted)} passes of the policy "
                          f"before an optimizer step: compared is one loss for each pass, by `loss.backward()`")
        if not found:
            raise Refused("an optimizer step follows no pass of the policy")
        parts: dict[str, list[Tensor]] = {}
        responses: list[int] = []
        total = 0.0
        for noted, (loss, token_loss, weight) in zip(self.noted, found):
            batch = noted["batch"]
            responses += numbers_of(batch)
            total += float(loss)
            values = {
                "mask": noted["mask"], "advantage": batch.advantage, "logp_grad": noted["logp"].grad,
                "entropy_grad": noted["entropy"].grad, "token_loss": token_loss, "weight": weight,
                "kl": noted.get("kl"),
            }
            for name, value in values.items():
                if value is not None:
                    parts.setdefault(name, []).append(padded(value, batch, self.recorded))
        order = torch.tensor(responses).argsort()
        whole = {name: torch.cat(many)[order] for name, many in parts.items() if len(many) == len(found)}
        mask = whole["mask"].nan_to_num() > 0
        zeros = torch.zeros_like(whole["mask"])
        self.updates.append(Update(
            torch.tensor(responses)[order], self.noted[0]["pass"], mask, whole.get("advantage", zeros),
            whole.get("logp_grad", zeros), whole.get("entropy_grad", zeros), whole.get("token_loss"),
            whole.get("weight"), whole.get("kl"), total,
            self.noted[0]["batch"].old_logp is not None,
        ))
        self.noted = []

    def end(self, run: Run, rollout: Rollout, rewards: Tensor) -> None:
        """At run.finish: writes the numbers and ends the process."""
        self.watch.__exit__(None, None, None)
        if not self.updates:
            raise Refused("it made no optimizer step")
        samples = sorted(rollout.samples, key=lambda sample: sample.index)
        means = {name: values[-1] if values and len(values[-1]) == len(rewards) else None
                 for name, values in self.means.items()}
        numbers = Numbers(torch.tensor([sample.prompt.tokens[0] - FIRST for sample in samples]), rewards.double(),
                          means["group_mean"], means["group_std"], self.updates, asdict(run.args))
        torch.save(numbers, self.out)
        os._exit(0)


def noting(function: Any, found: list[Tensor]) -> Any:
    """The function, whose results for the script itself are added to `found`."""
    def noted(*args: Any, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") == "__main__":
            found.append(result)
        return result

    return noted


def numbers_of(batch: Batch) -> list[int]:
    """The recorded batch's number of each response of a micro-batch, without dummies."""
    firsts = batch.tokens[batch.cu_seqlens[:-1].long()] - FIRST
    return firsts[batch.index >= 0].tolist()


def unpadded(values: Tensor, batch: Batch) -> Tensor:
    """[S, L] of the recorded batch -> [T] of a micro-batch, 0 on prompts, dummies and outside the mask."""
    flat = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for start, end, i in places(batch):
        flat[start:end] = values[i, : end - start]
    return torch.where(batch.mask, flat, 0)


def padded(values: Tensor, batch: Batch, recorded: Recorded) -> Tensor:
    """[T] of a micro-batch -> [s, L] of its responses, NaN after their ends."""
    rows = []
    for start, end, _ in places(batch):
        row = torch.full((recorded.mask.shape[1],), torch.nan, dtype=torch.float64)
        row[: end - start] = values[start:end].double()
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, recorded.mask.shape[1], dtype=torch.float64)


def places(batch: Batch) -> list[tuple[int, int, int]]:
    """First and last token of each response, and its number in the recorded batch."""
    bounds = batch.cu_seqlens.tolist()
    found = []
    for s, index in enumerate(batch.index.tolist()):
        if index >= 0:
            found.append((bounds[s] + 1, bounds[s + 1], int(batch.tokens[bounds[s]]) - FIRST))
    return found
