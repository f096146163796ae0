"""What a step should take on 8 to 1,024 H100s: `python -m tests.bench.h100 [--prompts 1024]`.

PREDICTIONS of simulate.py, which bench_scale checks on this machine's CPU: nothing here was measured on a GPU. H100 and
ASSUMED are what they stand on.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import tyro
from transformers import LlamaConfig, Qwen2Config

from tests.bench.simulate import Job, Machine, Shape, step_seconds

SIZES = {"7B": Qwen2Config(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                           intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False),
         "32B": Qwen2Config(hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
                            intermediate_size=27648, vocab_size=152064, tie_word_embeddings=False),
         "70B": LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
                            intermediate_size=28672, vocab_size=128256, tie_word_embeddings=False)}
TP = {"7B": 1, "32B": 4, "70B": 8}
H100 = Machine("H100 SXM", flops=989e12, bytes_per_s=3.35e12, memory_gb=80, update_mfu=0.40, prefill_mfu=0.50,
               memory_frac=0.70, layer_s=1e-3, decode_step_s=3e-3, decode_sequence_s=10e-6, tensor_s=1e-4,
               node_bytes_per_s=350e9, nic_bytes_per_s=40e9, host_bytes_per_s=40e9, hop_s=3e-6)
ASSUMED = {
    "machine": dataclasses.asdict(H100),
    "responses": "log-normal, cut at the longest; no stop of stragglers",
    "loop": "one update a step, so no old log-probs; no reference; layers recomputed in backward; FSDP over all ranks; "
            "at most 256 sequences an engine; of these the first that fits with 15 GiB of cache: 32,768 or 16,384 "
            "tokens a micro-batch, one longest sequence, that with masters and moments in host memory in the rollout",
    "model": "as simulate.py says",
}


@dataclass
class Batch:
    """Of one step, whatever the number of GPUs."""

    prompts: int = 1024
    samples: int = 8
    prompt: int = 512
    """Tokens of a prompt."""
    median: int = 2000
    """Of the response lengths, tokens."""
    sigma: float = 0.8
    """Of the logarithm of the response lengths."""
    longest: int = 8192
    """Tokens of a response at most."""


def predict(batch: Batch) -> list[dict]:
    rng, rows = np.random.default_rng(0), []
    lengths = rng.lognormal(np.log(batch.median), batch.sigma, batch.prompts * batch.samples)
    lengths, longest = np.clip(lengths, 1, batch.longest).astype(int), batch.prompt + batch.longest
    for size, config in SIZES.items():
        shape = Shape.of(config)
        for gpus in (8, 64, 512, 1024):
            for max_tokens, offload in ((32768, False), (16384, False), (longest, False), (longest, True)):
                job = Job(np.full(len(lengths), batch.prompt), lengths, batch.samples, gpus, TP[size],
                          max_tokens=max_tokens, checkpointing=True, offload=offload)
                found = step_seconds(H100, shape, job)
                if found["fits"] and found["cache_gb"] >= 15:
                    tokens = float((job.prompt_lengths + lengths).sum())
                    found["tokens_per_s_per_gpu"] = tokens / found["step_s"] / gpus
                    break
            rows.append({"model": size, "gpus": gpus, "tp": job.tp, "max_tokens": job.max_tokens,
                         "offload": job.offload, **found})
    return rows


def table(rows: list[dict]) -> None:
    columns = ["model", "gpus", "tp", "max_tokens", "offload", "slots", "rollout_s", "mean_engine_s", "sync_s",
               "offload_s", "update_s", "imbalance", "network_bound_frac", "train_gb", "cache_gb", "step_s",
               "tokens_per_s_per_gpu"]
    print("\nH100s: PREDICTED, not measured\n\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        shown = [row.get(name, "does not fit" if name == "step_s" else "") for name in columns]
        print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in shown) + " |")


if __name__ == "__main__":
    table(predict(tyro.cli(Batch, description=__doc__)))
