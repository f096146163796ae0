"""Load a policy or a critic from a Hugging Face folder and shard it with FSDP2: each rank reads its own shards."""

import importlib.util
import logging
import os
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.flags.model import LoRAConfig, ModelConfig
from common.forward.attention import choose_attention, use_kernel
from common.forward.mixture import Mixture, use_float32_routers
from common.forward.router_replay import routers_of
from common.forward.states import separate_states
from common.forward.vision import FAMILIES, auto_class
from common.model.flops import sequence_cost
from common.model.lora import Reference, add_adapters, new_adapters
from common.model.packing_check import check_packing, explain_failure
from common.model.policy import Critic, Policy
from common.model.sharding import kept_tensors, local, shard, shard_slice
from common.parallel.ranks import World, all_max, all_sum, print_on_main
from common.source.folder import check_config
from common.source.stored import Experts, open_folder, weights_of

CAUSAL_LM = ("ForCausalLM", "LMHeadModel")              # how the names of architectures end
SCORED = ("ForSequenceClassification",)
IMAGE_TEXT = "ForConditionalGeneration"                 # of models that read images, where a causal LM is meant
NO_ADAPTERS = LoRAConfig()
LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose kernels tests/model/test_liger.py proves. Experts of mixtures keep transformers' products."""
LIGER_KERNELS = {"fused_linear_cross_entropy": False}
"""Liger changes the rotary embedding for all models of the family in this process."""
READERS = 4
"""Ranks of a machine that read files at the same time: a larger number makes a disk or a file server slower."""
GIB = 2**30


def read_config(path: str, config: ModelConfig, flag: str = "--model", heads: tuple = CAUSAL_LM) -> PretrainedConfig:
    """The config of a Hugging Face folder or hub name that the user gave with `flag`.

    Raises ValueError, before anything heavy, if it holds no model whose architecture ends in one of `heads`."""
    if os.path.isdir(path) or path.startswith((".", "/", "~")):
        check_config(path, flag)
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ArithmeticError, RecursionError, StrictDataclassError) as error:
        raise ValueError(f"cannot read a model config from {path} ({flag}): {error}") from error
    if hasattr(hf_config, "transformers_weights"):
        raise ValueError(f"{path}: config.json names transformers_weights {hf_config.transformers_weights}, and only "
                         f"model.safetensors and its index are read: choose another {flag}")
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    reads_images = hf_config.model_type in FAMILIES
    accepted = heads
    if reads_images and heads != SCORED:
        accepted = (*heads, IMAGE_TEXT)
    if config.freeze_vision and flag == "--model" and not reads_images:
        raise ValueError(f"--policy.freeze-vision: {path} reads no images, leave it out")
    if reads_images and config.sequence_parallel > 1:
        raise ValueError(f"{path} reads images: --policy.sequence-parallel {config.sequence_parallel} must be 1")
    if causal_lm is None and not reads_images and not config.trust_remote_code:
        raise ValueError(f"{path} holds a {hf_config.model_type} model, which is no causal LM: choose another {flag}")
    saved_as = (hf_config.architectures or [causal_lm or IMAGE_TEXT])[0]
    if (causal_lm is not None or reads_images) and not saved_as.endswith(accepted):
        raise ValueError(f"{path} holds a {saved_as}, must be a *{accepted[0]}: choose another {flag}")
    if hasattr(hf_config, "quantization_config"):
        raise ValueError(f"{path} is quantized, and what is trained is not: choose the model that it was made from")
    if is_scored(hf_config) and hf_config.num_labels != 1:
        raise ValueError(f"{path} has {hf_config.num_labels} labels, must have 1: choose another {flag}")
    if not reads_images and not hasattr(hf_config, "hidden_size"):
        raise ValueError(f"{path} is a composite model ({hf_config.model_type}): point {flag} to its language model")
    with explain_failure(path, hf_config):
        sequence_cost(np.ones(1), hf_config)
    return hf_config


