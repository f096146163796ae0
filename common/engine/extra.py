"""--rollout.extra, additional arguments of vLLM's LLM(...): refused before vLLM is imported if vLLM has none of that
name, or if the engine could no longer be what the trainer takes it for."""

import ast
import difflib
import importlib.util
from pathlib import Path

import torch

from rewards import json_object

DECIDED = {
    "model": "--model", "seed": "--seed", "dtype": "--policy.compute-dtype", "tensor_parallel_size": "--rollout.tp",
    "trust_remote_code": "--policy.trust-remote-code", "max_num_seqs": "--rollout.max-num-seqs",
    "max_model_len": "--rollout.max-response-length and --data.max-prompt-length",
    "enable_return_routed_experts": "--policy.router-replay",
    **dict.fromkeys(("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), "--save.timeout-s"),
}
"""Arguments -> the flags that decide them."""
ON_DEVICE = {
    "cpu": {"kv_cache_memory_bytes": "--rollout.kv-cache-gb"},
    "cuda": {"gpu_memory_utilization": "--rollout.gpu-memory-utilization", "enforce_eager": "--rollout.enforce-eager"},
}
SAMPLER = "the trainer computes log-probs of the distribution that --rollout.temperature, top-p and top-k say"
SAME_MODEL = "engine and trainer must read the same model, in the same way"
ENDS = "what ends a response must be known to all: --rollout.stop-token-ids and the model's own end tokens"
STALE = "it would keep keys and values that earlier weights computed"
FIXED = {
    "load_format": "weights come from the trainer", "logprobs_mode": SAMPLER, "logits_processors": SAMPLER,
    "watermark_config": SAMPLER, "distributed_executor_backend": "the engine runs in the trainer's processes",
    "pipeline_parallel_size": "an engine has as many ranks as --rollout.tp says",
    "enable_eplb": "it moves experts between ranks, where a sync does not look for them",
    "enable_sleep_mode": "the engine sleeps while the trainer needs the memory",
    "limit_mm_per_prompt": "images are as many as the data has, videos none", "mm_processor_kwargs": SAME_MODEL,
    "mm_hasher_algorithm": SAME_MODEL, "mm_device_do_normalize": SAME_MODEL,
    **dict.fromkeys(("tokenizer", "revision", "code_revision", "tokenizer_revision", "hf_config_path", "hf_overrides",
                     "config_format", "model_class_overrides"), SAME_MODEL),
    **dict.fromkeys(("generation_config", "override_generation_config"), ENDS),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"), STALE),
}
"""Arguments that nothing may change -> why."""
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Arguments for vLLM's own speculative decoding."""
DRAFTS = "on a CPU vLLM's rejection sampler reads memory that nothing has written (vLLM issue 55005): tokens are wrong"
WHOLE = "on a CPU prompts are computed whole: a response's generator cannot be rewound after a part of one"
EXPERTS = "on a CPU vLLM's kernel takes a rank's experts for all of them, and reads other memory"
FIXED_ON_CPU = {
    "enforce_eager": "CPUs have no graphs", "block_size": "it is 32 on CPUs, so that short prompts are cached",
    **dict.fromkeys(SPECULATION, DRAFTS), "enable_expert_parallel": EXPERTS,
    **dict.fromkeys(("enable_chunked_prefill", "max_num_batched_tokens", "long_prefill_token_threshold"), WHOLE),
}


def most_sequences(device: torch.device, num_responses: int) -> int:
    """--rollout.max-num-seqs 0, for an engine with so many responses in a step. The memory of graphs and of vLLM's
    sampler grows with it, so it is no larger than needed; validation and unknown numbers (0) have 256 at least. The
    limits are those of vLLM's `EngineArgs.get_batch_defaults`."""
    limit = 256
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        if total >= 70 * 2**30:
            limit = 1024
    return min(limit, max(256, num_responses))


def check_extra(extra: str, device: str) -> None:
    """Raise ValueError for an argument that vLLM does not have, or that would break what the trainer relies on.
    `device`: of the engine, cpu or cuda."""
    given = json_object("--rollout.extra", extra)
    decided = DECIDED | ON_DEVICE[device]
    fixed = FIXED | (FIXED_ON_CPU if device == "cpu" else {})
    for name, value in given.items():
        if name in decided:
            raise ValueError(f"--rollout.extra: {name} {value} is what {decided[name]} decides; leave it out")
        if name in fixed:
            raise ValueError(f"--rollout.extra: {name} {value} cannot be set, because {fixed[name]}; leave it out")
    if not given:
        return
    known = arguments_of_vllm()
    unknown = sorted(given.keys() - known)
    if unknown:
        problem = f"--rollout.extra: vLLM's LLM(...) has no argument {unknown[0]}"
        near = difflib.get_close_matches(unknown[0], known, 3)
        if near:
            problem += f", did you mean {' or '.join(near)}"
        raise ValueError(problem)


def arguments_of_vllm() -> set[str]:
    """What vLLM's LLM(...) takes, read from its source: the import takes several seconds."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    found = set()
    for file, name in (("entrypoints/llm.py", "LLM"), ("engine/arg_utils.py", "EngineArgs")):
        (made,) = [node for node in ast.parse((root / file).read_text()).body
                   if isinstance(node, ast.ClassDef) and node.name == name]
        for node in made.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
    return {name for name in found if not name.startswith("_")}
