"""Host memory that loading a policy and writing it take on each rank: of a dense model and of a mixture, in float32.

    python -m tests.bench.bench_loading [--ranks 1 2 4]
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from common.checkpoint.export import export, hf_files
from common.model import loading
from common.model.policy import ModelConfig
from common.parallel import ranks
from tests.bench.record import report
from tests.conftest import MODEL, launch

MIXTURE = Qwen3MoeConfig(
    vocab_size=8192, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, max_position_embeddings=1024, eos_token_id=2,
)


@dataclass
class Args:
    ranks: tuple[int, ...] = (1, 2, 4)
    worker: str = ""
    """A model's folder: measure it on these ranks."""


def memory(field: str) -> float:
    """GiB of this process: VmRSS, or VmHWM, its peak since `reset`. Pages of mapped files count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(field))


def reset() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def work(folder: str) -> None:
    world = ranks.init()
    before = reset()
    with mock.patch.object(loading, "check_packing"):                   # a forward pass, with unsharded weights
        policy = loading.load_policy(folder, ModelConfig(compute_dtype="float32"), world)
    loaded = memory("VmHWM") - before
    shards = sum(p.to_local().nbytes for p in policy.parameters()) / 2**30
    files = hf_files(folder, policy.lm.config, AutoTokenizer.from_pretrained(MODEL), "bfloat16")
    between = reset()
    export(policy, files, Path(folder) / "exported", world)
    found = ranks.all_gather_objects([loaded, shards, memory("VmHWM") - between])
    if world.is_main:
        print("found", json.dumps(found))
    ranks.shutdown()


def main(args: Args) -> None:
    if args.worker:
        return work(args.worker)
    figures = {}
    with tempfile.TemporaryDirectory() as root:
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).save_pretrained(f"{root}/dense")
        AutoModelForCausalLM.from_config(MIXTURE, dtype=torch.float32).save_pretrained(f"{root}/mixture")
        for name in ("dense", "mixture"):
            size = sum(path.stat().st_size for path in Path(root, name).glob("*.safetensors")) / 2**30
            print(f"\n{name}: {size:.2f} GiB of safetensors\n| ranks | a rank's shards | peak of loading above what "
                  "was before, rank by rank | peak of writing |\n| --- | --- | --- | --- |")
            for number in args.ranks:
                done = launch("-m", "tests.bench.bench_loading", "--worker", f"{root}/{name}", ranks=number)
                lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
                found = json.loads(lines["found"].removeprefix("found"))
                loaded, shards, written = ([f"{x:.2f}" for x in column] for column in zip(*found))
                print(f"| {number} | {max(shards)} | {' '.join(loaded)} | {' '.join(written)} |")
                if "read" in lines:
                    print("  ", lines["read"], file=sys.stderr)
                figures[f"{name}_{number}"] = {"loaded": loaded, "shards": shards, "written": written}
    report("loading", **figures)


if __name__ == "__main__":
    main(tyro.cli(Args))
