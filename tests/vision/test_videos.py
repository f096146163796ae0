"""Rows with videos: what the models get of frames against a slow loop and, with torchvision, transformers' own
processors; the trainer and the Hugging Face engine against transformers' models; what is refused."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

import sft
from common.batch import Batch
from common.dataset.conversations import ConversationConfig, RowParser, load_conversations
from common.dataset.images import inputs_of, load_processor
from common.dataset.store import load_prompts
from common.dataset.videos import check_engine, frames_of, settings_of, size_of, video_of
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.model.flops import microbatch_flops
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import DataConfig
from tests.conftest import launch
from tests.scripts.test_supervised import metrics_of
from tests.vision.alone import language_model
from tests.vision.test_conversations import assert_close, gradients, say
from tests.vision.test_engines import TOLERANCE, sample
from tests.vision.tiny_models import make_row, make_vision_model, picture

FLOAT32 = ModelConfig(compute_dtype="float32")


@pytest.fixture(scope="module", params=("qwen2_5_vl", "qwen3_vl"))
def model(request, tmp_path_factory, smollm) -> str:
    """Its folder has the sizes of a processor of videos, which cannot be made without torchvision."""
    folder = Path(make_vision_model(request.param, tmp_path_factory.mktemp("video") / request.param))
    side = 32 if request.param == "qwen3_vl" else 28
    settings = {"size": {"shortest_edge": side**2, "longest_edge": 24 * side**2}, "image_mean": [0.4, 0.5, 0.6],
                "image_std": [0.2, 0.25, 0.3]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    whole = json.loads((folder / "processor_config.json").read_text())
    if "video_processor" in whole:                                      # with torchvision
        whole["video_processor"] |= settings | {"patch_size": side // 2}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    return str(folder)


def clip(count: int, height: int, width: int, seed: int, **more) -> dict:
    """Frames of random pixels, as verl's column `videos` has them."""
    return {"type": "video", "video": [picture(height, width, 100 * seed + n) for n in range(count)]} | more


CLIPS = [clip(4, 64, 96, 1), clip(5, 60, 90, 2, fps=4.0), clip(3, 90, 60, 3)]
ROWS = [
    make_row("What happens in <video>?") | {"videos": CLIPS[:1]},
    make_row("No video here.") | {"videos": []},
    make_row("<image> then <video> then <image> then <video>", picture(60, 90, 0), picture(84, 84, 1))
    | {"videos": CLIPS[1:]},
    make_row("<image>", picture(60, 90, 3)) | {"videos": None},
]
RESPONSES = [[5, 7, 2], [8, 2], [900, 901, 902, 2], [5, 2]]


def write(path: Path, rows: list[dict]) -> str:
    """JSON lines, with the files of pictures in a folder beside them."""
    def saved(value):
        match value:
            case {"bytes": bytes(content)}:
                file = path.parent / f"{hash(content)}.png"
                file.write_bytes(content)
                return str(file)
            case dict():
                return {key: saved(item) for key, item in value.items()}
            case list():
                return [*map(saved, value)]
        return value

    path.write_text("".join(json.dumps(saved(row)) + "\n" for row in rows))
    return str(path)


def load(model: str, path: Path, rows: list[dict] = ROWS, all_columns: bool = False, **flags):
    return load_prompts([write(path / "rows.jsonl", rows)], AutoTokenizer.from_pretrained(model), DataConfig(**flags),
                        all_columns)


# --------------------------------------------------------------------------- what the models get

