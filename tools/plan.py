"""What a command would take of each GPU's memory, and whether it fits, on any machine:

    python -m tools.plan grpo.py --model Qwen/Qwen2.5-7B-Instruct --train-data x --gpus 8x2 --gpu-gb 80
    python -m tools.plan --table                # of public shapes, for docs/gpus.md
    python -m tools.plan --large-table          # of 7B to 235B, the same

Takes a script (a fork too) with its flags, and reads nothing but the model's config. All numbers are calculated
(common/memory/plan.py), of the fullest rank, in GiB. Exit status 1: it does not fit.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import tyro
from transformers import AutoConfig

from common.engine import make
from common.flags.model import ModelConfig
from common.flags.rollout import RolloutConfig
from common.flags.run import RunArgs
from common.forward.attention import head_dims
from common.layout.shared_prefixes import LEAST_COMMON
from common.memory.plan import FREE_BLOCKS, GIB, IN_PASSES, MAX_TOKENS, MemoryPlan, Model
from common.model import loading
from common.model.flops import count_layers
from common.model.loading import read_config
from common.parallel.ranks import SAMPLERS, World
from common.run import Run
from tools.flags import refuse_others_flags

VISIBLE = 0.99
"""GiB that CUDA reports for each GB in a GPU's name."""
ENGINE_SHARE = 0.92
"""The most that vLLM is given of a GPU without --rollout.gpu-memory-utilization (`gpu_share` in
common/engine/vllm.py)."""
ENGINE_TOKENS = {70.0: 16384, 0.0: 8192}
"""GiB of a GPU, at least -> tokens of vLLM's largest forward pass, its max_num_batched_tokens (of an A100 always the
smaller number: the plan knows no names, and calculates with the larger one)."""
FLOPS_PER_BYTE = 295
"""FLOPs in bfloat16 of an H100 in the time in which it moves a byte."""
KEY_MOVES = 5
"""How often a gathered key moves: read and written, and its gradient read and added to what is there."""
AT_A_TIME = 16
"""Longest sequences that the engine's cache must hold. vLLM starts with one, and then decodes one at a time."""


