"""The engine on this machine, measured: `python -m tests.gpu.check_engine`. Under 10 minutes on one H100.

For random Qwen2-shaped models of 0.5B, 1.5B and 7B, each in a process of its own: seconds and freed memory of sleep and
wake at both levels, weight sync against plain copies of the same bytes, what the sleeping engine keeps over the cycles,
generation in the loop against bare vLLM, and the difference of engine and trainer in log-probs. One line of JSON per
shape, and a table in `--out`. On a machine without a GPU it runs one tiny shape in the same way.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import torch
import tyro
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config

from common.engine.base import Engine, EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.forward.attention import choose_attention
from common.model.policy import ModelConfig, Policy
from common.parallel import ranks
from common.sync import checksums as sync
from tests.bench.bench_sync import measure_sync
from tests.generate import generate

# hidden, intermediate, layers, heads, kv heads, vocabulary, tied head: Qwen2.5's published shapes
SHAPES = {
    "tiny": (128, 256, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}


@dataclass
class Args:
    shapes: tuple[str, ...] = ()
    """Which; by default the three large ones on a GPU, tiny elsewhere."""
    cycles: int = 20
    """Wake-generate-sleep rounds with a sync each, for what stays allocated."""
    prompts: int = 32
    """Groups of 8 responses, for tokens/s."""
    max_tokens: int = 256
    """Length of each response: end tokens are ignored."""
    extra: str = "{}"
    """More arguments for vLLM's LLM(...), as --rollout.extra: graphs without torch.compile start a minute faster,
    {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}."""
    out: str = ""
    """File for the table."""
    in_process: bool = False
    """Measure the one shape here: what each child process does."""


def main(args: Args) -> None:
    shapes = args.shapes or (("0.5B", "1.5B", "7B") if torch.cuda.is_available() else ("tiny",))
    if args.in_process:
        print(json.dumps(measure(shapes[0], args)))
        return
    rows = []
    for shape in shapes:
        command = [sys.executable, "-m", "tests.gpu.check_engine", "--shapes", shape, "--in-process",
                   "--cycles", str(args.cycles), "--prompts", str(args.prompts), "--max-tokens", str(args.max_tokens)]
        done = subprocess.run([*command, "--extra", args.extra], stdout=subprocess.PIPE, text=True, timeout=600)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(f"{shape}: ended with {done.returncode}")
        rows.append({"exit status": done.returncode} | json.loads(lines[-1]))  # vLLM's teardown may abort
        print(json.dumps(rows[-1]), flush=True)
    columns = list(rows[0])
    cells = [[f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    lines = ["| " + " | ".join(x) + " |" for x in [["", *shapes], ["---"] * (1 + len(shapes))]]
    lines += ["| " + " | ".join([c, *(row[i] for row in cells)]) + " |" for i, c in enumerate(columns)]
    if args.out:
        Path(args.out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def measure(shape: str, args: Args) -> dict[str, float | str]:
    world = ranks.init()
    on_gpu = world.device.type == "cuda"
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    hf_config = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, architectures=["Qwen2ForCausalLM"],
    )
    folder = tempfile.TemporaryDirectory()
    hf_config.save_pretrained(folder.name)
    config = RolloutConfig(
        max_response_length=args.max_tokens, max_num_seqs=256, kv_cache_gb=0.1,
        extra=json.dumps({"skip_tokenizer_init": True} | json.loads(args.extra)),
        gpu_memory_utilization=0.3 if on_gpu else 0.0,  # 7B: 28 GiB of float32 weights, 14 unsharded ones by the probe
    )
    model_config = ModelConfig()
    prompts = [[(7 * i + j) % vocab for j in range(64)] for i in range(args.prompts)]
    start = time.perf_counter()
    engine = make_engine(EngineSetup(
        folder.name, hf_config, config, model_config, world, prompts[:4], [], 64 + args.max_tokens, 0
    ))
    row = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "parameters": sum(p.numel() for p in meta_model(hf_config).parameters()),
        "engine start s": time.perf_counter() - start,
    }
    engine.probe_every = 1
    policy = random_policy(hf_config, world)
    wakes, sleeps, freed = [], [], []
    for _ in range(4):
        policy.version += 1
        start = time.perf_counter()
        engine.wake(policy)
        wakes.append(time.perf_counter() - start)
        awake_gb = used_gb()
        sleeps.append(engine.sleep()["timing_s/sleep"])
        freed.append(awake_gb - used_gb())
    row |= {"sleep s": statistics.median(sleeps), "wake and sync s": statistics.median(wakes),
            "sleep freed GiB": statistics.median(freed)}
    syncs = [measure_sync(engine, policy) for _ in range(5)][2:]  # the first two are slower
    row |= {f"sync {name}": statistics.median(x[name] for x in syncs) for name in ("sync_s", "gb_per_s", "ratio")}
    row |= checksum_seconds(engine, policy)
    used = []
    for _ in range(args.cycles):
        policy.version += 1
        metrics = engine.wake(policy)
        generate(engine, prompts[:2], range(2), SamplingConfig(1.0, 8))
        metrics |= engine.sleep()
        used.append(used_gb())
    row["asleep growth GiB"] = used[-1] - used[len(used) // 2]
    row |= {"probe logp diff": metrics["sync/probe_logp_diff"], "probe prob diff": metrics["sync/probe_prob_diff"]}
    engine.wake(policy)
    row |= speed(engine, [p for p in prompts for _ in range(8)], args.max_tokens)
    engine.sleep()
    engine.close()
    ranks.shutdown()
    return row


def used_gb() -> float:
    """Used memory of the GPU, or of this process on CPUs."""
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def checksum_seconds(engine: Engine, policy: Policy) -> dict[str, float]:
    """Of all weights: with a wait for each, in blocks for a CPU's cache, and as a sync does it."""
    weights = dict(policy.full_tensors(engine.dtype))

    def seconds(work: Callable[[], object]) -> float:
        work()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def one_by_one() -> None:
        for name, weight in weights.items():
            sync.as_numbers({name: sync.checksum(weight, engine.dtype)})

    def together() -> None:
        sync.as_numbers({name: sync.checksum(weight, engine.dtype) for name, weight in weights.items()})

    with mock.patch.object(sync, "BLOCK", dict.fromkeys(sync.BLOCK, 2**20)):
        before = seconds(one_by_one)
    return {"checksums one by one s": before, "checksums s": seconds(together)}