def test_the_pixels_are_those_of_a_slow_loop(model):
    """Frames that need no resizing: two make a patch, rows and columns of patches come in squares of two."""
    side, per = (16, "qwen3_vl") if "qwen3_vl" in model else (14, "qwen2_5_vl")
    given = clip(3, 4 * side, 6 * side, 7)
    _, inputs = inputs_of(video_of(given), model)
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 6]] and per in model
    frames = [np.asarray(Image.open(io.BytesIO(frame["bytes"])), dtype=np.float64) for frame in given["video"]]
    frames.append(frames[-1])
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
    expected = []
    for step in (frames[:2], frames[2:]):
        for top in range(2):
            for left in range(3):
                for row in range(2):
                    for column in range(2):
                        y, x = (2 * top + row) * side, (2 * left + column) * side
                        numbers = [((frame[y : y + side, x : x + side] / 255 - mean) / std) for frame in step]
                        expected.append(np.stack(numbers).transpose(3, 0, 1, 2).ravel())    # colour, time, y, x
    assert np.abs(inputs["pixel_values_videos"].numpy() - np.array(expected)).max() < 1e-5


def test_tokens_and_times(model, tmp_path):
    """Qwen2.5-VL gets seconds between the steps of time, Qwen3-VL reads the time of each."""
    prompts = load(model, tmp_path)
    tokenizer, file = prompts.tokenizer, prompts[2].images.files[1]
    frames, fps = frames_of(file)
    assert fps == 4.0 and frames == [frame["bytes"] for frame in CLIPS[1]["video"]]
    text, (_, inputs) = tokenizer.decode(prompts[2].tokens), inputs_of(file, model)
    steps, rows, columns = inputs["video_grid_thw"][0].tolist()
    assert steps == 3 and text.count("<|image_pad|>") > 2 and prompts.loaded.num_videos == 3
    pads = "<|video_pad|>" * (rows * columns // 4)
    if "qwen2_5_vl" in model:
        assert inputs["second_per_grid_ts"].tolist() == [0.5]
        assert f" then <|vision_start|>{3 * pads}<|vision_end|> then <|vision_start|><|image_pad|>" in text
    else:                                                               # 0, 1/4; 2/4, 3/4; 4/4 and again 4/4 seconds
        shown = "".join(f"<{time} seconds><|vision_start|>{pads}<|vision_end|>" for time in (0.1, 0.6, 1.0))
        assert f" then <|vision_start|>{shown}<|vision_end|> then <|vision_start|><|image_pad|>" in text


@pytest.mark.parametrize("shape", [(5, 60, 90), (4, 17, 50), (7, 120, 130), (2, 400, 300)])
def test_sizes_and_tokens_are_those_of_transformers_processors(shape, model, tmp_path):
    """And pixels, but for one grey level where frames are resized."""
    pytest.importorskip("torchvision", reason="transformers' processors of videos need torchvision")
    import transformers

    name = "Qwen3VL" if "qwen3_vl" in model else "Qwen2VL"
    settings = json.loads((Path(model) / "video_preprocessor_config.json").read_text())
    side = 16 if name == "Qwen3VL" else 14
    videos = getattr(transformers, f"{name}VideoProcessor")(**settings, patch_size=side)
    images, tokenizer = load_processor(model)[0].image_processor, AutoTokenizer.from_pretrained(model)
    processor = getattr(transformers, f"{name.replace('Qwen2', 'Qwen2_5_')}Processor")(images, tokenizer, videos)
    given = clip(*shape, 5)
    frames = [np.asarray(Image.open(io.BytesIO(frame["bytes"]))) for frame in given["video"]]
    about = transformers.video_utils.VideoMetadata(
        total_num_frames=shape[0], fps=2.0, frames_indices=[*range(shape[0])], duration=shape[0] / 2)
    theirs = processor(text=["a<|video_pad|>b"], videos=[frames], video_metadata=[about], do_sample_frames=False,
                       return_tensors="pt")
    tokens, inputs = inputs_of(video_of(given), model)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "ab")
    assert theirs["input_ids"][0].tolist() == [*before, *tokens, *after]
    assert torch.equal(inputs["video_grid_thw"], theirs["video_grid_thw"])
    assert inputs.get("second_per_grid_ts") == theirs.get("second_per_grid_ts")
    assert (inputs["pixel_values_videos"] - theirs["pixel_values_videos"]).abs().mean() < 0.02


