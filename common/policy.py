"""The trained models: loaded from a Hugging Face folder, sharded with FSDP2, run on packed tokens."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common.dist import World
from common.kernels import choose_attention, linear_logp
from common.packing import Batch, sequence_cost

# torch 2.13 renamed it
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclass
class ModelConfig:
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of activations and matrix products. Master weights, gradients and logits are float32 in any case."""
    attention: Literal["auto", "flash_attention_2", "packed_varlen", "packed_sdpa"] = "auto"
    """Attention over packed sequences. auto: the fastest one that this machine has; the log says which."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass: less memory for about a third more compute. None: over 1B weights."""
    share_prompt: bool = False
    """Compute the prompt of a group once per micro-batch, not once per response: the same gradient for fewer tokens.
    Not with --policy.attention flash_attention_2; on GPUs auto then means packed_varlen."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: only architectures that transformers knows."""

    def __post_init__(self):
        if self.share_prompt and self.attention == "flash_attention_2":
            raise ValueError("--policy.share-prompt: --policy.attention flash_attention_2 cannot, packed_varlen can")


CAUSAL_LM, SCORED = ("ForCausalLM", "LMHeadModel"), ("ForSequenceClassification",)


def read_config(path: str, config: ModelConfig, flag: str = "--model", heads: tuple = CAUSAL_LM) -> PretrainedConfig:
    """The folder's config. Raises ValueError before anything heavy if `path` (from `flag`) holds no such model."""
    if not (Path(path) / "config.json").is_file() and (os.path.isdir(path) or path.startswith((".", "/"))):
        raise ValueError(f"{path} holds no config.json: {flag} must be a Hugging Face model folder or hub name")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a model config from {path} ({flag}): {error}") from error
    if hf_config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.trust_remote_code:
        raise ValueError(f"{path} holds a {hf_config.model_type} model, which is no causal LM: choose another {flag}")
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    saved_as = hf_config.architectures or [causal_lm]
    if causal_lm and not any(n.endswith(heads) or (n == causal_lm and "ForCausalLM" in heads) for n in saved_as):
        wanted = causal_lm if "ForCausalLM" in heads else f"*{heads[0]}"
        raise ValueError(f"{path} holds a {saved_as[0]}, must be a {wanted}: choose another {flag}")
    if not hasattr(hf_config, "hidden_size"):
        raise ValueError(f"{path} is a composite model ({hf_config.model_type}): point {flag} to its language model")
    try:
        sequence_cost(np.ones(1), hf_config)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}: choose another {flag}") from error
    return hf_config


