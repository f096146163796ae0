"""TRL's side of bench_step, in TRL's own environment: `.venv-trl/bin/python -m tests.bench.step_trl JOB.json`.

JOB.json: model, prompts (a file of JSON lines: prompt, tokens, ground_truth, in the order of the steps), run_dir,
prompts_per_step, samples_per_prompt, sequences_per_microbatch, max_new_tokens, lr, steps, use_vllm. Writes a line a
step to run_dir/metrics.jsonl, as grpo.py does. Nothing of TRL is patched.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rewards.gsm8k import compute_score


class WriteMetrics(TrainerCallback):
    def __init__(self, file: Path):
        self.file = file

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:                                              # not the summary at the end
            with self.file.open("a") as out:
                out.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def reward(completions: list[str], ground_truth: list[str], **kwargs) -> list[float]:
    return [compute_score("word_problems", text, truth) for text, truth in zip(completions, ground_truth)]


def main(job: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    for row in rows:
        if tokenizer(row["prompt"])["input_ids"] != row.pop("tokens"):
            raise ValueError(f"TRL would see other tokens than grpo.py: {row['prompt']!r}")
    run_dir, samples = Path(job["run_dir"]), job["prompts_per_step"] * job["samples_per_prompt"]
    run_dir.mkdir(parents=True)
    config = GRPOConfig(
        output_dir=str(run_dir / "trl"), use_cpu=True, seed=0, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, max_steps=job["steps"], shuffle_dataset=False, model_init_kwargs={"dtype": "float32"},
        bf16=True, gradient_checkpointing=False, per_device_train_batch_size=job["sequences_per_microbatch"],
        gradient_accumulation_steps=samples // job["sequences_per_microbatch"],
        num_generations=job["samples_per_prompt"], max_completion_length=job["max_new_tokens"], temperature=1.0,
        beta=0.0, loss_type="dapo", learning_rate=job["lr"], lr_scheduler_type="constant", max_grad_norm=1.0,
        use_vllm=job["use_vllm"], vllm_mode="colocate", vllm_max_model_length=256,
    )
    trainer = GRPOTrainer(
        model=job["model"], processing_class=tokenizer, reward_funcs=reward, args=config,
        train_dataset=Dataset.from_list(rows), callbacks=[WriteMetrics(run_dir / "metrics.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
