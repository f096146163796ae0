"""Every script's unchanged `main`, two steps on the stand-in for CUDA: what it asks of the device and of the engine."""

import json
import math
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.conftest import ROOT, TRAIN, VOCAB, launch, save_tokenizer
from tests.cuda.fake_cuda import WHY_NOT

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "initializer_range": 0.1,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
MIXTURE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FLAGS = [
    "--prompts-per-step", "2", "--samples-per-prompt", "4", "--total-steps", "2",
    "--data.max-prompt-length", "200", "--rollout.max-response-length", "8", "--rollout.max-probe-diff", "0",
    "--reward.function", f"{ROOT}/tests/scripts/reward_by_length.py:compute_score", "--reward.num-workers", "1",
    "--save.every", "0", "--save.hf", "never", "--optim.lr", "1e-3",
]
UPDATES = ["--epochs-per-step", "2"]
TERMS = ["--kl-loss-coef", "0.1", "--entropy-coef", "0.01"]
MEMORY = ["--offload.params", "--offload.optimizer", "--policy.gradient-checkpointing", "True"]
CHANGES_NOTHING = {                                                     # name -> without them
    "distill, offloaded": "distill", "memory": "terms", "offload.params": "grpo", "offload.optimizer": "grpo",
}
JOBS = {                                                                # name -> script, model, flags
    "grpo": ("grpo", "tied", []),
    "dapo": ("dapo", "tied", ["--save.async"]),
    "rloo": ("rloo", "tied", []),
    "ppo": ("ppo", "untied", ["--minibatches-per-step", "1"]),
    "mixture": ("grpo", "mixture", []),
    "adapters": ("ppo", "untied", ["--minibatches-per-step", "1", *TERMS, "--lora.rank", "4", *MEMORY]),
    "terms": ("grpo", "untied", [*TERMS, *UPDATES]),
    "memory": ("grpo", "untied", [*TERMS, *UPDATES, *MEMORY]),
    "offload.params": ("grpo", "tied", ["--offload.params"]),
    "offload.optimizer": ("grpo", "tied", ["--offload.optimizer"]),
    "distill": ("distill", "tied", ["--teacher", "untied"]),
    "distill, offloaded": ("distill", "tied", ["--teacher", "untied", *MEMORY]),
    "distill, two": ("distill", "tied", ["--teacher", "0=untied", "1=tied", "--divergence", "jsd", "--top-k", "8"]),
    "shared": ("grpo", "tied", ["--policy.share-prompt"]),
    "float32": ("grpo", "tied", ["--policy.compute-dtype", "float32"]),
    "many micro-batches": ("grpo", "tied", ["--max-tokens-per-gpu", "220"]),
    "resumed": ("grpo", "tied", ["--total-steps", "1"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, smollm) -> Path:
    """A folder with a run folder of each job, all made by one process. CUDA_JOBS in the environment: of some jobs."""
    folder = tmp_path_factory.mktemp("cuda")
    models = {
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "untied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "mixture": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE, tie_word_embeddings=False)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    rows = pq.read_table(TRAIN).slice(length=32)
    pq.write_table(rows, folder / "train.parquet")
    sources = pa.array([str(number % 2) for number in range(32)])
    number = rows.column_names.index("data_source")
    pq.write_table(rows.set_column(number, "data_source", sources), folder / "two.parquet")
    jobs = []
    for name, (script, model, flags) in JOBS.items():
        data = folder / ("two.parquet" if name == "distill, two" else "train.parquet")
        flags = [re.sub(r"^(\d=)?(un)?tied$", lambda found: f"{found[1] or ''}{folder}/{found[2] or ''}tied", flag)
                 for flag in flags]
        jobs.append([script, str(folder / "runs" / name),
                     ["--model", str(folder / model), "--train-data", str(data), *FLAGS, *flags]])
    jobs.append([*jobs[-1][:2], [*jobs[-1][2], "--total-steps", "2"]])
    if asked := os.environ.get("CUDA_JOBS"):                            # for tests that look at these alone
        jobs = [job for job in jobs if Path(job[1]).name in asked.split(",")]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "said.txt").write_text(launch("tests/cuda/worker.py", folder / "jobs.json", warm=True).stdout)
    return folder


def metrics_of(runs: Path, name: str) -> list[dict[str, float]]:
    """Without what is measured in seconds or bytes."""
    lines = (runs / "runs" / name / "metrics.jsonl").read_text().splitlines()
    measured = re.compile(r"timing|perf|sleep/|rollout/tokens_per_s|save/")
    return [{key: x for key, x in json.loads(line).items() if not measured.match(key)} for line in lines]


def seen_of(runs: Path, name: str) -> dict:
    return json.loads((runs / "runs" / name / "seen.json").read_text())


@pytest.mark.parametrize("name", JOBS)
def test_two_steps(name, runs):
    rows = metrics_of(runs, name)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, int | float)), row
        assert row["actor/grad_norm"] > 0 and row["actor/skipped_steps"] == 0


