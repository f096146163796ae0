"""The trained models on packed sequences: log-probs of a policy, values of a critic."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from common.batch import Batch
from common.kernels import linear_logp
from common.model.lora import merged_weights


@dataclass
class ModelConfig:
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of activations and matrix products. Master weights, gradients and logits are float32 in any case."""
    attention: Literal["auto", "flash_attention_2", "packed_varlen", "packed_sdpa"] = "auto"
    """Attention over packed sequences. auto: the fastest one that this machine has; the log says which."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass: less memory for about a third more compute. None: over 1B weights."""
    replicas: int = 1
    """Copies of the models (HSDP): each is sharded over world size / replicas ranks, and weights travel among these."""
    liger: bool | None = None
    """Liger's fused kernels for norms, rotary embeddings and MLPs. None: on GPUs where the family has them."""
    share_prompt: bool = False
    """Compute the prompt of a group once per micro-batch, not once per response: the same gradient for fewer tokens.
    Not with --policy.attention flash_attention_2; on GPUs auto then means packed_varlen."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: only architectures that transformers knows."""

    def __post_init__(self):
        if self.share_prompt and self.attention == "flash_attention_2":
            raise ValueError("--policy.share-prompt: --policy.attention flash_attention_2 cannot, packed_varlen can")
        if self.compute_dtype == "float32" and self.attention in ("flash_attention_2", "packed_varlen"):
            raise ValueError(
                f"--policy.attention {self.attention} takes no --policy.compute-dtype float32: choose auto"
            )


class PackedModel(nn.Module):
    """A transformer on packed sequences. FSDP2 shards it as a whole, so its head is unsharded while `forward` runs."""

    def __init__(self):
        super().__init__()
        self.share_prompt = False
        self.version = 0  # grows with every optimizer step, so the engine knows when its weights are stale
        self.skipped_in_a_row = 0  # the latest optimizer steps whose gradient norm was not finite

    def hidden_before(self, backbone: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The positions [N] of the tokens that the policy sampled, and the hidden states [N, H] that predict them.

        The shift from "next token" to "this token" is here and nowhere else: position t is scored by that of t - 1.
        """
        before = batch.sampled - 1                                                              # [N]
        tokens, positions = batch.tokens, batch.position_ids
        layout = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        if self.share_prompt:
            shared = batch.shared_prompts
            before = shared.row[before]
            tokens, positions = tokens[shared.run], positions[shared.run]
            layout = {"cu_seq_lens_q": shared.cu_seqlens, "cu_seq_lens_k": shared.cu_seqlens_k,
                      "key_rows": shared.key_rows}
        longest = max(batch.host_lengths)
        hidden = backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            max_length_q=longest,
            max_length_k=longest,
            use_cache=False,
            **layout,
        ).last_hidden_state[0]                                          # [tokens that run, H]
        return batch.sampled, hidden[before]

    def free_unsharded(self) -> None:
        """Free the unsharded weights, which FSDP2 would keep until a backward pass."""
        for module in self.modules():
            if isinstance(module, FSDPModule):                      # `reshard` acts on one module, not on its children
                module.reshard()


class Policy(PackedModel):
    """A causal LM: log-probs of what was sampled."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.keeps_sum_p2 = False  # `score` then also writes `batch.sum_p2`

    def forward(self, batch: Batch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, at the sampling temperature, of every token that the policy sampled: logp [T]
        and entropy [T], float32, 0 where `batch.mask` is False."""
        sampled, hidden = self.hidden_before(self.lm.base_model, batch)
        logp, entropy, sum_p2 = linear_logp(
            hidden,
            self.lm.get_output_embeddings().weight,
            batch.tokens[sampled],
            temperature=temperature,
            with_entropy_grad=entropy_grad,
            with_sum_p2=self.keeps_sum_p2 and not torch.is_grad_enabled(),
            **head_options(self.lm.config),
        )                                                                                       # [N] each
        zeros = logp.new_zeros(len(batch.tokens))
        if sum_p2 is not None:
            batch.sum_p2 = zeros.index_copy(0, sampled, sum_p2)                                 # [T]
        return zeros.index_copy(0, sampled, logp), zeros.index_copy(0, sampled, entropy)        # [T], [T]

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs [T] without a gradient."""
        logp, _ = self(batch, temperature)
        self.free_unsharded()
        return logp

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, unsharded, adapters merged, in `dtype` (None: as stored), under its Hugging Face name; tied
        weights once; then, as stored, the buffers that belong to a checkpoint.

        One of them exists at a time beside the shards. All ranks must iterate to the end, in step.
        """
        yield from merged_weights(self.lm, dtype)
        yield from saved_buffers(self.lm).items()


class Critic(PackedModel):
    """A backbone with a scalar head: value[t] is what the tokens before t are worth."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1, bias=False, dtype=torch.float32)

    def forward(self, batch: Batch) -> Tensor:
        """Values [T], float32, of the state in which each token was sampled; 0 where `batch.mask` is False."""
        sampled, hidden = self.hidden_before(self.backbone, batch)
        value = self.head(hidden.float())[:, 0]                                                 # [N]
        return value.new_zeros(len(batch.tokens)).index_copy(0, sampled, value)                 # [T]

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Values [T] without a gradient."""
        value = self(batch)
        self.free_unsharded()
        return value


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds (the expert biases of GLM-4.5); rotary frequencies, for one, are not."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def head_options(config: PretrainedConfig) -> dict[str, float]:
    """What a family does to its logits besides the matrix product (Gemma's soft-cap, Cohere's and Granite's scale)."""
    fields = config.to_dict()
    options = {"softcap": fields.get("final_logit_softcapping"), "logit_scale": fields.get("logit_scale")}
    if "logits_scaling" in fields:
        options["logit_scale"] = 1.0 / config.logits_scaling
    return {name: value for name, value in options.items() if value is not None}
