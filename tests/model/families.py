"""A tiny random model of each family that is trained most, and what the trainer does with it.

`python -m tests.model.families [FAMILY...]` prints a table; with `--vllm`, vLLM's log-probs are in it too.

The oracle is transformers' own model with eager attention, one sequence at a time, in float64. What is compared is the
policy as `load_policy` makes it, in float32: log-probs of the sampled tokens, and the gradient of a weighted sum of
them.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.batch import Batch
from common.engine.base import SamplingConfig
from common.forward import states
from common.forward.adapted import are_experts
from common.model.loading import ALL_TRAINED, Weights, load_policy
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig, Policy, saved_buffers
from common.parallel import ranks
from common.parallel.ranks import World
from tests.engine.engine_models import PROMPTS, SEEDS, start
from tests.generate import generate

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1, "tie_word_embeddings": False}
HEAD = {"head_dim": 32}                                                 # the least that vLLM's attention on CPUs takes
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_chunk_size": 8}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4}

FAMILIES = {
    "llama": ("LlamaConfig", HEAD),
    "qwen2": ("Qwen2Config", {}),                                       # biases
    "qwen3": ("Qwen3Config", HEAD),                                     # norms of queries and keys
    "qwen3_moe": ("Qwen3MoeConfig", HEAD | EXPERTS | {"num_experts": 6, "norm_topk_prob": True}),
    "gemma3_text": ("Gemma3TextConfig", HEAD | WINDOW),                 # windows, two rotary bases
    "mistral": ("MistralConfig", HEAD | {"sliding_window": 4}),
    "phi3": ("Phi3Config", {"sliding_window": 4}),                      # q, k, v in one matrix; Phi-4 is of this type
    "gpt_oss": ("GptOssConfig", HEAD | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),     # sinks
    "glm4_moe": ("Glm4MoeConfig", HEAD | EXPERTS | GROUPS | {"use_qk_norm": True}),
    "olmo3": ("Olmo3Config", WINDOW),                                   # norms after the layers
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),           # a layer without positions
    "deepseek_v3": ("DeepseekV3Config", EXPERTS | GROUPS | LATENT),     # keys of 24, values of 16
    "qwen3_next": ("Qwen3NextConfig", HEAD | EXPERTS | DELTA | {
        "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": ("Qwen3_5TextConfig", HEAD | DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", HEAD | EXPERTS | DELTA | {
        "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA | {"linear_conv_kernel_dim": 4}),
    "kimi_linear": ("KimiLinearConfig", EXPERTS | LATENT | {
        "layer_types": ["linear_attention", "full_attention"], "q_lora_rank": None, "linear_head_dim": 16,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "num_local_experts": 4, "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1}),
    "nemotron_h": ("NemotronHConfig", HEAD | {
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", MAMBA | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 96,
        "position_embedding_type": "rope"}),
    "falcon_h1": ("FalconH1Config", MAMBA | HEAD | {"mamba_d_ssm": 128}),       # both in each layer
    "zamba2": ("Zamba2Config", {
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8,
        "mamba_headdim": 16, "chunk_size": 8, "num_hidden_layers": 3, "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", EXPERTS | {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1}),
}
LAYERS_OF_THEIR_OWN = {"nemotron_h"}                                    # its list of blocks says how many
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
REFUSED = {"zamba2"}                                                    # its blocks share weights
STATE_SPACES = ("nemotron_h", "bamba", "granitemoehybrid", "falcon_h1", "zamba2")
WITH_STATE = {*DELTA_NETS, *STATE_SPACES, "lfm2", "lfm2_moe"}


@dataclass
class Found:
    """What was found for a family. Of log-probs the largest difference from one by one, of gradients see `relative`."""

    refused: str = ""
    spread: float = 0.0
    """Standard deviation of the log-probs: near 0, differences would show nothing."""
    logp: float = math.nan
    gradient: float = math.nan
    shared_logp: float = math.nan
    """With `share_prompt`; the gradient with checkpointing too."""
    shared_gradient: float = math.nan
    checkpointed_gradient: float = math.nan
    """With gradient checkpointing."""
    adapted_logp: float = math.nan
    """With LoRA's adapters, which change nothing before the first step; `num_adapters` of them have a gradient."""
    num_adapters: int = 0
    adapts_experts: bool = True
    """Those of experts, if there are experts, are among them."""
    bfloat16: float = math.nan
    """The mean difference of a log-prob in bfloat16."""
    experts: str = "-"
    """Whether transformers can divide the experts over ranks."""
    engines: dict[str, float] = field(default_factory=dict)
    """The largest difference of a sampled token's log-prob between an engine and the trainer."""


def restore(monkeypatch, config: PretrainedConfig) -> None:
    """Until the end of the test, what `separate_states` replaced in transformers' file of a family is as it was."""
    modeling = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    for name in states.FUNCTIONS.keys() & vars(modeling).keys():
        function = getattr(modeling, name)
        monkeypatch.setattr(modeling, name, function.own if isinstance(function, states.Told) else function)


def config_of(family: str) -> PretrainedConfig:
    name, special = FAMILIES[family]
    sizes = SIZES | special
    if family in LAYERS_OF_THEIR_OWN:
        del sizes["num_hidden_layers"]
    return getattr(transformers, name)(**sizes)