def test_a_folder_with_one_file_for_images_and_videos(tmp_path):
    """As Qwen2.5-VL was published; without any, the limits are those of transformers' processors."""
    size_of_one = partial(size_of, "qwen2_5_vl", str(tmp_path), 4)
    assert size_of_one(2000, 1000) == (1092, 532) and 1092 * 532 <= 768 * 28**2 < 1120 * 560
    settings_of.cache_clear()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 56**2, "max_pixels": 4 * 28**2}))
    assert size_of_one(2000, 1000) == (56, 28) and size_of_one(28, 28) == (56, 56)


# --------------------------------------------------------------------------- models

def theirs_of(lm, prompt, response: list[int]) -> torch.Tensor:
    """Log-probs of a response by transformers' own model in float64, which gets the row alone."""
    inputs = {"input_ids": torch.tensor([[*prompt.tokens, *response]])}
    if prompt.images:
        for name, x in prompt.images.pixels().items():
            inputs[name] = x.double() if "pixel" in name else x
    tokens = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (tokens == lm.config.image_token_id) + 2 * (tokens == lm.config.video_token_id)
    logp = lm(**inputs).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
    return logp[torch.arange(len(response)), torch.tensor(response)]


@pytest.mark.parametrize("share_prompt", [False, True])
def test_packed_rows_have_the_log_probs_and_gradient_of_each_alone(share_prompt, model, world, tmp_path):
    prompts, lm = load(model, tmp_path), language_model(model)
    policy = load_policy(model, ModelConfig(compute_dtype="float32", share_prompt=share_prompt), world)
    policy.prompts = prompts
    order = [2, 1, 0, 3]
    expected = [theirs_of(lm, prompts[row], RESPONSES[row]) for row in order]
    sum((1 + n) * logp.sum() for n, logp in enumerate(expected)).backward()
    want = gradients(lm)
    for groups in ([order], [[row] for row in order]):
        for rows in groups:
            batch = Batch.build([prompts[row].tokens for row in rows], [RESPONSES[row] for row in rows])
            batch.image_row = torch.tensor([row if prompts[row].images else -1 for row in rows])
            batch = batch.to("cpu", share_prompt)
            logp, _ = policy(batch, 1.0)
            found = torch.cat([expected[order.index(row)] for row in rows])
            assert (logp[batch.mask] - found).abs().max() < TOLERANCE
            weight = torch.tensor([1.0 + order.index(row) for row in rows])[batch.sequence_ids]
            (logp * weight).sum().backward()
            assert microbatch_flops(batch, policy.lm.config, False) > 0
        assert_close(gradients(policy.lm), want)


def test_the_hugging_face_engine_agrees(model, world, tmp_path):
    prompts = load(model, tmp_path)
    config = RolloutConfig(engine="hf", max_response_length=24)
    engine = make_engine(EngineSetup(model, read_config(model, FLOAT32), config, FLOAT32, world,
                                     [prompt.tokens for prompt in prompts], [2], 512, 0))
    policy = load_policy(model, FLOAT32, world)
    policy.prompts = prompts
    engine.wake(policy)
    assert sample(engine, prompts, policy) < TOLERANCE
    engine.sleep()
    engine.close()


def test_scripts_train_on_videos(model, tmp_path):
    """grpo.py with the engine's log-probs against the trainer's, and sft.py, two steps each; rollouts show frames."""
    rows = write(tmp_path / "rows.jsonl", ROWS)
    common = ["--model", model, "--train-data", rows, "--policy.compute-dtype", "float32", "--total-steps", "2"]
    launch("grpo.py", *common, "--rollout.engine", "hf", "--prompts-per-step", "4", "--samples-per-prompt", "2",
           "--rollout.max-response-length", "6", "--data.max-prompt-length", "300", "--reward.num-workers", "1",
           "--reward.function", "tests/scripts/reward_by_length.py", "--log.rollouts-every", "1",
           "--run-dir", tmp_path / "grpo", warm=True)
    for row in metrics_of(tmp_path / "grpo"):
        assert row["training/rollout_probs_diff_max"] < TOLERANCE
    recorded = pq.read_table(tmp_path / "grpo/rollouts/step_000001.parquet").to_pylist()
    assert sorted(len(row["images"] or []) for row in recorded) == [0] * 5 + [1, 4, 10]
    talks = write(tmp_path / "talks.jsonl", [
        {"messages": say(row["prompt"][0]["content"], "so"), "images": row["images"], "videos": row["videos"]}
        for row in ROWS])
    launch("sft.py", *common[:2], "--train-data", talks, *common[4:], "--val-data", talks, "--rows-per-step", "2",
           "--data.max-length", "512", "--optim.lr", "1e-3", "--run-dir", tmp_path / "sft", warm=True)
    first, *_, last = metrics_of(tmp_path / "sft")
    assert last["val/loss"] < first["val/loss"]


