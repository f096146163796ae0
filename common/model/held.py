"""The models of a run, by name: those that are trained, with their optimizers, and those that only score."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import set_seed

from common.flags.model import OptimConfig
from common.model.loading import FLOAT32_FROZEN, Weights, load_critic, load_frozen, load_policy
from common.model.lora import Reference
from common.model.optimizers import WEIGHTS, make_optimizer
from common.model.policy import Critic, PackedModel, Policy
from common.model.sharding import num_changes
from common.parallel import ranks


class Models:
    """What `Training` has of models. A checkpoint holds each one that has an entry in `optimizers`."""

    args: Any  # the script's
    world: ranks.World
    policy: Policy
    watchdog: Any

    def __init__(self) -> None:
        self.models: dict[str, PackedModel] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.has_resumed = False
        self.num_changes_before: dict[str, int] = {}
        """How often the weights of each frozen model were changed before the first step."""
        self.recomputed_share: bool | float | None = None
        """Share of the blocks of trained models that are recomputed, by the plan of memory; None: by the flag."""

    def load_policy(self, name: str, path: str, optim: OptimConfig,
                    load: Callable[..., Any] = load_policy) -> tuple[Policy, torch.optim.Optimizer]:
        """A causal LM that is trained (or what else `load` makes), and its optimizer. The one named "policy" is
        `run.policy`, which is validated and exported. Raises RuntimeError before the engine was started, because the
        engine measures how much memory is free, and for a name that is taken, as checkpoints hold models by name."""
        self.watchdog.phase("setup of models")
        set_seed(ranks.seed_of(self.args.seed))  # vLLM has seeded random, numpy and torch otherwise
        model, optimizer = self._load(name, load, path, optim)
        if name == "policy":
            self.policy = model
        return model, optimizer

    def load_critic(self, name: str, path: str, optim: OptimConfig) -> tuple[Critic, torch.optim.Optimizer]:
        """A backbone with a scalar head, and its optimizer."""
        return self._load(name, load_critic, path, optim)

    def load_frozen(self, name: str, path: str, is_saved: bool = False,
                    any_tokens: bool = False) -> Policy | Reference:
        """A causal LM without a gradient, in the compute dtype. With adapters, and for the policy's own `path`, it is
        the policy without them. `is_saved`: checkpoints hold it, because the script copies other weights into it.
        `any_tokens`: its tokens need not be the policy's."""
        self._before_loading(name)
        model = load_frozen(path, self.args, self.policy, self.world, any_tokens)
        if isinstance(model, PackedModel):
            self.models[name] = model
        if is_saved:
            self.optimizers[name] = torch.optim.SGD(model.parameters())  # for the checkpoint: it has no state, no step
        return model

    def load_average(self, name: str, path: str) -> Policy:
        """A causal LM without a gradient that the script moves, in float32 and in checkpoints: an average over steps of
        the policy's weights. In bfloat16, a step of less than 1/256 of a weight would be lost."""
        self._before_loading(name)
        if self.args.lora.rank:
            raise ValueError(f"--lora.rank {self.args.lora.rank}: {name} has no adapters that could follow those of "
                             f"the policy; this script needs --lora.rank 0")
        model = load_policy(path, self.args.policy, self.world, FLOAT32_FROZEN)
        self.models[name] = model
        self.optimizers[name] = torch.optim.SGD(model.parameters())
        return model

    def note_loaded(self) -> None:
        """A checkpoint's weights and learning rates have come into the models that it holds."""
        for name, optimizer in self.optimizers.items():
            self.models[name].version += 1  # not the model of its folder
            self.models[name].rate = optimizer.param_groups[0]["lr"]

    def watch_frozen(self) -> None:
        """From now on the models that no checkpoint holds keep their weights."""
        for name, model in self.models.items():
            if name not in self.optimizers:
                self.num_changes_before[name] = num_changes(model)

    def check_frozen(self) -> None:
        """Raises RuntimeError if one of them has others now. A script may have dropped some."""
        for name, before in self.num_changes_before.items():
            model = self.models.get(name)
            if model is None:
                continue
            model.free_unsharded()  # after a pass that was not of `score`, its parameters are other tensors
            if num_changes(model) != before:
                raise RuntimeError(f"this script has changed the weights of {name}, which no checkpoint holds: load it "
                                   f"with run.load_average (float32, for an average over steps), or with "
                                   f"run.load_frozen(..., is_saved=True) (for copies of other weights)")

    def _before_loading(self, name: str) -> None:
        if name in self.models:
            raise RuntimeError(f"{name} is loaded already, and a checkpoint would hold one of the two: give the second "
                               f"another name")
        if self.has_resumed:
            raise RuntimeError("models must be loaded before run.resume() and before the loop over run.steps() "
                               "because a checkpoint fills all of them together")

    def _load(self, name: str, load: Callable[..., Any], path: str, optim: OptimConfig) -> tuple[Any, Any]:
        self._before_loading(name)
        args = self.args
        config = args.policy
        if self.recomputed_share is not None:
            config = replace(config, gradient_checkpointing=self.recomputed_share)
        self.models[name] = load(path, config, self.world, Weights(lora=args.lora, dtype=WEIGHTS[optim.kind]))
        self.optimizers[name] = make_optimizer(self.models[name], optim)
        self.models[name].rate = optim.lr
        return self.models[name], self.optimizers[name]
