"""TRL's side of bench_sft, in TRL's own environment: `.venv-trl/bin/python -m tests.bench.sft_trl JOB.json`.

JOB.json: model, rows (a file of JSON lines: input_ids, labels, in the order in which sft.py draws them), run_dir,
max_tokens, sequences_per_step, lr, steps. Writes a line a step to run_dir/metrics.jsonl, as sft.py does. Nothing of TRL
is patched.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.bench.step_trl import WriteMetrics


def main(job: dict) -> None:
    run_dir = Path(job["run_dir"])
    run_dir.mkdir(parents=True)
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    config = SFTConfig(
        output_dir=str(run_dir / "trl"), use_cpu=True, seed=0, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, max_steps=job["steps"], model_init_kwargs={"dtype": "float32"}, bf16=True,
        gradient_checkpointing=False, packing=True, max_length=job["max_tokens"], per_device_train_batch_size=1,
        gradient_accumulation_steps=job["sequences_per_step"], learning_rate=job["lr"], lr_scheduler_type="constant",
        max_grad_norm=1.0, weight_decay=0.0,
    )
    trainer = SFTTrainer(
        model=job["model"], processing_class=AutoTokenizer.from_pretrained(job["model"]), args=config,
        train_dataset=Dataset.from_list(rows), callbacks=[WriteMetrics(run_dir / "metrics.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