# --------------------------------------------------------------------------- what is refused

ONE_FRAME, TWO_SIZES = clip(1, 60, 90, 1), {"video": [picture(60, 90, 1), picture(90, 60, 1)]}


@pytest.mark.parametrize(("text", "videos", "rule"), [
    ("<video>", [], "the prompt has 1 <video> and videos has 0"),
    ("none", CLIPS[:1], "the prompt has 0 <video> and videos has 1"),
    ("<video> <|video_pad|>", CLIPS[:1], "the model's own token of a video"),
    ("<video>", ["a.mp4"], "a video is 'a.mp4'; must be a list of its frames, .* files of videos are not read"),
    ("<video>", [{"video": "a.mp4"}], "a video is 'a.mp4'; must be a list of its frames"),
    ("<video>", [[]], r"a video is \[\]; must be a list of its frames"),
    ("<video>", [CLIPS[0] | {"fps": 0}], "the fps of a video is 0; must be a number"),
    ("<video>", [CLIPS[0] | {"fps": "2"}], "the fps of a video is '2'; must be a number"),
    ("<video>", [ONE_FRAME], "a video must have at least 2 frames, all of one size"),
    ("<video>", [TWO_SIZES], "a video must have at least 2 frames, all of one size"),
    ("<video>", "a.mp4", "videos is 'a.mp4'; must be a list"),
])
def test_a_bad_video_is_a_bad_row(text, videos, rule, model, tmp_path):
    with pytest.raises(ValueError, match=rf"row 1 .counted from 0.: .*{rule}"):
        load(model, tmp_path, [ROWS[0], make_row(text) | {"videos": videos}])


def test_what_reads_no_videos_says_so(model, smollm, tmp_path):
    prompts = load(model, tmp_path)
    with pytest.raises(ValueError, match=r"rows have videos, which vLLM's engine is not given here: .*--rollout"):
        check_engine("vllm", prompts, None)
    check_engine("hf", prompts, None)
    check_engine("vllm", load(model, tmp_path, [ROWS[1], ROWS[3]]), None)
    with pytest.raises(ValueError, match=r"row 0 .*an episode reads no videos"):
        load(model, tmp_path, all_columns=True)
    with pytest.raises(ValueError, match=r"row 0 .*is a llama model"):
        load(smollm, tmp_path)
    other = make_vision_model("internvl", tmp_path / "internvl")
    with pytest.raises(ValueError, match=r"row 0 .*is a internvl model; qwen2_5_vl, .* read videos"):
        load(other, tmp_path)


def test_a_conversation_with_a_video_is_not_cut(model, tmp_path):
    rows = [{"messages": say("see", "x " * 200), "videos": []},
            {"messages": say("see <video>", "x " * 200), "videos": CLIPS[:1]}]
    data = load_conversations([write(tmp_path / "rows.jsonl", rows)], AutoTokenizer.from_pretrained(model), [2],
                              ConversationConfig(max_length=150, on_long_row="truncate"),
                              RowParser({"messages": "messages"}, sft.parse))
    assert (len(data), data.loaded.num_truncated, data.loaded.num_filtered) == (1, 1, 1)
