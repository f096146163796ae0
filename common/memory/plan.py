"""How much GPU memory the trainer takes at most: arithmetic from the model's config and the flags, without weights.

It counts, on the fullest rank with gradients present: FSDP2's shards and one gathered block; the activations that
autograd keeps of blocks with gated MLPs or experts; the tiles of `linear_logp`. tests/cuda/test_memory_plan.py compares
it with a simulation of the real step; tools/plan.py prints it.
"""

from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig

from common.flags.model import OffloadConfig
from common.flags.rules import num_shards
from common.flags.served import is_served
from common.forward.mixture import check_balanced, use_float32_routers
from common.forward.router_replay import routers_of
from common.forward.vision import FAMILIES
from common.kernels import CHUNK_BYTES
from common.memory.sizes import IN_PASSES, Model, Moment
from common.model.flops import check_context
from common.model.loading import GIB, read_critic, read_teacher
from common.model.reward_model import check_reward_model
from common.parallel.ranks import all_max

RESERVED_GB = 4.0
"""GPU memory for the CUDA context, NCCL and the unsharded tensors of the weight sync."""
GRAPHS_GB = 1.5
"""GPU memory for the engine's CUDA graphs."""
MAX_TOKENS = 32768
"""The largest token budget that is chosen: a micro-batch of this size keeps a GPU busy."""
TOKENS_ON_CPU = 16384
ENOUGH_TOKENS = 16384
"""The token budget for which layers are recomputed: a larger one saves less time than recomputing them takes."""
FREE_BLOCKS = {"gradients": 0.5, **dict.fromkeys(IN_PASSES, 0.15)}
"""Bytes that torch's allocator holds between the blocks in use, for each byte of a part (as simulated: gradients arrive
one by one between temporary tensors)."""


KEYS_OF_EPISODES = 4.0
"""Keys of an episode's further sequences that a micro-batch gathers at most, for each token that runs."""


def keys_per_token(rollout: Any, longest: int) -> float:
    """With --policy.share-prompt, the keys that a micro-batch gathers for each token that runs: those of a whole
    sequence for each response; and of episodes, which may have many sequences, so many that packing keeps to it."""
    keys = longest / rollout.max_response_length
    if rollout.episode:
        keys += KEYS_OF_EPISODES
    return keys


