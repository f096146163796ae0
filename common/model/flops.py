"""FLOPs of a transformer on packed sequences: a product of [m, k] and [k, n] is 2mkn.

This counts attention's projections, a gated MLP of three matrices (of a mixture the active and the shared experts), the
output head, and QK^T and PV over the pairs of tokens inside the causal mask and the layer's sliding window. It does not
count norms, rotary embeddings, softmax and routers.
"""

from collections.abc import Iterable

import numpy as np
from transformers import PretrainedConfig

from common.batch import Batch
from common.model.vision import FAMILIES
from common.parallel.ranks import all_sum


def sequence_cost(lengths: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Forward FLOPs of each sequence by itself, float64 [S], with the output head on every token.

    `config` is a Hugging Face config; in a nested config the text part counts. Raises ValueError for attention that it
    cannot count (latent, linear, chunked)."""
    config = config.get_text_config()
    lengths = np.asarray(lengths, dtype=np.float64)
    head = 2 * lengths * config.hidden_size * config.vocab_size
    return _layers(np.zeros_like(lengths), lengths, config) + head


def microbatch_flops(batch: Batch, config: PretrainedConfig, share_prompt: bool) -> float:
    """Forward FLOPs of a micro-batch as the policy runs it.

    With `share_prompt` a prompt runs once, and the responses after it attend to it. The output head runs only where the
    policy sampled a token."""
    tower = _tower(batch, config) if config.model_type in FAMILIES and batch.row is not None else 0.0
    config = config.get_text_config()
    lengths = lengths_k = np.array(batch.host_lengths, dtype=np.float64)
    if share_prompt:
        shared = batch.shared_prompts
        lengths, lengths_k = (x.cpu().diff().double().numpy() for x in (shared.cu_seqlens, shared.cu_seqlens_k))
    head = 2 * len(batch.sampled) * config.hidden_size * config.vocab_size
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
    hidden, heads, fields = config.hidden_size, config.num_attention_heads, config.to_dict()
    kv_heads = fields.get("num_key_value_heads") or heads
    projections = 2 * hidden * head_dim(config) * (2 * heads + 2 * kv_heads)                    # q and o, k and v
    linear = config.num_hidden_layers * projections + 6 * hidden * sum(mlp_widths(config))      # a token
    spans = {"full_attention": np.inf, "sliding_attention": fields.get("sliding_window") or np.inf}
    kinds = fields.get("layer_types") or ["sliding_attention"] * config.num_hidden_layers
    unknown = {"latent_attention"} if "kv_lora_rank" in fields else set(kinds) - set(spans)
    if unknown:
        raise ValueError(f"sequence_cost counts full and sliding attention; {config.model_type} has {sorted(unknown)}")
    pairs = sum(_pairs(before + new, spans[kind]) - _pairs(before, spans[kind]) for kind in kinds)
    return new * linear + 4 * heads * head_dim(config) * pairs


def mlp_widths(config: PretrainedConfig) -> list[int]:
    """The intermediate width that a token runs through in each layer; in a mixture the sum over all its experts."""
    fields = config.to_dict()           # families differ in these fields: absent or None, the model has no such thing
    widths = [config.intermediate_size] * config.num_hidden_layers
    if "num_experts_per_tok" in fields:
        expert = fields.get("moe_intermediate_size") or config.intermediate_size
        shared = fields.get("shared_expert_intermediate_size") or fields.get("n_shared_experts", 0) * expert
        dense = {*(fields.get("mlp_only_layers") or ()), *range(fields.get("first_k_dense_replace", 0))}
        for layer in range(config.num_hidden_layers):
            if layer not in dense and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0:
                widths[layer] = config.num_experts_per_tok * expert + shared
    return widths


def _pairs(length: np.ndarray, window: float) -> np.ndarray:
    """Pairs of a query and a key at most `window - 1` tokens before it, in sequences of these lengths: [S]."""
    near = np.minimum(length, window)
    return near * (near + 1) / 2 + (length - near) * near


def head_dim(config: PretrainedConfig) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
