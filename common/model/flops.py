"""FLOPs of a transformer on packed sequences: a product of [m, k] and [k, n] is 2mkn.

This counts the matrices and convolutions of all layers (of a mixture the active and the shared experts), the output
head, QK^T and PV over the pairs of tokens inside the causal mask and the layer's sliding window, and the products with
the state of a recurrent layer, token by token. It does not count norms, rotary embeddings and softmax.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from common.batch import Batch
from common.forward.attention import head_dims
from common.forward.states import layers_with_state, state_flops
from common.forward.vision import FAMILIES, auto_class, placeholders
from common.parallel.ranks import all_sum


class Counts(NamedTuple):
    """What the layers of a model have."""

    weights: int  # that multiply a token: of a mixture's experts those that it runs through
    state_flops: int  # of a token, by its products with states
    has_states: bool  # convolutions, delta nets or state-space layers


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""The names that configs have for it."""
KNOWN: dict[str, Counts] = {}
"""The result of `count_layers` for each config."""


def context_length(hf_config: PretrainedConfig) -> float:
    """Most tokens of a sequence; infinite for families without such a limit (ALiBi, states alone), whatever the window
    of their layers. LongRoPE (Phi-4-mini, MiniCPM3) has other frequencies beyond the model's original context, and
    takes them for a whole packed row if one sequence in it is longer: there the original is the limit."""
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    if hasattr(text, "max_position_embeddings"):
        return text.max_position_embeddings
    return np.inf


def check_context(hf_config: PretrainedConfig, longest: int, model: str) -> None:
    """Raise ValueError if a sequence of the run can be longer than the context of one of its models: what such a model
    says beyond it is no log-prob or value that it has learned. `model`: its flag and path."""
    limit = context_length(hf_config)
    if longest > limit:
        raise ValueError(
            f"{model} has a context of {limit} tokens, and a sequence of this run (prompt and response) "
            f"may have {longest}: choose another model, or lower --rollout.max-response-length or "
            f"--data.max-prompt-length"
        )


