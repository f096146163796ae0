"""The memory of a step on GPUs, simulated: the project's own code runs on the stand-in for CUDA with shapes alone.

    python -m tests.cuda.memory Qwen2.5-7B --gpus 8 --tokens 16384 --offload.optimizer

One rank of `gpus` is run: real FSDP2 with collectives that do nothing, the real policy, optimizer, engine calls and
offloading. Every tensor takes its block of a caching allocator like PyTorch's (allocator.py). Not counted, because
it is no tensor of the trainer's: the CUDA context, NCCL's buffers, cuBLAS's workspaces, and all that the engine holds.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.model.offload import OffloadConfig
from common.model.policy import ModelConfig


class Peak(NamedTuple):
    """Of one phase, in GiB."""

    allocated_gb: float
    """Most that tensors took at once."""
    reserved_gb: float
    """Most that the caching allocator held, which is what nvidia-smi would show."""
    after_gb: float
    """What tensors take when the phase has ended."""


@dataclass(frozen=True)
class Case:
    """What is simulated: the second step of a run, on one rank. Its phases, in order:

    rollout    `engine.wake`: moments offloaded if asked for, weights gathered and handed over, the probe scored; then
               `engine.sleep`, with what was offloaded on its way back
    log-probs  old and reference log-probs of each micro-batch
    forward    } of each micro-batch of the update; gradients of the first are there when the second runs
    backward   }
    optimizer  clipping and AdamW's step
    save       weights gathered for an export, shards copied for a checkpoint
    """

    model: dict[str, Any]
    """The fields of a Hugging Face config.json, `model_type` and `architectures` among them."""
    gpus: int
    tokens: int
    """Budget of a micro-batch: as many sequences as fit, at least one (with shared prompts as many groups)."""
    prompt_length: int = 256
    response_length: int = 768
    samples_per_prompt: int = 8
    num_microbatches: int = 2
    policy: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    reference: bool = False
    critic: bool = False
    entropy: bool = False
    """The entropy has a gradient."""


def simulate(*cases: Case) -> list[dict[str, Peak]]:
    """The peaks of each case, by phase: all in one process, which the stand-in needs for itself.

    A model of more than 8 layers is run with 4 and with 8 of them; its peaks follow on a straight line."""
    raise NotImplementedError
