"""The trained models: loaded from a Hugging Face folder, sharded with FSDP2, run on packed tokens."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common.model.attention import choose_attention
from common.model.flops import sequence_cost
from common.model.policy import Critic, ModelConfig, PackedModel, Policy
from common.parallel.ranks import World

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