class Command:
    """A command on so many GPUs, and its memory by phase."""

    def __init__(self, args: Any, hf_config: Any, gpus: int, gpu_gb: float, max_tokens: int,
                 frozen: str | tuple = "", critic: str = ""):
        """`max_tokens` 0: the most that fit."""
        self.args, self.hf_config, self.gpus, self.gpu_gb = args, hf_config, gpus, gpu_gb
        self.max_tokens, self.frozen, self.critic = max_tokens, frozen, critic
        longest = args.data.max_prompt_length + args.rollout.max_response_length
        self.plan = MemoryPlan(args, hf_config, gpus, longest, frozen, critic)
        self.plan.decide_share(gpu_gb, max_tokens)
        self.tokens = max_tokens or self.plan.largest_budget(gpu_gb) or self.plan.smallest

    def changed(self, flags: dict[str, Any], gpus: int) -> "Command":
        """With other flags (`--rollout.tp` -> 2), on other GPUs."""
        args, max_tokens = SimpleNamespace(**vars(self.args)), self.max_tokens
        for flag, value in flags.items():
            if flag == "--max-tokens-per-gpu":
                max_tokens = value
                continue
            group, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
            setattr(args, group, dataclasses.replace(getattr(args, group), **{name: value}))
        return Command(args, self.hf_config, gpus, self.gpu_gb, max_tokens, self.frozen, self.critic)

    def phases(self) -> dict[str, dict[str, float]]:
        """Phase -> part -> GiB."""
        plan, policy, rollout = self.plan, self.plan.policy, self.args.rollout
        engine = self.engine_alone()
        if rollout.gpu_memory_utilization and not num_samplers():       # vLLM takes all of it, beside the trainer
            engine["engine's cache"] = max(self.cache_gb(), 0.0)
        else:
            engine[f"engine's cache, {AT_A_TIME} sequences"] = self.least_cache_gb()
        if rollout.engine == "hf":                                      # its weights are in the reserve of all phases
            engine = {"engine's activations": 0.0}
        if rollout.engine == "server":                                  # on other GPUs
            engine = {}
        # one unsharded tensor at a time, and the buffer of its gathering; on one rank a copy in another dtype
        largest = policy.itemsize * max(policy.head, policy.embedding) * min(policy.ranks, 2) / GIB
        scoring = max((self.scoring(model) for model in plan.trained), key=lambda parts: sum(parts.values()))
        moments = sum(model.moment_bytes for model in plan.trained) / GIB
        found = {
            "rollout": self.beside_engine() | engine,
            "log-probs": plan.resident() | scoring,
            "update": plan.update(self.tokens),
            # moments that are offloaded come back, of all models
            "save": plan.resident() | {"moments": moments, "unsharded weights": largest},
        }
        for phase, parts in found.items():
            if phase != "rollout":
                parts["between blocks"] = sum(share * parts.get(part, 0.0) for part, share in FREE_BLOCKS.items())
            parts["CUDA, NCCL, graphs"] = plan.reserved_gb
        return found

    def scoring(self, model: Model) -> dict[str, float]:
        """GiB of log-probs or values without a gradient, at the fullest of three moments. The weights of a group arrive
        in one buffer, which is there until those of the next group are in their places; on one rank all stay."""
        hidden = 2 * model.itemsize * model.config.hidden_size * self.tokens
        at_start, in_block, in_head = (
            model.itemsize * (model.all if model.ranks == 1 else model.head + others)
            for others in (model.head + 2 * model.embedding, 3 * model.block, model.block)
        )
        moments = [
            (at_start, hidden, 0),
            (in_block, self.tokens * in_forward(model) + hidden, 0),    # the loop has the embedding and the input
            (in_head, hidden, model.tiles(self.tokens)),
        ]
        return {part: x / GIB for part, x in zip(IN_PASSES, max(moments, key=sum))}

    def beside_engine(self) -> dict[str, float]:
        """GiB of models while the engine is awake. Samplers have none of the trainer's, and share the reward model."""
        if num_samplers():
            return {"frozen models": self.plan.reward_model_gb * self.plan.policy.ranks / num_samplers()}
        return self.plan.beside_engine()

    def engine_alone(self) -> dict[str, float]:
        """GiB of vLLM without its cache."""
        policy, tp = self.plan.policy, self.args.rollout.tp
        engine_tokens = next(tokens for least, tokens in ENGINE_TOKENS.items() if self.gpu_gb >= least)
        return {
            "engine's weights": policy.all * policy.itemsize / tp / GIB,
            "engine's activations": engine_tokens * in_forward(policy) / tp / GIB,
        }

    def least_cache_gb(self) -> float:
        return AT_A_TIME * self.plan.longest * self.cache_gb_per_token()

    def cache_gb_per_token(self) -> float:
        config, tp = self.plan.policy.config, self.args.rollout.tp
        kv_heads = config.to_dict().get("num_key_value_heads") or config.num_attention_heads
        width = max(kv_heads // tp, 1) * sum(head_dims(config))                 # of keys and values
        return config.num_hidden_layers * width * self.plan.policy.itemsize / GIB

    def cache_gb(self) -> float:
        """What is left for the engine's cache, of the share that was given or beside the trainer."""
        if share := self.args.rollout.gpu_memory_utilization:
            return share * self.gpu_gb - sum(self.engine_alone().values())
        parts = self.phases()["rollout"]
        cache = next(part for part in parts if "cache" in part)
        awake = sum(x for part, x in parts.items() if part != cache)
        own = sum(x for part, x in parts.items() if "engine" in part and part != cache)
        return min(self.gpu_gb - awake, ENGINE_SHARE * self.gpu_gb - own)

    def totals(self) -> dict[str, float]:
        return {phase: sum(parts.values()) for phase, parts in self.phases().items()}

    def share_is_too_small(self) -> bool:
        rollout = self.args.rollout
        is_given = rollout.gpu_memory_utilization and rollout.engine == "vllm"
        return bool(is_given) and self.cache_gb() < self.least_cache_gb()

    def fits(self) -> bool:
        return max(self.totals().values()) <= self.gpu_gb and not self.share_is_too_small()


def num_samplers() -> int:
    """Ranks that only sample, as async_grpo.py said: their engine is on other GPUs than the trainer."""
    return int(os.environ.get(SAMPLERS, "0").partition(" ")[0])


def in_forward(model: Model) -> float:
    """Bytes a token of a block's forward pass that keeps nothing: gate, up and product, or the experts' outputs."""
    hidden = model.config.hidden_size
    return model.itemsize * (2 * hidden + max(3 * model.mlp_width, 4 * model.experts * hidden))


def changes(command: Command, node: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(flags, GPUs) that take less memory, the smallest change first. `node`: GPUs of one machine."""
    heads = command.plan.policy.config.num_attention_heads
    divided = math.gcd(node, heads, num_samplers())                     # without samplers node and heads
    tps = [tp for tp in (2, 4, 8) if tp > command.args.rollout.tp and divided % tp == 0]
    moments, both = {"--offload.optimizer": True}, {"--offload.optimizer": True, "--offload.params": True}
    alone: list[dict[str, Any]] = [{}, moments]
    if command.max_tokens > command.plan.smallest:
        alone.insert(1, {"--max-tokens-per-gpu": 0})
    given = command.args.policy.gradient_checkpointing                  # None: what must be is recomputed already
    may_recompute = given is not None and given < 1
    if may_recompute:
        alone += [{"--policy.gradient-checkpointing": True}, {"--policy.gradient-checkpointing": True} | moments]
    alone += [{"--rollout.tp": tp} | other for other in ({}, moments) for tp in tps]
    alone += [both, *(both | {"--rollout.tp": tp} for tp in tps)]
    if may_recompute:
        alone += [flags | {"--policy.gradient-checkpointing": True} for flags in alone if "--rollout.tp" in flags]
    needs_share = num_samplers() and command.args.reward_model.path     # async_grpo.py refuses it without
    if command.args.rollout.gpu_memory_utilization and not needs_share:     # 0: what the trainer leaves free
        own: dict[str, Any] = {"--rollout.gpu-memory-utilization": 0}
        alone = [{}, own, *alone[1:], *(own | flags for flags in alone[1:])]
    if num_samplers():                                                  # with them nothing is offloaded
        alone = [flags for flags in alone if "--offload.optimizer" not in flags]
    gpus = command.gpus
    while gpus <= 1024:
        yield from ((flags, gpus) for flags in alone)
        gpus *= 2


def would_fit(command: Command, flags: dict[str, Any], gpus: int) -> bool:
    """With these changes. So many ranks may not divide the experts."""
    try:
        return command.changed(flags, gpus).fits()
    except ValueError:
        return False


def in_words(flags: dict[str, Any]) -> str:
    return " ".join(flag if value is True and "." in flag and "gradient" not in flag else f"{flag} {value}"
                    for flag, value in flags.items())


def gather_share(policy: Model) -> float:
    """With --policy.share-prompt, the part of a sequence that must be common to others so that running it once saves
    what the gathering of the sequence's keys and values costs, in forward and backward pass."""
    key = policy.itemsize * policy.kv_heads * sum(head_dims(policy.config))
    flops_of_token = 6 * count_layers(policy.config).weights / policy.num_blocks
    return FLOPS_PER_BYTE * KEY_MOVES * key / flops_of_token


def report(command: Command, node: int) -> str:
    """The table by phase, and what follows from it."""
    phases, totals = command.phases(), command.totals()
    parts = list(dict.fromkeys(part for phase in ("update", "log-probs", "rollout") for part in phases[phase]))
    parts = [part for part in parts if any(phases[phase].get(part) for phase in phases)]
    lines = [f"{'GiB on each GPU (calculated)':34}" + "".join(f"{phase:>11}" for phase in phases)]
    for part in parts:
        cells = (f"{phases[phase][part]:11.2f}" if phases[phase].get(part) else f"{'':11}" for phase in phases)
        lines.append(f"{part:34}" + "".join(cells))
    lines.append(f"{'total':34}" + "".join(f"{total:11.2f}" for total in totals.values()))
    fullest = max(totals, key=totals.get)
    policy = command.plan.policy
    lines += [
        "",
        f"model    {policy.all / 1e9:.2f}B weights on {command.gpus} GPUs of {command.gpu_gb:.1f} GiB, "
        f"{policy.num_recomputed} of {policy.num_blocks} layers recomputed",
        f"budget   {command.tokens:,} tokens a micro-batch ({why(command)})",
        f"fullest  {fullest}, {totals[fullest]:.1f} of {command.gpu_gb:.1f} GiB: "
        f"{'it fits' if command.fits() else 'it does not fit'}",
    ]
    if command.args.policy.share_prompt:
        lines.append(f"sharing  {command.plan.keys:.1f} keys gathered for each token; it saves time where sequences "
                     f"have more than {gather_share(policy):.1%} in common, and below {LEAST_COMMON:.0%} nothing is "
                     f"shared")
    share = command.args.rollout.gpu_memory_utilization
    given = f"--rollout.gpu-memory-utilization {share:g} is {share * command.gpu_gb:.1f} GiB: "
    if command.share_is_too_small():
        needed = sum(command.engine_alone().values()) + command.least_cache_gb()
        lines.append(f"engine   {given}its weights, activations and the cache of {AT_A_TIME} sequences take "
                     f"{needed:.1f}")
    if command.fits() and command.args.rollout.engine != "vllm":        # it has no cache of its own
        return "\n".join(lines)
    if command.fits():
        cache = command.cache_gb()
        tokens = int(cache / command.cache_gb_per_token())
        lines.append(f"engine   {given if share else ''}{cache:.1f} GiB are left for its cache: {tokens:,} tokens, "
                     f"{tokens // command.plan.longest} sequences of {command.plan.longest:,}")
        return "\n".join(lines)
    found = next((x for x in changes(command, node) if would_fit(command, *x)), None)
    if found is None:
        tried = "" if num_samplers() else "offloading, "
        return "\n".join([*lines, f"change   none of {tried}tensor parallelism and up to 1,024 GPUs makes it fit"])
    flags, gpus = found
    more = f"{gpus} GPUs that train" if num_samplers() else f"{gpus} GPUs"
    words = [more] * (gpus != command.gpus) + [in_words(flags)] * bool(flags)
    return "\n".join([*lines, f"change   the smallest that makes it fit: {' and '.join(words)}"])


def why(command: Command) -> str:
    if command.max_tokens:
        return "--max-tokens-per-gpu"
    if command.plan.largest_budget(command.gpu_gb) == 0:
        return "one longest sequence: not even this fits"
    return "the most that fit" if command.tokens < MAX_TOKENS else "the most that is chosen"


# --------------------------------------------------------------------------- a script's command

MOST = {"hidden_size": 10**6, "intermediate_size": 10**7, "num_hidden_layers": 1000, "num_attention_heads": 10**4,
        "num_key_value_heads": 10**4, "head_dim": 10**4, "vocab_size": 10**7, "num_experts_per_tok": 10**4}
"""More than any model has."""
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"


def check_sizes(config: Any) -> None:
    """Raises ValueError for sizes that no model has. A plan of them would take for ever, or end in a traceback."""
    fields = config.get_text_config().to_dict()
    for name, most in MOST.items():
        size = fields.get(name)                                         # families differ in these fields
        if isinstance(size, int) and not 1 <= size <= most:
            raise ValueError(f"{name} is {size}, must be from 1 to {most:,}")
    whole, parts = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if whole and parts and whole % parts:
        raise ValueError(f"num_attention_heads {whole} must be a multiple of num_key_value_heads {parts}")
    chosen = fields.get("num_experts_per_tok")
    experts = [fields[name] for name in EXPERTS if fields.get(name) is not None]
    if chosen and experts and chosen > experts[0]:
        raise ValueError(f"num_experts_per_tok {chosen} must be at most the number of experts, {experts[0]}")


class Planned(Run):
    """Ends where the script asks for the plan: no ranks meet, no data are read, no engine is started."""

    node: int
    gpu_gb: float
    fits: bool

    def __enter__(self):
        args = self.args
        samplers = num_samplers()
        size = int(os.environ["WORLD_SIZE"]) - samplers
        self.world = World(0, size, torch.device("cuda"), mesh=None, num_samplers=samplers)
        with mock.patch.object(loading, "sequence_cost"):               # it builds the model, of whatever sizes
            check_sizes(read_config(args.model, args.policy))
        self.hf_config = read_config(args.model, args.policy)
        with mock.patch.object(make, "check_vllm"):                     # it asks what this machine can do
            make.check_rollout(args.rollout, self.hf_config, self.world, args.data.max_prompt_length,
                               self.correction.covers_cut_sampling)
        self.total_steps = 10**9 if args.total_epochs else args.total_steps     # how many rows there are is not known
        return self

    def plan_memory(self, max_tokens: int, frozen: str | tuple = "", critic: str = "") -> int:
        command = Command(self.args, self.hf_config, self.world.size, self.gpu_gb, max_tokens, frozen, critic)
        print(report(command, self.node))
        Planned.fits = command.fits()
        sys.exit(0)

    def __exit__(self, *_) -> None:
        pass


def load(script: str) -> ModuleType:
    if not Path(script).is_file():
        raise ValueError(f"{script} is no file: name a training script and its flags, as in grpo.py --model ...")
    sys.path.insert(0, str(Path(script).parent))
    module = importlib.import_module(Path(script).stem)
    if not hasattr(module, "Run"):
        raise ValueError(f"{script} has no `Run`: only scripts that sample from their policy are read here")
    return module


def plan_script(script: str, flags: list[str], gpus: str, gpu_gb: float) -> bool:
    """Run the script up to its plan. `gpus`: GPUs of a machine, or GPUSxMACHINES. Returns whether it fits."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", gpus)
    if found is None:
        raise ValueError(f"--gpus {gpus} must be a number of GPUs, or GPUs and machines as 8x2")
    if not 0 < gpu_gb <= 10_000:
        raise ValueError(f"--gpu-gb {gpu_gb:g} must be above 0, and at most 10,000")
    node, machines = int(found[1]), int(found[2] or 1)
    os.environ["WORLD_SIZE"] = str(node * machines)
    Planned.node, Planned.gpu_gb = node, VISIBLE * gpu_gb
    module = load(script)
    refuse_others_flags(module.Args, flags, script)
    args = tyro.cli(module.Args, args=flags)
    bridge = mock.patch.object(module, "Bridge", create=True)           # of async_grpo.py, to ranks that are not here
    with mock.patch.object(module, "Run", Planned), bridge, contextlib.suppress(SystemExit):
        module.main(args)
    return Planned.fits


# --------------------------------------------------------------------------- public shapes

def shape(kind: str, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool = False,
          **others: int) -> Any:
    return AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, **others,
    )


SHAPES = {
    "Qwen3-0.6B": shape("qwen3", 1024, 3072, 28, 16, 8, 151936, True, head_dim=128),
    "Qwen2.5-1.5B": shape("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen3-4B": shape("qwen3", 2560, 9728, 36, 32, 8, 151936, True, head_dim=128),
    "Qwen2.5-7B": shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": shape("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": shape("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "Qwen3-32B": shape("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "Llama-3.1-70B": shape("llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen3-30B-A3B": shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128,
                           num_experts_per_tok=8, moe_intermediate_size=768),
    "Qwen3-235B-A22B": shape("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, head_dim=128, num_experts=128,
                             num_experts_per_tok=8, moe_intermediate_size=1536),
}
LARGE = "Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-235B-A22B"
HOMES = [(1, 80.0), (1, 141.0), (8, 80.0), (16, 80.0), (64, 80.0)]              # GPUs, GB of each
NUMBERS = 8, 16, 32, 64, 128                                                    # of GPUs with 80 GB
RESPONSES = {1024: 1, 31744: 4}
"""Tokens of the longest response, in the table of large models -> --policy.sequence-parallel."""


def fitting(hf_config: Any, gpus: int, gpu_gb: float, max_tokens: int = 0, response_length: int = 1024,
            sequence_parallel: int = 1,
            recomputes: bool | None = None) -> tuple[Command, dict[str, Any]] | None:
    """A GRPO run without a reference, with the flags with which it fits."""
    policy = ModelConfig(liger=False, sequence_parallel=sequence_parallel, gradient_checkpointing=recomputes)
    rollout = RolloutConfig(max_response_length=response_length)
    args = RunArgs(model="", train_data=(), policy=policy, rollout=rollout)
    command = Command(args, hf_config, gpus, VISIBLE * gpu_gb, max_tokens)
    for flags, more in changes(command, min(gpus, 8)):
        if more > gpus:
            break
        found = command.changed(flags, gpus)
        if found.fits():
            return found, flags
    return None


def cell(text: str, flags: dict[str, Any]) -> str:
    return text + (f"<br>`{in_words(flags)}`" if flags else "")


def budget_cell(command: Command, flags: dict[str, Any]) -> str:
    policy = command.plan.policy
    share = f", {policy.num_recomputed / policy.num_blocks:.0%}" if policy.num_recomputed else ""
    return cell(f"{command.tokens:,}{share}", flags)


def table(names: Iterable[str] = SHAPES) -> str:
    """Of each model and home the budget, the share of layers that are recomputed if any are, and the flags."""
    rows = ["| model | " + " | ".join(f"{gpus} x {gb:g} GB" for gpus, gb in HOMES) + " |", "| --- " * 6 + "|"]
    for name in names:
        found = [fitting(SHAPES[name], *home) for home in HOMES]
        rows.append(f"| {name} | " + " | ".join(budget_cell(*x) if x else "no" for x in found) + " |")
    return "\n".join(rows)


def large_table(names: Iterable[str] = LARGE, numbers: Iterable[int] = NUMBERS) -> str:
    """Of each model, longest response and number of GPUs the GiB of each, in the fullest phase, and the flags. All
    layers are recomputed."""
    rows = ["| model | response | " + " | ".join(f"{gpus} GPUs" for gpus in numbers) + " |"]
    rows.append("| --- " * (rows[0].count("|") - 1) + "|")
    for name, (length, n) in itertools.product(names, RESPONSES.items()):
        found = [fitting(SHAPES[name], gpus, 80.0, 8192, length, n, True) for gpus in numbers]
        cells = (cell(f"{max(x[0].totals().values()):.0f}", x[1]) if x else "no" for x in found)
        rows.append(f"| {name} | {length:,} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("script", nargs="?", help="grpo.py or another training script; its flags follow")
    parser.add_argument("--gpus", default="8", help="GPUs of a machine, or GPUSxMACHINES (default 8)")
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="memory of a GPU, as in its name (default 80)")
    parser.add_argument("--table", action="store_true", help="the table of docs/gpus.md")
    parser.add_argument("--large-table", action="store_true", help="the table of tests/evidence/memory.md")
    options, flags = parser.parse_known_args()
    if options.table or options.large_table:
        print(table() if options.table else large_table())
        return
    if options.script is None:
        parser.error("name a training script, --table or --large-table")
    try:
        sys.exit(not plan_script(options.script, flags, options.gpus, options.gpu_gb))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
