"""How much GPU memory the trainer takes at most: arithmetic from the model's config and the flags, without weights.

It counts, on the fullest rank with gradients present: FSDP2's shards and one gathered block; the activations that
autograd keeps of blocks with gated MLPs or experts; the tiles of `linear_logp`. tests/cuda/test_memory_plan.py compares
it with a simulation of the real step; tools/plan.py prints it.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

from common.forward.router_replay import routers_of
from common.forward.vision import auto_class
from common.kernels import CHUNK_BYTES, tile_shape
from common.memory.offload import OffloadConfig
from common.model.flops import active_weights, check_context, head_dims
from common.model.loading import GIB, NO_ADAPTERS, read_critic, read_teacher, uses_liger
from common.model.lora import LoRAConfig, add_adapters
from common.model.optimizers import WEIGHTS, block_size, uses_muon
from common.model.policy import ModelConfig
from common.model.reward_model import check_reward_model
from common.model.sharding import PART, shard_dim
from common.parallel.ranks import all_max, num_shards

RESERVED_GB = 4.0
"""GPU memory for the CUDA context, NCCL and the unsharded tensors of the weight sync."""
GRAPHS_GB = 1.5
"""GPU memory for the engine's CUDA graphs."""
MAX_TOKENS = 32768
"""The largest token budget that is chosen: a micro-batch of this size keeps a GPU busy."""
TOKENS_ON_CPU = 16384
IN_PASSES = "unsharded weights", "activations", "log-prob tiles"
"""The parts that exist only during a forward and backward pass."""
FREE_BLOCKS = {"gradients": 0.5, **dict.fromkeys(IN_PASSES, 0.15)}
"""Bytes that torch's allocator holds between the blocks in use, for each byte of a part (as simulated: gradients arrive
one by one between temporary tensors)."""


