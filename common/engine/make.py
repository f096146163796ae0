"""Which engine: its flags checked, then the engine itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from common.engine.base import Engine, RolloutConfig
from common.model.policy import ModelConfig
from common.parallel.ranks import World


def check_rollout(
    config: RolloutConfig, hf_config: PretrainedConfig, world: World, max_prompt_length: int, corrected: bool = False
) -> int:
    """Refuse what cannot work, before anything heavy. Returns the longest sequence, prompt and response, in tokens.

    `corrected`: the script multiplies its losses by p_trainer / p_engine (untruncated below 1).
    """
    if config.temperature <= 0:
        raise ValueError(f"--rollout.temperature {config.temperature} must be above 0: training needs a distribution")
    for name in ("top_p", "val_top_p"):
        if not 0 < getattr(config, name) <= 1:
            raise ValueError(f"--rollout.{name.replace('_', '-')} {getattr(config, name)} must be in (0, 1]")
    cuts = [f"--rollout.top-p {config.top_p}"] * (config.top_p < 1) + [f"--rollout.top-k {config.top_k}"] * (
        config.top_k > 0) + [f"--rollout.min-p {config.min_p}"] * (config.min_p > 0)
    if cuts and not corrected:
        raise ValueError(
            f"{' and '.join(cuts)}: responses then come from a cut distribution q, the trainer's log-probs are of the "
            f"whole p, and the gradient is biased unless losses are multiplied by p / q: turn on the engine "
            f"correction, or leave these to validation (--rollout.val-top-p, ...)"
        )
    if config.oversample < 0:
        raise ValueError(f"--rollout.oversample {config.oversample} must be at least 0")
    if config.tp < 1 or world.size % config.tp:
        raise ValueError(f"world size {world.size} must be a multiple of --rollout.tp {config.tp}")
    longest = max_prompt_length + config.max_response_length
    if longest > hf_config.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({max_prompt_length} tokens) and --rollout.max-response-length "
            f"{config.max_response_length} exceed the model's context of {hf_config.max_position_embeddings} tokens: "
            f"lower --rollout.max-response-length or --data.max-prompt-length"
        )
    if config.engine == "vllm":
        from common.engine.vllm import check_vllm

        check_vllm(config, hf_config, world)
    else:
        from common.engine.hf import check_hf

        check_hf(config)
    return longest


def make_engine(
    model: str,
    hf_config: PretrainedConfig,
    config: RolloutConfig,
    model_config: ModelConfig,
    world: World,
    probe: Sequence[Sequence[int]],
    stop_token_ids: list[int],
    max_model_len: int,
    seed: int,
    trainer_gb: float = 0.0,
) -> Engine:
    """The engine that `config.engine` names. `model`: a folder or hub name; vLLM reads config and tokenizer from it.
    `trainer_gb`: what the trainer keeps on each GPU while the engine is awake (`offload.resident_gb`)."""
    if config.engine == "hf":
        from common.engine.hf import HFEngine

        return HFEngine(model, hf_config, config, model_config, world, probe, stop_token_ids, max_model_len)
    from common.engine.vllm import VLLMEngine

    return VLLMEngine(model, config, model_config, world, probe, stop_token_ids, max_model_len, seed, trainer_gb)


def stop_tokens(model: str, tokenizer: Any) -> list[int]:
    """Ids that end a response: the tokenizer's end token and those of the model's generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    if not Path(model).is_dir() or (Path(model) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos])
    ids.discard(None)
    if not ids:
        raise ValueError(f"{model}: neither tokenizer nor generation config names an end token (eos_token)")
    return sorted(ids)
