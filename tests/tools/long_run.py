"""A made-up run with long responses, to see how the page copes: `python -m tests.tools.long_run FOLDER`."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.rollouts.record import SCHEMA
from tests.tools.test_report import write_run

WORDS = ("so", "the", "next", "term", "must", "be", "even,", "because", "3", "+", "5", "=", "8", "wait:", "again")


def write_rollouts(folder: Path, step: int, num_groups: int, group_size: int, length: int) -> None:
    """A training step's file, groups of responses of about `length` tokens; numbers per token have no pattern."""
    rng = np.random.default_rng(step)
    rows = []
    for index in range(num_groups * group_size):
        group = index // group_size
        num_tokens = length - index % 7
        tokens = rng.integers(0, len(WORDS), num_tokens)
        ends_line = rng.random(num_tokens) < 0.05
        texts = [" " + WORDS[token] + ("\n" if end else "") for token, end in zip(tokens, ends_line)]
        reward = float(rng.random() < 0.3 + 0.05 * step)
        row = {
            "step": step, "index": index, "group": group, "data_source": "made_up", "prompt": prompt_of(group),
            "response": "".join(texts), "ground_truth": str(group), "score": reward, "reward": reward,
            "reward_parts": "{}", "advantage": reward - 0.5, "finish_reason": "stop", "prompt_length": 20,
            "response_length": num_tokens, "tokens": tokens, "token_texts": texts,
            "trained": np.full(num_tokens, True), "clipped": rng.random(num_tokens) < 0.01,
        }
        for name in [field.name for field in SCHEMA if field.type == pa.list_(pa.float32())]:
            row[name] = rng.normal(size=num_tokens).astype(np.float32)
        row["token_advantage"] = np.full(num_tokens, reward - 0.5, np.float32)
        row["value"] = row["returns"] = row["ref_logp"] = None          # as GRPO's are
        rows.append(row)
    (folder / "rollouts").mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, folder / f"rollouts/step_{step:06d}.parquet", compression="zstd")


def write_validation(folder: Path, step: int, num_prompts: int, num_samples: int) -> None:
    """A validation's file has what training's has per response, but no advantage and nothing per token."""
    rows = [{
        "step": step, "index": i, "group": i // num_samples, "data_source": "made_up",
        "prompt": prompt_of(i // num_samples), "response": f"answer {i} at step {step}", "ground_truth": "7",
        "score": float(i % 2 == 0), "reward": float(i % 2 == 0), "reward_parts": "{}", "advantage": None,
        "finish_reason": "stop", "prompt_length": 20, "response_length": 6,
    } for i in range(num_prompts * num_samples)]
    (folder / "rollouts").mkdir(exist_ok=True)
    schema = pa.schema([field for field in SCHEMA if not pa.types.is_list(field.type)])
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, folder / f"rollouts/val_{step:06d}.parquet")


def prompt_of(group: int) -> str:
    return f"<|im_start|>user\nWhat is term {group} of the sequence?<|im_end|>\n<|im_start|>assistant\n"


def write_long_run(folder: Path, length: int = 8000) -> Path:
    """200 responses of one step, and two validations."""
    write_run(folder)
    (folder / "config.json").write_text(json.dumps({"model": "made-up"}))
    write_rollouts(folder, 5, num_groups=10, group_size=20, length=length)
    for step in (0, 5):
        write_validation(folder, step, num_prompts=10, num_samples=4)
    return folder


if __name__ == "__main__":
    write_long_run(Path(sys.argv[1]))
