"""The trained models on packed sequences: log-probs of a policy, values of a critic."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from common.batch import Batch
from common.flags.model import ModelConfig as ModelConfig
from common.forward.mixture import Mixture
from common.forward.router_replay import Router
from common.forward.sequence_parallel import Row, make_row
from common.forward.vision import hidden_with_images
from common.kernels import Head, linear_logp
from common.model.lora import adapters_of, is_adapter, merge
from common.parallel.gather import gathered_by_block
from common.parallel.ranks import all_sum


class PackedModel(nn.Module):
    """A transformer on packed sequences. FSDP2 shards it as a whole, so its head is unsharded while `forward` runs."""

    def __init__(self):
        super().__init__()
        self.share_prompt = False
        self.has_states = False  # convolutions, delta nets or state-space layers
        self.sequence_group: ProcessGroup | None = None  # the ranks that run a micro-batch together
        self.prompts: Any = None  # what holds the images of the data, if there are some
        self.routers: list[Router] = []  # whose choice is recorded and replayed
        self.gathers_in: torch.dtype | None = None  # FSDP2 gathers weights in it; None: ranks do not divide them
        self.num_blocks = 0  # that FSDP2 gathers one by one, and
        self.num_recomputed = 0  # of them the first ones, which are recomputed in the backward pass
        self.mixture: Mixture | None = None  # of a policy that is trained: what its routers say
        self.folder = ""  # or hub name, from which its weights were read
        self.rate: float | None = None  # the learning rate that its optimizer has, if the script sets no other
        self.version = 0  # grows with every change of the weights, so the engine knows when its own are stale
        self.noise_scale: Any = None  # common/tracking/noise_scale.py, of the policy in training
        self.gradient_terms: Any = None  # common/tracking/gradient_terms.py, the same
        self.skipped_in_a_row = 0  # the latest optimizer steps whose gradient norm was not finite
        self.canary_gradients: list[Tensor] = []  # of this mini-batch, bool: an output has a gradient on a canary

    def hidden_before(self, backbone: nn.Module, batch: Batch) -> tuple[Row, Tensor]:
        """The tokens of the micro-batch that run here, and the hidden states [N, H] that predict the sampled tokens."""
        if isinstance(self, FSDPModule) and torch.is_grad_enabled():
            self.set_requires_all_reduce(batch.ends_minibatch)
        row = make_row(batch, self.share_prompt, self.sequence_group, self.has_states)
        for layer, router in enumerate(self.routers):
            router.replayed = None
            if batch.routing is not None:
                router.replayed = row.batch.routing[row.run, layer]
        with nullcontext() if self.mixture is None else self.mixture.hear(row.before):
            return row, self._hidden(backbone, row)[row.before]

    def _hidden(self, backbone: nn.Module, row: Row) -> Tensor:
        """The hidden states [t, H] of a row."""
        if self.prompts is not None and row.batch.image_row is not None:
            return hidden_with_images(backbone, row, self.prompts)
        tokens = row.batch.tokens[row.run]                                                              # [t]
        positions = row.batch.sequence_positions[row.run]                                               # [t]
        out = backbone(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **row.layout)
        return out.last_hidden_state[0]

    def watched(self, batch: Batch, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs [T] of a forward pass. A gradient on the tokens of a canary becomes NaN: so the gradient norm,
        which all ranks have anyway, tells of it without a wait for the device or a collective of its own."""
        canary = batch.canary_mask
        if canary is None or not torch.is_grad_enabled():
            return outputs

        def poisoned(gradient: Tensor) -> Tensor:
            is_wrong = canary & (gradient.abs() > 0)  # NaN is no sign: it comes from what is not finite
            self.canary_gradients.append(is_wrong.any())
            return gradient.masked_fill(is_wrong, torch.nan)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(poisoned)
        return outputs

    def check_canaries(self) -> None:
        """After a gradient norm that is not finite; all ranks call it. Raises ValueError if the cause is a gradient on
        a canary."""
        found = all_sum([sum(map(int, self.canary_gradients))])
        if found.any():
            raise ValueError(
                "a response whose advantage is 0 has a gradient, and others like it were left out of this update "
                "(skip_zero_advantage): a term of the loss is not proportional to the advantage, or advantages were "
                "written after run.to_minibatches; give skip_zero_advantage=False to run.to_minibatches"
            )

    def free_unsharded(self) -> None:
        """Free the unsharded weights, which FSDP2 would keep until a backward pass."""
        for module in self.modules():
            if isinstance(module, FSDPModule):                      # `reshard` acts on one module, not on its children
                module.reshard()


