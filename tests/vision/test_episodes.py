"""Episodes whose tools and users show pictures, also beside those of the row: both engines against the trainer, tokens
against the model's own processor, transport between ranks, in flight."""

import base64
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from common.dataset.images import check_sequence, frame_of, load_processor, show
from common.dataset.store import load_prompts
from common.engine.base import EngineSetup, Request, RolloutConfig, Until
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import DataConfig, TemplateConfig
from common.rollout import Sample
from common.rollouts.episodes import start_episodes
from common.rollouts.gather import gather_rollout
from envs.stored import pack, unpack
from tests.engine.episode_runs import Runs, runs_of, with_tools
from tests.vision.episodes_with_pictures import random_picture
from tests.vision.stand_in import without_torchvision
from tests.vision.tiny_models import ROWS, write_rows

FILE = Path(__file__).parent / "episodes_with_pictures.py"
FLOAT32 = ModelConfig(compute_dtype="float32")
TOLERANCE = 2e-5                        # as test_engines.py


def load(model: str, path: Path, rows=None):
    rows = rows or [row | {"extra_info": {"split": "tools"}} for row in ROWS]
    return load_prompts([write_rows(path / "rows.parquet", rows)], AutoTokenizer.from_pretrained(model), DataConfig(),
                        all_columns=True)


@pytest.fixture(scope="module", params=["vllm", "hf"])
def engine(request, model, world):
    if request.param == "vllm":
        without_torchvision()
    config = RolloutConfig(engine=request.param, max_response_length=256, max_num_seqs=16, kv_cache_gb=0.1)
    engine = make_engine(EngineSetup(model, read_config(model, FLOAT32), config, FLOAT32, world, [[1, 2]], [2], 900, 0))
    engine.policy = load_policy(model, FLOAT32, world)
    engine.wake(engine.policy)
    yield engine
    engine.sleep()
    engine.close()


