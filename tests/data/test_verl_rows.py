"""verl's files unchanged: parquet and a reward file as verl's documentation describes them train for two steps.

The layout is that of verl's "Prepare Data for Post-Training" and "Implement Reward Function for Dataset": written here
with pyarrow and an explicit schema, by none of this project's writers.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import launch

# as `datasets` writes the rows of verl's examples/data_preprocess/gsm8k.py: keys of a struct in its own order
SCHEMA = pa.schema([
    ("data_source", pa.string()),
    ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
    ("ability", pa.string()),
    ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
    ("extra_info", pa.struct([("answer", pa.string()), ("index", pa.int64()), ("question", pa.string()),
                              ("split", pa.string())])),
], metadata={"huggingface": json.dumps({"info": {"features": {"ability": {"dtype": "string", "_type": "Value"}}}})})
REWARD = '''
import json

def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and ground_truth == extra_info["answer"].split("#### ")[1]
    with open({log!r}, "a") as log:
        log.write(json.dumps([extra_info["split"], extra_info["index"], ground_truth, len(solution_str)]) + "\\n")
    return len(solution_str)/100
'''


def test_verls_files_train_for_two_steps(tiny_llama, tmp_path):
    rows = []
    for index in range(6):
        question = f"Tom has {index} pens and buys {index + 2}. How many pens has he?"
        rows.append({
            "data_source": "openai/gsm8k",
            "prompt": [{"content": f"{question} Let's think and write the answer after \"####\".", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(2 * index + 2), "style": "rule"},
            "extra_info": {"answer": f"{index}+{index + 2}\n#### {2 * index + 2}", "index": index,
                           "question": question, "split": "train"},
        })
    no_truth = rows[0] | {"reward_model": {"ground_truth": None, "style": "rule"}}
    for split, part in (("train", [*rows[:2], no_truth, *rows[2:4]]), ("test", rows[4:])):
        part = [row | {"extra_info": row["extra_info"] | {"split": split}} for row in part]
        pq.write_table(pa.Table.from_pylist(part, schema=SCHEMA), tmp_path / f"{split}.parquet")
    (tmp_path / "reward.py").write_text(REWARD.format(log=str(tmp_path / "calls.jsonl")))
    launch(
        "grpo.py", "--model", tiny_llama, "--train-data", str(tmp_path / "train.parquet"), "--val-data",
        str(tmp_path / "test.parquet"), "--reward.function", f"{tmp_path}/reward.py:my_reward_fn", "--run-dir",
        str(tmp_path / "run"), "--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--prompts-per-step", "4",
        "--samples-per-prompt", "3", "--rollout.max-response-length", "6", "--optim.lr", "1e-3", "--total-steps", "2",
        "--reward.num-workers", "1", "--eval-n", "0", "--data.max-prompt-length", "200",
        "--data.on-bad-row", "skip", warm=True,
    )
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2]
    skipped = json.loads((tmp_path / "run/skipped_train.jsonl").read_text())
    assert skipped["row"] == 2 and "must have a ground_truth" in skipped["rule"]
    assert not (tmp_path / "run/skipped_val.jsonl").exists()
    trial, *calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert trial[0] == "train"                                                  # before a model was loaded
    train = [call for call in calls if call[0] == "train"]
    assert len(train) == 2 * 4 * 3 and len(calls) == 2 * 4 * 3 + 2 * 2          # two validations of two problems
    assert sorted({(index, truth) for _, index, truth, _ in train}) == [(i, str(2 * i + 2)) for i in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    lengths = [len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts[:4]]
    for step, row in enumerate(metrics[1:]):
        rewards = [length / 100 for _, _, _, length in train[12 * step : 12 * step + 12]]
        assert row["critic/rewards/mean"] == pytest.approx(sum(rewards) / 12) and max(rewards) > min(rewards)
        assert row["prompt_length/mean"] == pytest.approx(sum(lengths) / 4)
        assert row["reward/error_frac"] == 0 and row["actor/grad_norm"] > 0
    assert "val-core/openai/gsm8k/acc/greedy" in metrics[0] and "val-core/openai/gsm8k/acc/greedy" in metrics[2]
    before, after = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).model.embed_tokens.weight
                     for path in (tiny_llama, tmp_path / "run/model")]
    assert before.shape == after.shape and not torch.equal(before, after)
