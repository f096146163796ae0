"""The flags of sampling, --rollout.*, and what is refused of them without a model."""

from dataclasses import dataclass
from typing import Literal

from common.flags.rules import check_at_least
from envs.runtime.conversation import EpisodeConfig


@dataclass
class SamplingConfig:
    """How one call of `complete` samples."""

    temperature: float = 1.0
    """Sampling temperature of training rollouts. Log-probs, ratios and entropy are taken at the same temperature."""
    max_response_length: int = 1024
    """Maximum number of tokens of a response."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this. Below 1, training needs an importance
    weight (--correction.weights)."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all. Above 0, training needs an importance weight."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the end token. The response keeps the tokens that spell it. Needs
    --rollout.engine vllm."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end tokens."""


@dataclass
class RolloutConfig(EpisodeConfig, SamplingConfig):
    """How training samples, and the engine that samples."""

    engine: Literal["vllm", "hf"] = "vllm"
    """Sampling backend: vLLM, or Hugging Face's `generate`, which is slow but needs no vLLM and is an independent
    check."""
    val_top_p: float = 1.0
    """top_p of validation. 1: all tokens. Needs --val-data and --eval-n."""
    val_top_k: int = 0
    """top_k of validation. 0: all tokens. Needs --val-data and --eval-n."""
    in_flight: float = 1.0
    """Prompts in flight at once, as a multiple of --prompts-per-step (1 to 2). A step ends when --prompts-per-step
    groups are complete; the others continue in the next step. 1: a step waits for its longest response. Needs
    --rollout.engine vllm and training."""
    max_staleness: int = 4
    """Oldest a token may be when it is trained, in steps (weight syncs); the rollout waits for groups that would exceed
    it. 0: drop unfinished groups, which is oversampling and favours short responses. Needs --rollout.in-flight above
    1."""
    max_num_seqs: int = 256
    """Maximum number of responses that one vLLM engine decodes at the same time. Only for --rollout.engine vllm or
    --rollout.episode."""
    tp: int = 1
    """Tensor-parallel ranks per engine. There are world size / tp engines. Needs --rollout.engine vllm."""
    gpu_memory_utilization: float = 0.0
    """Share of a GPU's total memory for the engine's weights and cache while it is awake. 0: the memory that the
    trainer leaves free. Only for --rollout.engine vllm and a GPU."""
    kv_cache_gb: float = 0.5
    """Size of the key-value cache of one vLLM engine in GiB. Only for --rollout.engine vllm and a CPU."""
    enforce_eager: bool = False
    """Do not use CUDA graphs: the start is faster, decoding slower. Only for --rollout.engine vllm and a GPU."""
    max_probe_diff: float = 0.1
    """Stop if the mean |p_engine - p_trainer| over a step's tokens, or over the probe, exceeds this. 0: never."""
    extra: str = "{}"
    """Additional arguments for vLLM's LLM(...), as a JSON object. Needs --rollout.engine vllm."""


def check_sampling(config: RolloutConfig) -> None:
    """Refuse what cannot work with any model. Mistyped commands meet it before torch is imported."""
    if config.temperature <= 0:
        raise ValueError(f"--rollout.temperature {config.temperature} must be above 0: training needs a distribution")
    for flag, top_p in (("top-p", config.top_p), ("val-top-p", config.val_top_p)):
        if not 0 < top_p <= 1:
            raise ValueError(f"--rollout.{flag} {top_p} must be in (0, 1]")
    check_at_least(1, {"--rollout.max-response-length": config.max_response_length})
    given = f"--rollout.in-flight {config.in_flight:g}"
    if not 1 <= config.in_flight <= 2 or config.max_staleness < 0:
        raise ValueError(f"{given} must be from 1 to 2, so that what a step carries over fits into the next one, and "
                         f"--rollout.max-staleness {config.max_staleness} at least 0")
    if config.in_flight > 1 and config.stop:
        raise ValueError(f"{given} does not go with --rollout.stop: only the tokens of a response are carried over, "
                         f"not a text that is half written")


def changed_flags(config: RolloutConfig, *names: str) -> list[str]:
    """The flags among these that differ from their defaults, with their values."""
    defaults = RolloutConfig()
    found = []
    for name in names:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            found.append(f"--rollout.{name.replace('_', '-')} {value}")
    return found
