"""Load a policy or a critic from a Hugging Face folder and shard it with FSDP2.

Rank 0 alone reads the folder; the others receive one tensor at a time and keep their shard of it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import AutoModelForSequenceClassification as AutoClassifier
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common.model.attention import choose_attention
from common.model.flops import sequence_cost
from common.model.liger import choose_liger, use_liger
from common.model.lora import LoRAConfig, Reference, add_adapters, new_adapters
from common.model.packing_check import check_packing, explain_failure
from common.model.policy import Critic, ModelConfig, PackedModel, Policy
from common.model.sequence_parallel import PREFIX
from common.model.sharding import shard
from common.parallel.ranks import World

CAUSAL_LM = ("ForCausalLM", "LMHeadModel")              # how the names of architectures end
SCORED = ("ForSequenceClassification",)
NO_ADAPTERS = LoRAConfig()


def read_config(path: str, config: ModelConfig, flag: str = "--model", heads: tuple = CAUSAL_LM) -> PretrainedConfig:
    """The config of a Hugging Face folder or hub name that the user gave with `flag`.

    Raises ValueError, before anything heavy, if it holds no model whose architecture ends in one of `heads`."""
    if not (Path(path) / "config.json").is_file() and (os.path.isdir(path) or path.startswith((".", "/"))):
        raise ValueError(f"{path} holds no config.json: {flag} must be a Hugging Face model folder or hub name")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a model config from {path} ({flag}): {error}") from error
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if causal_lm is None and not config.trust_remote_code:
        raise ValueError(f"{path} holds a {hf_config.model_type} model, which is no causal LM: choose another {flag}")
    if causal_lm is not None:
        saved_as = hf_config.architectures or [causal_lm]
        takes_causal_lm = "ForCausalLM" in heads
        if not any(name.endswith(heads) or (takes_causal_lm and name == causal_lm) for name in saved_as):
            wanted = causal_lm if takes_causal_lm else f"*{heads[0]}"
            raise ValueError(f"{path} holds a {saved_as[0]}, must be a {wanted}: choose another {flag}")
    if is_scored(hf_config) and hf_config.num_labels != 1:
        raise ValueError(f"{path} has {hf_config.num_labels} labels, must have 1: choose another {flag}")
    if not hasattr(hf_config, "hidden_size"):
        raise ValueError(f"{path} is a composite model ({hf_config.model_type}): point {flag} to its language model")
    try:
        sequence_cost(np.ones(1), hf_config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}: choose another {flag}") from error
    return hf_config


def is_scored(hf_config: PretrainedConfig) -> bool:
    """Whether it is a reward model: a sequence classifier."""
    return any(name.endswith(SCORED) for name in hf_config.architectures or ())


def read_teacher(path: str, model: str, config: ModelConfig, is_used: bool) -> PretrainedConfig:
    """The config of --teacher. Raises ValueError if its tokens are not those of `model`, or if no KL is computed."""
    hf_config = read_config(path, config, "--teacher")
    if not is_used:
        raise ValueError(f"--teacher {path} has no effect without a KL: set --kl-loss-coef (or --kl-reward-coef)")
    theirs, ours = (
        AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_vocab().items()
        for folder in (path, model)
    )
    for token, number in sorted(ours ^ theirs)[:1]:
        raise ValueError(f"--teacher {path} must have the tokens of --model: only one has {token!r} as {number}")
    return hf_config


def load_policy(path: str, config: ModelConfig, world: World, frozen: bool = False, lora: LoRAConfig = NO_ADAPTERS,
                ) -> Policy:
    """The causal LM of a Hugging Face folder, sharded.

    Weights that are trained are float32. The others have the compute dtype: nothing is accumulated in them."""
    hf_config = read_config(path, config)
    lm = _build(AutoModelForCausalLM, path, hf_config, config, world, frozen, lora)
    lm.tie_weights()
    if lm.get_output_embeddings() is None or lm.get_output_embeddings().bias is not None:
        raise ValueError(f"{path}: the output head must be one matrix without bias; choose another --model")
    policy = Policy(lm)
    shard(policy, lm, config, world, frozen)
    source = _read_folder(AutoModelForCausalLM, path, hf_config, config) if world.is_main else None
    _copy_from_main(lm, source, world)
    check_packing(partial(policy.score, temperature=1.0), path, hf_config, config.compute_dtype, world.device)
    return policy


def load_reference(teacher: str, args: Any, models: dict[str, PackedModel], world: World) -> Policy | Reference:
    """The teacher, or the model before training, frozen: one more of `models`, with adapters a view of the policy."""
    if args.lora.rank and not teacher:
        return Reference(models["policy"])
    models["reference"] = load_policy(teacher or args.model, args.policy, world, frozen=True)
    return models["reference"]


def load_critic(path: str, config: ModelConfig, world: World, frozen: bool = False, lora: LoRAConfig = NO_ADAPTERS,
                ) -> Critic:
    """The backbone of a Hugging Face folder with a scalar head, sharded.

    A causal LM gets a head of zeros, so every value starts at 0. A reward model (a *ForSequenceClassification with one
    label) brings its head, `score.weight`."""
    hf_config = read_config(path, config, "--critic-model", CAUSAL_LM + SCORED)
    with torch.device("meta"):
        critic = Critic(_build(AutoModel, path, hf_config, config, world, frozen, lora))
    shard(critic, critic.backbone, config, world, frozen)
    reader = AutoClassifier if is_scored(hf_config) else AutoModel
    source = _read_folder(reader, path, hf_config, config) if world.is_main else None
    _copy_from_main(critic.backbone, source.base_model if world.is_main else None, world)
    with torch.no_grad():                                   # with a head of zeros, no value could differ
        critic.head.weight.to_local().copy_(torch.linspace(-1, 1, hf_config.hidden_size))
    check_packing(critic.score, path, hf_config, config.compute_dtype, world.device)
    if is_scored(hf_config):
        with explain_failure(path, hf_config):              # classifiers of encoders have other heads
            _copy_from_main(critic.head, source.score if world.is_main else None, world)
    else:
        nn.init.zeros_(critic.head.weight)
    return critic


def _disable_dropout(config: PretrainedConfig) -> None:
    """Set every rate of dropout to 0, in nested configs too: with dropout the ratio would differ from 1 on policy."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _disable_dropout(value)
        elif isinstance(value, float) and "drop" in name:     # residual_dropout, embd_pdrop, layerdrop, ...
            setattr(config, name, 0.0)


