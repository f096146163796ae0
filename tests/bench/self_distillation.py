"""Self-distillation (distill.py --teacher self) and grpo.py on a task for a tiny model: rewards by step, three seeds.
About six CPU minutes.

    python -m tests.bench.self_distillation runs/self_distillation

The questions have one of sixteen words as answer. Before, sft.py teaches the model two things: to answer a question
with any of the words, and, where it was answered before in the conversation, to answer it in the same way.
"""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.conftest import launch, make_tiny_llama

WORDS = ["apple", "book", "cat", "dog", "egg", "fish", "gold", "hand", "ice", "key", "lamp", "milk", "nut", "oil",
         "pen", "queen"]
NUM_QUESTIONS = 64
PLAIN = ["--data.template", "plain", "--policy.compute-dtype", "float32", "--save.every", "0"]
STEPS = (4, 8, 12, 16, 24, 32)
RATES = ("3e-3",)


def question(number: int) -> str:
    return f"Which word has the number {number}? It is"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


def write_rows(folder: Path) -> None:
    generator = random.Random(0)
    rows = []
    for number in range(NUM_QUESTIONS):
        rows.append({"prompt": [{"role": "user", "content": question(number)}], "data_source": "words",
                     "reward_model": {"ground_truth": generator.choice(WORDS)}, "extra_info": {"number": number}})
    pq.write_table(pa.Table.from_pylist(rows), folder / "questions.parquet")
    talks = []
    for _ in range(8192):
        asked = {"role": "user", "content": question(generator.randrange(NUM_QUESTIONS))}
        answer = f" {generator.choice(WORDS)}"
        before = generator.choice([[], [asked, {"role": "assistant", "content": answer.strip()}]])
        talks.append({"prompt": [*before, asked], "response": answer})
    pq.write_table(pa.Table.from_pylist(talks), folder / "talks.parquet")


def rewards_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_llama(folder, hidden_size=64)
    write_rows(folder)
    launch("sft.py", "--model", model, "--train-data", str(folder / "talks.parquet"), *PLAIN, "--total-steps", "256",
           "--rows-per-step", "64", "--optim.lr", "3e-3", "--data.max-length", "256", "--run-dir", str(folder / "sft"))
    common = [
        "--model", str(folder / "sft/model"), "--train-data", str(folder / "questions.parquet"), *PLAIN,
        "--data.max-prompt-length", "64", "--rollout.engine", "hf", "--rollout.max-response-length", "4",
        "--prompts-per-step", "16", "--samples-per-prompt", "8", "--total-steps", str(STEPS[-1]), "--optim.schedule",
        "constant", "--reward.function", f"{__file__}:compute_score", "--reward.num-workers", "1", "--save.hf", "never",
    ]
    context = Path("common/distillation/contexts.py").resolve()
    taught = ["distill.py", "--teacher", "self", "--context", f"{context}:sibling_success"]
    ways = {"GRPO": ["grpo.py"], "policy of the moment, reverse KL": taught,
            "average, JSD (SDPO)": [*taught, "--divergence", "jsd", "--teacher-update-rate", "0.05"]}
    print("| way, lr | " + " | ".join(f"step {step}" for step in STEPS) + " |\n| --- |" + " --- |" * len(STEPS))
    for rate in RATES:
        for name, (script, *flags) in ways.items():
            curves = []
            for seed in ("1", "2", "3"):
                run = folder / f"{name.split()[0]}{rate}.{seed}"
                launch(script, *common, *flags, "--optim.lr", rate, "--seed", seed, "--run-dir", str(run))
                curves.append(rewards_of(run))
            cells = []
            for step in STEPS:
                cells.append("; ".join(f"{sum(curve[step - 4 : step]) / 4:.2f}" for curve in curves))
            print(f"| {name}, {rate} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