class Policy(PackedModel):
    """A causal LM: log-probs of the sampled tokens."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.reported: dict[str, Tensor] = {}  # what a mixture's routers say in the latest pass with a gradient, [T]
        self.keeps_sum_p2 = False  # `score` then also writes `batch.extra["sum_p2"]`; `forward` has a copy of the batch

    def forward(self, batch: Batch, temperature: float, *,
                also: Callable[[Tensor, Head], Tensor] | None = None) -> tuple[Tensor, ...]:
        """Log-probability and entropy, at the sampling temperature, of every token that the policy sampled: logp [T]
        and entropy [T], float32, 0 where `batch.mask` is False.

        `also`: what else is computed where the whole head is at hand, from the hidden states [N, H] that predict these
        tokens and the head, to [N]. It is returned last, as [T]."""
        row, hidden = self.hidden_before(self.lm.base_model, batch)
        head = output_head(self.lm)
        targets = row.batch.tokens[row.sampled]                                                 # [N]
        with_sum_p2 = self.keeps_sum_p2 and not torch.is_grad_enabled()
        logp, entropy, sum_p2 = linear_logp(hidden, head, targets, temperature, with_sum_p2)    # [N] each
        self.sum_p2 = None
        if sum_p2 is not None:
            self.sum_p2 = row.per_token(sum_p2)                                                 # [T]
        self._read_routers(row, batch.routing)
        if self.mixture is not None and torch.is_grad_enabled():
            logp = self.mixture.read(logp)
            self.reported = {}
            for name, numbers in self.mixture.reported.items():
                self.reported[name] = row.per_token(numbers)                                    # [T]
        outputs = [logp, entropy]
        if also is not None:
            outputs.append(also(hidden, head))
        return self.watched(batch, *map(row.per_token, outputs))                                # [T] each

    def _read_routers(self, row: Row, replayed: Tensor | None) -> None:
        """After a pass: the experts that its routers chose for each token, or, where those of an earlier pass
        were replayed, for what share of the layers they would have chosen others."""
        self.router_changed = None
        self.routing = None
        if not self.routers:
            return
        if replayed is not None:
            assert replayed.shape[1] == len(self.routers), "engine and trainer have other layers with experts"
            changed = torch.stack([router.changed for router in self.routers])                  # [layers, t]
            share = changed.float().mean(0)                                                     # [t]
            self.router_changed = row.per_token(share[row.before])                              # [T]
        elif not torch.is_grad_enabled():
            own = torch.stack([router.own for router in self.routers], dim=1)                   # [t, layers, k]
            self.routing = row.routing(own)                                                     # [T, layers, k]

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> Tensor:
        """The hidden states [N, H] that predict the sampled tokens, in the order of those that `also` gets. Like after
        `forward`, unsharded weights stay until `free_unsharded`."""
        return self.hidden_before(self.lm.base_model, batch)[1]

    def count_choices(self, minibatch: Iterable[Batch]) -> None:
        """Before the update of a mini-batch, for --policy.router-aux-coef; see common/forward/mixture.py."""
        self.mixture.count_choices(self.hidden_states(microbatch) for microbatch in minibatch)
        self.free_unsharded()

    @torch.no_grad()
    def whole_head(self) -> Head:
        """A copy of the output head that is on every rank. All ranks call this together."""
        head = output_head(self.lm)
        return head._replace(weight=head.weight.full_tensor())

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs [T] without a gradient."""
        logp, _ = self(batch, temperature)
        if self.keeps_sum_p2:
            batch.extra["sum_p2"] = self.sum_p2
        if self.routing is not None:
            batch.routing = self.routing
        self.free_unsharded()
        return logp

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, unsharded, adapters merged, in `dtype` (None: as stored), under its Hugging Face name; tied
        weights once; then, as stored, the buffers that belong to a checkpoint.

        Only one of these tensors exists at a time beside the shards, or two blocks in the data type in which the model
        computes. All ranks must iterate to the end, in step.
        """
        adapters = adapters_of(self.lm)
        if dtype is not None and dtype == self.gathers_in and not adapters:
            for name, weight in gathered_by_block(self, dtype):
                yield name.removeprefix("lm."), weight
            yield from saved_buffers(self.lm).items()
            return
        for name, parameter in self.lm.named_parameters():
            as_sent = dtype or parameter.dtype
            if name in adapters:
                adapter = adapters[name]        # A and B are rounded first, as FSDP2 does for the forward pass
                weight = parameter.full_tensor()
                a = adapter.a.to(parameter.dtype).full_tensor()
                b = adapter.b.to(parameter.dtype).full_tensor()
                yield name, merge(weight, a, b, adapter.scale, adapter.is_transposed).to(as_sent)
            elif not is_adapter(name):
                yield name, parameter.to(as_sent).full_tensor()
        yield from saved_buffers(self.lm).items()

    def described(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of `full_tensors`, without memory."""
        described = {}
        for name, parameter in self.lm.named_parameters():
            if not is_adapter(name):
                described[name] = torch.empty(parameter.shape, dtype=dtype, device="meta")
        for name, buffer in saved_buffers(self.lm).items():
            described[name] = buffer.to("meta")
        return described


class Critic(PackedModel):
    """A backbone with a scalar head: value[t] is the value of the tokens before t."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        hidden_size = backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, bias=False, device=backbone.device, dtype=torch.float32)

    def forward(self, batch: Batch) -> Tensor:
        """Values [T], float32, of the state in which each token was sampled; 0 where `batch.mask` is False."""
        row, hidden = self.hidden_before(self.backbone, batch)
        (value,) = self.watched(batch, row.per_token(self.head(hidden.float())[:, 0]))          # [T]
        return value

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Values [T] without a gradient."""
        value = self(batch)
        self.free_unsharded()
        return value


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds: the expert biases of GLM-4.5, for example, but not rotary frequencies."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def output_head(lm: nn.Module) -> Head:
    """The head, and what a family does to its logits after the product (Gemma: soft-cap; Cohere, Granite: scale)."""
    config = lm.config  # attributes, because MiniCPM3's logits_scaling is a property
    scaling = getattr(config, "logits_scaling", 1.0)
    if config.model_type == "hyperclovax":
        scale = scaling
    else:                                       # Granite and MiniCPM3 divide by it
        scale = scaling**-1
    for factor in (getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)):
        if factor:                              # of Cohere, of Falcon-H1
            scale *= factor
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(lm.get_output_embeddings().weight, softcap, scale)
