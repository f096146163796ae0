"""The flags of sampling, --rollout.*"""

from dataclasses import dataclass
from typing import Literal

from common.flags.servers import ServerConfig


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
    --rollout.engine vllm or server."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end tokens."""


@dataclass
class EpisodeConfig:
    """Episodes of many turns instead of single responses."""

    episode: str = ""
    """File and name of `async def episode(chat, row)`, path/to/file.py:name, see docs/environments.md. Several, as
    NAME=FILE,NAME=FILE: a row's `agent_name` picks one. Default: no episodes; the model writes one response to each
    prompt."""
    max_turns: int = 16
    """Most replies of the model in an episode. --rollout.max-response-length bounds the tokens of an episode, including
    the tokens of users and tools. Needs --rollout.episode."""
    tool_timeout_s: float = 30.0
    """Seconds that an episode's own code, including its tools, may take between two replies before its process is
    killed. Needs --rollout.episode."""
    episodes_at_once: int = 0
    """Episodes that one engine runs at the same time, each in its own process. 0: --rollout.max-num-seqs,
    or 256. Needs --rollout.episode."""
    lockstep: bool = False
    """Wait for the tools of all episodes before each step of the engine. Then a run repeats byte for byte. Otherwise
    the times at which tools end decide what is decoded together, and so how it is rounded. Needs --rollout.episode."""
    drop: tuple[Literal["timeout", "length", "turns", "error"], ...] = ()
    """Episodes that end for these reasons are excluded from the loss and their group's statistics (compact filtering).
    Needs --rollout.episode."""
    rewritten_history: Literal["split", "append", "error"] = "split"
    """What to do if the chat template later writes earlier turns differently, for example without their reasoning.
    split: the episode becomes several sequences, each as the model saw it. append: the model sees its own tokens.
    error: stop. Needs --rollout.episode."""
    tool_result_tokens: int = 0
    """Most tokens of a tool's result that the model sees; a longer one loses its middle, and says so. 0: no limit.
    Needs --rollout.episode."""
    tool_parser: str = ""
    """vLLM's parser of tool calls, by name (hermes, llama3_json, ...), for episodes with chat.tools. Needs
    --rollout.episode."""


@dataclass
class RolloutConfig(ServerConfig, EpisodeConfig, SamplingConfig):
    """How training samples, and the engine that samples."""

    engine: Literal["vllm", "hf", "server"] = "vllm"
    """Sampling backend: vLLM; Hugging Face's `generate`, which is slow but needs no vLLM and is an independent check;
    or --rollout.servers."""
    val_top_p: float = 1.0
    """top_p of validation. 1: all tokens. Needs --val-data and --eval-n."""
    val_top_k: int = 0
    """top_k of validation. 0: all tokens. Needs --val-data and --eval-n."""
    in_flight: float = 1.0
    """Prompts in flight at once, as a multiple of --prompts-per-step (1 to 2). A step ends when --prompts-per-step
    groups are complete; the others continue in the next step. 1: a step waits for its longest response. Needs
    --rollout.engine vllm or server and training."""
    max_staleness: int = 4
    """Oldest a token may be when it is trained, in steps (weight syncs); the rollout waits for groups that would exceed
    it. 0: drop unfinished groups, which is oversampling and favours short responses. Needs --rollout.in-flight above
    1."""
    drafts: int = 0
    """Most tokens that are guessed of each response, from earlier responses, and checked in one pass of the engine. No
    token depends on the guesses; with --rollout.in-flight it depends on them which groups end first. Passes of many
    responses have none: at most 160 / (1 + drafts) responses. 0: none. Needs --rollout.engine vllm."""
    max_num_seqs: int = 0
    """Maximum number of responses that one vLLM engine decodes at the same time, or that a rank asks one server for. 0:
    all that it has in a step, from 256 up to vLLM's own limit for the card (1,024 from 70 GiB on); 256 of a server.
    Only for --rollout.engine vllm or server or --rollout.episode."""
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


def changed_flags(config: RolloutConfig, *names: str) -> list[str]:
    """The flags among these that differ from their defaults, with their values."""
    defaults = RolloutConfig()
    found = []
    for name in names:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            found.append(f"--rollout.{name.replace('_', '-')} {value}")
    return found
