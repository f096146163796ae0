"""A tiny vision-language model learns the colour of shapes from random weights, by GRPO alone. Three seeds, 5 minutes.

    .venv/bin/python -m tests.bench.learn_vision runs/vision
    .venv/bin/python -m tests.bench.learn_vision runs/vision_sft sft

Makes the model (Qwen2.5-VL's architecture, a vocabulary of words) and the data of data/shapes.py, trains with grpo.py
and prints a table: accuracy on held-out pictures, and that of the trained model when it sees grey ones instead. With
`sft` it trains with sft.py on the answers, and the curve is the mean probability of the held-out answers.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.dataset.images import load_processor

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<pad>", "<end>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = ["red", "green", "blue", "yellow", "Which", "colour", "do", "the", "shapes", "have", "?", "Answer", "with",
         "one", "word", ".", "cat", "dog", "up", "down", "left", "right"]
TEMPLATE = ("{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
            "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}")


def make_model(folder: Path) -> str:
    """Two layers of width 64 below and above, random."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
            "bos_token_id": None, "eos_token_id": ids["<end>"], "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], tie_word_embeddings=False,
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return str(folder)


def run(*command: str) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


@torch.no_grad()
def accuracy(folder: Path, rows: list[dict], grey: bool) -> float:
    """Greedy accuracy of a folder that grpo.py wrote, by transformers' own model and processor, row by row."""
    model, processor = transformers.AutoModelForImageTextToText.from_pretrained(folder), load_processor(str(folder))[0]
    right = 0
    for row in rows:
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        if grey:
            picture = Image.new("RGB", picture.size, (128, 128, 128))
        parts = [{"type": "image"}, {"type": "text", "text": row["prompt"][0]["content"].removeprefix("<image>")}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}])
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
        word = processor.tokenizer.decode(model(**inputs).logits[0, -1].argmax())
        right += word == row["reward_model"]["ground_truth"]
    return right / len(rows)


def main_sft(out: Path, seeds: list[int], steps: int) -> None:
    model = make_model(out / "model")
    run("data/shapes.py", "--out", out / "data", "--num-train", 1024, "--num-test", 128)
    rows = {}
    for split in ("train", "test"):
        rows[split] = pq.read_table(out / f"data/{split}.parquet").to_pylist()
        solved = [{"prompt": row["prompt"], "response": row["reward_model"]["ground_truth"], "images": row["images"]}
                  for row in rows[split]]
        pq.write_table(pa.Table.from_pylist(solved), out / f"data/solved_{split}.parquet")
    print("probability of held-out answers; last: accuracy of the written model by transformers")
    for seed in seeds:
        run("sft.py", "--model", model, "--run-dir", out / f"seed{seed}", "--seed", seed,
            "--train-data", out / "data/solved_train.parquet", "--val-data", out / "data/solved_test.parquet",
            "--rows-per-step", 32, "--total-steps", steps, "--eval-every", steps // 4, "--policy.compute-dtype",
            "float32", "--data.template", "plain", "--optim.lr", 1e-3, "--optim.warmup-steps", 5, "--save.every", 0)
        lines = [json.loads(line) for line in (out / f"seed{seed}/metrics.jsonl").read_text().splitlines()]
        curve = [f"{line['val-core/probability']:.2f}" for line in lines if "val-core/probability" in line]
        shown = [f"{accuracy(out / f'seed{seed}/model', rows['test'], grey):.2f}" for grey in (False, True)]
        print(f"| {seed} | {' | '.join([*curve, *shown])} |", flush=True)


def main(out: Path, seeds: list[int], steps: int) -> None:
    model = make_model(out / "model")
    run("data/shapes.py", "--out", out / "data", "--num-train", 1024, "--num-test", 128)
    table = []
    for seed in seeds:
        run("grpo.py", "--model", model, "--run-dir", out / f"seed{seed}", "--seed", seed,
            "--train-data", out / "data/train.parquet", "--val-data", out / "data/test.parquet",
            "--prompts-per-step", 16, "--samples-per-prompt", 16, "--total-steps", steps, "--eval-every", steps // 4,
            "--rollout.engine", "hf", "--rollout.max-response-length", 1, "--policy.compute-dtype", "float32",
            "--optim.lr", 1e-3, "--optim.warmup-steps", 5, "--entropy-coef", 0.01, "--reward.num-workers", 1,
            "--save.every", 0, "--log.rollouts-every", steps // 2)
        lines = [json.loads(line) for line in (out / f"seed{seed}/metrics.jsonl").read_text().splitlines()]
        found = [(line["step"], line["val-core/shapes/acc/greedy"], line["val-core/shapes/acc/mean@4"])
                 for line in lines if "val-core/shapes/acc/greedy" in line]
        rows = pq.read_table(out / "data/test.parquet").to_pylist()
        shown = [accuracy(out / f"seed{seed}/model", rows, grey) for grey in (False, True)]
        table.append((seed, found, shown))
    print("accuracy on held-out pictures, greedy and (sampled); last: of the written model by transformers")
    print(f"| seed | {' | '.join(f'step {step}' for step, *_ in table[0][1])} | pictures | all grey |")
    for seed, found, (pictures, grey) in table:
        curve = " | ".join(f"{greedy:.2f} ({sampled:.2f})" for _, greedy, sampled in found)
        print(f"| {seed} | {curve} | {pictures:.2f} | {grey:.2f} |")


if __name__ == "__main__":
    out, *more = sys.argv[1:]
    is_sft = more[:1] == ["sft"]
    steps, *seeds = map(int, more[is_sft:] or [120])
    (main_sft if is_sft else main)(Path(out).absolute(), seeds or [1, 2, 3], steps)
