"""What a decode step costs beside the model: `python -m tests.bench.bench_decode`. A tiny model of one layer samples a
response for each of so many requests, none of which ends before the last step.

Medians over the steps of the last rounds, in ms of one step: the parts of vLLM that no GPU makes faster (its scheduler,
what it makes of a pass's output), our code around them (`complete` without vLLM's own `step`), and Python's collection
of garbage, which is part of all of them. `--drafts N`: with `--rollout.drafts N`. `--vllm-outputs`: vLLM's own
collection of tokens and log-probs, in place of common/engine/outputs.py.
"""

import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import tyro
from transformers import Qwen2Config

from common.engine.base import Engine, EngineSetup, Request, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.prompts import Prompt
from tests.bench.record import report
from tests.gpu.check_engine import SHAPES, random_policy

PARTS = {
    "schedule": "scheduler.schedule",
    "update_from_output": "scheduler.update_from_output",
    "execute_model": "model_executor.execute_model",
    "sample_tokens": "model_executor.sample_tokens",
}
"""Of vLLM's core."""


@dataclass
class Args:
    requests: tuple[int, ...] = (128, 256, 512, 1024)
    tokens: int = 48
    """Of each response."""
    rounds: int = 3
    """After one to warm up."""
    drafts: int = 0
    vllm_outputs: bool = False


class Clock:
    """Seconds of parts, a list of calls each."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)
        self.begun = 0.0
        gc.callbacks.append(self.collected)

    def collected(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self.begun = time.perf_counter()
        else:
            self.calls["garbage"].append(time.perf_counter() - self.begun)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Measure all calls of this method from now on."""
        run: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = run(*args, **kwargs)
            self.calls[part].append(time.perf_counter() - start)
            return result

        setattr(owner, name, timed)


def start(args: Args, num_requests: int, folder: str, world: ranks.World) -> Engine:
    """An engine that is awake, for so many requests."""
    hidden, inner, _, heads, kv_heads, vocab, is_tied = SHAPES["tiny"]
    shape = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=2048, tie_word_embeddings=is_tied, bos_token_id=0,
        eos_token_id=1, architectures=["Qwen2ForCausalLM"],
    )
    shape.save_pretrained(folder)
    config = RolloutConfig(
        max_response_length=args.tokens, max_num_seqs=num_requests, kv_cache_gb=0.5, drafts=args.drafts,
        extra=json.dumps({"skip_tokenizer_init": True}),
    )
    setup = EngineSetup(
        folder, shape, config, ModelConfig(compute_dtype="float32"), world, [[1, 2, 3]], [], 64 + args.tokens, 0
    )
    engine = make_engine(setup)
    policy = random_policy(shape, world)
    policy.version += 1
    engine.wake(policy)
    return engine


def measure(args: Args, num_requests: int, world: ranks.World) -> dict[str, float]:
    clock = Clock()
    as_vllm_has_it = mock.patch("common.engine.vllm.shorten") if args.vllm_outputs else nullcontext()
    with tempfile.TemporaryDirectory() as folder, as_vllm_has_it:
        engine = start(args, num_requests, folder, world)
    vllm = engine.llm.llm_engine
    for part, path in PARTS.items():
        owner, _, name = path.partition(".")
        clock.watch(getattr(vllm.engine_core.engine_core, owner), name, part)
    clock.watch(vllm.output_processor, "process_outputs", "outputs")
    clock.watch(vllm, "step", "vllm")
    clock.watch(vllm, "add_request", "add")
    prompts = [[(7 * i + j) % 500 for j in range(48)] for i in range(num_requests // 8)]
    steps = []
    for number in range(args.rounds + 1):
        if number == 1:
            clock.calls.clear()
        engine.llm.reset_prefix_cache()
        requests = []
        for i in range(num_requests):
            requests.append(Request(Prompt(prompts[i // 8], "", "", {}, []), number * num_requests + i))
        start_s = time.perf_counter()
        engine.complete(requests, SamplingConfig(1.0, args.tokens))
        if number:
            steps.append(time.perf_counter() - start_s)
    gc.callbacks.remove(clock.collected)
    num_steps = len(clock.calls["vllm"])
    row = {part: 1e3 * statistics.median(clock.calls[part]) for part in (*PARTS, "outputs", "vllm")}
    own = sum(steps) - sum(clock.calls["vllm"]) - sum(clock.calls["add"])
    row["ours"] = 1e3 * own / num_steps
    row["garbage"] = 1e3 * sum(clock.calls["garbage"]) / num_steps
    row["seconds a round"] = statistics.median(steps)
    engine.close()
    return row


def main(args: Args) -> None:
    world = ranks.init()
    rows = {str(number): measure(args, number, world) for number in args.requests}
    report("decode", unit="ms of a decode step", drafts=args.drafts, vllm_outputs=args.vllm_outputs, requests=rows)
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
