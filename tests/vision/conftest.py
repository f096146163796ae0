"""Tiny random models of the families that read images, and prompts for them."""

import pytest
from transformers import AutoTokenizer

from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.vision.tiny_models import ROWS, make_vision_model, write_rows


@pytest.fixture(scope="module", params=("qwen2_5_vl", "qwen3_vl", "internvl"))
def model(request, tmp_path_factory, smollm) -> str:
    return make_vision_model(request.param, tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def prompts(model, tmp_path_factory):
    files = [write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", ROWS)]
    return load_prompts(files, AutoTokenizer.from_pretrained(model), DataConfig())
