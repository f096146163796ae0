"""The flat batch: sequences one after another, with `cu_seqlens`. No padding anywhere."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

PER_TOKEN, PER_RESPONSE = {"per": "token"}, {"per": "response"}


@dataclass
class Batch:
    """Sequences one after another. Each field but `cu_seqlens` says in its metadata whether it is per token or per
    response, so `select`, `cat`, `to` and `exchange` treat all alike. None means absent, on every rank."""

    tokens: Tensor = field(metadata=PER_TOKEN)      # [T] int64
    mask: Tensor = field(metadata=PER_TOKEN)        # [T] bool, True where the policy sampled, stop token included
    cu_seqlens: Tensor                              # [S+1] int32
    index: Tensor = field(metadata=PER_RESPONSE)    # [S] int64, number of the response in the step; a dummy has -1
    rollout_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)   # [T] float32, 0 where mask is False
    old_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)       # [T] float32, as the next six
    ref_logp: Tensor | None = field(default=None, metadata=PER_TOKEN)
    advantage: Tensor | None = field(default=None, metadata=PER_TOKEN)
    weight: Tensor | None = field(default=None, metadata=PER_TOKEN)
    rollout_weight: Tensor | None = field(default=None, metadata=PER_TOKEN)
    value: Tensor | None = field(default=None, metadata=PER_TOKEN)
    returns: Tensor | None = field(default=None, metadata=PER_TOKEN)
    reward: Tensor | None = field(default=None, metadata=PER_RESPONSE)      # [S] float32
    truncated: Tensor | None = field(default=None, metadata=PER_RESPONSE)   # [S] bool

    def __post_init__(self):
        sizes = {"token": len(self.tokens), "response": len(self.cu_seqlens) - 1}
        for name, (tensor, per) in self.present().items():
            if tensor.shape != (sizes[per],):
                raise ValueError(f"Batch.{name} has shape {list(tensor.shape)}, must be [{sizes[per]}]: one per {per}")

    def present(self) -> dict[str, tuple[Tensor, str]]:
        """name -> (tensor, "token" or "response") of every field that is not None, `cu_seqlens` left out."""
        values = {f.name: (vars(self)[f.name], f.metadata["per"]) for f in fields(self) if f.metadata}
        return {name: pair for name, pair in values.items() if pair[0] is not None}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> Tensor:                    # [S] int64, tokens of each sequence, its prompt included
        return self.cu_seqlens.diff().long()

    @property
    def sequence_ids(self) -> Tensor:               # [T] int64, which response a token belongs to
        responses = torch.arange(len(self), device=self.tokens.device)
        return responses.repeat_interleave(self.lengths, output_size=len(self.tokens))

    @property
    def position_ids(self) -> Tensor:               # [T] int64, restarts at 0 with each sequence
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.cu_seqlens[self.sequence_ids]

    @cached_property
    def max_seqlen(self) -> int:                    # cached: reading it waits for a GPU
        return int(self.lengths.max()) if len(self) else 0

    @classmethod
    def build(cls, prompts: list[list[int]], responses: list[list[int]], *, index: list[int] | None = None,
              rollout_logps: list[list[float]] | None = None, masks: list[list[bool]] | None = None,
              truncated: list[bool] | None = None) -> "Batch":
        """From lists, one entry a response; `rollout_logps` and `masks` have a number for each response token. `masks`
        is False on tool output (whose rollout_logp becomes 0); without it the whole response was sampled. A response
        without tokens stays, as its prompt alone with no mask: no loss, in no denominator.
        Raises ValueError, naming the sample, for no responses, empty prompts, wrong lengths, bad ids or log-probs."""
        if not responses:
            raise ValueError("Batch.build got 0 responses, it needs one; a rank that has none uses Batch.empty()")
        per_token = {"rollout_logps": rollout_logps, "masks": masks}
        for name, rows in {"prompts": prompts, "index": index, "truncated": truncated, **per_token}.items():
            if rows is not None and len(rows) != len(responses):
                raise ValueError(f"Batch.build got {len(rows)} {name} for {len(responses)} responses; one each")
        for i, response in enumerate(responses):
            if not len(prompts[i]):
                raise ValueError(f"sample {i}: the prompt is empty; the first response token must follow something")
            for name, rows in per_token.items():
                if rows is not None and len(rows[i]) != len(response):
                    raise ValueError(f"sample {i}: {len(rows[i])} {name} for {len(response)} response tokens; one each")
        index = list(range(len(responses))) if index is None else index
        if min(index) < 0 or len(set(index)) < len(index):
            raise ValueError(f"index must be distinct numbers from 0, got {index}")

        def flat(before: list, after: list, dtype: torch.dtype) -> Tensor:      # [T]
            return torch.tensor(list(chain.from_iterable(chain(*pair) for pair in zip(before, after))), dtype=dtype)

        zeros, masks = [[0] * len(prompt) for prompt in prompts], masks or [[1] * len(row) for row in responses]
        lengths = torch.tensor([len(prompt) + len(response) for prompt, response in zip(prompts, responses)])
        tokens, mask = flat(prompts, responses, torch.int64), flat(zeros, masks, torch.bool)
        batch = cls(tokens, mask, _offsets(lengths), torch.tensor(index))
        checks = [("token id", tokens, tokens < 0)]
        if rollout_logps is not None:
            logp = flat(zeros, rollout_logps, torch.float32)
            batch.rollout_logp = logp.where(mask, 0.0)
            checks.append(("rollout log-prob", logp, mask & ~logp.isfinite()))
        if truncated is not None:
            batch.truncated = torch.tensor(truncated, dtype=torch.bool)
        for name, values, bad in checks:
            for t in bad.nonzero()[:1, 0]:
                where = f"sample {batch.sequence_ids[t]}, token {batch.position_ids[t]}"
                raise ValueError(f"{where}: {name} is {values[t]}; ids are from 0, log-probs finite: check the engine")
        return batch

    @classmethod
    def empty(cls) -> "Batch":
        """No responses: what a rank that has none brings to `exchange`."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none.bool(), torch.zeros(1, dtype=torch.int32), none)

    def dummy(self) -> "Batch":
        """One response of two tokens, none in the mask, every number 0, with the optional fields that this batch has.

        A rank without responses in a micro-batch runs it forward and backward, because FSDP's collectives must match on
        all ranks. Having no mask it is in no denominator and no statistic, and its weight and its gradient are 0."""
        zeros = {name: tensor.new_zeros(1 + (per == "token")) for name, (tensor, per) in self.present().items()}
        zeros["index"] -= 1
        return Batch(**zeros, cu_seqlens=self.cu_seqlens.new_tensor([0, 2]))

    def select(self, responses: Tensor) -> "Batch":
        """The responses at these positions in this order (none, or one twice, is fine)."""
        responses = torch.as_tensor(responses, dtype=torch.int64, device=self.tokens.device)    # [S']
        cu_seqlens = _offsets(self.lengths[responses])                                          # [S'+1]
        shift = (self.cu_seqlens[:-1][responses] - cu_seqlens[:-1]).long()                      # [S'] old - new start
        total = int(cu_seqlens[-1])
        where = shift.repeat_interleave(cu_seqlens.diff(), output_size=total)                   # [T']
        picks = {"token": where + torch.arange(total, device=where.device), "response": responses}
        return Batch(cu_seqlens=cu_seqlens, **{name: x[picks[per]] for name, (x, per) in self.present().items()})

    def microbatch(self, index: np.ndarray | Tensor) -> "Batch":
        """The responses of these global numbers, of a batch sorted by index (as `exchange` gives); of none, a dummy."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.tokens.device)
        missing = index[~torch.isin(index, self.index)]
        if len(missing):
            raise ValueError(f"responses {missing.tolist()} are not in this batch; was it exchanged by this plan?")
        return self.select(torch.searchsorted(self.index, index)) if len(index) else self.dummy()

    def sort(self) -> "Batch":
        """By index, without dummies: `Batch.cat(microbatches).sort()` restores the order."""
        order = self.index.argsort()
        return self.select(order[self.index[order] >= 0])

    @classmethod
    def cat(cls, batches: list["Batch"]) -> "Batch":
        """One after another; all must have the same optional fields."""
        names = {tuple(batch.present()) for batch in batches}
        if len(names) > 1:
            raise ValueError(f"Batch.cat: different fields {names}; fill an optional one in all batches or in none")
        joined = {name: torch.cat([vars(batch)[name] for batch in batches]) for name in names.pop()}
        return cls(**joined, cu_seqlens=_offsets(torch.cat([batch.lengths for batch in batches])))

    def to(self, device: torch.device | str) -> "Batch":
        values = {name: tensor.to(device, non_blocking=True) for name, (tensor, _) in self.present().items()}
        return Batch(**values, cu_seqlens=self.cu_seqlens.to(device, non_blocking=True))


def _offsets(lengths: Tensor) -> Tensor:            # [S] -> [S+1] int32
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
