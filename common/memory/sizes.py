"""The sizes of a model that determine its memory: its shards, its moments, and what a pass needs beside them."""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from common.flags.model import LoRAConfig, ModelConfig
from common.forward import states
from common.forward.attention import head_dims
from common.forward.blocks import blocks_of
from common.forward.states import layers_with_state, state_shape
from common.forward.vision import auto_class
from common.kernels import tile_shape
from common.model.flops import count_layers, experts_per_token
from common.model.loading import GIB, NO_ADAPTERS, uses_liger
from common.model.lora import adapters_of, add_adapters
from common.model.optimizers import WEIGHTS, block_size, uses_muon
from common.model.sharding import PART, recomputed_share, shard_dim

IN_PASSES = ("unsharded weights", "activations", "log-prob tiles")
"""The parts that exist only during a forward and backward pass."""


CHUNK_PADDING = 1.1
"""Places of chunks for each token: half a chunk is empty at the end of a sequence (of 320 tokens, for this number)."""


class Moment(NamedTuple):
    """Bytes at one moment of a pass, in the order of IN_PASSES."""

    weights: float
    activations: float = 0
    tiles: float = 0


class Model:
    """The sizes of a model that determine its memory, and the memory of a pass beside shards and gradients."""

    def __init__(self, hf_config: PretrainedConfig, config: ModelConfig, ranks: int, family: type | None = None,
                 lora: LoRAConfig = NO_ADAPTERS, kind: str = "adamw"):
        """`family`: AutoModel for a backbone with a scalar head. `lora`: the adapters, if only they are
        trained. `kind`: of the optimizer."""
        if family is None:
            family = auto_class(hf_config)
        with torch.device("meta"):
            model = family.from_config(hf_config, trust_remote_code=config.trust_remote_code)
        if lora.rank:
            add_adapters(model, lora)
        self.config = hf_config.get_text_config()
        self.ranks = ranks
        self.itemsize = getattr(torch, config.compute_dtype).itemsize
        self.is_fused = uses_liger(torch.device("cuda"), hf_config, config)
        entries = self.config.to_dict()
        self.experts = experts_per_token(hf_config)
        self.router_probs = 0                           # bytes of the probabilities that the routers' loss keeps
        if config.router_aux_coef:
            self.router_probs = 4 * 2 * (entries.get("num_experts") or entries.get("num_local_experts") or 0)
        self.heads = self.config.num_attention_heads
        self.kv_heads = entries.get("num_key_value_heads") or self.heads
        columns = count_layers(hf_config).weights / self.config.num_hidden_layers / self.config.hidden_size
        self.mlp_width = (columns - (self.heads + self.kv_heads) * sum(head_dims(self.config))) / 3
        self._count_weights(model, config.expert_parallel)
        with_state = layers_with_state(model.get_decoder())
        self.kept_by_states = [kept_by_state(layer, self.itemsize) for layer in with_state]
        """Bytes a token of each layer with a state, where a block has it in the place of attention."""
        shards = shard_sizes(model, config, ranks)
        self._count_shards(shards, kind)
        self.gradient_bytes = self.trained_bytes
        if config.replicas > 1:                         # float32 until the copies sum them
            self.gradient_bytes = 4 * self.trained_shard
        self._count_moments(model, shards, kind, config.expert_parallel)
        self.recompute(recomputed_share(config, self.all))
        self.has_states = any(isinstance(module, nn.Conv1d) for module in model.modules())
        """Layers that carry a state over tokens, whose activations are counted as those of attention and MLPs."""

    def recompute(self, share: float) -> None:
        """Count with this share of the blocks recomputed in the backward pass."""
        self.num_recomputed = round(share * self.num_blocks)

    def _count_weights(self, model: PreTrainedModel, expert_parallel: int) -> None:
        """Numbers of weights: of all, and of what FSDP2 gathers together: a block (of its experts those that a
        rank has), an untied embedding, head and rest."""
        blocks = blocks_of(model, model)
        self.largest = max(blocks, key=count)
        self.num_blocks = len(blocks)
        self.all = count(model)
        self.block = 0
        self.merged = self.config.hidden_size**2                        # of a matrix with its adapter
        for p in self.largest.parameters():
            self.block += p.numel() // expert_parallel if p.ndim == 3 else p.numel()
        for name in adapters_of(self.largest):
            weight = self.largest.get_parameter(name)
            if weight.ndim == 3:                                        # of all experts that a rank has
                self.merged = max(self.merged, weight.numel() // expert_parallel)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        self.embedding = 0 if is_tied else count(embedding)
        self.head = self.all - sum(map(count, blocks)) - self.embedding

    def _count_shards(self, shards: dict[nn.Parameter, int], kind: str) -> None:
        self.trained_shard = 0
        self.frozen_shard = 0                                           # below adapters
        for p, size in shards.items():
            if p.requires_grad:
                self.trained_shard += size
            else:
                self.frozen_shard += size
        self.trained_bytes = WEIGHTS[kind].itemsize * self.trained_shard        # gradients as many
        self.frozen_gb = self.itemsize * sum(shards.values()) / GIB
        """Bytes of the shard of a model that is not trained."""

    def _count_moments(self, model: nn.Module, shards: dict[nn.Parameter, int], kind: str,
                       expert_parallel: int) -> None:
        """Bytes of the optimizer: of its moments, and what a step takes beside them at most."""
        self.moment_bytes: float = 0
        self.step_bytes = 0
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            size = block_size(kind, p.shape, [shard_dim(p.shape, self.ranks)])
            bytes_of_weight = 2 * WEIGHTS[kind].itemsize                # of two moments
            if size > 1:                                    # a byte for each code, and 8 for each block of them
                bytes_of_weight = 2 + 8 / size
            if uses_muon(kind, name, p.shape):
                bytes_of_weight -= 4                                    # it has one moment
                # bfloat16 copies of a matrix, and of the experts that it may be gathered with
                copies = 12 * p.shape[-2:].numel() + 4 * p.numel() // expert_parallel
                self.step_bytes = max(self.step_bytes, copies)
            self.moment_bytes += bytes_of_weight * shards[p]

    def kept_beside_blocks(self) -> list[float]:
        """Bytes a token that each layer with a state keeps beyond what `kept_by_block` counts for attention."""
        num_heads = self.heads + self.kv_heads
        attention = self.itemsize * num_heads * sum(head_dims(self.config)) + 4 * self.heads
        return [max(0, kept - attention) for kept in self.kept_by_states]

    def kept_by_block(self, keys: float) -> float:
        """Bytes a token that autograd keeps of a block with attention. `keys`: rows of keys and values gathered for
        each token."""
        size = self.itemsize
        hidden = self.config.hidden_size
        width, value_width = head_dims(self.config)
        widths = {"q_norm": self.heads * width, "k_norm": self.kv_heads * width}
        normalised = 0                                                          # numbers of all norms together
        for name, _ in self.largest.named_parameters():
            if name.endswith("norm.weight"):
                norm = name.split(".")[-2]
                normalised += widths.get(norm, hidden)
        kept = size * normalised                                                # the input
        if not self.is_fused:
            kept += 4 * normalised                                              # in float32, and normalised
        num_heads = self.heads + (1 + keys) * self.kv_heads                     # of q and output, of k and v
        kept += size * (hidden + num_heads * (width + value_width)) + 4 * self.heads
        num_inner = 3 if self.is_fused else 4                                   # gate(s), up, product
        kept += size * (hidden + num_inner * self.mlp_width)
        return kept + self.experts * (2 * size * hidden + 32)       # inputs and outputs of experts, their order

    def tiles(self, tokens: int) -> float:
        """Most bytes that `linear_logp` holds at a time of the logits, their gradient and the head's
        gradient."""
        hidden = self.config.hidden_size
        vocab = self.config.vocab_size
        states = torch.empty(tokens, hidden, device="meta")
        head = torch.empty(vocab, hidden, device="meta")
        rows, columns = tile_shape(states, head)
        columns = min(columns, vocab)
        logits = 4 * rows * columns
        gradient = 4 * hidden * columns
        return max(2 * logits, 1.5 * logits + gradient)

    def update(self, tokens: int, keys: float) -> dict[str, float]:
        """Bytes of a forward and backward pass at its fullest moment, by part."""
        size = self.itemsize
        hidden = size * self.config.hidden_size                         # bytes of a hidden state
        kept = self.kept_by_block(keys)
        beside = sorted(self.kept_beside_blocks())
        num_kept = self.num_blocks - self.num_recomputed
        of_blocks = self.num_recomputed * hidden + num_kept * kept + sum(beside[-num_kept:] if num_kept else ())
        of_blocks += self.num_blocks * self.router_probs
        in_block = of_blocks + 2 * hidden + max(2 * size * self.mlp_width, 3 * hidden * self.experts)
        if self.num_recomputed:
            in_block += max(beside, default=0)
        # the first blocks are recomputed: then what the last ones kept is free, if there are any
        if not num_kept:
            in_block += kept
        # one rank has all weights, others those of the head, of a block and of the next one on their way
        weights = self.all if self.ranks == 1 else self.head + 2 * self.block
        # head and embedding arrive, and the buffers they come in
        arriving = 2 * size * (self.head + max(self.block, self.embedding))
        head_grads = 0                                      # of the large matrices, if they are trained
        block_grads = self.merged
        last_grads = 0
        if not self.frozen_shard:
            head_grads = self.head
            block_grads = self.head + self.block
            last_grads = 3 * self.head + self.block
            # at last gradients are summed, a part in float32
            arriving += 4 * (self.embedding / self.ranks + min(self.embedding, PART))
        moments = [
            Moment(size * (weights + head_grads), tokens * (of_blocks + 7 * hidden), self.tiles(tokens)),
            Moment(size * (weights + self.block + block_grads), tokens * in_block),
            Moment(arriving, 3 * tokens * hidden),
            Moment(size * last_grads, 3 * tokens * hidden),
            Moment(self.step_bytes),
        ]
        fullest = max(moments, key=sum)
        return dict(zip(IN_PASSES, fullest))


def kept_by_state(layer: nn.Module, itemsize: int) -> float:
    """Bytes a token that autograd keeps of a layer with a state, its input aside. tests/model/test_memory_plan.py
    compares them with what torch keeps; those of the kernels are what they save by their source."""
    (convolution,) = (part for part in layer.children() if isinstance(part, nn.Conv1d))
    channels = convolution.out_channels
    shape = state_shape(layer)
    if shape is None:                                           # gates, the convolution's input, and its output
        return itemsize * 8 * channels
    heads, rows, columns = shape
    outputs = heads * columns
    if "ssm_state_size" in vars(layer):
        kept = itemsize * (4 * channels + 3 * outputs) + 4 * 5 * outputs            # gated norm in float32
        if states.is_installed(states.MAMBA2_SCAN):
            return kept + itemsize * (channels + outputs)
        in_chunks = heads * (4 * rows + 2 * columns + 3 * states.CHUNK + 2 * rows * columns / states.CHUNK)
        return kept + 4 * CHUNK_PADDING * in_chunks
    kept = itemsize * (2 * channels + 5 * outputs) + 4 * 3 * outputs                # gated norm in float32
    if states.is_installed(states.DELTA_RULE):
        return kept + itemsize * heads * (2 * rows + states.CHUNK)
    in_chunks = heads * (11 * rows + 2 * columns + 6 * states.CHUNK + 2.2 * rows * columns / states.CHUNK)
    return kept + 4 * 2 * heads * rows + 4 * CHUNK_PADDING * in_chunks


def shard_sizes(model: nn.Module, config: ModelConfig, ranks: int) -> dict[nn.Parameter, int]:
    """Parameter -> its numbers on the rank that has most of them. Raises ValueError for experts that the ranks
    cannot divide."""
    sizes = {}
    for p in model.parameters():
        largest = p.chunk(ranks, shard_dim(p.shape, ranks))[0]
        sizes[p] = largest.numel()
    if config.expert_parallel == 1:
        return sizes
    n = ranks * config.replicas // config.expert_parallel               # ranks that have the same experts
    for name, p in model.named_parameters():
        if ".experts." in name and p.shape[shard_dim(p.shape, n, first=1)] % n:
            raise ValueError(f"--policy.expert-parallel {config.expert_parallel}: {n} ranks would divide each "
                             f"expert, but of {name} no side ({[*p.shape[1:]]}) is a multiple of {n}: choose "
                             f"another value or number of GPUs")
    for p in sizes:
        if p.ndim == 3:                                                 # experts are sharded over all ranks
            sizes[p] = p.numel() // (ranks * config.replicas)
    return sizes


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