class Model:
    """The sizes of a model that determine its memory, and the memory of a pass beside shards and gradients."""

    def __init__(self, hf_config: PretrainedConfig, config: ModelConfig, ranks: int, family: type | None = None,
                 lora: LoRAConfig = NO_ADAPTERS, kind: str = "adamw"):
        """`family`: AutoModel for a backbone with a scalar head. `lora`: the adapters, if only they are trained.
        `kind`: of the optimizer."""
        with torch.device("meta"):
            model = (family or auto_class(hf_config)).from_config(hf_config, trust_remote_code=config.trust_remote_code)
        if lora.rank:
            add_adapters(model, lora)
        self.config, self.ranks = hf_config.get_text_config(), ranks
        self.itemsize = getattr(torch, config.compute_dtype).itemsize
        self.is_fused = uses_liger(torch.device("cuda"), hf_config, config)
        self.experts = self.config.to_dict().get("num_experts_per_tok") or 0    # that a token runs through
        self.heads = self.config.num_attention_heads
        self.kv_heads = self.config.to_dict().get("num_key_value_heads") or self.heads
        columns = active_weights(hf_config) / self.config.num_hidden_layers / self.config.hidden_size
        self.mlp_width = (columns - (self.heads + self.kv_heads) * sum(head_dims(self.config))) / 3
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        self.largest, self.num_blocks = max(blocks, key=count), len(blocks)
        # numbers of weights: of all, and of what FSDP2 gathers together: a block (of its experts those that a rank
        # has), an untied embedding, head and rest
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.all = count(model)
        self.block = sum(p.numel() // (config.expert_parallel if p.ndim == 3 else 1) for p in self.largest.parameters())
        self.embedding = 0 if head is not None and head.weight is embedding.weight else count(embedding)
        self.head = self.all - sum(map(count, blocks)) - self.embedding
        shards = {p: p.chunk(ranks, shard_dim(p.shape, ranks))[0].numel() for p in model.parameters()}  # the largest
        if config.expert_parallel > 1:                                  # experts are sharded over all ranks
            n = ranks * config.replicas // config.expert_parallel       # that have the same experts
            for name, p in model.named_parameters():
                if ".experts." in name and p.shape[shard_dim(p.shape, n, first=1)] % n:
                    raise ValueError(f"--policy.expert-parallel {config.expert_parallel}: {n} ranks would divide each "
                                     f"expert, but of {name} no side ({[*p.shape[1:]]}) is a multiple of {n}: choose "
                                     f"another value or number of GPUs")
            shards |= {p: p.numel() // (ranks * config.replicas) for p in shards if p.ndim == 3}
        self.trained_shard = sum(numbers for p, numbers in shards.items() if p.requires_grad)
        self.frozen_shard = sum(shards.values()) - self.trained_shard           # below adapters
        self.trained_bytes = WEIGHTS[kind].itemsize * self.trained_shard        # gradients as many
        blocks = {p: block_size(kind, p.shape, [shard_dim(p.shape, ranks)]) for p in shards if p.requires_grad}
        alone = 2 * WEIGHTS[kind].itemsize                                      # of a weight without codes
        self.moment_bytes = sum((2 + 8 / n if n > 1 else alone) * shards[p] for p, n in blocks.items())
        muon = [p for name, p in model.named_parameters() if p.requires_grad and uses_muon(kind, name, p.shape)]
        self.moment_bytes -= 4 * sum(shards[p] for p in muon)                   # they have one moment
        # bfloat16 copies of a matrix, and of the experts that it may be gathered with
        sizes = [12 * p.shape[-2:].numel() + 4 * p.numel() // config.expert_parallel for p in muon]
        self.step_bytes = max(sizes, default=0)
        self.frozen_gb = self.itemsize * sum(shards.values()) / GIB
        """Bytes of the shard of a model that is not trained."""
        self.recomputes = self.all > 1e9 if config.gradient_checkpointing is None else config.gradient_checkpointing

    def kept_by_block(self, keys: float) -> float:
        """Bytes a token that autograd keeps of a block. `keys`: rows of keys and values gathered for each token."""
        size, hidden = self.itemsize, self.config.hidden_size
        width, value_width = head_dims(self.config)
        widths = {"q_norm": self.heads * width, "k_norm": self.kv_heads * width}
        norms = [name.split(".")[-2] for name, _ in self.largest.named_parameters() if name.endswith("norm.weight")]
        of_norm = size if self.is_fused else 4 + size                           # the input; in float32, and normalised
        kept = of_norm * sum(widths.get(norm, hidden) for norm in norms)
        num_heads = self.heads + (1 + keys) * self.kv_heads                     # of q and output, of k and v
        kept += size * (hidden + num_heads * (width + value_width)) + 4 * self.heads
        kept += size * (hidden + (3 if self.is_fused else 4) * self.mlp_width)  # input; gate(s), up, product
        return kept + self.experts * (2 * size * hidden + 32)           # inputs and outputs of experts, their order

    def tiles(self, tokens: int) -> float:
        """Most bytes that `linear_logp` holds at a time of the logits, their gradient and the head's gradient."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        rows, columns = tile_shape(*(torch.empty(n, hidden, device="meta") for n in (tokens, vocab)))
        logits, gradient = 4 * rows * min(columns, vocab), 4 * hidden * min(columns, vocab)
        return max(2 * logits, 1.5 * logits + gradient)

    def update(self, tokens: int, keys: float) -> dict[str, float]:
        """Bytes of a forward and backward pass at its fullest moment, by part."""
        size, hidden, kept = self.itemsize, self.itemsize * self.config.hidden_size, self.kept_by_block(keys)
        of_blocks = self.num_blocks * (hidden if self.recomputes else kept)
        in_block = of_blocks + 2 * hidden + max(2 * size * self.mlp_width, 3 * hidden * self.experts)
        in_block += kept if self.recomputes else 0
        # one rank has all weights, others those of the head, of a block and of the next one on their way
        weights = self.all if self.ranks == 1 else self.head + 2 * self.block
        grads = 0 if self.frozen_shard else 1                           # of the large matrices
        in_block_grads = self.head + self.block if grads else self.config.hidden_size**2    # of a merged matrix
        # head and embedding arrive, and the buffers they come in; at last gradients are summed, a part in float32
        arriving = 2 * size * (self.head + max(self.block, self.embedding))
        arriving += grads * 4 * (self.embedding / self.ranks + min(self.embedding, PART))
        moments = [                                                     # unsharded weights, activations, tiles
            (size * (weights + grads * self.head), tokens * (of_blocks + 7 * hidden), self.tiles(tokens)),
            (size * (weights + self.block + in_block_grads), tokens * in_block, 0),
            (arriving, 3 * tokens * hidden, 0),
            (size * grads * (3 * self.head + self.block), 3 * tokens * hidden, 0),
            (self.step_bytes, 0, 0),
        ]
        return dict(zip(IN_PASSES, max(moments, key=sum)))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class MemoryPlan:
    """The trainer's memory on the fullest GPU, in GiB."""

    def __init__(self, args: Any, hf_config: PretrainedConfig, ranks: int, longest: int,
                 frozen: str | tuple = "", critic: str = ""):
        """`args`: a script's flags; `ranks`: of the run; `longest`: tokens of the longest sequence; `frozen`, `critic`:
        folders or hub names of a frozen policy (a tuple: of teachers, whose heads and hidden states the update compares
        with) and of a critic."""
        policy, self.longest = args.policy, longest
        ranks = num_shards(ranks, policy.replicas, policy.sequence_parallel, policy.expert_parallel)
        self.smallest = -(-longest // policy.sequence_parallel)
        """The smallest budget: this rank's share of the longest sequence."""
        self.policy = Model(hf_config, policy, ranks, lora=args.lora, kind=args.optim.kind)
        if policy.router_replay != "none":
            routers_of(self.policy.largest)  # refuses what has none
        self.trained = [self.policy]
        if critic:
            config = read_critic(critic, policy, hf_config)
            check_context(config, longest, f"--critic-model {critic}")
            self.trained.append(Model(config, policy, ranks, AutoModel, args.lora, args.critic_optim.kind))
        # with sequence parallel, the keys of all ranks, and of them what is seen
        self.keys = 2.0 * policy.sequence_parallel if policy.sequence_parallel > 1 else 0.0
        self.reference_gb = self.reward_model_gb = 0.0
        self.teachers: list[Model] = []
        self.reserved_gb, self.offload = RESERVED_GB, OffloadConfig()
        if "rollout" not in vars(args):
            return
        self.offload = args.offload
        for path in filter(None, (frozen,) if isinstance(frozen, str) else frozen):
            is_own = path == args.model
            config = hf_config if is_own else read_teacher(path, args.model, policy)
            check_context(config, longest, f"--model {path}" if is_own else f"--teacher {path}")
            model = self.policy if is_own else Model(config, policy, ranks)
            self.reference_gb += 0 if is_own and args.lora.rank else model.frozen_gb    # 0: it is below the adapters
            self.teachers += [] if isinstance(frozen, str) else [model]
        if args.reward_model.path:
            config = check_reward_model(args.reward_model, policy, longest)
            self.reward_model_gb = Model(config, policy, ranks, AutoModel).frozen_gb
        self.reserved_gb += 0 if args.rollout.enforce_eager else GRAPHS_GB
        if args.rollout.engine == "hf":                                 # its weights stay on the GPU
            self.reserved_gb += self.policy.itemsize * self.policy.all / GIB
        self.keys += longest / args.rollout.max_response_length if policy.share_prompt else 0.0

    def resident(self) -> dict[str, float]:
        """Memory that stays between the phases, by part. Offloaded moments are there in the optimizer step alone."""
        weights = sum(model.trained_bytes + model.itemsize * model.frozen_shard for model in self.trained) / GIB
        moments = 0 if self.offload.optimizer else sum(model.moment_bytes for model in self.trained) / GIB
        return {"weights": weights, "moments": moments, "frozen models": self.reference_gb + self.reward_model_gb}

    def beside_engine(self) -> dict[str, float]:
        """Memory on the GPU while the engine is awake."""
        return self.resident() | ({"weights": 0, "frozen models": self.reward_model_gb} if self.offload.params else {})

    def update(self, tokens: int) -> dict[str, float]:
        """Memory of the update with micro-batches of this many tokens, by part: the fullest phase without the
        engine."""
        passes = [{"gradients": model.trained_bytes} | model.update(tokens, self.keys) for model in self.trained]
        if self.offload.optimizer:
            names = "gradients", "moments", *IN_PASSES
            passes += [dict(zip(names, (x.trained_bytes, x.moment_bytes, x.step_bytes, 0, 0))) for x in self.trained]
        fullest = max(passes, key=lambda parts: sum(parts.values()))
        found = self.resident() | {part: x / GIB for part, x in fullest.items()}
        for teacher in self.teachers:
            vectors = teacher.config.vocab_size + tokens                # of its whole head, and its hidden states
            found["frozen models"] += teacher.itemsize * teacher.config.hidden_size * vectors / GIB
        if self.teachers:                                               # the head's gradient in float32, and chunks
            head = self.policy.config.vocab_size * self.policy.config.hidden_size
            found["log-prob tiles"] += (4 * head + 8 * CHUNK_BYTES["cuda"]) / GIB
        return found

    def update_gb(self, tokens: int) -> float:
        """All memory of the update on a GPU, including free memory between the blocks in use."""
        return self.reserved_gb + sum(x * (1 + FREE_BLOCKS.get(part, 0.0)) for part, x in self.update(tokens).items())

    def largest_budget(self, gpu_gb: float) -> int:
        """The largest number of tokens, up to MAX_TOKENS, that fits; 0: not even the longest sequence fits."""
        sizes = [self.smallest, *range(1024 * -(-self.smallest // 1024), MAX_TOKENS + 1, 1024)]
        return max((tokens for tokens in sizes if self.update_gb(tokens) <= gpu_gb), default=0)

    def choose_budget(self, requested: int, device: torch.device) -> tuple[int, str]:
        """Return the token budget of a micro-batch and its reason; if `requested` is 0, the largest that fits."""
        if device.type == "cpu":
            tokens = requested or TOKENS_ON_CPU
            return tokens, f"micro-batches of {tokens:,} tokens (nothing is calculated for CPUs)"
        gpu_gb = -all_max([-torch.cuda.mem_get_info()[1]]).item() / GIB         # all ranks need the same budget
        tokens = requested or self.largest_budget(gpu_gb)
        if not tokens:
            raise ValueError(f"the longest sequence, {self.longest} tokens, needs "
                             f"{self.update_gb(self.smallest):.1f} GiB, by calculation, and a GPU has {gpu_gb:.1f}: "
                             f"use more GPUs, --policy.gradient-checkpointing True, --policy.sequence-parallel or a "
                             f"smaller --rollout.max-response-length (sft.py and dpo.py: --data.max-length); "
                             f"python -m tools.plan says what fits")
        reason = "--max-tokens-per-gpu" if requested else "the most that fit"
        stays = sum(self.beside_engine().values())
        return tokens, (f"micro-batches of {tokens:,} tokens ({reason}); calculated: the update takes "
                        f"{self.update_gb(tokens):.1f} of {gpu_gb:.1f} GiB, and {stays:.1f} stay between updates")
