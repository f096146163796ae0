"""The flags of models and optimizers: --policy.*, --lora.*, --optim.*, --reward-model.* and --offload.*"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass
class ModelConfig:
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of activations and matrix products. Logits are always float32; --optim.kind is for weights. A CPU
    without bfloat16 instructions (AMX, AVX-512 BF16) emulates them at an eighth of float32's speed."""
    gradient_checkpointing: bool | float | None = None
    """Share of the layers that are recomputed in the backward pass, for less memory: the same gradient, and for all of
    them about a third more compute. True: all, False: none. None: on a GPU as few as the plan of memory allows with
    micro-batches of 16384 tokens (or --max-tokens-per-gpu); on a CPU, and of models that read images or have layers
    with a state, all above 1B weights. Needs training."""
    replicas: int = 1
    """Copies of the models (HSDP), each sharded over world size / replicas ranks; weights travel only among these."""
    liger: bool = True
    """Use Liger's fused kernels for norms, rotary embeddings and MLPs, for the families it supports. Only for a GPU."""
    share_prompt: bool = False
    """Compute what sequences of a micro-batch begin with once: the prompt of a group, the history that turns and
    branches of an episode repeat. The same gradient for fewer tokens. Needs training."""
    sequence_parallel: int = 1
    """Number of ranks that run a micro-batch together, each a part of every sequence, so that a response need not fit
    on one GPU. Together they hold this many times the token budget."""
    expert_parallel: int = 1
    """Ranks over which the experts of a mixture are divided: tokens travel between ranks instead of weights."""
    router_replay: Literal["none", "old-logp", "rollout"] = "none"
    """Experts that a token uses in the update. old-logp: those chosen by the pass that scored the old log-probs, if
    there was one. rollout: those that the engine chose, also in the pass for the old log-probs. Needs training."""
    router_float32: bool = False
    """Compute the routers of a mixture, of trainer and engine, in float32: their logits are not rounded to bfloat16,
    so that the two choose the same experts more often."""
    router_aux_coef: float = 0.0
    """Factor of the load balancing loss (arXiv 2101.03961) of the policy's routers, which every script adds to its own.
    It is transformers' number, over the tokens of the loss in the whole mini-batch, and costs a forward pass more. 0:
    no such loss. Needs training."""
    freeze_vision: bool = False
    """Train only the language model of a vision-language model; its vision tower and projector stay frozen. Needs
    training."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: only architectures of transformers itself."""

    def __post_init__(self):
        share = self.gradient_checkpointing
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"--policy.gradient-checkpointing {share} must be True, False, None or a share of the "
                             f"layers in [0, 1]")
        if not 0 <= self.router_aux_coef < math.inf:
            raise ValueError(f"--policy.router-aux-coef {self.router_aux_coef:g} must be at least 0")


@dataclass
class LoRAConfig:
    rank: int = 0
    """Rank of the adapters that are trained instead of all weights (LoRA). 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """The adapters' product is multiplied by alpha / rank. Needs --lora.rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers with adapters, such as q_proj v_proj; all-linear: all in attention and MLPs; experts:
    those of a mixture, a pair of matrices for each matrix of each expert. Default: all-linear. Needs --lora.rank."""

    def __post_init__(self):
        if self.rank < 0 or self.alpha <= 0:
            raise ValueError(f"--lora.rank {self.rank} must be at least 0, --lora.alpha {self.alpha:g} above 0")
        if self.targets and not self.rank:
            raise ValueError("--lora.targets need adapters: set --lora.rank")


@dataclass
class OptimConfig:
    kind: Literal["adamw", "adamw-bf16", "adamw-8bit", "muon"] = "adamw"
    """adamw: weights, gradients and moments are float32, 16 bytes a weight. adamw-bf16: bfloat16, rounded
    stochastically, 8 bytes. adamw-8bit: the same with moments in 8 bits, 6 bytes. muon: Muon for the layers' matrices,
    12 bytes, adamw for the rest."""
    lr: float = 1e-6
    """Peak learning rate. muon: the root mean square of an update is 0.2 of it, like AdamW's in long runs."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to `min_lr_frac` of the peak. It would be reached one step
    after the last, so that the last step still learns."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps."""
    min_lr_frac: float = 0.0
    """Learning rate at the end of the schedule as a share of the peak. Needs schedule linear or cosine."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of muon too."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm at this value. 0: no clipping."""
    max_skipped_steps: int = 3
    """Stop after this many optimizer steps in a row whose gradient norm is not finite (each is skipped and counted)."""

    def __post_init__(self):
        rules = {
            "lr": (0 < self.lr < math.inf, "must be positive"),
            "warmup_steps": (self.warmup_steps >= 0, "must be at least 0"),
            "min_lr_frac": (0 <= self.min_lr_frac <= 1, "must be in [0, 1]"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "must be in [0, 1), both"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "must be at least 0"),
            "max_grad_norm": (self.max_grad_norm >= 0, "must be at least 0 (0: no clipping)"),
            "max_skipped_steps": (self.max_skipped_steps >= 1, "must be at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"--optim.{name.replace('_', '-')} {vars(self)[name]} {rule}")


@dataclass
class RewardModelConfig:
    path: str = ""
    """Hugging Face folder or hub name of a sequence classifier with one label, scored in float32. Empty: none."""
    weight: float = 1.0
    """Factor of the reward model's score, which is added to the score of the reward function. Needs
    --reward-model.path."""
    alone: bool = False
    """The reward is the model's score alone: no reward function runs. Needs --reward-model.path."""

    def __post_init__(self):
        if self.alone and not self.path:
            raise ValueError("--reward-model.alone needs --reward-model.path")


@dataclass
class OffloadConfig:
    params: bool = False
    """Keep the trainer's weights in pinned host memory while the engine is awake (moved after each weight sync). Only
    for a GPU."""
    optimizer: bool = False
    """Keep the optimizer's moments in pinned host memory except for the optimizer step and a save: they are never on
    the GPU together with the engine or with activations. Only for a GPU."""
