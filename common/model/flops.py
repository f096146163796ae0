"""FLOPs of a transformer on packed sequences."""

import numpy as np


def sequence_cost(lengths: np.ndarray, config) -> np.ndarray:
    """Forward FLOPs of each sequence, float64 [S], from a Hugging Face config (its text part if nested).

    A product of [m, k] and [k, n] is 2mkn. Counted: attention's projections, a gated MLP of three matrices (of a
    mixture the active and the shared experts), the output head on every token, QK^T and PV over the pairs inside the
    causal mask and the layer's sliding window. Not counted: norms, rotary, softmax, routers. Raises ValueError for
    attention it cannot count (latent, linear, chunked)."""
    config = config.get_text_config()
    hidden, heads, num_layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    own = config.to_dict()      # families differ in the keys read from it; absent or None: the model has no such thing
    plain = "sliding_attention" if own.get("sliding_window") else "full_attention"
    kinds = own.get("layer_types") or [plain] * num_layers
    unknown = {"latent_attention"} if "kv_lora_rank" in own else set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"sequence_cost counts full and sliding attention; {config.model_type} has {sorted(unknown)}")

    mlp_widths = [config.intermediate_size] * num_layers
    if "num_experts_per_tok" in own:
        expert = own.get("moe_intermediate_size") or config.intermediate_size
        shared = own.get("shared_expert_intermediate_size") or own.get("n_shared_experts", 0) * expert
        dense = {*(own.get("mlp_only_layers") or ()), *range(own.get("first_k_dense_replace", 0))}
        for layer in range(num_layers):
            if layer not in dense and (layer + 1) % own.get("decoder_sparse_step", 1) == 0:
                mlp_widths[layer] = config.num_experts_per_tok * expert + shared
    head_dim = own.get("head_dim") or hidden // heads
    kv_heads = own.get("num_key_value_heads") or heads
    projections = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads)                            # q and o, k and v
    per_token = num_layers * projections + 6 * hidden * sum(mlp_widths) + 2 * hidden * config.vocab_size
    n = np.asarray(lengths, dtype=np.float64)
    near = np.minimum(n, own.get("sliding_window") or np.inf)
    pairs = {"full_attention": n * (n + 1) / 2, "sliding_attention": near * (near + 1) / 2 + (n - near) * near}
    return n * per_token + 4 * heads * head_dim * sum(kinds.count(kind) * pairs[kind] for kind in pairs)


def train_flops(lengths: np.ndarray, config) -> float:
    """Forward and backward (3x forward) of these sequences, for MFU: what checkpointing recomputes is not counted."""
    return 3 * float(sequence_cost(lengths, config).sum())
