"""Liger's fused kernels for norms, rotary embeddings and gated MLPs of the trained model (arXiv 2410.10989).

They compute what transformers' modules compute, in fewer passes over memory, and keep less for the backward pass: of a
norm its input, of an MLP no activated gate. tests/model/test_liger.py proves values and gradients in Triton's
interpreter. The log-probs stay those of common/kernels.py, whose logits are float32 and whose entropy has a gradient.
"""

import importlib.util

import torch
from transformers import PretrainedConfig

from common.model.policy import ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those that the test proves. Experts of mixtures keep transformers' grouped products."""
KERNELS = {"fused_linear_cross_entropy": False}
"""For `apply_liger_kernel`. It changes the rotary embedding for all models of the family in this process."""


def uses_liger(device: torch.device, hf_config: PretrainedConfig, config: ModelConfig) -> bool:
    """Whether the model is trained with Liger's kernels."""
    is_installed = importlib.util.find_spec("liger_kernel") is not None
    return config.liger and is_installed and device.type == "cuda" and hf_config.model_type in FAMILIES