class MemoryPlan:
    """The trainer's memory on the fullest GPU, in GiB."""

    def __init__(self, args: Any, hf_config: PretrainedConfig, ranks: int, longest: int,
                 frozen: str | tuple = "", critic: str = ""):
        """`args`: a script's flags; `ranks`: of the run; `longest`: tokens of the longest sequence; `frozen`, `critic`:
        folders or hub names of a frozen policy (a tuple: of teachers, whose heads and hidden states the update compares
        with) and of a critic."""
        policy = args.policy
        self.longest = longest
        ranks = num_shards(ranks, policy.replicas, policy.sequence_parallel, policy.expert_parallel)
        self.smallest = -(-longest // policy.sequence_parallel)
        """The smallest budget: this rank's share of the longest sequence."""
        self.policy = Model(hf_config, policy, ranks, lora=args.lora, kind=args.optim.kind)
        if policy.router_replay != "none":
            routers_of(self.policy.largest)  # refuses what has none
        if policy.router_aux_coef:
            check_balanced(self.policy.largest, policy.router_aux_coef)
        if policy.router_float32 and not use_float32_routers(self.policy.largest):
            raise ValueError(f"--policy.router-float32: a {hf_config.model_type} has no routers, leave it out")
        self.trained = [self.policy]
        if critic:
            config = read_critic(critic, policy, hf_config)
            check_context(config, longest, f"--critic-model {critic}")
            self.trained.append(Model(config, policy, ranks, AutoModel, args.lora, args.critic_optim.kind))
        self.share = policy.gradient_checkpointing
        """Share of the blocks of each model that are recomputed; None: not decided."""
        self.reads_images = hf_config.model_type in FAMILIES
        self.keys = 0.0
        if policy.sequence_parallel > 1:                    # the keys of all ranks, and of them what is seen
            self.keys = 2.0 * policy.sequence_parallel
        self.reference_gb = 0.0
        self.reward_model_gb = 0.0
        self.teachers: list[Model] = []
        self.has_served_teacher = False  # behind a server, with no weights here
        self.reserved_gb = RESERVED_GB
        self.offload = OffloadConfig()
        given = vars(args)
        if "rollout" not in given or given.get("eval_by") == "loss":
            return
        self.offload = given.get("offload", self.offload)
        if frozen and isinstance(frozen, str):
            self._add_frozen(args, hf_config, ranks, frozen)
        elif frozen:
            for path in filter(None, frozen):
                if is_served(path):
                    self.has_served_teacher = True
                else:
                    self.teachers.append(self._add_frozen(args, hf_config, ranks, path, any_tokens=True))
        if "reward_model" in given and args.reward_model.path:
            config = check_reward_model(args.reward_model, policy, longest)
            self.reward_model_gb = Model(config, policy, ranks, AutoModel).frozen_gb
        if not args.rollout.enforce_eager and args.rollout.engine != "server":
            self.reserved_gb += GRAPHS_GB
        if args.rollout.engine == "hf":                                 # its weights stay on the GPU
            self.reserved_gb += self.policy.itemsize * self.policy.all / GIB
        if policy.share_prompt:
            self.keys += keys_per_token(args.rollout, longest)

    def _add_frozen(self, args: Any, hf_config: PretrainedConfig, ranks: int, path: str,
                    any_tokens: bool = False) -> Model:
        """Count a frozen policy or a teacher, which may have any tokens in distill.py."""
        if path == args.model:
            check_context(hf_config, self.longest, f"--model {path}")
            if not args.lora.rank:                                      # else it is below the adapters
                self.reference_gb += self.policy.frozen_gb
            return self.policy
        config = read_teacher(path, args.model, args.policy, any_tokens)
        check_context(config, self.longest, f"--teacher {path}")
        model = Model(config, args.policy, ranks)
        self.reference_gb += model.frozen_gb
        return model

    def resident(self) -> dict[str, float]:
        """Memory that stays between the phases, by part. Offloaded moments are there in the optimizer step alone."""
        weights = 0.0
        moments = 0.0
        for model in self.trained:
            weights += model.trained_bytes + model.itemsize * model.frozen_shard
            if not self.offload.optimizer:
                moments += model.moment_bytes
        return {
            "weights": weights / GIB,
            "moments": moments / GIB,
            "frozen models": self.reference_gb + self.reward_model_gb,
        }

    def beside_engine(self) -> dict[str, float]:
        """Memory on the GPU while the engine is awake."""
        found = self.resident()
        if self.offload.params:
            found |= {"weights": 0, "frozen models": self.reward_model_gb}
        return found

    def update(self, tokens: int) -> dict[str, float]:
        """Memory of the update with micro-batches of this many tokens, by part: the fullest phase without the
        engine."""
        phases = []
        for model in self.trained:
            phases.append({"gradients": model.gradient_bytes} | model.update(tokens, self.keys))
            if self.offload.optimizer:                                  # the optimizer step
                step = dict(zip(IN_PASSES, Moment(model.step_bytes)))
                phases.append({"gradients": model.trained_bytes, "moments": model.moment_bytes} | step)
        fullest = max(phases, key=lambda parts: sum(parts.values()))
        found = self.resident() | {part: x / GIB for part, x in fullest.items()}
        for teacher in self.teachers:
            vectors = teacher.config.vocab_size + tokens                # of its whole head, and its hidden states
            found["frozen models"] += teacher.itemsize * teacher.config.hidden_size * vectors / GIB
        if self.teachers or self.has_served_teacher:                    # the head's gradient in float32, and chunks
            head = self.policy.config.vocab_size * self.policy.config.hidden_size
            found["log-prob tiles"] += (4 * head + 8 * CHUNK_BYTES["cuda"]) / GIB
        return found

    def update_gb(self, tokens: int) -> float:
        """All memory of the update on a GPU, including free memory between the blocks in use."""
        total = self.reserved_gb
        for part, size in self.update(tokens).items():
            total += size * (1 + FREE_BLOCKS.get(part, 0.0))
        return total

    def decide_share(self, gpu_gb: float, requested: int) -> None:
        """Without --policy.gradient-checkpointing, recompute as few blocks as a GPU of this size allows with
        micro-batches of `requested` tokens (0: of ENOUGH_TOKENS), or all where even these do not fit."""
        # the activations of a vision tower and of layers with a state are no upper bound
        is_unknown = self.reads_images or any(model.has_states for model in self.trained)
        if self.share is not None or is_unknown:
            return
        tokens = requested or max(ENOUGH_TOKENS, self.smallest)
        num_blocks = self.policy.num_blocks
        for count in range(num_blocks + 1):
            self.share = count / num_blocks
            for model in self.trained:
                model.recompute(self.share)
            if self.update_gb(tokens) <= gpu_gb:
                return

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
        self.decide_share(gpu_gb, requested)
        tokens = requested or self.largest_budget(gpu_gb)
        if not tokens:
            recompute = "" if self.share == 1 else "--policy.gradient-checkpointing True, "
            raise ValueError(f"the longest sequence, {self.longest} tokens, needs "
                             f"{self.update_gb(self.smallest):.1f} GiB, by calculation, and a GPU has {gpu_gb:.1f}: "
                             f"use more GPUs, {recompute}--policy.sequence-parallel or a "
                             f"smaller --rollout.max-response-length (sft.py and dpo.py: --data.max-length); "
                             f"python -m tools.plan says what fits")
        reason = "--max-tokens-per-gpu" if requested else "the most that fit"
        stays = sum(self.beside_engine().values())
        return tokens, (f"micro-batches of {tokens:,} tokens ({reason}); calculated: the update takes "
                        f"{self.update_gb(tokens):.1f} of {gpu_gb:.1f} GiB, and {stays:.1f} stay between updates")