def save(config: PretrainedConfig, folder: Path) -> str:
    """A random model in which norms, biases, sinks and saved buffers are not all 0 or 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()                                     # a share of about 1 / (1 + number of keys)
            elif parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer in saved_buffers(model).values():
            if buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return str(folder)


def make_batch() -> Batch:
    """Two prompts with several responses each, and one of a single token; the lengths are beyond windows and chunks."""
    generator = torch.Generator().manual_seed(1)

    def draw(n: int) -> list[int]:
        return torch.randint(3, 512, (n,), generator=generator).tolist()

    long, short = draw(9), draw(5)
    return Batch.build([long, long, short, long, short, [7]], [draw(n) for n in (14, 1, 7, 0, 3, 11)])


class Float64(TorchFunctionMode):
    """What asks for float32 gets float64: transformers computes norms, softmax and states in float32 by name."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


def one_by_one(model: torch.nn.Module, batch: Batch, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [T] of the sampled tokens and the gradient of their sum, weighed by `upstream` [T]."""
    rows = []
    for tokens in batch.tokens.split(batch.host_lengths):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        scored = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        rows.append(torch.cat([scored.new_zeros(1), scored]))
    logp = torch.where(batch.mask, torch.cat(rows), 0)
    model.zero_grad()
    (logp * upstream).sum().backward()
    return logp.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def packed(policy: Policy, batch: Batch, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the policy."""
    policy.zero_grad()
    logp, _ = policy(batch, 1.0)
    (logp * upstream).sum().backward()
    return logp.detach(), {name: p.grad.full_tensor() for name, p in policy.lm.named_parameters() if p.grad is not None}


def relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of a weight's gradient, relative to its norm, or to a thousandth of the norm of all where
    its own is smaller: the bias of keys, for example, has a gradient of 0."""
    whole = torch.stack([gradient.norm() for gradient in want.values()]).norm()
    return max(float((got[name] - gradient).norm() / torch.maximum(gradient.norm(), whole / 1000))
               for name, gradient in want.items())


def largest(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


def measure(family: str, folder: Path, world: World, engines: tuple[str, ...] = ("hf",)) -> Found:
    batch, path = make_batch(), save(config_of(family), folder)

    def load(compute_dtype: str = "float32", weights: Weights = ALL_TRAINED, **flags) -> Policy:
        return load_policy(path, ModelConfig(compute_dtype=compute_dtype, **flags), world, weights)

    try:
        policy = load()
    except ValueError as error:
        return Found(refused=str(error).replace(path, "it"))
    upstream = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(2))
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kinds).double()
    with Float64():
        want_logp, want = one_by_one(oracle, batch, upstream.double())
    found = Found(spread=float(want_logp[batch.mask].std()))
    logp, gradient = packed(policy, batch, upstream)
    found.logp, found.gradient = largest(logp, want_logp), relative(gradient, want)
    logp, gradient = packed(load(share_prompt=True, gradient_checkpointing=True), batch, upstream)
    found.shared_logp, found.shared_gradient = largest(logp, want_logp), relative(gradient, want)
    found.checkpointed_gradient = relative(packed(load(gradient_checkpointing=True), batch, upstream)[1], want)
    targets = ("all-linear", "experts") if any(map(are_experts, oracle.modules())) else ("all-linear",)
    adapters = LoRAConfig(rank=4, targets=targets)
    logp, gradient = packed(load(weights=Weights(lora=adapters)), batch, upstream)
    found.adapted_logp = largest(logp, want_logp)
    changing = [name for name, x in gradient.items() if name.endswith("lora_B") and x.any()]
    found.num_adapters = len(changing)
    found.adapts_experts = any("experts" in name for name in changing) or "experts" not in targets
    found.bfloat16 = float((load("bfloat16").score(batch, 1.0) - want_logp)[batch.mask].abs().mean())
    if any(parameter.ndim == 3 and "expert" in name for name, parameter in oracle.named_parameters()):
        found.experts = "yes" if "ep_dispatch_experts" in getattr(oracle, "ep_plan", {}).values() else "no"
    found.engines = {kind: compare_engine(kind, path, world) for kind in engines}
    return found


def compare_engine(kind: str, path: str, world: World) -> float:
    """The engine samples with the trainer's weights, and the trainer scores what was sampled, packed."""
    engine, policy = start(path, world, kind)
    engine.wake(policy)
    sampled = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12))
    engine.sleep()
    engine.close()
    batch = Batch.build(PROMPTS, [response.tokens for response in sampled])
    told = torch.tensor([x for response in sampled for x in response.logp])
    return largest(told, policy.score(batch, 1.0)[batch.mask])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--vllm", action="store_true")
    args = parser.parse_args()
    world = ranks.init()
    kinds = ("hf", "vllm") if args.vllm else ("hf",)
    print(f"| family | packed: log-prob | gradient | shared prompts | checkpointing | LoRA | bfloat16 | "
          f"experts divided | {' | '.join(kinds)} |")
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(family, Path(folder), world, kinds)
        if found.refused:
            print(f"| {family} | refused: {found.refused} |", flush=True)
            continue
        shared = f"{found.shared_logp:.0e}, {found.shared_gradient:.0e}"
        adapters = f"{found.num_adapters}, {found.adapted_logp:.0e}"
        cells = [family, f"{found.logp:.0e}", f"{found.gradient:.0e}", shared, f"{found.checkpointed_gradient:.0e}",
                 adapters, f"{found.bfloat16:.0e}", found.experts, *(f"{x:.0e}" for x in found.engines.values())]
        print(f"| {' | '.join(cells)} |", flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