def sequence_cost(lengths: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Forward FLOPs of each sequence by itself, float64 [S], with the output head on every token.

    `config` is a Hugging Face config; in a nested config the text part counts. Raises ValueError for a kind of layer
    that it cannot count (chunked attention)."""
    lengths = np.asarray(lengths, dtype=np.float64)
    text = config.get_text_config()
    head = 2 * lengths * text.hidden_size * text.vocab_size
    return _layers(np.zeros_like(lengths), lengths, config) + head


def microbatch_flops(batch: Batch, config: PretrainedConfig, share_prompt: bool) -> float:
    """Forward FLOPs of a micro-batch as the policy runs it.

    With `share_prompt` what several sequences begin with runs once, and what follows attends to it. The output head
    runs only where the policy sampled a token."""
    tower = 0.0
    if config.model_type in FAMILIES and batch.image_row is not None:
        tower = _tower(batch, config)
    shared = batch.shared_prefixes if share_prompt else None
    if shared is not None:
        num_queries = _lengths(shared.cu_seqlens)
        num_keys = _lengths(shared.cu_seqlens_k)
    else:
        num_queries = np.array(batch.host_lengths, dtype=np.float64)
        num_keys = num_queries
    layers = _layers(num_keys - num_queries, num_queries, config).sum()
    text = config.get_text_config()
    head = 2 * len(batch.sampled) * text.hidden_size * text.vocab_size
    return float(tower + layers + head)


def update_flops(microbatches: Iterable[Batch], config: PretrainedConfig, share_prompt: bool, lora_rank: int) -> float:
    """FLOPs of forward and backward (3x forward; with adapters 2x, as no weight has a gradient) of all ranks'
    micro-batches, for MFU: recomputation by checkpointing is not counted. All ranks call this together."""
    own = sum(microbatch_flops(batch, config, share_prompt) for batch in microbatches)
    forward = all_sum([own]).item()
    if lora_rank:
        return 2 * forward
    return 3 * forward


def _lengths(cu_seqlens: Tensor) -> np.ndarray:
    """The lengths of the segments with these ends, float64."""
    return cu_seqlens.cpu().diff().double().numpy()


def _tower(batch: Batch, config: PretrainedConfig) -> float:
    """FLOPs of a vision tower's blocks, which see the images of each different prompt once. Qwen2.5-VL's attention
    within windows of 64 patches is not counted: 1% of the matrices of its layers. A video of Qwen2.5-VL counts as one
    image, though its frames do not see each other."""
    rows, first = np.unique(batch.image_row.cpu().numpy(), return_index=True)
    prompts = batch.select(first[rows != -1])
    of_pictures = torch.tensor(placeholders(config), device=prompts.tokens.device)
    in_image = torch.isin(prompts.tokens, of_pictures) & ~prompts.mask                          # [T]
    is_image, num_tokens = in_image.unique_consecutive(return_counts=True)                   # of runs of tokens
    vision = config.vision_config.to_dict()
    merge_size = vision.get("spatial_merge_size") or 1 / config.downsample_ratio
    patches_per_token = merge_size**2
    patches = patches_per_token * num_tokens[is_image].double()                                 # [images]
    tile = patches_per_token * config.to_dict().get("image_seq_length", np.inf)           # InternVL cuts images

    hidden = vision["hidden_size"]
    num_layers = vision.get("depth") or vision["num_hidden_layers"]
    num_global = num_layers                                     # layers in which a patch sees its whole image
    num_mlp_matrices = 2
    if vision.get("fullatt_block_indexes"):                     # Qwen2.5-VL
        num_global = len(vision["fullatt_block_indexes"])
        num_mlp_matrices = 3
    per_patch = 8 * hidden**2 + 2 * num_mlp_matrices * hidden * vision["intermediate_size"]
    linear = num_layers * per_patch * patches.sum()
    attention = 4 * hidden * num_global * (patches * patches.clamp(max=tile)).sum()
    return float(linear + attention)


def _layers(before: np.ndarray, new: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """FLOPs of all layers for `new` [S] tokens, each after `before` [S] keys that came earlier: [S]."""
    text = config.get_text_config()
    fields = text.to_dict()
    windows = {
        "full_attention": np.inf,
        "sliding_attention": fields.get("sliding_window") or np.inf,
        # the others see no keys
        "linear_attention": 0,
        "conv": 0,
        "mlp": 0,
        "moe": 0,
    }
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if not kinds:
        kinds = ["sliding_attention"] * text.num_hidden_layers
    pairs = np.zeros_like(new)
    for kind in kinds:
        if kind not in windows:                         # such as Zamba2's, which share weights: FSDP2 shards them once
            raise ValueError(f"its layers of the kind {kind!r} can be neither counted nor sharded")
        window = windows[kind]
        pairs += _pairs(before + new, window) - _pairs(before, window)
    counts = count_layers(config)
    matrices = (2 * counts.weights + counts.state_flops) * new
    attention = 2 * text.num_attention_heads * sum(head_dims(text)) * pairs
    return matrices + attention


def count_layers(config: PretrainedConfig) -> Counts:
    """The weights and states of the layers of the model with this config."""
    key = config.to_json_string(use_diff=False)
    if key not in KNOWN:
        KNOWN[key] = _count_layers(config)
    return KNOWN[key]


def _count_layers(config: PretrainedConfig) -> Counts:
    is_trusted = type(config).__module__.startswith("transformers_modules.")      # its code came with the model
    own_config = config.from_dict(config.to_dict())                                 # from_config changes it
    with torch.device("meta"):
        model = auto_class(config).from_config(own_config, trust_remote_code=is_trusted)
    count = 0
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or "bias" in name:
                continue
            is_channelwise = weight.shape[1] == 1               # a convolution [channels, 1, width]
            if weight.ndim == 2 or is_channelwise:
                count += weight.numel()
            else:                                               # experts [experts, rows, columns], or diagonal blocks
                count += weight[0].numel() * (experts_per_token(config) or len(weight))
    with_state = layers_with_state(model.get_decoder())
    return Counts(count, sum(map(state_flops, with_state)), bool(with_state))


def experts_per_token(config: PretrainedConfig) -> int:
    """How many experts of a layer a token runs through; 0: the model is no mixture."""
    fields = config.get_text_config().to_dict()
    found = [fields[name] for name in EXPERTS_PER_TOKEN if fields.get(name)]
    if not found:
        return 0
    return int(np.max(found[0]))  # some have a number a layer


def _pairs(length: np.ndarray, window: float) -> np.ndarray:
    """Pairs of a query and a key at most `window - 1` tokens before it, in sequences of these lengths: [S]."""
    near = np.minimum(length, window)
    return near * (near + 1) / 2 + (length - near) * near
