"""FSDP2: how the weights of a model are divided over the ranks."""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from common.flags.model import ModelConfig
from common.forward.blocks import blocks_of
from common.forward.states import layers_with_state
from common.model.policy import Critic, PackedModel, saved_buffers
from common.parallel.ranks import World, reduce_scatter_single

PART = 2**26
"""Bytes of gradients that are float32 at a time while ranks sum them: 256 MiB."""


def shard_dim(shape: torch.Size, num_shards: int, first: int = 0) -> int:
    """The dimension along which a weight is divided: the first. The experts of a mixture are one tensor of three
    dimensions; if their number is not a multiple of the shards, another dimension that is a multiple is divided."""
    if len(shape) == 3:
        for dim in range(first, 3):
            if shape[dim] % num_shards == 0:
                return dim
    return first


def shard_slice(weight: Tensor) -> tuple[slice, ...]:
    """The part of a weight that this rank holds."""
    lengths = weight.shape
    starts = [0] * weight.dim()
    if isinstance(weight, DTensor):
        lengths, starts = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a weight: `shard_slice` of it."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def num_changes(model: nn.Module) -> int:
    """Grows with each operation that writes into a weight of this rank, as autograd counts them: in the sharded tensor
    if the operation was on it, in this rank's part if it was on that."""
    return sum(parameter._version + local(parameter)._version for parameter in model.parameters())


def stores(number: int, tensor: Tensor) -> bool:
    """Whether this rank stores its part of the tensor with this number in a checkpoint. Of ranks that hold the same one
    (--policy.replicas) one does, and the next tensor another one, so that they share the work. What is no DTensor is
    small: each rank stores it, and has it in its own file."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() and number % mesh.size(dim) != mesh.get_local_rank(dim):
            return False
    return True


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in lists that one operation can process: each list is sharded over one mesh."""
    found: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh, []).append(parameter)
    return list(found.values())


def check_all_reduced(model: nn.Module) -> None:
    """Raises RuntimeError if copies of the model (--policy.replicas) have not summed all gradients. FSDP2 keeps what
    waits for that sum."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and group._partial_reduce_output is not None:
            raise RuntimeError(
                f"--policy.replicas: the copies of the model have not summed the gradient of {name or 'its head'}, "
                f"because the last backward pass before this optimizer step was not that of the last micro-batch: "
                f"run the micro-batches of a mini-batch in their order, or set microbatch.ends_minibatch = True of each"
            )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down to this norm, over all ranks (0: no scaling). Returns the norm before."""
    parts = by_mesh(p for p in parameters if p.grad is not None)
    wide = torch.promote_types(parts[0][0].grad.dtype, torch.float32)           # of bfloat16 gradients, float32
    norms = []
    for part in parts:
        gradients = [p.grad for p in part]
        each = torch._foreach_norm(gradients, 2, wide)
        norms.append(torch.linalg.vector_norm(torch.stack(each)).full_tensor())
    norm = reduce(torch.hypot, norms)
    if max_norm > 0:
        for part in parts:
            nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return norm