@pytest.mark.parametrize("name", [name for name in JOBS if name != "resumed"])
def test_the_engine_is_asked_in_order(name, runs):
    (first, options), *calls = seen_of(runs, name)["engine"]
    assert first == "LLM" and options["enable_sleep_mode"]
    assert options["dtype"] == ("float32" if name == "float32" else "bfloat16")
    cycle = [["wake", "weights"], ["load"], ["wake", "kv_cache"], ["sleep", 2]]
    num_rollouts = (len(calls) - 2) // len(cycle)
    assert calls == [["sleep", 2], *cycle * num_rollouts, ["shutdown"]]
    assert num_rollouts == 2 or name == "dapo"


def test_the_attention_is_the_one_for_gpus(runs):
    said = re.findall(r"attention (\w+)", (runs / "said.txt").read_text())
    float32 = list(JOBS).index("float32")
    assert said == ["packed_sdpa" if i == float32 else "packed_varlen" for i in range(len(JOBS) + 1)]


@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_offloading_and_checkpointing_change_nothing(name, runs):
    """Weights, moments and gradients of the device go to the host and back, bit by bit."""
    assert metrics_of(runs, name) == metrics_of(runs, CHANGES_NOTHING[name])


def close(a: list[dict[str, float]], b: list[dict[str, float]], tolerance: float) -> None:
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        for one, other in zip(a, b, strict=True):
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize(("name", "tolerance"), [("shared", 0.02), ("many micro-batches", 0.02), ("float32", 0.05)])
def test_layouts_and_kernels_agree(name, tolerance, runs):
    """A shared prompt, two responses in each micro-batch, and float32 with another attention: the same first step. In
    bfloat16 every difference is of rounding."""
    close(metrics_of(runs, name)[:1], metrics_of(runs, "grpo")[:1], tolerance)


def test_a_resumed_run_is_the_same_run(runs):
    """Saved from the device and loaded onto it: the second step, with new weights and moments, is that of one run."""
    assert "resumed after step 1" in (runs / "said.txt").read_text()
    ours, theirs = metrics_of(runs, "resumed")[1], metrics_of(runs, "grpo")[1]
    for name in ("sync/probe_prob_diff", "sync/probe_logp_diff"):       # a new process has a probe
        del ours[name]
    assert ours == theirs


# Host reads: the host waits until the device has done all it was given, and the device then waits for the host. What
# the host knew when it planned the micro-batches moves to the device with them.


def test_a_forward_reads_nothing(runs):
    """But for layouts of shared prompts that only the check of a new model and the probe use: three lists each."""
    for name in ("grpo", "shared", "mixture", "terms", "distill"):
        read = seen_of(runs, name)["reads"]
        parts = "model/(policy|attention)|kernels|segments|batch.py:(?!to$|<dictcomp>)|metrics.py:mean|correction"
        assert not [place for place in read if re.match(f"common/({parts})", place)], name
        assert read["common/optim.py:optimizer_step"] >= 2
        assert not {"common/batch.py:to", "common/batch.py:<dictcomp>"} & read.keys()   # advantages are written before
        assert read.get("common/layout/shared_prefixes.py:sort_by_prefix", 0) <= (15 if name == "shared" else 0)


def test_a_microbatch_reads_nothing(runs):
    """Two runs that differ in their micro-batches only. What more of them read is what is written of responses, in
    steps whose rollouts are recorded."""
    few, many = (seen_of(runs, name)["reads"] for name in ("grpo", "many micro-batches"))
    more = {place for place in many if many[place] > few.get(place, 0)}
    assert more == {"common/rollouts/record.py:<dictcomp>", "common/rollouts/record.py:numbers_of_tokens"}
