"""How much GPU memory the trainer takes: arithmetic from the model's config and the flags. No weight is made.

Counted are what FSDP2 keeps in shards and gathers for a block at a time, what autograd keeps of blocks with gated MLPs
or experts, and the tiles of `linear_logp`, on the fullest rank, when the gradients of earlier micro-batches are there.
tests/cuda/test_memory_plan.py holds it to a simulation of the real step; tools/plan.py prints it.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from common.engine.vllm import GRAPHS_GB, RESERVED_GB
from common.kernels import tile_shape
from common.model.flops import head_dim, mlp_widths
from common.model.liger import uses_liger
from common.model.loading import CAUSAL_LM, GIB, NO_ADAPTERS, SCORED, read_config, read_teacher
from common.model.lora import LoRAConfig, add_adapters
from common.model.offload import OffloadConfig
from common.model.policy import ModelConfig
from common.model.reward_model import check_reward_model
from common.model.sharding import shard_dim
from common.parallel.ranks import all_max, num_shards

MAX_TOKENS = 32768
"""The largest budget that is chosen: a micro-batch of this size keeps a GPU busy."""
TOKENS_ON_CPU = 16384
IN_PASSES = "unsharded weights", "activations", "log-prob tiles"
"""The parts that come and go in a forward and backward pass."""
FREE_BLOCKS = {"gradients": 0.5, **dict.fromkeys(IN_PASSES, 0.15)}
"""Bytes that torch's allocator holds between the blocks in use, for each of a part's bytes (as simulated: gradients
arrive one by one between what comes and goes)."""


class Model:
    """The sizes of a model that memory follows from, and what a pass takes beside shards and gradients."""

    def __init__(self, hf_config: PretrainedConfig, config: ModelConfig, ranks: int, is_critic: bool = False,
                 lora: LoRAConfig = NO_ADAPTERS):
        """`is_critic`: a backbone with a scalar head, else a causal LM. `lora`: the adapters that alone are trained."""
        family = AutoModel if is_critic else AutoModelForCausalLM
        with torch.device("meta"):
            model = family.from_config(hf_config, trust_remote_code=config.trust_remote_code)
        if lora.rank:
            add_adapters(model, lora)
        self.config, self.ranks, self.is_critic = hf_config.get_text_config(), ranks, is_critic
        self.itemsize = getattr(torch, config.compute_dtype).itemsize
        self.is_fused = uses_liger(torch.device("cuda"), hf_config, config)
        self.mlp_width = max(mlp_widths(self.config))
        self.experts = self.config.to_dict().get("num_experts_per_tok") or 0    # that a token runs through
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        self.largest, self.num_blocks = max(blocks, key=count), len(blocks)
        # numbers of weights: of all, and of what FSDP2 gathers together: a block, an untied embedding, head and rest
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        divided = sum(p.numel() for p in self.largest.parameters() if p.ndim == 3)      # a rank gathers its own experts
        self.all = count(model)
        self.block = count(self.largest) - divided + divided // config.expert_parallel
        self.embedding = 0 if head is not None and head.weight is embedding.weight else count(embedding)
        self.head = self.all - sum(map(count, blocks)) - self.embedding
        # one dimension of each is cut into equal chunks, the last ones shorter
        cut = {p: p.shape[shard_dim(p.shape, ranks)] for p in model.parameters()}
        rows = {p: -(-size // ranks) * (p.numel() // size) for p, size in cut.items()}
        if config.expert_parallel > 1:                                  # experts are sharded over all ranks
            rows |= {p: p.numel() // (ranks * config.replicas) for p in rows if p.ndim == 3}
        self.trained_shard = sum(numbers for p, numbers in rows.items() if p.requires_grad)
        self.frozen_shard = sum(rows.values()) - self.trained_shard
        # with adapters, the largest matrix is made in float32 twice, and in the compute dtype
        self.merging = 0
        if lora.rank:
            self.merging = (8 + self.itemsize) * max(p.numel() for p in self.largest.parameters() if p.ndim == 2)
        self.recomputes = self.all > 1e9 if config.gradient_checkpointing is None else config.gradient_checkpointing

    def kept_by_block(self, keys: float) -> float:
        """Bytes a token that autograd keeps of a block. `keys`: rows of keys and values gathered for each token."""
        size, hidden, heads = self.itemsize, self.config.hidden_size, self.config.num_attention_heads
        queries = heads * head_dim(self.config)
        key_values = (self.config.to_dict().get("num_key_value_heads") or heads) * head_dim(self.config)
        widths = {"q_norm": queries, "k_norm": key_values}
        norms = [name.split(".")[-2] for name, _ in self.largest.named_parameters() if name.endswith("norm.weight")]
        of_norm = size if self.is_fused else 4 + size                           # the input; in float32, and normalised
        kept = of_norm * sum(widths.get(norm, hidden) for norm in norms)
        kept += size * (hidden + 2 * queries + (2 + 2 * keys) * key_values) + 4 * heads     # input, q, k, v, output
        kept += size * (hidden + (3 if self.is_fused else 4) * self.mlp_width)  # input; gate(s), up, product
        return kept + self.experts * (2 * size * hidden + 32)           # inputs and outputs of experts, their order

    def tiles(self, tokens: int) -> tuple[float, float]:
        """Bytes that the head makes in its forward and in its backward pass (`linear_logp`)."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        if self.is_critic:
            return 0, 4 * tokens * hidden
        shape = tile_shape(torch.empty(tokens, hidden, device="meta"), torch.empty(vocab, hidden, device="meta"))
        rows, columns = shape[0], min(shape[1], vocab)
        logits, weights = 4 * rows * columns, 4 * columns * hidden
        return 2 * logits, 1.5 * logits + weights + 4 * tokens * hidden

    def update(self, tokens: int, keys: float) -> dict[str, float]:
        """Bytes of a forward and backward pass at its fullest moment, by part."""
        size, width, block, head = self.itemsize, self.config.hidden_size, self.block, self.head
        kept, hidden = self.kept_by_block(keys), size * width
        of_blocks = tokens * self.num_blocks * (hidden if self.recomputes else kept)
        of_head = of_blocks + tokens * (4 * width + 3 * hidden)         # the last norm, the head's input
        added = 2 * hidden + max(2 * size * self.mlp_width, 3 * hidden * self.experts)
        of_block = of_blocks + tokens * (added + (kept if self.recomputes else -kept))
        # one rank has all weights; others a block's, in a backward pass those of the next one on their way, and at the
        # end the gradients of head and embedding, of which one is float32 for its sum over the ranks
        one, two = (self.all - head, self.all - head) if self.ranks == 1 else (block, 2 * block)
        at_end = size * (head + 2 * (self.embedding or head)) + 4 * max(block, self.embedding)
        tiles, backward_tiles = self.tiles(tokens)
        grads = 0 if self.merging else 1                                # of the large matrices
        moments = [                                                     # unsharded weights, activations, tiles
            (size * (head + one) + self.merging, of_head, tiles),
            (size * (head + one + grads * head), of_head, backward_tiles),
            (size * (head + two + grads * (head + block / 3)) + grads * 4 * block + self.merging, of_block, 0),
            (grads * at_end, 2 * tokens * hidden, 0),
        ]
        return dict(zip(IN_PASSES, max(moments, key=sum)))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class MemoryPlan:
    """What the trainer keeps on the fullest GPU, in GiB."""

    def __init__(self, args: Any, hf_config: PretrainedConfig, ranks: int, longest: int, reference: bool = False,
                 critic: str = ""):
        """`args`: a script's flags; `ranks`: of the run; `longest`: tokens of the longest sequence; `critic`: its
        folder."""
        self.offload, self.longest = OffloadConfig(), longest
        self.sequence_parallel = args.policy.sequence_parallel
        ranks = num_shards(ranks, args.policy.replicas, self.sequence_parallel, args.policy.expert_parallel)
        self.smallest = -(-longest // self.sequence_parallel)
        """The smallest budget: this rank's share of the longest sequence."""
        self.policy = Model(hf_config, args.policy, ranks, lora=args.lora)
        # the model below adapters is the reference
        self.reference = self.policy if reference and not args.lora.rank else None
        self.trained = [self.policy]
        if critic:
            config = read_config(critic, args.policy, "--critic-model", CAUSAL_LM + SCORED)
            self.trained.append(Model(config, args.policy, ranks, is_critic=True, lora=args.lora))
        self.reward_model_gb, self.reserved_gb = 0.0, RESERVED_GB
        # with sequence parallel, the keys of all ranks, and of them what is seen
        self.keys = 2.0 * self.sequence_parallel if self.sequence_parallel > 1 else 0.0
        self.chosen = ""
        """The budget of a micro-batch and the reason for it, in words."""
        self.has_engine = "rollout" in vars(args)
        if not self.has_engine:
            return
        self.offload = args.offload
        if args.teacher:
            config = read_teacher(args.teacher, args.model, args.policy, is_used=reference)
            self.reference = Model(config, args.policy, ranks)
        if args.reward_model.path:
            scorer = Model(check_reward_model(args.reward_model, args.policy), args.policy, ranks, is_critic=True)
            self.reward_model_gb = scorer.itemsize * scorer.trained_shard / GIB
        self.reserved_gb += 0 if args.rollout.enforce_eager else GRAPHS_GB
        if args.rollout.engine == "hf":                                 # its weights stay on the GPU
            self.reserved_gb += self.policy.itemsize * self.policy.all / GIB
        self.keys += self.longest / args.rollout.max_response_length if args.policy.share_prompt else 0.0

    def resident(self) -> dict[str, float]:
        """What stays between the phases, by part. Moments that are offloaded are there for the optimizer step alone."""
        trained = sum(model.trained_shard for model in self.trained) / GIB
        below = sum(model.itemsize * model.frozen_shard for model in self.trained) / GIB    # adapters
        frozen = self.reference.itemsize * self.reference.trained_shard / GIB if self.reference else 0
        moments = 0 if self.offload.optimizer else 8 * trained
        return {"weights": 4 * trained + below, "moments": moments, "frozen models": frozen + self.reward_model_gb}

    def beside_engine(self) -> dict[str, float]:
        """What is on the GPU while the engine is awake."""
        parts = self.resident()
        if self.offload.params:
            parts |= {"weights": 0, "frozen models": self.reward_model_gb}
        return parts

    def update(self, tokens: int) -> dict[str, float]:
        """The update with micro-batches of so many tokens, by part: of all phases without the engine the fullest."""
        passes = [{"gradients": 4 * model.trained_shard} | model.update(tokens, self.keys) for model in self.trained]
        if self.offload.optimizer:
            most = max(model.trained_shard for model in self.trained)
            passes.append({"gradients": 4 * most, "moments": 8 * most, **dict.fromkeys(IN_PASSES, 0)})
        fullest = max(passes, key=lambda parts: sum(parts.values()))
        return self.resident() | {part: x / GIB for part, x in fullest.items()}

    def update_gb(self, tokens: int) -> float:
        """All that the update takes of a GPU, with what lies free between the blocks in use."""
        parts = self.update(tokens)
        return self.reserved_gb + sum(x * (1 + FREE_BLOCKS.get(part, 0.0)) for part, x in parts.items())

    def largest_budget(self, gpu_gb: float) -> int:
        """The most tokens, up to MAX_TOKENS, that fit; 0: not even the longest sequence does."""
        sizes = [self.smallest, *range(1024 * -(-self.smallest // 1024), MAX_TOKENS + 1, 1024)]
        return max((tokens for tokens in sizes if self.update_gb(tokens) <= gpu_gb), default=0)

    def choose_budget(self, requested: int, device: torch.device) -> int:
        """Return the token budget of a micro-batch: `requested`, or if it is 0 the largest that fits."""
        if device.type == "cpu":
            self.chosen = f"micro-batches of {requested or TOKENS_ON_CPU:,} tokens (nothing is calculated for CPUs)"
            return requested or TOKENS_ON_CPU
        gpu_gb = -all_max([-torch.cuda.mem_get_info()[1]]).item() / GIB         # all ranks need the same budget
        tokens = requested or self.largest_budget(gpu_gb)
        if not tokens:
            shorter = "--rollout.max-response-length" if self.has_engine else "--data.max-length"
            raise ValueError(
                f"the longest sequence, {self.longest} tokens, needs {self.update_gb(self.smallest):.1f} GiB, by "
                f"calculation, and a GPU has {gpu_gb:.1f}: use more GPUs, --policy.gradient-checkpointing True, "
                f"--policy.sequence-parallel or a smaller {shorter}; python -m tools.plan says what fits"
            )
        self.chosen = (
            f"micro-batches of {tokens:,} tokens ({'--max-tokens-per-gpu' if requested else 'the most that fit'}); "
            f"calculated: the update takes {self.update_gb(tokens):.1f} of {gpu_gb:.1f} GiB"
        )
        if self.has_engine:
            self.chosen += f", and {sum(self.beside_engine().values()):.1f} stay beside the engine"
        return tokens