def read_tokenizer(path: str, config: ModelConfig, flag: str = "--model") -> Any:
    """The tokenizer of a Hugging Face folder or hub name that the user gave with `flag`, as transformers loads it.

    Raises ValueError if it has none that can be read."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # of a file that is damaged or missing the libraries raise many kinds, also this one
        what, *_ = str(error).strip().split("\n")
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{flag} {path}: its tokenizer comes with code, which is not run unless you trust it: "
                f"--policy.trust-remote-code (trust_remote_code of transformers)"
            ) from None
        raise ValueError(
            f"{flag} {path}: no tokenizer can be read ({type(error).__name__}: {what}): copy tokenizer.json "
            f"and tokenizer_config.json of the model that it was made from into the folder"
        ) from error


def is_scored(hf_config: PretrainedConfig) -> bool:
    """Whether the model is a reward model: a sequence classifier."""
    return any(name.endswith(SCORED) for name in hf_config.architectures or ())


def check_vocabulary(hf_config: PretrainedConfig, ours: PretrainedConfig, flag: str) -> None:
    """Raise ValueError if a policy with the config `ours` can sample tokens that the model of `flag` does not have.
    Vocabularies are padded beyond the tokenizer, to different sizes, and all of it can be sampled."""
    size = hf_config.get_text_config().vocab_size
    least = ours.get_text_config().vocab_size
    if size < least:
        raise ValueError(
            f"{flag} has a vocabulary of {size} tokens, must have at least the {least} of --model, "
            f"padding included: choose another one, or pad its embedding"
        )


def check_sight(hf_config: PretrainedConfig, ours: PretrainedConfig, flag: str) -> None:
    """Raise ValueError if the model of `flag` does not see images as the policy does, whose config is `ours`: with the
    same processor, as the same tokens."""
    seen = []
    for config in (hf_config, ours):
        sizes: dict[str, Any] = {}
        if config.model_type in FAMILIES:
            vision = config.vision_config.to_dict()
            sizes = {name: vision.get(name) for name in ("patch_size", "spatial_merge_size", "image_size")}
            sizes |= {"model_type": config.model_type, "image_token_id": config.image_token_id}
        seen.append(sizes)
    theirs, own = seen
    if bool(theirs) != bool(own):
        raise ValueError(f"{flag} must read images if --model does, and else not")
    if theirs != own:
        raise ValueError(f"{flag} sees images otherwise than --model ({theirs}, must be {own}): choose another one")


def read_critic(path: str, config: ModelConfig, ours: PretrainedConfig) -> PretrainedConfig:
    """The config of --critic-model, for a policy with the config `ours`."""
    hf_config = read_config(path, config, "--critic-model", CAUSAL_LM + SCORED)
    check_sight(hf_config, ours, f"--critic-model {path}")
    check_vocabulary(hf_config, ours, f"--critic-model {path}")
    return hf_config


def read_teacher(path: str, model: str, config: ModelConfig, any_tokens: bool = False) -> PretrainedConfig:
    """The config of --teacher, or of another frozen model. Raises ValueError if its tokens are not those of `model`,
    unless `any_tokens`."""
    hf_config = read_config(path, config, "--teacher")
    ours_config = read_config(model, config)
    check_sight(hf_config, ours_config, f"--teacher {path}")
    theirs = read_tokenizer(path, config, "--teacher").get_vocab()
    ours = read_tokenizer(model, config).get_vocab()
    differing = sorted(ours.items() ^ theirs.items())
    if differing and any_tokens:
        return hf_config
    check_vocabulary(hf_config, ours_config, f"--teacher {path}")
    if differing:
        token, number = differing[0]
        raise ValueError(f"--teacher {path} must have the tokens of --model: only one has {token!r} as {number}")
    return hf_config


class Weights(NamedTuple):
    """How the weights of a model are held."""

    frozen: bool = False
    lora: LoRAConfig = NO_ADAPTERS
    dtype: torch.dtype = torch.float32  # of what is trained
    frozen_dtype: torch.dtype | None = None  # of what is not; None: the compute dtype, since nothing accumulates
    like: Policy | None = None  # of the same folder, unchanged since it was loaded: its shards are copied, nothing read


ALL_TRAINED = Weights()
FLOAT32_FROZEN = Weights(frozen=True, frozen_dtype=torch.float32)


def load_policy(path: str, config: ModelConfig, world: World, weights: Weights = ALL_TRAINED) -> Policy:
    """The causal LM of a Hugging Face folder, sharded."""
    hf_config = read_config(path, config)
    lm = _build(auto_class(hf_config), path, hf_config, config, world, weights)
    head = lm.get_output_embeddings()
    if head is None or head.bias is not None:
        raise ValueError(f"{path}: the output head must be one matrix without bias; choose another --model")
    policy = Policy(lm)
    policy.folder = path
    mixture = None
    if not weights.frozen:
        if config.router_replay != "none":
            policy.routers = routers_of(lm)
        mixture = Mixture(lm, config.router_aux_coef, world.size)
    shard(policy, lm, config, world, weights.frozen)
    register_fsdp_forward_method(policy, "hidden_states")
    if weights.like is None:
        tensors = weights_of(lm, path, open_folder(path)) | new_adapters(lm)
        _read_in_turns(path, lm, tensors, world)
    else:
        own_tensors = kept_tensors(lm).values()
        their_tensors = kept_tensors(weights.like.lm).values()
        for own, theirs in zip(own_tensors, their_tensors, strict=True):
            own.detach().copy_(theirs.detach())
    check_packing(policy, lambda batch: policy(batch, 1.0)[0], path, hf_config, config.compute_dtype, world.device)
    policy.mixture = mixture  # what the check ran is not counted
    return policy


def load_frozen(path: str, args: Any, policy: Policy, world: World, any_tokens: bool = False) -> Policy | Reference:
    """A causal LM that is not trained, with the policy's tokens unless `any_tokens`. For the policy's own folder
    (--model) it copies the policy's shards if they are still as loaded, and with adapters it is a view of the policy
    without them."""
    if path != args.model:
        read_teacher(path, args.model, args.policy, any_tokens)
        return load_policy(path, args.policy, world, Weights(frozen=True))
    if args.lora.rank:
        return Reference(policy)
    is_changed = policy.version > 0
    like = None if is_changed else policy
    return load_policy(path, args.policy, world, Weights(frozen=True, like=like))


def load_critic(path: str, config: ModelConfig, world: World, weights: Weights = ALL_TRAINED) -> Critic:
    """The backbone of a Hugging Face folder with a scalar head, sharded.

    A causal LM gets a head of zeros, so every value starts at 0. A reward model (a *ForSequenceClassification with one
    label) brings its head, `score.weight`."""
    hf_config = read_config(path, config, "--critic-model", CAUSAL_LM + SCORED)
    critic = Critic(_build(AutoModel, path, hf_config, config, world, weights))
    critic.folder = path
    stored = open_folder(path)
    tensors = weights_of(critic.backbone, path, stored) | new_adapters(critic.backbone)
    if is_scored(hf_config) and "score.weight" not in stored:   # classifiers of encoders have other heads
        raise ValueError(f"{path} lacks the head score.weight: choose another model than a {hf_config.model_type}")
    hidden_size = hf_config.get_text_config().hidden_size
    first_head = stored.get("score.weight", torch.zeros(1, hidden_size))
    if first_head.shape != critic.head.weight.shape:
        raise ValueError(
            f"{path}: score.weight is {list(first_head.shape)}, must be "
            f"{list(critic.head.weight.shape)} by config.json"
        )
    shard(critic, critic.backbone, config, world, weights.frozen)
    _read_in_turns(path, critic.backbone, tensors, world)
    head = critic.head.weight.detach().to_local()
    head.copy_(torch.linspace(-1, 1, hidden_size))              # with a head of zeros, no value could differ
    check_packing(critic, critic, path, hf_config, config.compute_dtype, world.device)
    head.copy_(first_head[shard_slice(critic.head.weight)])
    return critic


def _build(auto_class: type, path: str, hf_config: PretrainedConfig, config: ModelConfig, world: World,
           weights: Weights) -> PreTrainedModel:
    """The model, without memory for its weights."""
    attention = choose_attention(world.device, hf_config, config)
    use_kernel(world.device, hf_config, config)
    if hf_config.model_type in FAMILIES:
        attention = {"text_config": attention, "vision_config": "sdpa"}
    dtype = weights.dtype
    if weights.frozen or weights.lora.rank:
        dtype = weights.frozen_dtype
        if dtype is None:
            dtype = getattr(torch, config.compute_dtype)
    with torch.device("meta"), explain_failure(path, hf_config):
        model = auto_class.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    # routers' biases choose experts, in bfloat16 perhaps others: from_pretrained, too, keeps them in float32
    for module in model.modules():
        bias = module._buffers.get("e_score_correction_bias")
        if bias is not None:
            module._buffers["e_score_correction_bias"] = bias.float()
    with explain_failure(path, hf_config):
        has_states = separate_states(model.get_decoder())
    if has_states and config.sequence_parallel > 1:
        raise ValueError(f"{path} has layers with a state: omit --policy.sequence-parallel")
    if config.freeze_vision:
        model.base_model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
    if uses_liger(world.device, hf_config, config):
        logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # else it tells of kernels for other accelerators
        apply_liger_kernel(model, LIGER_KERNELS)
    if config.router_float32:
        use_float32_routers(model)
    if weights.lora.rank and add_adapters(model, weights.lora, weights.dtype):
        print_on_main(world, f"lora   the experts of {path} have no adapters: --lora.targets all-linear experts gives "
                             f"them some")
    return model


def uses_liger(device: torch.device, hf_config: PretrainedConfig, config: ModelConfig) -> bool:
    """Whether the model is trained with Liger's fused norms, rotary embeddings and gated MLPs (arXiv 2410.10989). They
    keep less for the backward pass: for a norm only its input, for an MLP no activated gate. Log-probs still come from
    common/kernels, whose logits are float32 and whose entropy has a gradient."""
    if not config.liger or device.type != "cuda":
        return False
    if hf_config.model_type not in LIGER_FAMILIES:
        return False
    return importlib.util.find_spec("liger_kernel") is not None


@torch.no_grad()
def _read_in_turns(path: str, module: nn.Module, tensors: dict[str, Tensor | Experts], world: World) -> None:
    """Fill the shards of a module by name, on READERS ranks of a machine at a time. Prints seconds and bytes."""
    own_turn = int(os.environ["LOCAL_RANK"]) // READERS
    last_turn = int(all_max([own_turn]))
    bytes_read = 0
    for turn in range(last_turn + 1):
        if turn == own_turn:
            bytes_read = _fill(module, tensors)
        dist.barrier()
    most_read = float(all_max([bytes_read])) / GIB
    by_all = float(all_sum([bytes_read])) / GIB
    print_on_main(world, f"read   {path}: {by_all:.3f} GiB, at most {most_read:.3f} a rank")


def _fill(module: nn.Module, tensors: dict[str, Tensor | Experts]) -> int:
    """Read this rank's shards; how many bytes."""
    bytes_read = 0
    for name, target in kept_tensors(module).items():
        own_part = local(target)
        if own_part.numel():
            part = tensors[name][shard_slice(target)]
            bytes_read += part.nbytes
            own_part.copy_(part)
    return bytes_read
