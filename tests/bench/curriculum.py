"""Uniform sampling, --data.pool learning, the curriculum of docs/forks.md and dapo.py on rows of mixed difficulty:
steps, responses and seconds to a sampled accuracy. `python -m tests.bench.curriculum OUT [--seeds 3] [--steps 80]`: 12
runs of half a minute on one core; the numbers are in tests/evidence/curriculum.json.

A row asks for a text of at most 12 tokens with at least k letters e, k from 0 to 12, or 20, which no text has. The
model is random, of two layers, and its tokens are single characters; validation rows have k from 1 to 8."""

import argparse
import json
import os
import statistics
import string
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import ROOT
from tests.forks.patches import apply, documented

TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
RESULT = "val-core/e/acc/mean@4"
REWARD = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.lower().count("e") >= int(ground_truth))
'''


def make_model(folder: Path) -> None:
    words = ["<|end|>", "<|user|>", "<|assistant|>", "<unk>", *string.ascii_lowercase, *string.digits, *" .,:\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>",
                                   additional_special_tokens=["<|user|>", "<|assistant|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0,
                         bos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_rows(path: Path, count: int, wanted: list[int]) -> None:
    rows = []
    for i in range(count):
        k = wanted[i % len(wanted)]
        rows.append(json.dumps({"prompt": f"{i}: write {k} e", "data_source": "e",
                                "reward_model": {"style": "rule", "ground_truth": str(k)}}))
    path.write_text("\n".join(rows))


def crossing(run: Path, target: float) -> list[float]:
    """Step, responses and seconds of training at which the accuracy is reached, a straight line between validations."""
    seconds = responses = 0.0
    before = None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "timing_s/step" in row:
            seconds += row["timing_s/step"] - row.get("timing_s/testing", 0.0)
            responses += 64 * row.get("rollout/gen_batches", 1)
        if RESULT in row:
            point = [row["step"], responses, seconds, row[RESULT]]
            if before and before[3] < target <= point[3]:
                share = (target - before[3]) / (point[3] - before[3])
                return [a + share * (b - a) for a, b in zip(before[:3], point[:3])]
            before = point
    return [float("nan")] * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    out, seeds = args.out.absolute(), range(1, args.seeds + 1)
    out.mkdir(parents=True)
    make_model(out / "model")
    write_rows(out / "train.jsonl", 96, [*range(13), 20, 20, 20])
    write_rows(out / "val.jsonl", 32, [*range(1, 9)])
    (out / "reward.py").write_text(REWARD)
    (out / "fork.py").write_text(apply(documented()["A curriculum"], (ROOT / "grpo.py").read_text())[0])
    variants = {"uniform": ["grpo.py"], "pool": ["grpo.py", "--data.pool", "learning"],
                "weights": [str(out / "fork.py")], "dapo": ["dapo.py", "--clip-high", "0.2"]}
    for seed in seeds:
        for name, command in variants.items():
            subprocess.run([
                sys.executable, *command, "--model", out / "model", "--train-data", out / "train.jsonl", "--val-data",
                out / "val.jsonl", "--prompts-per-step", "8", "--samples-per-prompt", "8", "--total-steps",
                str(args.steps), "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
                "--data.max-prompt-length", "100",
                "--rollout.max-response-length", "12", "--optim.lr", "1e-3", "--reward.function",
                f"{out / 'reward.py'}:compute_score", "--reward.num-workers", "1", "--save.hf", "never",
                "--save.resume", "none", "--eval-every", "4", "--eval-n", "4", "--seed", str(seed), "--run-dir",
                out / f"{name}.seed{seed}"], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    for name in variants:
        for target in (0.5, 0.9):
            found = [crossing(out / f"{name}.seed{seed}", target) for seed in seeds]
            steps, responses, seconds = ([*column] for column in zip(*found))
            spread = statistics.stdev(steps) if len(steps) > 1 else float("nan")
            print(f"{name} {target}: {statistics.mean(steps):.1f} +- {spread:.1f} steps, "
                  f"{statistics.mean(responses):.0f} responses, {min(seconds):.1f} s at least")


if __name__ == "__main__":
    main()