class PackedModel(nn.Module):
    """A transformer on packed tokens. Sharded as a whole, so its head is unsharded while `forward` runs."""

    def __init__(self):
        super().__init__()
        self.share_prompt = False
        self.version = 0  # of the weights: grows with every optimizer step, so the engine knows when it is stale
        self.skipped_in_a_row = 0  # optimizer steps whose gradient norm was not finite

    def hidden_before(self, backbone: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The positions [N] of the tokens that the policy sampled, and the hidden states [N, H] that predict them.

        The shift from "next token" to "this token" is here and nowhere else: position t is scored by that of t - 1.
        """
        sampled = batch.mask.nonzero()[:, 0]                                                    # [N]
        if self.share_prompt:
            shared = share_prompts(batch)
            tokens, positions = batch.tokens[shared.run], batch.position_ids[shared.run]
            before, cu_seqlens, cu_seqlens_k = shared.row[sampled - 1], shared.cu_seqlens, shared.cu_seqlens_k
            extra = {"key_rows": shared.key_rows}
        else:
            tokens, positions, before, extra = batch.tokens, batch.position_ids, sampled - 1, {}
            cu_seqlens = cu_seqlens_k = batch.cu_seqlens
        hidden = backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens_k,
            max_length_q=batch.max_seqlen,
            max_length_k=batch.max_seqlen,
            use_cache=False,
            **extra,
        ).last_hidden_state[0]                                                                  # [T, H]
        return sampled, hidden[before]

    def free_unsharded(self) -> None:
        """Free the unsharded weights, which FSDP2 would keep until a backward. (FSDP2's `reshard` is of one module.)"""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Policy(PackedModel):
    """A causal LM: log-probs of what was sampled."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, at the sampling temperature, of every token that the policy sampled: logp [T]
        and entropy [T], float32, 0 where `batch.mask` is False."""
        sampled, hidden = self.hidden_before(self.lm.base_model, batch)
        logp, entropy = linear_logp(
            hidden,
            self.lm.get_output_embeddings().weight,
            batch.tokens[sampled],
            temperature=temperature,
            with_entropy_grad=entropy_grad,
            **head_options(self.lm.config),
        )                                                                                       # [N], [N]
        zeros = logp.new_zeros(len(batch.tokens))
        return zeros.index_copy(0, sampled, logp), zeros.index_copy(0, sampled, entropy)        # [T], [T]

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs [T] without a gradient."""
        logp, _ = self(batch, temperature)
        self.free_unsharded()
        return logp

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None, bucket_mb: float) -> Iterator[tuple[str, Tensor]]:
        """Every weight, unsharded and in `dtype` (None: as stored), under its Hugging Face name; tied weights once;
        then, as stored, the buffers that belong to a checkpoint.

        Shards are cast first and gathered in one collective per bucket of `bucket_mb` (of the full size). The next
        bucket travels while the caller reads this one, so at most two buckets and one tensor exist beside the shards.
        All ranks must iterate to the end, in step.
        """
        arriving, bucket, size = None, [], 0
        dtype = dtype or self.lm.dtype
        for name, parameter in self.lm.named_parameters():
            bucket.append((name, parameter))
            size += parameter.numel() * dtype.itemsize
            if size >= bucket_mb * 2**20:
                arriving, ready = _Gather(bucket, dtype), arriving
                if ready is not None:
                    yield from ready.tensors()
                bucket, size = [], 0
        for ready in (arriving, _Gather(bucket, dtype) if bucket else None):
            if ready is not None:
                yield from ready.tensors()
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
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


class SharedPrompts(NamedTuple):
    """A layout in which equal prompts appear once: their tokens, then each response as a segment of its own."""

    run: Tensor  # [T'] the tokens of the batch to run
    row: Tensor  # [T] where in `run` each token of the batch is found
    cu_seqlens: Tensor  # [segments + 1], of the queries
    key_rows: Tensor  # [K] rows of `run` that the segments' queries see: a response's prompt, then its own
    cu_seqlens_k: Tensor  # [segments + 1], of `key_rows`


def share_prompts(batch: Batch) -> SharedPrompts:
    tokens, bounds, device = batch.tokens.tolist(), batch.cu_seqlens.tolist(), batch.tokens.device
    first = torch.where(batch.mask, batch.position_ids, len(tokens)).tolist()
    begins: dict[tuple[int, ...], int] = {}                             # prompt -> its first row in `run`
    run, row, ends, key_rows, key_ends = [], [], [0], [], [0]

    def add_segment(start: int, end: int, prefix: range) -> None:
        key_rows.extend((*prefix, *range(len(run), len(run) + end - start)))
        run.extend(range(start, end))
        ends.append(len(run))
        key_ends.append(len(key_rows))

    for start, end in pairwise(bounds):
        split = start + min(end - start, *first[start:end])             # where the policy's first token is
        prompt = tuple(tokens[start:split])
        if prompt not in begins:
            begins[prompt] = len(run)
            add_segment(start, split, range(0))
        prefix = range(begins[prompt], begins[prompt] + len(prompt))
        row += prefix
        if split < end:
            row += range(len(run), len(run) + end - split)
            add_segment(split, end, prefix)
    rows = (torch.tensor(x, device=device) for x in (run, row, key_rows))
    cu_seqlens, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, key_ends))
    run, row, key_rows = rows
    return SharedPrompts(run, row, cu_seqlens, key_rows, cu_seqlens_k)


class _Gather:
    """A bucket of parameters on its way: created, it travels; `tensors` waits for it. On one rank nothing moves."""

    def __init__(self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype):
        self.bucket, self.dtype, mesh = bucket, dtype, bucket[0][1].device_mesh
        self.ranks = mesh.size()
        if self.ranks == 1:
            return
        # FSDP2 cuts dimension 0 into equal chunks, the last ones shorter or empty: pad to the first one's size
        self.rows = [-(-parameter.shape[0] // self.ranks) for _, parameter in bucket]
        self.sizes = [rows * math.prod(parameter.shape[1:]) for rows, (_, parameter) in zip(self.rows, bucket)]
        self.mine = torch.zeros(sum(self.sizes), dtype=dtype, device=bucket[0][1].device)
        for part, (_, parameter) in zip(self.mine.split(self.sizes), bucket):
            local = parameter.to_local().flatten()
            part[: local.numel()].copy_(local)
        self.everyone = self.mine.new_empty(self.ranks, self.mine.numel())
        self.work = all_gather(self.everyone.view(-1), self.mine, group=mesh.get_group(), async_op=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.ranks == 1:
            yield from ((name, parameter.to_local().to(self.dtype)) for name, parameter in self.bucket)
            return
        self.work.wait()
        offset = 0
        for rows, size, (name, parameter) in zip(self.rows, self.sizes, self.bucket):
            full = self.everyone[:, offset : offset + size].reshape(self.ranks * rows, *parameter.shape[1:])
            yield name, full[: parameter.shape[0]]
            offset += size


def head_options(config: PretrainedConfig) -> dict[str, float]:
    """What a family does to its logits besides the matrix product (Gemma's soft-cap, Cohere's and Granite's scale)."""
    options = {}
    if hasattr(config, "final_logit_softcapping") and config.final_logit_softcapping is not None:
        options["softcap"] = config.final_logit_softcapping
    if hasattr(config, "logit_scale") and config.logit_scale is not None:
        options["logit_scale"] = config.logit_scale
    if hasattr(config, "logits_scaling"):
        options["logit_scale"] = 1.0 / config.logits_scaling
    return options


def load_policy(path: str, config: ModelConfig, world: World, frozen: bool = False) -> Policy:
    """The causal LM of a Hugging Face folder, sharded. Master weights are float32 (bfloat16 when `frozen` and the
    compute is bfloat16: nothing is accumulated in them)."""
    hf_config = read_config(path, config)
    dtype, options = _prepare(hf_config, config, world, frozen)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, **options)
    lm.tie_weights()
    if lm.get_output_embeddings() is None or lm.get_output_embeddings().bias is not None:
        raise ValueError(f"{path}: the output head must be one matrix without bias; choose another --model")
    policy = Policy(lm)
    _shard(policy, lm, config, world, frozen)
    source = _read(AutoModelForCausalLM, path, hf_config, options) if world.is_main else None
    _fill(lm, source, world)
    return policy


def load_critic(path: str, config: ModelConfig, world: World, frozen: bool = False) -> Critic:
    """The backbone of a Hugging Face folder with a scalar head, sharded: a causal LM (the head starts at 0, so every
    value does) or a reward model (`score.weight` of a *ForSequenceClassification with one label)."""
    hf_config = read_config(path, config, "--critic-model", CAUSAL_LM + SCORED)
    dtype, options = _prepare(hf_config, config, world, frozen)
    with torch.device("meta"):
        critic = Critic(AutoModel.from_config(hf_config, dtype=dtype, **options))
    _shard(critic, critic.backbone, config, world, frozen)
    source = _read(AutoModel, path, hf_config, options) if world.is_main else None
    _fill(critic.backbone, source, world)
    head = torch.zeros(1, hf_config.hidden_size, device=world.device)
    if world.is_main and any(name.endswith(SCORED) for name in hf_config.architectures or ()):
        found = _stored_tensor(path, "score.weight")
        if found.shape != head.shape:
            raise ValueError(f"{path}: score.weight is {list(found.shape)}, must be {list(head.shape)}: one label")
        head.copy_(found)
    dist.broadcast(head, 0)
    _copy_shard(critic.head.weight, head)
    return critic


def _prepare(hf_config: PretrainedConfig, config: ModelConfig, world: World, frozen: bool) -> tuple[torch.dtype, dict]:
    """The master weights' dtype and options for transformers' constructors; dropout is taken out of `hf_config`."""
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(hf_config, name):
            setattr(hf_config, name, 0.0)  # dropout would make the ratio differ from 1 on policy
    attention, _ = choose_attention(world.device, hf_config, config.attention, config.share_prompt)
    dtype = getattr(torch, config.compute_dtype) if frozen else torch.float32
    return dtype, {"attn_implementation": attention, "trust_remote_code": config.trust_remote_code}


def _shard(model: PackedModel, transformer: nn.Module, config: ModelConfig, world: World, frozen: bool) -> None:
    """FSDP2 on each block of `transformer`, then on the whole; memory for the shards. A critic's head stays float32."""
    model.train()
    model.share_prompt = config.share_prompt
    many = sum(p.numel() for p in transformer.parameters()) > 1e9
    if many if config.gradient_checkpointing is None else config.gradient_checkpointing:
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        model.requires_grad_(False)
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32)
    for module in transformer.modules():
        if type(module).__name__ in transformer._no_split_modules:
            fully_shard(module, mesh=world.mesh, mp_policy=precision, reshard_after_forward=world.size > 1)
    if isinstance(model, Critic):
        fully_shard(model.head, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh, mp_policy=precision)
    model.to_empty(device=world.device)


def _read(cls: type, path: str, hf_config: PretrainedConfig, options: dict) -> nn.Module:
    transformers_logging.disable_progress_bar()
    source, report = cls.from_pretrained(path, dtype="auto", config=hf_config, output_loading_info=True, **options)
    if report["missing_keys"]:  # transformers would go on with random numbers
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"{path} lacks weights, {some} among them: --model must be a complete causal LM")
    source.tie_weights()
    return source


@torch.no_grad()
def _fill(module: nn.Module, source: nn.Module | None, world: World) -> None:
    """Rank 0 has read the folder (`source`); the others receive one tensor at a time and keep their shard."""
    # non-persistent buffers (rotary frequencies) are in no checkpoint and garbage after to_empty: send them too
    tensors = dict(source.named_parameters()) | dict(source.named_buffers()) if source is not None else {}
    for name, target in [*module.named_parameters(), *module.named_buffers()]:
        full = torch.empty(target.shape, dtype=target.dtype, device=world.device)
        if world.is_main:
            full.copy_(tensors[name])
        dist.broadcast(full, 0)
        _copy_shard(target, full)


@torch.no_grad()
def _copy_shard(target: Tensor, full: Tensor) -> None:
    if isinstance(target, DTensor):
        shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(full)


def _stored_tensor(path: str, name: str) -> Tensor:
    """One tensor of a model folder's safetensors."""
    folder = path if os.path.isdir(path) else snapshot_download(path, allow_patterns=["*.safetensors"])
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118, it is no dict
                return tensors.get_tensor(name)
    raise ValueError(f"{path} has no tensor {name} in its safetensors files")