def speed(engine: Engine, asked: list[list[int]], max_tokens: int) -> dict[str, float]:
    """Response tokens/s of `engine.complete` and of `LLM.generate` on the same requests, alternating."""
    from vllm import SamplingParams

    def bare(round_number: int) -> int:
        params = [SamplingParams(temperature=1.0, max_tokens=max_tokens, detokenize=False, logprobs=0,
                                 seed=1000 * round_number + i)
                  for i in range(len(asked))]
        outs = engine.llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs)

    def loop(round_number: int) -> int:
        seeds = [1000 * round_number + i for i in range(len(asked))]
        return sum(len(r.tokens) for r in generate(engine, asked, seeds, SamplingConfig(1.0, max_tokens)))

    rates = {bare: [], loop: []}
    for pair in range(4):
        for work in ((bare, loop), (loop, bare))[pair % 2]:
            engine.llm.reset_prefix_cache()
            start = time.perf_counter()
            rates[work].append(work(pair) / (time.perf_counter() - start))
    in_loop, alone = (statistics.median(rates[work][1:]) for work in (loop, bare))
    return {"tokens/s in the loop": in_loop, "tokens/s bare": alone, "loop / bare": in_loop / alone}


def meta_model(hf_config: Qwen2Config) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def random_policy(hf_config: Qwen2Config, world: ranks.World) -> Policy:
    """As `load_policy`, with random weights made in place: there is no checkpoint to read."""
    attention = choose_attention(world.device, hf_config, ModelConfig())
    with torch.device(world.device):
        lm = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation=attention)
    policy = Policy(lm).train()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in lm.model.layers:
        fully_shard(module, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(policy, mesh=world.mesh, mp_policy=precision)
    return policy


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