def product_with_moment(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> float | None:
    """The scalar product of gradient and AdamW's first moment, over all ranks. None before the first step, and for
    optimizers that do not keep the moment as numbers (--optim.kind adamw does)."""
    total = 0.0
    for part in by_mesh(p for p in parameters if p.grad is not None):
        products = []
        for parameter in part:
            moment = optimizer.state.get(parameter, {}).get("exp_avg")
            if moment is None or moment.shape != parameter.shape or not moment.is_floating_point():
                return None
            flat = [tensor.to_local().flatten().float() for tensor in (parameter.grad, moment)]
            products.append(torch.dot(*flat))
        here = torch.stack(products).double().sum()
        placements = [Replicate() if placement.is_replicate() else Partial() for placement in part[0].placements]
        whole = DTensor.from_local(here, part[0].device_mesh, placements, run_check=False).full_tensor()
        total += float(whole)
    return total


def shard_experts(transformer: PreTrainedModel, world: World, precision: MixedPrecisionPolicy) -> None:
    """Expert parallel: consecutive ranks hold different experts, and tokens travel to them and back, by transformers'
    functions. Ranks with the same experts shard them along another dimension."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism  # since transformers 5.19

    shards = world.experts["shard"]
    experts = world.experts["expert"]

    def average(grad: Tensor) -> None:
        """An expert's gradient is of the tokens of all ranks, and FSDP2 divides by those of `shards` alone."""
        grad.div_(experts.size())
        if grad.is_cuda:  # FSDP2 frees it when this stream has yet to add it up, and takes its memory in another one
            grad.record_stream(torch.cuda.current_stream())

    plan = dict(transformer.ep_plan)
    for name, style in transformer.ep_plan.items():
        if style == "grouped_gemm":                                             # of the experts' tensors
            plan[f"{name}_lora_A"] = style
            plan[f"{name}_lora_B"] = style
    apply_expert_parallelism(transformer, experts, None, plan)  # ValueError where experts do not divide
    without_cast = replace(precision, cast_forward_inputs=False)

    def placement(weight: nn.Parameter) -> Shard:
        return Shard(shard_dim(weight.shape, shards.size(), first=1))

    for module in transformer.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            fully_shard(module, mesh=shards, mp_policy=without_cast, shard_placement_fn=placement)
            module.set_all_reduce_hook(average)


class ReduceInParts:
    """FSDP2's `ReduceScatter` for bfloat16 gradients that are summed in float32. It converts a part of them to float32
    at a time, where FSDP2 would copy all (4.6 GiB for a head of 152,064 x 8,192)."""

    def __init__(self, precision: MixedPrecisionPolicy):
        self.dtypes = cycle((precision.param_dtype, precision.reduce_dtype))

    def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for the gradients [ranks * n], then for this rank's sums [n]."""
        return torch.empty(size, dtype=next(self.dtypes), device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp):
        length = PART // group.size()
        outputs = output_tensor.split(length)
        inputs = input_tensor.view(group.size(), -1).split(length, dim=1)
        for sums, part in zip(outputs, inputs):
            reduce_scatter_single(sums, part.to(sums.dtype).flatten(), op, group)


def recomputed_share(config: ModelConfig, num_weights: int) -> float:
    """Share of a model's blocks that are recomputed in the backward pass, where no plan of memory says so."""
    if config.gradient_checkpointing is None:
        return float(num_weights > 1e9)
    return float(config.gradient_checkpointing)


def shard(model: PackedModel, transformer: PreTrainedModel, config: ModelConfig, world: World, frozen: bool) -> None:
    """Apply FSDP2 to each block of `transformer` and an untied embedding, then to the whole, and allocate the shards.
    Buffers that are in no file are filled.

    A critic's head computes in float32. Nothing is random: with dropout the ratio would differ from 1 on policy."""
    model.eval()
    model.share_prompt = config.share_prompt
    model.has_states = bool(layers_with_state(transformer.get_decoder()))
    model.sequence_group = world.sequence
    if frozen:
        model.requires_grad_(False)
    compute_dtype = getattr(torch, config.compute_dtype)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if world.experts is not None:
        can_divide = "ep_dispatch_experts" in getattr(transformer, "ep_plan", {}).values()
        if can_divide:
            shard_experts(transformer, world, precision)
        elif not frozen:                                        # a teacher or reward model may have no experts
            raise ValueError(
                f"--policy.expert-parallel {config.expert_parallel}: transformers cannot divide the experts "
                f"of a {transformer.config.model_type}, if it has any, or is below 5.19: set it to 1"
            )
    num_shards = world.mesh.size(-1)
    if num_shards > 1:
        model.gathers_in = compute_dtype
    of_parts = {
        "mesh": world.mesh,
        "mp_policy": precision,
        "reshard_after_forward": num_shards > 1,
    }

    def placement(weight: nn.Parameter) -> Shard:
        return Shard(shard_dim(weight.shape, num_shards))

    blocks = blocks_of(transformer, transformer)
    share = recomputed_share(config, transformer.num_parameters())
    model.num_blocks = len(blocks)
    model.num_recomputed = round(share * len(blocks))
    for number, module in enumerate(blocks):
        # the first ones: when the backward pass comes to them, what the others kept is free
        if number < model.num_recomputed:
            checkpoint(module, preserve_rng_state=False)
        fully_shard(module, **of_parts, shard_placement_fn=placement)
    embedding = transformer.get_input_embeddings()
    head = transformer.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:     # else one group would hold both, whole and in float32
        fully_shard(embedding, **of_parts)
    if isinstance(model, Critic):
        fully_shard(model.head, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh, mp_policy=precision)
    for module in (model, *transformer.modules()):
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ReduceInParts(precision))
    model.to_empty(device=world.device)
    for tensor in kept_tensors(transformer).values():       # transformers fills what is not marked (rotary frequencies)
        tensor._is_hf_initialized = True
    transformer.initialize_weights()


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers that a model's files hold, tied ones once."""
    return dict(module.named_parameters()) | saved_buffers(module)
