"""Shapes of public models, as their config.json has them."""

from typing import Any


def dense(family: str, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int,
          is_tied: bool = False, **others) -> dict[str, Any]:
    return {
        "model_type": family.lower(), "architectures": [f"{family}ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **others,
    }


def mixture(hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int, experts: int, active: int,
            head_dim: int = 128) -> dict[str, Any]:
    """A Qwen3-MoE whose experts are `width` wide."""
    shape = dense("Qwen3Moe", hidden, 3 * width, layers, heads, kv_heads, vocab, head_dim=head_dim)
    return shape | {
        "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": active,
        "moe_intermediate_size": width, "norm_topk_prob": True,
    }


MODELS = {
    "Qwen3-0.6B": dense("Qwen3", 1024, 3072, 28, 16, 8, 151936, is_tied=True, head_dim=128),
    "Qwen2.5-1.5B": dense("Qwen2", 1536, 8960, 28, 12, 2, 151936, is_tied=True),
    "Qwen3-4B": dense("Qwen3", 2560, 9728, 36, 32, 8, 151936, is_tied=True, head_dim=128),
    "Qwen2.5-7B": dense("Qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Llama-3.1-8B": dense("Llama", 4096, 14336, 32, 32, 8, 128256),
    "Qwen2.5-14B": dense("Qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": dense("Qwen2", 5120, 27648, 64, 40, 8, 152064),
    "Llama-3.1-70B": dense("Llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen3-30B-A3B": mixture(2048, 768, 48, 32, 4, 151936, experts=128, active=8),
}