def _build(auto_class: type, path: str, hf_config: PretrainedConfig, config: ModelConfig, world: World, frozen: bool,
           lora: LoRAConfig) -> PreTrainedModel:
    """The model without dropout, and without memory for its weights."""
    _disable_dropout(hf_config)
    attention, _ = choose_attention(world.device, hf_config, config)
    attention = attention if world.sequence is None else PREFIX + attention
    dtype = getattr(torch, config.compute_dtype) if frozen or lora.rank else torch.float32
    with torch.device("meta"), explain_failure(path, hf_config):
        model = auto_class.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
        )
    if choose_liger(world.device, hf_config, config)[0]:
        use_liger(model)
    if lora.rank:
        add_adapters(model, lora)
    return model


def _read_folder(auto_class: type, path: str, hf_config: PretrainedConfig, config: ModelConfig) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    source, report = auto_class.from_pretrained(
        path, dtype="auto", config=hf_config, output_loading_info=True, trust_remote_code=config.trust_remote_code
    )
    if report["missing_keys"]:  # transformers would go on with random numbers
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"{path} lacks weights, {some} among them: choose a complete model")
    source.tie_weights()
    return source


@torch.no_grad()
def _copy_from_main(module: nn.Module, source: nn.Module | None, world: World) -> None:
    """Copy weights and buffers of `source`, which rank 0 alone has, into the shards that all ranks allocated."""
    weights = source.state_dict() | new_adapters(module) if world.is_main else {}
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Some buffers (rotary frequencies) are in no state dict, and allocating the shards left them undefined.
    buffers = dict(source.named_buffers()) if world.is_main else {}
    for name, buffer in module.named_buffers():
        if world.is_main:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
