"""FLOPs of a transformer on packed sequences: a product of [m, k] and [k, n] is 2mkn.

This counts the matrices and convolutions of all layers (of a mixture the active and the shared experts), the output
head, and QK^T and PV over the pairs of tokens inside the causal mask and the layer's sliding window. It does not count
norms, rotary embeddings, softmax, and the products with the state of a recurrent layer (2 to 5% of its matrices').
"""

from collections.abc import Iterable

import numpy as np
import torch
from transformers import PretrainedConfig

from common.batch import Batch
from common.model.vision import FAMILIES, auto_class
from common.parallel.ranks import all_sum

KNOWN: dict[str, int] = {}
"""The result of `active_weights` for each config."""


def context_length(hf_config: PretrainedConfig) -> float:
    """Most tokens of a sequence; infinite for families without such a limit (ALiBi, states alone), whatever the window
    of their layers. LongRoPE (Phi-4-mini, MiniCPM3) has other frequencies beyond the model's original context, and
    takes them for a whole packed row if one sequence in it is longer: there the original is the limit."""
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return text.max_position_embeddings if hasattr(text, "max_position_embeddings") else np.inf


def check_context(hf_config: PretrainedConfig, longest: int, model: str) -> None:
    """Raise ValueError if a sequence of the run can be longer than the context of one of its models: what such a model
    says beyond it is no log-prob or value that it has learned. `model`: its flag and path."""
    if longest > (limit := context_length(hf_config)):
        raise ValueError(f"{model} has a context of {limit} tokens, and a sequence of this run (prompt and response) "
                         f"may have {longest}: choose another model, or lower --rollout.max-response-length or "
                         f"--data.max-prompt-length")


def sequence_cost(lengths: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Forward FLOPs of each sequence by itself, float64 [S], with the output head on every token.

    `config` is a Hugging Face config; in a nested config the text part counts. Raises KeyError for a kind of layer that
    it cannot count (chunked attention)."""
    lengths, text = np.asarray(lengths, dtype=np.float64), config.get_text_config()
    return _layers(np.zeros_like(lengths), lengths, config) + 2 * lengths * text.hidden_size * text.vocab_size


def microbatch_flops(batch: Batch, config: PretrainedConfig, share_prompt: bool) -> float:
    """Forward FLOPs of a micro-batch as the policy runs it.

    With `share_prompt` a prompt runs once, and the responses after it attend to it. The output head runs only where the
    policy sampled a token."""
    tower = _tower(batch, config) if config.model_type in FAMILIES and batch.row is not None else 0.0
    text = config.get_text_config()
    lengths = lengths_k = np.array(batch.host_lengths, dtype=np.float64)
    if share_prompt:
        shared = batch.shared_prompts
        lengths, lengths_k = (x.cpu().diff().double().numpy() for x in (shared.cu_seqlens, shared.cu_seqlens_k))
    head = 2 * len(batch.sampled) * text.hidden_size * text.vocab_size
    return float(tower + _layers(lengths_k - lengths, lengths, config).sum() + head)


def update_flops(microbatches: Iterable[Batch], config: PretrainedConfig, share_prompt: bool, lora_rank: int) -> float:
    """FLOPs of forward and backward (3x forward; with adapters 2x, as no weight has a gradient) of all ranks'
    micro-batches, for MFU: recomputation by checkpointing is not counted. All ranks call this together."""
    forward = all_sum([sum(microbatch_flops(batch, config, share_prompt) for batch in microbatches)]).item()
    return forward * (2 if lora_rank else 3)


def _tower(batch: Batch, config: PretrainedConfig) -> float:
    """FLOPs of a vision tower's blocks, which see the images of each different prompt once. Qwen2.5-VL's attention
    within windows of 64 patches is not counted: 1% of the matrices of its layers."""
    rows, first = np.unique(batch.row.cpu().numpy(), return_index=True)
    prompts = batch.select(first[rows != -1])
    kinds, counts = ((prompts.tokens == config.image_token_id) & ~prompts.mask).unique_consecutive(return_counts=True)
    vision = config.vision_config.to_dict()
    layers, hidden = vision.get("depth") or vision["num_hidden_layers"], vision["hidden_size"]
    full = vision.get("fullatt_block_indexes")                  # of Qwen2.5-VL, whose MLPs have three matrices
    mlp = (6 if full else 4) * hidden * vision["intermediate_size"]
    per_token = (vision.get("spatial_merge_size") or 1 / config.downsample_ratio) ** 2
    patches = per_token * counts[kinds].double()                                                # [images]
    tile = per_token * config.to_dict().get("image_seq_length", np.inf)                         # InternVL cuts images
    linear = layers * (8 * hidden**2 + mlp) * patches.sum()
    return float(linear + 4 * hidden * len(full or range(layers)) * (patches * patches.clamp(max=tile)).sum())


def _layers(before: np.ndarray, new: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """FLOPs of all layers for `new` [S] tokens, each after `before` [S] keys that came earlier: [S]."""
    text = config.get_text_config()
    fields = text.to_dict()
    spans = {"full_attention": np.inf, "sliding_attention": fields.get("sliding_window") or np.inf}
    spans |= dict.fromkeys(("linear_attention", "conv", "mlp", "moe"), 0)           # they see no keys
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    kinds = kinds or ["sliding_attention"] * text.num_hidden_layers
    pairs = sum(_pairs(before + new, spans[kind]) - _pairs(before, spans[kind]) for kind in kinds)
    return 2 * new * active_weights(config) + 2 * text.num_attention_heads * sum(head_dims(text)) * pairs


def active_weights(config: PretrainedConfig) -> int:
    """How many weights of the layers multiply a token: of a mixture's experts those that it runs through."""
    key = config.to_json_string(use_diff=False)
    if key not in KNOWN:
        is_trusted = type(config).__module__.startswith("transformers_modules.")    # its code came with the model
        with torch.device("meta"):                                                  # of a copy: from_config changes it
            model = auto_class(config).from_config(config.from_dict(config.to_dict()), trust_remote_code=is_trusted)
        weights = [p for module in model.get_decoder().modules() if not isinstance(module, torch.nn.Embedding)
                   for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and "bias" not in name]
        # experts are one tensor [experts, rows, columns], and a convolution of each channel is [channels, 1, width]
        KNOWN[key] = sum(p.numel() if p.ndim == 2 or p.shape[1] == 1 else
                         p[0].numel() * config.get_text_config().num_experts_per_tok for p in weights)
    return KNOWN[key]


def _pairs(length: np.ndarray, window: float) -> np.ndarray:
    """Pairs of a query and a key at most `window - 1` tokens before it, in sequences of these lengths: [S]."""
    near = np.minimum(length, window)
    return near * (near + 1) / 2 + (length - near) * near


def head_dims(config: PretrainedConfig) -> tuple[int, int]:
    """The width of a head's queries and keys, and of its values."""
    fields = config.to_dict()
    if "kv_lora_rank" in fields:                                                    # latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = fields.get("head_dim") or config.hidden_size // config.num_attention_heads
    return width, width
