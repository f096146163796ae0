"""FSDP2: how the weights of a model are divided over the ranks."""

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from common.model.policy import Critic, ModelConfig, PackedModel
from common.parallel.ranks import World


def shard_dim(shape: torch.Size, num_shards: int) -> int:
    """The dimension along which a weight is divided: the first. The experts of a mixture are one tensor of three; where
    their number does not divide by the shards, some ranks would have one more, or none: another that divides."""
    if len(shape) == 3 and shape[0] % num_shards:
        return next((dim for dim in (1, 2) if shape[dim] % num_shards == 0), 0)
    return 0


def shard_slice(weight: Tensor) -> tuple[slice, ...]:
    """The part of a weight that this rank holds: equal chunks along one dimension, the last ones shorter or empty."""
    index = [slice(0, size) for size in weight.shape]
    if isinstance(weight, DTensor):
        dim, mesh = weight.placements[-1].dim, weight.device_mesh
        chunk = -(-weight.shape[dim] // mesh.size(-1))
        start = min(chunk * mesh.get_local_rank(-1), weight.shape[dim])
        index[dim] = slice(start, start + weight.to_local().shape[dim])
    return tuple(index)


def shard(model: PackedModel, transformer: PreTrainedModel, config: ModelConfig, world: World, frozen: bool) -> None:
    """Apply FSDP2 to each block of `transformer` and an untied embedding, then to the whole, and allocate the shards.

    A critic's head computes in float32."""
    model.train()
    model.share_prompt, model.sequence_group = config.share_prompt, world.sequence
    is_large = transformer.num_parameters() > 1e9
    if config.gradient_checkpointing or (config.gradient_checkpointing is None and is_large):
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        model.requires_grad_(False)
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32)
    num_shards = world.mesh.size(-1)
    is_divided = num_shards > 1
    for module in transformer.modules():
        if type(module).__name__ in transformer._no_split_modules:
            fully_shard(module, mesh=world.mesh, mp_policy=precision, reshard_after_forward=is_divided,
                        shard_placement_fn=lambda weight: Shard(shard_dim(weight.shape, num_shards)))
    embedding, head = transformer.get_input_embeddings(), transformer.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:     # else one group would hold both, whole and in float32
        fully_shard(embedding, mesh=world.mesh, mp_policy=precision, reshard_after_forward=is_divided)
    if isinstance(model, Critic):
        fully_shard(model.head, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh, mp_policy=precision)
    model.to_empty(device=world.device)
