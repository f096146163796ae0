"""Log-probs, entropies and divergences from hidden states, without ever holding the logits [N, V]."""

from common.kernels.divergence import CHUNK_BYTES, linear_divergence
from common.kernels.logp import CPU_TILE, CUDA_TILE_BYTES, Head, linear_logp, tile_shape

__all__ = ["CHUNK_BYTES", "CPU_TILE", "CUDA_TILE_BYTES", "Head", "linear_divergence", "linear_logp", "tile_shape"]
