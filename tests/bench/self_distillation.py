"""Self-distillation (distill.py --teacher self) and grpo.py on a task for a tiny model: rewards by step, three seeds.
About ten CPU minutes; the numbers are in tests/evidence/self_distillation.json.

    python -m tests.bench.self_distillation runs/self_distillation

Each of 64 questions names another key, and has one of sixteen words as answer. Before, sft.py teaches the model two
things: to answer a question with any of the words, and, where it was answered before in the conversation, to answer it
in the same way. So a teacher that reads an answer repeats it.
"""

import json
import random
import re
import statistics
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from tests.conftest import launch, make_tiny_llama

WORDS = ["apple", "book", "cat", "dog", "egg", "fish", "gold", "hand", "ice", "key", "lamp", "milk", "nut", "oil",
         "pen", "queen"]
NUM_QUESTIONS = 64
PLAIN = ["--data.template", "plain", "--policy.compute-dtype", "float32", "--save.every", "0"]
STEPS = (8, 16, 24, 32, 40, 48)
OF_LAST = 4  # steps whose mean is shown
AVERAGE = ["--divergence", "jsd", "--teacher-update-rate"]
WAYS = {  # name -> script, seeds, learning rate, context, further flags
    "GRPO, lr 1e-3": ("grpo.py", (1,), "1e-3", "", []),
    "GRPO, lr 3e-3": ("grpo.py", (1, 2, 3), "3e-3", "", []),
    "GRPO, lr 1e-2": ("grpo.py", (1,), "1e-2", "", []),
    "a sibling's success, average 0.05 (SDPO)": ("distill.py", (1, 2, 3), "3e-3", "sibling_success",
                                                 [*AVERAGE, "0.05"]),
    "the answer, average 0.01, JSD": ("distill.py", (1, 2, 3), "3e-3", "reference_answer", [*AVERAGE, "0.01"]),
    "the answer, average 0.01, reverse KL": ("distill.py", (1,), "3e-3", "reference_answer",
                                             ["--teacher-update-rate", "0.01"]),
    "the answer, no average, reverse KL (SDFT)": ("distill.py", (1,), "3e-3", "reference_answer", []),
}


def question(key: str) -> str:
    return f"The word of {key} is"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


def write_rows(folder: Path, model: str) -> None:
    generator = random.Random(0)
    vocabulary = sorted(AutoTokenizer.from_pretrained(model).get_vocab())
    # a token each: with numbers as keys the model would have to learn what digits together mean
    keys = generator.sample([token[1:] for token in vocabulary if re.fullmatch(r"\u0120[a-z]{4,8}", token)],
                            NUM_QUESTIONS)
    rows = []
    for key in keys:
        rows.append({"prompt": [{"role": "user", "content": question(key)}], "data_source": "words",
                     "reward_model": {"ground_truth": generator.choice(WORDS)}, "extra_info": {"key": key}})
    pq.write_table(pa.Table.from_pylist(rows), folder / "questions.parquet")
    talks = []
    for _ in range(8192):
        asked = {"role": "user", "content": question(generator.choice(keys))}
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
    write_rows(folder, model)
    launch("sft.py", "--model", model, "--train-data", str(folder / "talks.parquet"), *PLAIN, "--total-steps", "256",
           "--rows-per-step", "64", "--optim.lr", "3e-3", "--data.max-length", "256", "--run-dir", str(folder / "sft"))
    common = [
        "--model", str(folder / "sft/model"), "--train-data", str(folder / "questions.parquet"), *PLAIN,
        "--data.max-prompt-length", "64", "--rollout.engine", "hf", "--rollout.max-response-length", "4",
        "--prompts-per-step", "16", "--samples-per-prompt", "8", "--total-steps", str(STEPS[-1]), "--optim.schedule",
        "constant", "--reward.function", f"{__file__}:compute_score", "--reward.num-workers", "1", "--save.hf", "never",
    ]
    contexts = Path("common/distillation/contexts.py").resolve()
    results = {}
    for name, (script, seeds, rate, context, flags) in WAYS.items():
        if context:
            flags = ["--teacher", "self", "--context", f"{contexts}:{context}", *flags]
        results[name] = {}
        for seed in seeds:
            run = folder / f"{len(results)}.seed{seed}"
            launch(script, *common, *flags, "--optim.lr", rate, "--seed", str(seed), "--run-dir", str(run))
            rewards = rewards_of(run)
            shown = [round(statistics.mean(rewards[step - OF_LAST : step]), 2) for step in STEPS]
            results[name][f"seed {seed}"] = shown
            print(name, seed, shown, flush=True)
    (folder / "self_distillation.json").write_text(json.dumps({
        "command": "python -m tests.bench.self_distillation OUT",
        "numbers": f"mean training reward of the {OF_LAST} steps up to step {', '.join(map(str, STEPS))}",
        "ways": results,
    }, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
