"""GPU memory that the trainer keeps while the engine is awake."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.model.offload import OffloadConfig


def resident_gb(hf_config: PretrainedConfig, config: OffloadConfig, ranks: int, trained: int, frozen: int) -> float:
    """GiB on each GPU that stay there while the engine is awake: `trained` models of this size with float32 weights and
    AdamW's two moments, `frozen` ones in bfloat16, over `ranks` shards. Gradients are gone by then. Unless the weights
    leave, the probe is scored beside the engine, with unsharded bfloat16 weights: on one rank all of them, on several
    those of embedding and head, twice while they are gathered."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    weights = sum(p.numel() for p in model.parameters())
    outside = sum(p.numel() for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight})
    kept = weights * (0 if config.optimizer else 8 * trained)
    if not config.params:
        kept += weights * (4 * trained + 2 * frozen)
    probe = 0 if config.params else 2 * weights if ranks == 1 else 2 * 2 * outside
    return (kept / ranks + probe) / 2**30
