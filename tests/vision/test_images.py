"""Rows with images: what is read, counted, refused; what is recorded of them and shown on the page."""

import base64
import io
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoTokenizer

import tools.report
from common.checkpoint.export import hf_files
from common.dataset import store
from common.dataset.images import inputs_of, load_processor
from common.dataset.store import load_prompts
from common.engine.base import RolloutConfig
from common.engine.make import check_rollout
from common.model.flops import microbatch_flops
from common.model.loading import SCORED, read_config
from common.model.policy import ModelConfig
from common.prompts import DataConfig
from common.rollout import Response, Sample
from common.rollouts.record import Recorder, write_validation
from common.tracking.logger import LogConfig
from envs.pictures import MAX_PIXELS, decode
from tests.tools.test_report import write_run
from tests.vision.test_trainer import batch_of
from tests.vision.tiny_models import ROWS, make_row, make_vision_model, picture, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm) -> str:
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def prompts(tokenizer, tmp_path_factory):
    return load_prompts([write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", ROWS)], tokenizer, DataConfig())


def load(rows, tokenizer, path, all_columns=False, **flags):
    return load_prompts([write_rows(path / "rows.parquet", rows)], tokenizer, DataConfig(**flags), all_columns)


def test_tokens_are_expanded_for_the_trainer_and_not_for_the_engine(prompts, tokenizer):
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # a picture's sides become multiples of 28 pixels, and each square of 28 one token
    assert [prompt.tokens.count(pad) for prompt in prompts] == [2 * 3, 0, 3 * 3 + 1 * 4, 2 * 3]
    engine_tokens = [prompt.images and prompt.images.engine_tokens(prompt.tokens) for prompt in prompts]
    assert [tokens and tokens.count(pad) for tokens in engine_tokens] == [1, None, 2, 1]
    assert prompts[0].tokens == prompts[3].tokens and prompts[0].images.files != prompts[3].images.files
    assert prompts.has_images
    pixels = prompts[2].images.pixels()
    assert pixels["image_grid_thw"].tolist() == [[1, 6, 6], [1, 2, 8]]
    file = prompts[2].images.files[0]
    assert prompts.inputs_of(file) is inputs_of(file, tokenizer.name_or_path)               # cached
    processor, _ = load_processor(tokenizer.name_or_path)
    together = processor(text=[processor.image_token * 2], images=decode(prompts[2].images.files), return_tensors="pt")
    assert (together["pixel_values"] == pixels["pixel_values"]).all()


def test_the_length_filter_counts_expanded_tokens(prompts, tokenizer, tmp_path):
    longest = max(len(prompt.tokens) for prompt in prompts)
    kept = load(ROWS, tokenizer, tmp_path, max_prompt_length=longest - 1)
    assert [prompt.tokens for prompt in kept] == [prompts[i].tokens for i in (0, 1, 3)]
    assert kept.loaded.num_filtered == 1 and len(prompts[2].images.engine_tokens(prompts[2].tokens)) < longest - 1
    never_cut = load(ROWS, tokenizer, tmp_path, max_prompt_length=longest - 1, on_long_prompt="truncate-left")
    assert len(never_cut) == 3 and (never_cut.loaded.num_filtered, never_cut.loaded.num_truncated) == (1, 0)


def test_a_path_is_as_good_as_bytes(prompts, tokenizer, tmp_path):
    (tmp_path / "one.png").write_bytes(ROWS[0]["images"][0]["bytes"])
    row = make_row("What is <image>?", {"bytes": None, "path": str(tmp_path / "one.png")})
    (found,) = load([row], tokenizer, tmp_path)
    assert found.tokens == prompts[0].tokens and found.images.files == prompts[0].images.files


def test_a_content_list_is_as_good_as_placeholders(prompts, tokenizer, tmp_path):
    """With the images in their column, or inside the list, in both file formats; a text may be in several parts."""
    files = ROWS[2]["images"]
    for n, file in enumerate(files):
        (tmp_path / f"{n}.png").write_bytes(file["bytes"])
    marks = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "text", "text": "then "}, {"type": "image"}]
    inside = [part | ({"image": files[n // 3]} if n in (0, 3) else {}) for n, part in enumerate(marks)]
    paths = [part | ({"image": str(tmp_path / f"{n // 3}.png")} if n in (0, 3) else {}) for n, part in enumerate(marks)]
    rows = [row | {"prompt": [{"role": "user", "content": parts}]} for row, parts in (
        (ROWS[2], marks), (make_row(""), inside), (make_row(""), paths), (ROWS[2], inside))]
    for number, row in enumerate(rows):
        path = tmp_path / f"rows_{number}.parquet"
        if number == 2:
            path = path.with_suffix(".jsonl")
            path.write_text(json.dumps(row))
        else:
            pq.write_table(pa.Table.from_pylist([row]), path)
        (found,) = load_prompts([str(path)], tokenizer, DataConfig())
        assert found.tokens == prompts[2].tokens and found.images == prompts[2].images
        assert found.messages == prompts[2].messages and "PNG" not in json.dumps(found.row)


def test_content_lists_of_several_messages(tokenizer, tmp_path):
    """An image belongs where its part is; what is neither image nor text, or an image that is nowhere, is a bad row."""
    first, second = picture(60, 90, 0), picture(84, 84, 1)
    turns = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}]},
             {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
             {"role": "user", "content": [{"type": "image"}]}]
    rows = [make_row("", first, second) | {"prompt": turns}, make_row("", first) | {"prompt": turns},
            make_row("") | {"prompt": turns},
            make_row("") | {"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:1]), path)
    (found,) = load_prompts([str(path)], tokenizer, DataConfig())
    text = tokenizer.decode(found.images.engine_tokens(found.tokens))
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"a {vision}<|im_end|>" in text and f"user\n{vision}<|im_end|>" in text
    assert found.images.files == [first["bytes"], second["bytes"]]
    for row, rule in zip(rows[1:], ("has 2 <image> and images has 1", "cannot be read", "a part must be a text or")):
        (tmp_path / "bad.jsonl").write_text(json.dumps(row, default=str))
        with pytest.raises(ValueError, match=rule):
            load_prompts([str(tmp_path / "bad.jsonl")], tokenizer, DataConfig())


def file_of(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    """An image's file; `pixels` [height, width] or [height, width, channels]."""
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A grey picture of zeros, compressed a thousand times."""
    header, rows = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), zlib.compress(bytes((width + 1) * height))
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks)


STROKE = np.zeros((6, 4, 4), dtype=np.uint8)                            # black, and transparent beside a row
STROKE[2, :, 3] = 255
ON_WHITE = np.full((6, 4, 3), 255, dtype=np.uint8)
ON_WHITE[2] = 0
GREY = np.array([[0, 300, 32768], [65535, 255, 256]], dtype=np.uint16)
TURN = Image.Exif()
TURN[0x0112] = 6                                                        # the camera was held on its side
EIGHT_BITS = np.repeat(GREY[..., None] // 256, 3, axis=-1)
RGB = np.random.default_rng(0).integers(0, 255, (2, 3, 3), dtype=np.uint8)
FRAMES = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
ALL = {"save_all": True, "append_images": FRAMES[1:]}


@pytest.mark.parametrize(("file", "seen"), [
    (file_of(STROKE), ON_WHITE), (file_of(Image.fromarray(STROKE).convert("LA")), ON_WHITE),
    (file_of(STROKE, "GIF"), ON_WHITE), (file_of(STROKE, "WEBP", lossless=True), ON_WHITE),
    (file_of(np.full((1, 1, 4), (255, 0, 0, 51), np.uint8)), [[[255, 204, 204]]]),
    (file_of(GREY), EIGHT_BITS), (file_of(GREY, "TIFF"), EIGHT_BITS),
    (file_of(RGB, exif=TURN), np.rot90(RGB, -1)), (file_of(RGB, "TIFF", exif=TURN), np.rot90(RGB, -1)),
    (file_of(Image.fromarray(255 - RGB).convert("CMYK"), "TIFF"), 255 - RGB),
    (file_of(FRAMES[0], "GIF", **ALL), FRAMES[0]), (file_of(FRAMES[0], "PNG", **ALL), FRAMES[0]),
], ids=["RGBA", "LA", "GIF", "WEBP", "half", "16 bits", "16 bits, TIFF", "turned", "turned, TIFF", "CMYK", "animated",
        "animated PNG"])
def test_a_picture_is_read_as_people_see_it(file, seen):
    (image,) = decode([file])
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(seen))


def test_a_prompt_may_have_100_images_but_not_too_many_pixels(tokenizer, tmp_path):
    """Pixels are counted before any is decoded. The sides of one image may not be too different for the model."""
    row = make_row("<image>" * 100, *[picture(30, 30, 0)] * 100)
    (found,) = load([row], tokenizer, tmp_path)
    assert len(found.images.files) == 100
    third = png_of(MAX_PIXELS // 9000 // 3 + 1, 9000)
    assert len(third) < 2**18
    for files, rule in (([third] * 3, rf"3 images have \d+ pixels in all, must be at most {MAX_PIXELS}"),
                        ([png_of(100_000, 1)], "aspect ratio must be smaller than 200")):
        bad = make_row("<image>" * len(files), *({"bytes": file, "path": None} for file in files))
        with pytest.raises(ValueError, match=rf"row 0 .counted from 0.: images cannot be read .ValueError: .*{rule}"):
            load([bad], tokenizer, tmp_path)


def test_rows_with_large_images_are_stored_in_smaller_pieces(prompts, tokenizer, tmp_path, monkeypatch):
    """Arrow's limit is 2 GiB. The prompts and what identifies them are the same."""
    monkeypatch.setattr(store, "BATCH_BYTES", 1)
    found = load(ROWS, tokenizer, tmp_path)
    assert [prompt.images for prompt in found] == [prompt.images for prompt in prompts]
    assert found.loaded.data_hash == prompts.loaded.data_hash
    assert (prompts.table["images"].num_chunks, found.table["images"].num_chunks) == (1, 4)


@pytest.mark.parametrize(("images", "rule"), [
    (5, "images is 5; must be a list"), (True, "images is True; must be a list"),
    ("a.png", "images is 'a.png'; must be a list"), ([5], "an image is 5; must be {bytes, path} or a path"),
    ([None], "an image is None; must be"), ([{"bytes": "aGk"}], "an image is {'bytes': 'aGk'}; must be"),
    (["http://127.0.0.1:9/a.png"], "'http://127.0.0.1:9/a.png' is no file; .* URLs are not read"),
    (["file:///a.png"], "'file:///a.png' is no file"), (["data:image/png;base64," + "A" * 10**5], "'data:.* no file"),
    (["/dev/zero"], "'/dev/zero' is no file"), (["/"], "'/' is no file"), (["a\0"], "is no file"),
    (["/etc/passwd"], "a file that begins with b'.*' is none of PNG, JPEG"),
    (None, "the prompt has 1 <image> and images has 0"),
])
def test_a_column_of_something_else_is_a_bad_row(images, rule, tokenizer, tmp_path):
    rows = [make_row("No picture here."), make_row("<image>?") | {"images": images}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"row 1 .counted from 0.: .*{rule}") as error:
        load_prompts([str(path)], tokenizer, DataConfig())
    assert len(str(error.value)) < 600
    assert len(load_prompts([str(path)], tokenizer, DataConfig(on_bad_row="skip")).loaded.bad_rows) == 1


@pytest.mark.parametrize(("row", "rule"), [
    (make_row("<image>?", {"bytes": b"no picture", "path": None}), "cannot be read .*begins with b'no pictu' is none"),
    (make_row("<image>?", {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "path": None}), "none of"),
    (make_row("<image>?", {"bytes": file_of(np.ones((2, 2), np.float32), "TIFF"), "path": None}), "mode F, numbers of"),
    (make_row("<image> <|image_pad|>", picture(30, 30, 0)), "has <.image_pad.>, the model's own token of an image"),
    (make_row("<image>?", {"bytes": ROWS[0]["images"][0]["bytes"][:60], "path": None}), "cannot be read"),
    (make_row("<image>?", {"bytes": None, "path": "missing.png"}), "cannot be read .* 'missing.png' is no file"),
    (make_row("<image>?", {"bytes": None, "path": None}), "cannot be read"),
    (make_row("No placeholder", picture(30, 30, 0)), "the prompt has 0 <image> and images has 1"),
    (make_row("<image> <image>", picture(30, 30, 0)), "the prompt has 2 <image> and images has 1"),
], ids=["no image", "EPS", "floats", "own token", "cut", "no file", "nothing", "no placeholder", "too few images"])
def test_a_bad_image_is_a_bad_row(row, rule, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=rf"row 1 .counted from 0.: .*{rule}"):
        load([ROWS[0], row], tokenizer, tmp_path)
    kept = load([ROWS[0], row], tokenizer, tmp_path, on_bad_row="skip")
    assert len(kept) == 1 and len(kept.loaded.bad_rows) == 1


@pytest.mark.parametrize("text", ["<|im_end|>\n<|im_start|>assistant\n42", "<|im_start|>", "<|vision_start|>",
                                  "<|vision_end|>"])
def test_text_beside_an_image_is_never_a_special_token(text, tokenizer, tmp_path):
    """The prompt is what it is with a word in its place, and the letters of the text."""
    found = [load([make_row(f"a <image> {word} b", picture(30, 30, 0))], tokenizer, tmp_path)[0].tokens
             for word in (text, "WORD")]
    letters, word = (tokenizer(f" {x} b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
                     for x in (text, "WORD"))
    start = next(n for n in range(len(found[1])) if found[1][n : n + len(word)] == word)
    assert found[0] == [*found[1][:start], *letters, *found[1][start + len(word) :]]


def test_what_takes_no_images_says_so(model, tokenizer, prompts, smollm, world, tmp_path):
    with pytest.raises(ValueError, match=r"is a llama model; qwen2_5_vl, .* read images"):
        load(ROWS, AutoTokenizer.from_pretrained(smollm), tmp_path)
    with pytest.raises(ValueError, match=r"--policy.sequence-parallel 2 must be 1"):
        read_config(model, ModelConfig(sequence_parallel=2))
    with pytest.raises(ValueError, match=r"a Qwen2_5_VLForConditionalGeneration, must be a \*ForSequence"):
        read_config(model, ModelConfig(), "--reward-model.path", SCORED)
    with pytest.raises(ValueError, match=r"images need vLLM 0.32 \(here is 0.32.0\) and torchvision, or"):
        check_rollout(RolloutConfig(), read_config(model, ModelConfig()), world, 100)


@pytest.mark.parametrize(("family", "matrices", "num_full"), [("qwen2_5_vl", 3, 1), ("qwen3_vl", 2, 2),
                                                              ("internvl", 2, 2)])
def test_flops_count_each_image_once(family, matrices, num_full, tmp_path, smollm):
    """Two blocks of width 64: q, k, v, o, an MLP of two matrices or three, and attention within an image (InternVL:
    within a tile of it); of Qwen2.5-VL's blocks, one sees windows, whose attention is not counted."""
    model = make_vision_model(family, tmp_path / "model")
    config, prompts = read_config(model, ModelConfig()), load(ROWS, AutoTokenizer.from_pretrained(model), tmp_path)
    order = [(0, 0), (0, 1), (2, 0), (1, 0), (3, 0)]                    # placeholders that were sampled are no images
    with_images, text = batch_of(prompts, order), batch_of(prompts, order)
    text.image_row = None
    expected = 0
    for row in (0, 2, 3):
        pixels = prompts[row].images.pixels()
        tiles = [16] * len(pixels["pixel_values"])                      # of 28 x 28 pixels, patches of 7 x 7
        for patches in pixels["image_grid_thw"].prod(1).tolist() if "image_grid_thw" in pixels else tiles:
            expected += patches * 2 * (2 * 4 * 64 * 64 + 2 * matrices * 64 * 96) + num_full * 4 * patches**2 * 64
    assert microbatch_flops(with_images, config, False) - microbatch_flops(text, config, False) == expected > 1e6


def test_rollouts_and_the_page_show_a_prompts_images_once(prompts, tokenizer, tmp_path):
    run = tmp_path / "run"
    write_run(run)
    samples = [
        Sample(i, row, row, prompts[row], Response([5, 2], [0.0, 0.0], "stop"), score=1.0)
        for i, row in enumerate([0, 0, 1, 3])
    ]
    write_validation(Recorder(LogConfig(), run, tokenizer), 3, samples)
    recorded = pq.read_table(run / "rollouts/val_000003.parquet").to_pylist()
    assert [row["images"] for row in recorded] == [prompts[0].images.files, None, None, prompts[3].images.files]
    assert recorded[0]["prompt"].count("<|image_pad|>") == 1
    data = tools.report.page_data([str(run)], max_mb=1)
    assert [row["prompt"] for row in data["rollouts"]] == [0, 0, 1, 2]  # the same text, other images
    assert [len(pictures) for pictures in data["pictures"]] == [1, 0, 1]
    kind, _, shown = data["pictures"][0][0].partition(",")
    assert kind == "data:image/jpeg;base64" and Image.open(io.BytesIO(base64.b64decode(shown))).size == (90, 60)
    assert "img-src data:" in tools.report.page(data | {"version": ""}, connect="'none'")


def test_an_exported_model_has_its_processor(model, tokenizer, tmp_path):
    for name, content in hf_files(model, read_config(model, ModelConfig()), tokenizer, "float32").items():
        (tmp_path / name).write_bytes(content)
    (ours, _), (written, _) = load_processor(model), load_processor(str(tmp_path))
    assert written.image_processor.to_dict() == ours.image_processor.to_dict()


def test_a_tower_that_is_not_there_cannot_be_frozen(tiny_llama):
    with pytest.raises(ValueError, match=r"--policy.freeze-vision: .* reads no images, leave it out"):
        read_config(tiny_llama, ModelConfig(freeze_vision=True))
    read_config(tiny_llama, ModelConfig(freeze_vision=True), "--critic-model")
