"""Tests of several ranks."""

from transformers.distributed import tensor_parallel

DIVIDES_EXPERTS = hasattr(tensor_parallel, "apply_expert_parallelism")
"""Since transformers 5.19."""
