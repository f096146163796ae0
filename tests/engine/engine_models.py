"""Tiny random models of every family that the engine tests sync, and the comparison with Hugging Face's own forward.

Run under torchrun by test_sync.py: `engine_models.py FOLDER DRAFTS MODEL...`, one engine of `--rollout.tp` 2.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.engine.base import Engine, EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig, Policy, saved_buffers
from common.parallel import ranks
from common.rollout import Response
from tests.engine import in_flight_runs
from tests.engine.episode_runs import Runs, make_prompt
from tests.engine.test_conversation import make_tokenizer
from tests.generate import generate

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2",
            "gemma3": "Gemma3", "qwen3_moe": "Qwen3Moe", "glm4_moe": "Glm4Moe"}
SPECIAL = {
    "gemma2": {"attn_logit_softcapping": 3.0, "sliding_window": 6, "query_pre_attn_scalar": 20},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    # a dense layer first; the routers' biases are buffers
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
PROMPTS = [[5, 17, 300, 41], [7] * 9, [5, 17, 300, 41], list(range(20, 60)), [400, 3, 3]]
SEEDS = [11, 12, 13, 14, 15]


def make_model(family: str, tied: bool, folder: Path) -> str:
    """A random 2-layer model in float32, wide enough for vLLM's CPU attention (head_dim 32) and two ranks."""
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{FAMILIES[family]}{text}Config")(
        vocab_size=512, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, **SPECIAL.get(family, {}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:                                     # norms and biases that are not all 0 or 1
                parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer in saved_buffers(model).values():
            buffer.add_(torch.randn_like(buffer))
    path = folder / f"{family}-{'tied' if tied else 'untied'}"
    model.save_pretrained(path)
    return str(path)


def start(
    model: str, world: ranks.World, kind: str = "vllm", dtype: str = "float32", more: dict | None = None, **flags
) -> tuple[Engine, Policy]:
    """Engine and trainer. In float32 what differs between them is order of summation only."""
    model_config = ModelConfig(compute_dtype=dtype)
    config = RolloutConfig(engine=kind, max_response_length=24, max_num_seqs=16, kv_cache_gb=0.1, **flags)
    if kind == "vllm":
        config.extra = json.dumps({"skip_tokenizer_init": True, **(more or {})})    # these models have none
    engine = make_engine(EngineSetup(
        model, read_config(model, model_config), config, model_config, world, PROMPTS[:2], [2], 256, 0,
    ))
    engine.probe_every = 1
    return engine, load_policy(model, model_config, world)


def perturb(policy: Policy, scale: float) -> None:
    """Multiply every weight by 1 + scale * noise, the same noise on any number of ranks."""
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            noise = noise_for(name, parameter.shape)
            share = noise.chunk(parameter.device_mesh.size())
            if policy_rank(parameter) < len(share):
                parameter.to_local().mul_(1 + scale * share[policy_rank(parameter)])
    policy.version += 1


def policy_rank(parameter) -> int:
    return parameter.device_mesh.get_rank()


def noise_for(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(ranks.seed_of(name)))


def oracle(model: str, scale: float) -> torch.nn.Module:
    """transformers' own model with the same perturbation."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.mul_(1 + scale * noise_for(name, parameter.shape))
    return lm


def compare(engine: Engine, lm: torch.nn.Module) -> tuple[float, int, list[Response]]:
    """Largest log-prob difference of sampled tokens, number of greedy tokens that differ, the sampled responses."""
    sampled = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12))
    greedy = generate(engine, PROMPTS, SEEDS, SamplingConfig(0.0, 12))
    worst, differing = 0.0, 0
    for prompt, response, best in zip(PROMPTS, sampled, greedy):
        worst = max(worst, float((logps(lm, prompt, response.tokens) - torch.tensor(response.logp)).abs().max()))
        expected = lm.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2)
        differing += expected[0, len(prompt) :].tolist() != best.tokens
    return worst, differing, sampled


@torch.no_grad()
def logps(lm: torch.nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:
    logits = lm(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def round_trip(model: str, world: ranks.World, kind: str = "vllm", **flags) -> dict:
    """Sync, perturb and sync, revert and sync: what each rank saw."""
    engine, policy = start(model, world, kind, **flags)
    saved = [parameter.to_local().clone() for parameter in policy.parameters()]
    first = engine.wake(policy)
    before = compare(engine, oracle(model, 0.0))
    first |= engine.sleep()
    perturb(policy, 0.3)
    second = engine.wake(policy)
    after = compare(engine, oracle(model, 0.3))
    second |= engine.sleep()
    with torch.no_grad():
        for parameter, old in zip(policy.parameters(), saved):
            parameter.to_local().copy_(old)
    policy.version += 1
    engine.wake(policy)
    finished = []
    again = generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12), on_finish=lambda i, _: finished.append(i))
    stopped = stop_early(engine)
    episodes = play(engine, oracle(model, 0.0)) if engine.config.tp > 1 else []
    engine.sleep()
    carried = in_flight_runs.carry(model, engine, policy, num_steps=4) if engine.config.tp > 1 else []
    engine.close()
    return {
        "logp": [before[0], after[0]],
        "greedy": [before[1], after[1]],
        "probe": [first["sync/probe_logp_diff"], second["sync/probe_logp_diff"]],
        "checksums": [first["sync/num_checksums"], second["sync/num_checksums"]],
        "before": [r.tokens for r in before[2]],
        "after": [r.tokens for r in after[2]],
        "again": [r.tokens for r in again],
        "finished": finished,
        "stopped": stopped,
        "episodes": episodes,
        "carried": carried,
    }


def play(engine: Engine, lm: torch.nn.Module) -> list[dict]:
    """Episodes whose tools take random times: what this rank has of each, and how far its log-probs are from `lm`."""
    tokenizer = make_tokenizer("SmolLM2", 0)
    prompts = [make_prompt(tokenizer, number, max_sleep_s=0.1) for number in range(3)]
    stops = [*engine.stop_token_ids, tokenizer.eos_token_id]
    run = Runs(engine, tokenizer, engine.world, stops, max_length=256)
    samples = run("three_turns", prompts, max_response_length=150)
    found = []
    for sample in samples:
        response = sample.response
        logp = logps(lm, sample.prompt.tokens, response.tokens)[response.mask]
        worst = (logp - torch.tensor(response.logp)[response.mask]).abs().max()
        ended = {"turns": response.num_turns, "end": response.end_reason}
        found.append(ended | {"index": sample.index, "off": float(worst)})
    return found


def stop_early(engine: Engine) -> dict:
    """Rank 0 alone is told to stop, once three responses have ended: what each rank has then."""
    requests = [PROMPTS[i % 5] + [i] for i in range(64)]
    ends = tuple(range(0, 512, 12))  # a response ends after 12 tokens or so
    finished = []
    calls = Counter()

    def counted(name):
        function = getattr(engine, name)

        def call(*given):
            calls[name] += 1
            return function(*given)

        return mock.patch.object(engine, name, call)

    with counted("step"), counted("from_first_rank"):
        sampled = stop_after_three(engine, requests, ends, finished)
    return {"sampled": [r.tokens if r.finish_reason else None for r in sampled], "num_before": 3, "calls": calls}


def stop_after_three(engine: Engine, requests: list[list[int]], ends: tuple[int, ...], finished: list[int]) -> list:
    return generate(
        engine, requests, range(64), SamplingConfig(1.0, 60, stop_token_ids=ends), lambda i, _: finished.append(i),
        stop=lambda: engine.world.is_main and len(finished) >= 3,
    )


def verdict(model: str, world: ranks.World) -> str:
    """Two engines of one rank each, the second one with a weight that is not what was sent."""
    engine, policy = start(model, world, kind="hf")
    load = engine._load

    def broken(tensors, sent):
        found = load(((n, t + world.rank) if n == "model.norm.weight" else (n, t) for n, t in tensors), sent)
        return found

    engine._load = broken
    try:
        engine.wake(policy)
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    world = ranks.init()
    out, drafts, *models = sys.argv[1:]
    results = []
    for model in models:
        results.append(round_trip(model, world, tp=2, drafts=int(drafts)) | {"verdict": verdict(model, world)})
    Path(out, f"{world.rank}.json").write_text(json.dumps(results))
    ranks.shutdown()
