"""The flat batch: sequences one after another, cut by `cu_seqlens`. There is no padding anywhere."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.layout.shared_prefixes import SharedPrefixes, share_prefixes

PER_TOKEN = {"per": "token"}
PER_RESPONSE = {"per": "response"}
OWN = ("extra.", "response_extra.")
INSTEAD = {
    "lengths": ": write response_lengths, the tokens that the policy sampled, or sequence_lengths, with the prompt's",
    "position_ids": ": write segment_cumsum(batch.mask.long(), batch.cu_seqlens), which is 1 at the first token "
                    "that the policy sampled, or sequence_positions, which begin with the prompt",
    "row": ": write rollout.row[batch.index.cpu()] for the row of the data; image_row is -1 without images",
}
"""What to write for names that would be taken for something else."""


@dataclass
class Batch:
    """Sequences of prompt and response, one after another, on one device.

    Each field's metadata says whether it holds a number per token or per response; `select`, `cat`, `to`, `exchange`
    and `dummy` handle every field from that. A field that is None is None on every rank. A fork keeps its own numbers
    in `extra` (per token) and `response_extra` (per response), which travel in the same way. Any other attribute would
    be lost on that way, so assigning one raises AttributeError."""

    tokens: Tensor = field(metadata=PER_TOKEN)      # [T] int64
    mask: Tensor = field(metadata=PER_TOKEN)        # [T] bool, True where the policy sampled, stop token included
    cu_seqlens: Tensor                              # [S+1] int32
    index: Tensor = field(metadata=PER_RESPONSE)    # [S] int64, the response's number in the step; a dummy's is -1
    number: Tensor = field(metadata=PER_RESPONSE)   # [S] int64, the sequence's number in the step
    image_row: Tensor | None = field(default=None, metadata=PER_RESPONSE)   # [S] int64, whose images; -1: it has none
    fresh: Tensor | None = field(default=None, metadata=PER_RESPONSE)   # [S] bool, sampled in this step
    canary: Tensor | None = field(default=None, metadata=PER_RESPONSE)  # [S] bool, must have no gradient: it is watched
    rollout_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)   # [T] float32, 0 where mask is False
    old_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)       # [T] float32, like the next five
    ref_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)
    advantage: Tensor | None = field(default=None, metadata=PER_TOKEN)
    rollout_weight: Tensor | None = field(default=None, metadata=PER_TOKEN)
    value: Tensor | None = field(default=None, metadata=PER_TOKEN)
    returns: Tensor | None = field(default=None, metadata=PER_TOKEN)
    routing: Tensor | None = field(default=None, metadata=PER_TOKEN)        # [T, layers, k] int16, by router_replay.py
    ends_minibatch: bool = True  # False: copies of the model need not sum its gradient yet (--policy.replicas)
    extra: dict[str, Tensor] = field(default_factory=dict)              # name -> [T, ...], a script's own
    response_extra: dict[str, Tensor] = field(default_factory=dict)     # name -> [S, ...], a script's own
    last_pass: dict[str, Tensor] = field(default_factory=dict)
    """Per-token outputs of the policy's last update pass, for the recorded rollouts. `cat` and `select` drop them."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Values of `cached`, by name. It is a field, because FSDP2 copies a batch field by field."""

    def __post_init__(self) -> None:
        sizes = {"token": len(self.tokens), "response": len(self.cu_seqlens) - 1}
        for name, (tensor, per) in self.present().items():
            may_be_wide = name.startswith(OWN) or name == "routing"
            is_flat = tensor.dim() == 1
            if len(tensor) != sizes[per] or not (may_be_wide or is_flat):
                raise ValueError(f"Batch.{name} has shape {list(tensor.shape)}, must be [{sizes[per]}]: one per {per}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name) and name not in self.__dataclass_fields__:
            raise AttributeError(f"Batch has no field {name!r}, and the ranks would not exchange it: "
                                 f"write batch.extra[{name!r}] for a number per token, "
                                 f"batch.response_extra[{name!r}] for a number per response")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # mypy shall see a name that is misspelt

        def __getattr__(self, name: str) -> Any:
            """Only called for what does not exist."""
            raise AttributeError(f"Batch has no {name}{INSTEAD.get(name, '')}")

    def cached(self, name: str, compute: Callable[[], Any], source: Tensor) -> Any:
        """A value that is computed once, and again where `source` is another tensor or was changed in place. `to`
        computes them before the batch goes to a GPU, because later the host would wait for the GPU to tell."""
        if name not in self.cache or self.cache[name][0] is not source or self.cache[name][1] != source._version:
            self.keep(name, compute(), source)
        return self.cache[name][2]

    def keep(self, name: str, value: Any, source: Tensor) -> None:
        """A value of `cached` that was computed elsewhere."""
        self.cache[name] = source, source._version, value

    def present(self) -> dict[str, tuple[Tensor, str]]:
        """name -> (tensor, "token" or "response") of every field that is not None, `cu_seqlens` left out. Names of a
        script's own fields begin with those of the dict that holds them: "extra.NAME"."""
        found = {}
        for f in fields(self):
            if f.metadata and vars(self)[f.name] is not None:
                found[f.name] = vars(self)[f.name], f.metadata["per"]
        for name, tensor in self.extra.items():
            found[f"extra.{name}"] = tensor, "token"
        for name, tensor in self.response_extra.items():
            found[f"response_extra.{name}"] = tensor, "response"
        return found

    @classmethod
    def of_fields(cls, values: dict[str, Any], cu_seqlens: Tensor) -> "Batch":
        """The batch whose `present()` has these names and tensors."""
        plain: dict[str, Any] = {}
        extra: dict[str, Tensor] = {}
        response_extra: dict[str, Tensor] = {}
        for name, tensor in values.items():
            if name.startswith("extra."):
                extra[name.removeprefix("extra.")] = tensor
            elif name.startswith("response_extra."):
                response_extra[name.removeprefix("response_extra.")] = tensor
            else:
                plain[name] = tensor
        return cls(**plain, cu_seqlens=cu_seqlens, extra=extra, response_extra=response_extra)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sequence_lengths(self) -> Tensor:           # [S] int64, tokens of each sequence, its prompt included
        return self.cu_seqlens.diff().long()

    @property
    def response_lengths(self) -> Tensor:           # [S] int64, tokens that the policy sampled; 1 for a dummy, which
        counts = torch.zeros_like(self.index).index_add(0, self.sequence_ids, self.mask.long())  # has none, to divide
        return counts.clamp(min=1)

    @property
    def sequence_ids(self) -> Tensor:               # [T] int64, which response a token belongs to
        responses = torch.arange(len(self), device=self.tokens.device)
        return responses.repeat_interleave(self.sequence_lengths, output_size=len(self.tokens))

    @property
    def sequence_positions(self) -> Tensor:         # [T] int64, restarts at 0 with each sequence, its prompt included
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.cu_seqlens[self.sequence_ids]

    @property
    def canary_mask(self) -> Tensor | None:         # [T] bool, the sampled tokens of canaries
        if self.canary is None:
            return None
        return self.canary[self.sequence_ids] & self.mask

    @property
    def measured(self) -> Tensor:                   # [T] bool, the tokens of which metrics tell: no canary's
        canary = self.canary_mask
        if canary is None:
            return self.mask
        return self.mask & ~canary

    @property
    def host_lengths(self) -> list[int]:            # [S] as `sequence_lengths`
        return self.cached("host_lengths", self.sequence_lengths.tolist, source=self.cu_seqlens)

    @property
    def sampled(self) -> Tensor:                    # [N] int64, the positions where mask is True
        return self.cached("sampled", lambda: self.mask.nonzero()[:, 0], source=self.mask)

    @property
    def shared_prefixes(self) -> SharedPrefixes | None:
        return self.cached("shared_prefixes", lambda: share_prefixes(
            self.tokens, self.mask, self.cu_seqlens, self.image_row, self.routing), source=self.tokens)

    @classmethod
    def build(cls, prompts: list[list[int]], responses: list[list[int]], *, index: list[int] | None = None,
              number: list[int] | None = None, rollout_logps: list[list[float]] | None = None,
              masks: list[list[bool]] | None = None) -> "Batch":
        """From lists with one entry a response; `rollout_logps` and `masks` have a number for each response token.

        `masks` is False on tool output, whose rollout_logp becomes 0; without it the whole response was sampled. A
        response without tokens stays as its prompt alone, without a mask: it has no loss and is in no denominator.
        Raises ValueError, naming the response, for log-probs that are not finite."""
        assert all(map(len, prompts)), "a prompt is empty: the first response token must follow something"
        if masks is None:
            masks = []
            for response in responses:
                masks.append([True] * len(response))
        for rows in (rollout_logps, masks):
            assert rows is None or list(map(len, rows)) == list(map(len, responses)), "one number for each token"

        def flat(of_prompts: list, of_responses: list, dtype: type) -> Tensor:                  # [T]
            rows = chain.from_iterable(zip(of_prompts, of_responses, strict=True))
            return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))

        zeros = [[0] * len(prompt) for prompt in prompts]
        tokens = flat(prompts, responses, np.int64)
        mask = flat(zeros, masks, np.bool_)
        lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses)], dtype=torch.int64)
        if index is None:
            index = [*range(len(responses))]
        if number is None:
            number = index
        batch = cls(tokens, mask, offsets(lengths), torch.tensor(index, dtype=torch.int64),
                    torch.tensor(number, dtype=torch.int64))
        if rollout_logps is not None:
            batch.rollout_logp = flat(zeros, rollout_logps, np.float32).where(mask, 0.0)
            batch.check_finite("the engine's log-prob", batch.rollout_logp, "check the engine")
        return batch

    def dummy(self) -> "Batch":
        """One response of two tokens without a mask, with the optional fields of this batch; every number is 0, but for
        index, number and routing, which are -1.

        A rank without responses in a micro-batch runs it, because FSDP's collectives must match on all ranks. Having no
        mask, it is in no denominator and no statistic, and its weight and gradient are 0."""
        sizes = {"token": 2, "response": 1}
        values = {name: x.new_zeros(sizes[per], *x.shape[1:]) for name, (x, per) in self.present().items()}
        for name in ("index", "number", "routing"):
            if name in values:
                values[name] -= 1
        return Batch.of_fields(values, self.cu_seqlens.new_tensor([0, 2]))

    def check_finite(self, name: str, x: Tensor, advice: str = "look at grad_norm before, and at its text") -> None:
        """Refuse NaN and infinity in a per-token tensor [T], naming the first response that has some."""
        broken = (~x.isfinite()).nonzero()[:, 0]
        if len(broken):
            t = broken[0]
            raise ValueError(f"{name} is {x[t]} for response {self.index[self.sequence_ids[t]]} at its token "
                             f"{self.sequence_positions[t]}: {advice}")

    def to_tokens(self, values: Tensor) -> Tensor:
        """A number for each response of the step, [S] -> float32 [T] of this batch: the response's number on each of
        its tokens with mask, 0 elsewhere and on dummies. Raises ValueError for numbers of another shape than [S]."""
        if values.dim() != 1:
            raise ValueError(f"to_tokens: the numbers have the shape {list(values.shape)}, must be [S], one for each "
                             f"response of the step: flatten() makes [S] of [P, G]")
        padded = torch.nn.functional.pad(values.to(self.tokens.device).float(), (0, 1))         # [S+1] -1: of dummies
        return torch.where(self.mask, padded[self.index][self.sequence_ids], 0)

    def select(self, responses: Tensor | np.ndarray) -> "Batch":
        """The responses at these positions, in this order; there may be none, or one twice."""
        responses = torch.as_tensor(responses, dtype=torch.int64, device=self.tokens.device)    # [S']
        cu_seqlens = offsets(self.sequence_lengths[responses])                                  # [S'+1]
        shift = (self.cu_seqlens[:-1][responses] - cu_seqlens[:-1]).long()                      # [S'] old - new start
        total = int(cu_seqlens[-1])
        where = shift.repeat_interleave(cu_seqlens.diff(), output_size=total)                   # [T']
        picks = {"token": where + torch.arange(total, device=where.device), "response": responses}
        return Batch.of_fields({name: x[picks[per]] for name, (x, per) in self.present().items()}, cu_seqlens)

    def microbatch(self, number: np.ndarray | Tensor) -> "Batch":
        """The sequences with these numbers, of a batch that is sorted; a dummy if there are no numbers."""
        number = torch.as_tensor(number, dtype=torch.int64, device=self.tokens.device)
        assert torch.isin(number, self.number).all(), "this batch was not exchanged by the plan of these micro-batches"
        if not len(number):
            return self.dummy()
        return self.select(torch.searchsorted(self.number, number))

    def sort(self) -> "Batch":
        """The sequences in the order of their numbers, without dummies: `Batch.cat(microbatches).sort()`."""
        order = self.number.argsort()
        return self.select(order[self.number[order] >= 0])

    @classmethod
    def cat(cls, batches: list["Batch"]) -> "Batch":
        """Batches one after another; all must have the same optional fields."""
        present = [batch.present() for batch in batches]
        for fields_of_batch in present:
            differing = fields_of_batch.keys() ^ present[0].keys()
            if differing:
                raise ValueError(f"Batch.cat: {', '.join(sorted(differing))} is in some of the batches only")
        joined = {name: torch.cat([of_batch[name][0] for of_batch in present]) for name in present[0]}
        return cls.of_fields(joined, offsets(torch.cat([batch.sequence_lengths for batch in batches])))

    def to(self, device: torch.device | str, share_prompt: bool = False) -> "Batch":
        """Copy to another device. Before a copy to a GPU it computes host_lengths and sampled (and shared_prefixes if
        asked for), so that the GPU is never asked for them."""
        # a copy to the host is read next, so it must have arrived
        to_host = torch.device(device).type == "cpu" and self.tokens.device.type != "cpu"
        values = {name: tensor.to(device, non_blocking=not to_host) for name, (tensor, _) in self.present().items()}
        moved = Batch.of_fields(values, self.cu_seqlens.to(device, non_blocking=not to_host))
        if not to_host:
            moved.keep("host_lengths", self.host_lengths, moved.cu_seqlens)
            moved.keep("sampled", self.sampled.to(device), moved.mask)
        if share_prompt:
            shared = self.shared_prefixes
            if shared is not None:
                shared = SharedPrefixes(*(x.to(device, non_blocking=True) for x in shared))
            moved.keep("shared_prefixes", shared, moved.tokens)
        return moved


def offsets(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths begin, and the end of the last: [S] -> [S+1] int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
