"""GPU memory that the trainer keeps while the engine is awake."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.model.offload import OffloadConfig
from common.model.policy import ModelConfig


def resident_gb(hf_config: PretrainedConfig, model_config: ModelConfig, offload: OffloadConfig, ranks: int,
                trained: int, frozen: int) -> float:
    """GiB that the trainer's models keep on each of `ranks` GPUs while the engine is awake and gradients are freed.

    `trained` models of this size have float32 weights and AdamW's two moments, `frozen` ones bfloat16 weights. Unless
    the weights are offloaded, the probe is scored beside the engine, with unsharded bfloat16 weights: on one rank all
    of them, on several those of embedding and head, twice while they are gathered."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=model_config.trust_remote_code)
    weights = model.num_parameters()
    outside = sum(p.numel() for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight})
    sharded, probe = 0, 0                                                                       # bytes
    if not offload.optimizer:
        sharded += weights * 8 * trained
    if not offload.params:
        sharded += weights * (4 * trained + 2 * frozen)
        probe = 2 * weights if ranks == 1 else 2 * 2 * outside
    return (sharded / ranks + probe) / 2**30
