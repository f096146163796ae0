"""Tiny random vision-language models with their processors, in folders like any other model's, and rows with images."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer, ProcessorMixin
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

import common.dataset.images  # noqa: F401, makes processors work without torchvision
from tests.conftest import save_tokenizer

QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>"}
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_vision_model(family: str, folder: Path, **text: Any) -> str:
    """Random weights that are large enough for differences to show. `text`: changes of the language model's config."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = [*INTERNVL.values()] if family == "internvl" else QWEN
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
             "eos_token_id": 2, "tie_word_embeddings": True} | text
    config, processor = (_internvl if family == "internvl" else _qwen)(family, tokenizer, ids, sizes)
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
            elif "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def _qwen(family: str, tokenizer, ids: dict[str, int], text: dict[str, Any]) -> tuple[Any, ProcessorMixin]:
    text |= {"head_dim": 32, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}}
    tokens = {name: ids[token] for name, token in zip(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), QWEN)}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 128}
    if family.startswith("qwen3_vl"):
        patch, kind = 16, "Qwen3VL"
        text["rope_parameters"]["mrope_interleaved"] = True             # transformers takes it for granted, vLLM not
        vision |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    else:
        patch, kind = 14, "Qwen2_5_VL"
        vision |= {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
    moe = ""
    if family == "qwen3_vl_moe":
        moe = "Moe"
        text = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_local_experts": 4,
                "norm_topk_prob": True} | text                          # vLLM reads it, transformers does so always
    config = getattr(transformers, f"{kind}{moe}Config")(
        text_config=text, vision_config=vision, **tokens, tie_word_embeddings=text["tie_word_embeddings"])
    images = Qwen2VLImageProcessorPil(
        min_pixels=(2 * patch) ** 2, max_pixels=16 * (2 * patch) ** 2, patch_size=patch)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    videos = video_processor("Qwen3VL" if kind == "Qwen3VL" else "Qwen2VL")
    return config, getattr(transformers, f"{kind}Processor")(images, tokenizer, **videos, chat_template=template)


def _internvl(family: str, tokenizer, ids: dict[str, int], text: dict[str, Any]) -> tuple[Any, ProcessorMixin]:
    for name, token in INTERNVL.items():
        tokenizer.init_kwargs[name] = token
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", ids[token])
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
              "image_size": [28, 28], "patch_size": [7, 7]}
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2"} | text, vision_config=vision, image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4, tie_word_embeddings=text["tie_word_embeddings"])
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, min_patches=1, max_patches=4)
    template = TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n")
    return config, transformers.InternVLProcessor(
        images, tokenizer, **video_processor("InternVL"), image_seq_length=4, chat_template=template)


def video_processor(kind: str) -> dict[str, Any]:
    """The argument with a processor of videos, which can be made with torchvision, and must be then."""
    if not is_torchvision_available():
        return {}
    return {"video_processor": getattr(transformers, f"{kind}VideoProcessor")()}


def picture(height: int, width: int, seed: int) -> dict[str, Any]:
    """Random pixels as parquet gives them."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return {"bytes": png.getvalue(), "path": None}


def make_row(text: str, *images: dict[str, Any]) -> dict[str, Any]:
    return {"data_source": "test", "prompt": [{"role": "user", "content": text}], "images": list(images),
            "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"split": "train"}}


ROWS = [
    make_row("What is <image>?", picture(60, 90, 0)),
    make_row("No picture here."),
    make_row("<image> and then <image>", picture(84, 84, 1), picture(30, 120, 2)),
    make_row("What is <image>?", picture(60, 90, 3)),          # the tokens of the first row, other pixels
]
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    arrays = {name: pa.array(values, pa.list_(IMAGE) if name == "images" else None) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return str(path)