@pytest.fixture
def play(engine, model, world, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    runs = Runs(engine, tokenizer, world, [2], max_length=900)
    flags = {"tool_parser": "hermes", "template": with_tools(tokenizer, tmp_path)}
    return lambda name, prompts, **more: runs(f"{FILE}:{name}", prompts, **flags | more)


def score(engine, data, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens by the engine and by the trainer, in one packed row."""
    rollout = gather_rollout(samples)
    batch = rollout.batch
    data.take_images(rollout, [[batch]])
    engine.policy.prompts = data
    logp = engine.policy.score(batch.to("cpu", engine.policy.share_prompt), 1.0)
    return batch.rollout_logp[batch.mask], logp[batch.mask]


def picture_of(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_engine_and_trainer_agree(engine, play, model, tmp_path):
    """Also with the tokens and pictures that each model's own processor makes of what was said."""
    data = load(model, tmp_path)
    samples = play("looks", data, num_samples=2)
    assert [sample.response.end_reason for sample in samples] == ["done"] * 8
    of_engine, of_trainer = score(engine, data, samples)
    assert len(of_engine) > 8 * 12
    assert (of_engine - of_trainer).abs().max() < TOLERANCE

    processor, marker = load_processor(model)
    tokenizer = processor.tokenizer
    for sample in samples:
        response, number = sample.response, int(sample.extras["number"])
        pictures = [random_picture(number + n) for n in (0, 10, 20)]
        num_row = len(sample.prompt.images.files) if sample.prompt.images else 0
        assert number // 100 == num_row                                     # the episode is given the row's
        own = [picture_of(text) for text in response.images[-3:]]
        assert [picture.tobytes() for picture in own] == [picture.tobytes() for picture in pictures]
        # the tokens that nobody sampled, after the prompt
        stretches = [(start, end) for value, start, end in runs_of(response.mask) if not value]
        text = f"Picture {number}: <image> is no place, IMAGE nor ends <|im_end|> it."
        told = [f"tool\n{text}<", "user\nNothing <|image_pad|> to see.<", "user\nIMAGEor IMAGE<"]
        for (start, end), text, files in zip(stretches, told, (pictures[:1], [], pictures[1:]), strict=True):
            found, text = response.tokens[start:end], text.replace("IMAGE", marker)
            seen = processor(text=[text], images=files)["input_ids"][0] if files else []
            image = tokenizer.convert_tokens_to_ids(processor.image_token)
            assert found.count(image) == seen.count(image) and bool(files) == (image in found)
            assert (tokenizer.decode(seen) if files else text) in tokenizer.decode(found)
            assert found.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) <= 2      # after the reply, and its own
        shown = [message["content"] for message in response.messages]
        assert f"Picture {number}: <image> is no place, <image> nor ends <|im_end|> it." in shown
        assert "<image>or <image>" in shown

    # pixels matter, of each sequence its own
    numbers = [*data.own_images]
    data.own_images = {n: [*map(base64_of, map(grey, files))] for n, files in data.own_images.items()}
    assert len(numbers) == 8
    other = engine.policy.score(gather_rollout(samples).batch.to("cpu"), 1.0)
    assert (other[gather_rollout(samples).batch.mask] - of_trainer).abs().max() > 0.1


def grey(text: str) -> Image.Image:
    return Image.new("RGB", picture_of(text).size, "grey")


def base64_of(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.sweep
def test_another_conversation_has_pictures_of_its_own(engine, play, model, tmp_path):
    """Prompts of equal tokens and other pictures are not shared, and the row's pictures are in its own alone."""
    data = load(model, tmp_path)
    samples = play("begins", data, num_samples=2)
    critics = [sample.response.earlier[0] for sample in samples]
    assert len({tuple(critic.prompt) for critic in critics}) == 1 and {len(critic.images) for critic in critics} == {1}
    assert len({critic.images[0] for critic in critics}) > 2
    for engine.policy.share_prompt in (True, False):
        of_engine, of_trainer = score(engine, data, samples)
        assert (of_engine - of_trainer).abs().max() < TOLERANCE


@pytest.mark.sweep
def test_what_is_no_picture_ends_an_episode_or_is_told(play, model, engine, tmp_path):
    """Not the run, and never in silence."""
    if "qwen2_5" not in model or engine.config.engine == "vllm":
        pytest.skip("one model and one engine are enough: nothing of them is asked")
    cases = {
        "'https://a.example/b.png'": "",
        "[{'type': 'image_url', 'image_url': {'url': 'https://a.b/c.png'}}]": "not read",
        "b'no picture'": "is none of PNG",
        "[{'type': 'image', 'image': 'data:image/png;base64,!!'}]": "base64 cannot be",
        "[random_picture(1), {'type': 'video', 'video': 1}]": "must be a text or a picture",
        "bytes(data_url(random_picture(1)), 'utf8')": "is none of PNG",
        "Image.new('F', (30, 30))": "mode F", "Image.new('1', (20000, 20000))": "exceeds limit of 178956970 pixels",
        "[Image.new('RGB', (9000, 20))]": "absolute aspect ratio",
    }
    rows = [ROWS[1] | {"extra_info": {"split": f"[{case}]" if case[0] != "[" else case}} for case in cases]
    said = play("says", load(model, tmp_path, rows), drop=(), tool_timeout_s=300.0)
    rows = [ROWS[1] | {"extra_info": {"split": case}} for case in cases]
    tells = play("tells", load(model, tmp_path, rows), tool_timeout_s=300.0)  # 400 million pixels become a file
    for sample, told, problem in zip(said, tells, cases.values(), strict=True):
        is_shown = "aspect" in problem                                      # the process has no processor
        assert sample.response.end_reason == ("error" if problem else "done"), problem
        assert told.response.end_reason == ("error" if is_shown else "done"), problem
        if problem and not is_shown:
            assert told.extras["told"].startswith("Error: ValueError") and problem in told.extras["told"]
            assert told.response.tools["tool_errors"] == 1


def test_tokens_for_the_engine_have_one_placeholder_an_image(model, prompts):
    """Others, which the model sampled, stay; an episode with images does not go on after one."""
    _, marker = load_processor(model)
    tokenizer, placeholder = prompts.tokenizer, frame_of(model)[0]
    for prompt in prompts:
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text.replace("<image>", marker), add_special_tokens=False)["input_ids"]
        if prompt.images:
            sampled = [5, placeholder, placeholder, 6]
            assert prompt.images.engine_tokens([*prompt.tokens, *sampled]) == [*tokens, *sampled]
            check_sequence([*prompt.tokens, 5], prompt.images.files, model)
            with pytest.raises(ValueError, match="the model wrote its own token of an image"):
                check_sequence([*prompt.tokens, *sampled], prompt.images.files, model)


def test_a_text_model_says_that_it_reads_no_images(smollm):
    with pytest.raises(ValueError, match=r"there are images, and .* is a llama model; qwen2_5_vl, .* read images"):
        show(ROWS[0]["images"][0]["bytes"], smollm)


def test_an_episode_that_restarts_is_told_its_replies_after_the_same_pictures_alone(engine, model, world, tmp_path):
    """As --rollout.in-flight stores it: all pictures have one size, so tokens do not tell them apart."""
    if "qwen2_5" not in model or engine.config.engine == "hf":
        pytest.skip("what is stored depends on no model, and needs vLLM")
    data = load(model, tmp_path, [row | {"extra_info": {"first": 2 + n}} for n, row in enumerate(ROWS[:2])])
    config = replace(engine.config, episode=f"{FILE}:lists", lockstep=True)
    episodes = start_episodes(config, data.tokenizer, TemplateConfig(), [2], 900, world)
    steps, ended = itertools.count(), {}
    requests = [Request(prompt, 5) for prompt in data]

    def run(asked, stop):
        episodes.run(engine, asked, config, lambda i, response, _: ended.update({i: response}), Until(stop))
        return [ended.get(i) for i in range(len(asked))]

    try:
        assert run(requests, lambda: next(steps) > 9) == [None, None]
        saved = pack([request.response for request in requests])
        replies = [reply for response in unpack(saved) for reply in response.earlier]
        assert len(replies) >= 4 and {len(reply.images) for reply in replies[1:2]} == {1} and len(saved) < 20_000
        for is_same in (True, False):
            restored = unpack(saved)
            assert pack(restored) == saved
            for response in restored:                                       # what no model would sample twice
                second = response.earlier[1]
                second.tokens, second.logp, second.finish_reason = [77, 78, 77], [0.0] * 3, "length"
                second.images = second.images if is_same else ["0" * 64]
            found = run([Request(prompt, 5, response) for prompt, response in zip(data, restored)], lambda: False)
            assert episodes.num_restarted == 2
            for response in found:
                assert response.end_reason == "done" and len(response.images) == 3
                sampled = [token for token, is_sampled in zip(response.tokens, response.mask) if is_sampled]
                assert (sampled[-9:-6] == [77, 78, 77]) == is_same
    finally:
        episodes.processes.close()
    samples = [Sample(n, n, n, data[n], response, score=1.0) for n, response in enumerate(found)]
    of_engine, of_trainer = score(engine, data, samples)
    assert (of_engine - of_trainer).abs().max() < TOLERANCE
