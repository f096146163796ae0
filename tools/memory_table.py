"""GiB on each GPU of 80 GB for Qwen2.5's shapes, calculated and not measured: python -m tools.memory_table"""

from transformers import Qwen2Config

from common.engine.vllm import GRAPHS_GB, RESERVED_GB
from common.model.offload import OffloadConfig, resident_gb
from common.model.policy import ModelConfig

GPU_GB = 79.0  # what CUDA reports for a GPU of 80 GB
SHAPES = {  # weights in billions; hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head
    "0.5B": (0.494, 896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1.544, 1536, 8960, 28, 12, 2, 151936, True),
    "3B": (3.086, 2048, 11008, 36, 16, 2, 151936, True),
    "7B": (7.616, 3584, 18944, 28, 28, 4, 152064, False),
    "14B": (14.770, 5120, 13824, 48, 40, 8, 152064, False),
    "32B": (32.764, 5120, 27648, 64, 40, 8, 152064, False),
}
OFFLOADS = {"sampling": OffloadConfig(), "sampling, `--offload.optimizer`": OffloadConfig(optimizer=True)}

if __name__ == "__main__":
    print("| model | engine | | 1 GPU | 8 GPUs | 16 GPUs | 64 GPUs |\n" + "| --- " * 7 + "|")
    for name, (billions, hidden, intermediate, layers, heads, kv_heads, vocabulary, tied) in SHAPES.items():
        config = Qwen2Config(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=tied,
        )
        weights_gb = billions * 1e9 * 2 / 2**30
        cache_gb = 256 * 2048 * layers * kv_heads * (hidden // heads) * 2 * 2 / 2**30      # keys and values, bfloat16
        update = [f"{8 * weights_gb / ranks:.1f}" for ranks in (1, 8, 16, 64)]
        print(f"| {name} | {weights_gb:.1f} + {cache_gb:.0f} | update |", " | ".join(update), "|")
        for row, offload in OFFLOADS.items():
            kept = [resident_gb(config, ModelConfig(), offload, ranks, trained=1, frozen=0) for ranks in (1, 8, 16, 64)]
            left = [max(0, min(GPU_GB - x - RESERVED_GB - GRAPHS_GB, 0.92 * GPU_GB)) for x in kept]
            print(f"| | | {row} |", " | ".join(f"{x:.1f}, {y:.0f}" for x, y in zip(kept, left)), "|")
