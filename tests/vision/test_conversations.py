"""sft.py, dpo.py and rm.py on rows with images: tokens, losses and gradients against transformers' own processor and
models, one conversation at a time in float64; whole runs on one and two ranks; what is cut and refused."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

import dpo
import rm
import sft
from common.dataset.conversations import ConversationConfig, ConversationSet, RowParser, load_conversations
from common.dataset.images import load_processor
from common.dataset.shown import Encoded, JudgedImages, cut
from common.model.loading import Weights, load_policy, read_config, read_critic
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModel, RewardModelConfig
from common.model.scorer import load_scorer
from common.segments import segment_sum
from envs.pictures import decode
from tests.conftest import launch_all
from tests.scripts.test_supervised import check_exact_resume, check_same_training, metrics_of
from tests.vision.alone import classifier, is_answer, language_model, logps, reward, seen, states_values
from tests.vision.tiny_models import make_row, make_vision_model, picture, write_rows

FLOAT32 = ModelConfig(compute_dtype="float32")
TOLERANCE = 2e-5                        # of log-probs and rewards in float32 against float64


def say(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant, in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


A, B, C, D, E, F = (picture(height, width, 20 + n) for n, (height, width) in enumerate(
    ((60, 90), (84, 84), (30, 120), (60, 90), (56, 56), (60, 90))))
TALKS = [
    (say("See <image>", "I see", "and <image>?", "two of them"), [A, B]),       # in a later turn, too
    (say("No picture here", "none"), []),
    (say("Draw", "here: <image> is it", "Again", "no"), [C]),                   # in an answer
    (say("<image><image> both?", "both", "What was <image>", "it was it"), [D, A, E]),
    (say("See <image>", "I see", "and <image>?", "two of them"), [F, B]),       # the tokens of the first, other pixels
]
SFT_ROWS = [{"messages": messages, "images": files} for messages, files in TALKS]
PAIRS = [
    {"prompt": say("What is <image>?"), "chosen": say("", "a dog")[1:], "rejected": say("", "a cat or so")[1:],
     "images": [A]},
    {"prompt": say("No picture"), "chosen": say("", "none")[1:], "rejected": say("", "one")[1:], "images": []},
    {"prompt": say("<image>", "this", "and <image>"), "chosen": say("", "yes it is")[1:],
     "rejected": say("", "no")[1:], "images": [B, C]},
    {"prompt": say("What is <image>?"), "chosen": say("", "a dog")[1:], "rejected": say("", "a cat or so")[1:],
     "images": [D]},
]


def columns(*names: str) -> dict[str, str]:
    return {name: name for name in (*names, "images")}


def load(model: str, rows: list[dict], path: Path, parser: RowParser, **flags) -> ConversationSet:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return load_conversations([write_rows(path / "rows.parquet", rows)], tokenizer, [2],
                              ConversationConfig(**flags), parser)


def load_sft(model: str, rows: list[dict], path: Path, **flags) -> ConversationSet:
    return load(model, rows, path, RowParser(columns(*rows[0]), sft.parse), **flags)


def load_pairs(model: str, rows: list[dict], path: Path, parse=dpo.parse, **flags) -> ConversationSet:
    padding = None if parse is dpo.parse else 2
    return load(model, rows, path, RowParser(columns(*rows[0]), parse, per_row=2, padding=padding), **flags)


def bytes_of(files: list[dict]) -> list[bytes]:
    return [file["bytes"] for file in files]


def both(row: dict) -> list[tuple[list[dict], list[bytes]]]:
    """The chosen and the rejected conversation."""
    return [([*row["prompt"], *row[name]], bytes_of(row["images"])) for name in ("chosen", "rejected")]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """By the largest entry of each tensor, which may be all zeros but for rounding."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found.items():
        scale = expected[name].abs().max().clamp(min=1e-3 * largest)
        assert (gradient - expected[name]).abs().max() < 2e-5 * scale, name
    towers = [float(g.abs().max()) for name, g in expected.items() if "visual" in name or "vision" in name]
    assert max(towers) > 1e-3 * largest                                 # pictures matter


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[name] = gradient.clone().double()
    module.zero_grad()
    return found


# --------------------------------------------------------------------------- against transformers

def test_tokens_and_trained_tokens_are_those_of_the_models_own_processor(model, tmp_path):
    data = load_sft(model, SFT_ROWS, tmp_path)
    assert len(data) == 5 and [x is not None for x in data.images_before.to_pylist()] == [True, False, True, True, True]
    for n, (messages, files) in enumerate(TALKS):
        tokens = seen(model, messages, bytes_of(files))["input_ids"][0].tolist()
        ours, mask = data.tokens[n].as_py(), data.mask[n].as_py()
        assert ours == tokens[: len(ours)] and {*tokens[len(ours) :]} <= {198}          # a line's end after the last
        assert mask == is_answer(model, tokens)[: len(ours)] and any(mask)
        assert data.images[n].as_py() == (bytes_of(files) or None)
    assert data.tokens[0] == data.tokens[4]
    assert data.sequence_lengths.tolist() == [len(x) for x in data.tokens.to_pylist()]


def test_loss_and_gradient_of_conversations_are_those_of_each_alone(model, world, tmp_path):
    """For several budgets; the rows come in another order than they have in the file."""
    data, rows = load_sft(model, SFT_ROWS, tmp_path), [4, 2, 1, 0, 3]
    lm = language_model(model)
    expected, total = [], 0.0
    for messages, files in (TALKS[row] for row in rows):
        inputs = seen(model, messages, bytes_of(files))
        mask = torch.tensor(is_answer(model, inputs["input_ids"][0].tolist())[1:])
        expected.append(logps(lm, inputs)[mask])
        total = total - (1 + len(expected)) * expected[-1].sum()
    total.backward()
    want = gradients(lm)
    policy = load_policy(model, FLOAT32, world)
    policy.prompts = data.images_of_all([data])
    for budget, counts in ((1, {5}), (150, {2, 3, 4}), (10_000, {1})):
        microbatches = data.minibatch(rows, policy.lm.config, world, budget)
        assert len(microbatches) in counts
        for batch in microbatches:
            logp, _ = policy(batch, 1.0)
            for n, (index, found) in enumerate(zip(batch.index.tolist(), logp.split(batch.host_lengths))):
                found = found[batch.mask[batch.sequence_ids == n]]
                assert (found - expected[index]).abs().max() < TOLERANCE
            (-(2 + batch.index)[batch.sequence_ids] * logp).sum().backward()
        assert_close(gradients(policy.lm), want)


def test_pairs_have_the_gradient_of_both_conversations_alone(model, world, tmp_path):
    """dpo.py's coefficients times the log-probs, with a reference that is not the policy; in one family the prompt with
    its picture runs once for both answers."""
    share_prompt = "qwen3_vl" in model
    data, rows = load_pairs(model, PAIRS, tmp_path), [3, 1, 0, 2]
    assert data.images_before.to_pylist() == [0, 1, None, None, 0, 1, 0, 1]             # stored once for both
    lm = language_model(model)
    policy = load_policy(model, ModelConfig(compute_dtype="float32", share_prompt=share_prompt), world)
    reference = load_policy(model, FLOAT32, world, Weights(frozen=True))
    with torch.no_grad():
        for weight in reference.parameters():
            weight.to_local().mul_(0.97)
    policy.prompts = reference.prompts = data.images_of_all([data])
    whole, = data.minibatch(rows, policy.lm.config, world, 10_000)
    whole = whole.to("cpu", share_prompt)
    ref_logp = torch.zeros(8).index_copy(
        0, whole.index, segment_sum(reference.score(whole, 1.0), whole.cu_seqlens))
    sums = []
    for messages, files in (talk for row in rows for talk in both(PAIRS[row])):
        inputs = seen(model, messages, files)
        mask = torch.tensor(is_answer(model, inputs["input_ids"][0].tolist(), len(messages) - 1)[1:])
        sums.append(logps(lm, inputs)[mask].sum())
    logp = torch.stack(sums)
    dpo.dpo_loss(logp - ref_logp, 0.3, 0.1).mean().backward()
    want = gradients(lm)
    for budget in (1, 120):
        microbatches = [x.to("cpu", share_prompt) for x in data.minibatch(rows, policy.lm.config, world, budget)]
        found = torch.zeros(8, dtype=torch.float64)
        for batch in microbatches:
            found[batch.index] = segment_sum(policy.score(batch, 1.0).double(), batch.cu_seqlens)
        assert (found - logp.detach()).abs().max() < 10 * TOLERANCE < found.std()       # sums over several tokens
        leaf = found.requires_grad_()
        slopes = torch.autograd.grad(dpo.dpo_loss(leaf - ref_logp, 0.3, 0.1).mean(), leaf)[0].float()
        for batch in microbatches:
            (slopes[batch.index][batch.sequence_ids] * policy(batch, 1.0)[0]).sum().backward()
        assert_close(gradients(policy.lm), want)


def test_rewards_and_their_gradient_are_those_of_transformers_classifier(model, world, tmp_path):
    data, rows = load_pairs(model, PAIRS, tmp_path, rm.parse), [3, 1, 0, 2]
    scorer = load_scorer(model, FLOAT32, world)
    scorer.prompts = data.images_of_all([data])
    theirs = classifier(language_model(model), dict(scorer.full_tensors(None)))
    args = rm.Args(model="", train_data=(), label_smoothing=0.1, centre_coef=0.05)
    margin = rm.margins_of(data, rows)
    expected = torch.stack([reward(theirs, seen(model, *talk)) for row in rows for talk in both(PAIRS[row])])
    rm.pair_loss(expected, margin, args).mean().backward()
    want = gradients(theirs)
    for budget in (1, 120):
        microbatches = data.minibatch(rows, scorer.lm.config, world, budget)
        found = torch.zeros(8, dtype=torch.float64)
        for batch in microbatches:
            found[batch.index] = scorer.score(batch)[batch.mask].double()
        assert (found - expected.detach()).abs().max() < TOLERANCE < found.std()
        leaf = found.requires_grad_()
        slopes = torch.autograd.grad(rm.pair_loss(leaf, margin, args).mean(), leaf)[0].float()
        for batch in microbatches:
            (slopes[batch.index][batch.sequence_ids] * scorer(batch)).sum().backward()
        found = {f"model.{name}": x for name, x in gradients(scorer.lm).items()}
        found["score.weight"] = scorer.critic.head.weight.grad.full_tensor().double()
        scorer.zero_grad()
        assert_close(found, want)


# --------------------------------------------------------------------------- rows

def places(tokens: list[int]) -> list[tuple[int, int]]:
    """Where each picture of Qwen2.5-VL begins and ends, its frame included."""
    names = AutoTokenizer.from_pretrained(places.model).convert_ids_to_tokens(tokens)
    starts, ends = ([n for n, name in enumerate(names) if name == f"<|vision_{what}|>"] for what in ("start", "end"))
    return [*zip(starts, ends, strict=True)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, smollm) -> str:
    places.model = make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen") / "model")
    return places.model


def test_a_cut_leaves_whole_pictures(qwen, tmp_path):
    """At any length: a row ends before a picture that would be cut, and holds the files of those that are left."""
    row = {"messages": say("Tell", "well", "See <image> and <image>", "two", "<image>", "a third"), "images": [A, B, C]}
    data = load_sft(qwen, [row], tmp_path)
    whole, mask, files = (column[0].as_py() for column in (data.tokens, data.mask, data.images))
    pictures = places(whole)
    assert len(pictures) == 3
    for length in range(len(whole) + 2):
        tokens, is_trained, images = cut(Encoded(whole, mask, files), length, qwen)
        inside = [start for start, end in pictures if start < length <= end]
        assert tokens == whole[: min([length, *inside])] and is_trained == mask[: len(tokens)]
        left = sum(end < len(tokens) for _, end in pictures)
        assert images == bytes_of([A, B, C])[:left] and len(places(tokens)) == left
    start, end = pictures[1]
    data = load_sft(qwen, [row], tmp_path, max_length=end, on_long_row="truncate")
    assert data.tokens[0].as_py() == whole[:start] and data.images[0].as_py() == files[:1]
    assert data.loaded.num_truncated == 1
    with pytest.raises(ValueError, match=r"none of 1 rows is left: 1 have more than --data.max-length 40 tokens"):
        load_sft(qwen, [row], tmp_path, max_length=40)


def test_pictures_may_stand_inside_of_messages(qwen, tmp_path):
    """Of a pair each column has its own then: prompt and answers, or whole conversations."""
    def inside(messages: list[dict], *files: dict) -> list[dict]:
        left, found = iter(files), []
        for message in messages:
            parts = [{"type": "image", "image": next(left)} if part == "<image>" else {"type": "text", "text": part}
                     for part in re.split("(<image>)", message["content"]) if part]
            found.append(message | {"content": parts})
        return found

    def stored(path: Path, row: dict, load) -> list[tuple[list[int], list[bytes]]]:
        pq.write_table(pa.Table.from_pylist([row]), path / "inside.parquet")
        data = load(path / "inside.parquet")
        found = []
        for n, before in enumerate(data.images_before.to_pylist()):
            found.append((data.tokens[n].as_py(), [] if before is None else data.images[n - before].as_py()))
        return found

    def as_sft(path: Path) -> ConversationSet:
        return load_conversations([str(path)], AutoTokenizer.from_pretrained(qwen), [2], ConversationConfig(),
                                  RowParser(columns("messages"), sft.parse))

    def as_pair(path: Path) -> ConversationSet:
        return load_conversations([str(path)], AutoTokenizer.from_pretrained(qwen), [2], ConversationConfig(),
                                  RowParser(columns("prompt", "chosen", "rejected"), dpo.parse, per_row=2))

    messages, files = TALKS[3]
    (found,) = stored(tmp_path, {"messages": inside(messages, *files)}, as_sft)
    assert found == (load_sft(qwen, [SFT_ROWS[3]], tmp_path).tokens[0].as_py(), bytes_of(files))
    prompt = say("What is <image>?")
    good, bad = (say("", "look", "<image>", answer)[1:] for answer in ("a dog", "a cat"))
    answers = {"prompt": inside(prompt, A), "chosen": inside(good, B), "rejected": inside(bad, C)}
    whole = {"chosen": inside([*prompt, *good], A, B), "rejected": inside([*prompt, *bad], A, C)}
    repeated = whole | {"prompt": inside(prompt, A)}
    rows = [stored(tmp_path, row, as_pair) for row in (answers, whole, repeated)]
    assert rows[0] == rows[1] == rows[2]
    assert [files for _, files in rows[0]] == [bytes_of([A, B]), bytes_of([A, C])]


@pytest.mark.parametrize(("row", "rule"), [
    ({"messages": say("<image>", "yes"), "images": []}, "the conversation has 1 <image> and images has 0"),
    ({"messages": say("none", "yes"), "images": [A]}, "the conversation has 0 <image> and images has 1"),
    ({"messages": say("<image>", "<image>"), "images": [A]}, "the conversation has 2 <image> and images has 1"),
    ({"messages": say("<image> <|image_pad|>", "yes"), "images": [A]}, "the model's own token of an image"),
    ({"messages": say("<image>", "yes"), "images": [{"bytes": b"no picture", "path": None}]}, "is none of PNG"),
])
def test_a_bad_row_is_named(row, rule, qwen, tmp_path):
    with pytest.raises(ValueError, match=rf"row 1 .counted from 0.: .*{rule}"):
        load_sft(qwen, [SFT_ROWS[0], row], tmp_path)
    assert len(load_sft(qwen, [SFT_ROWS[0], row], tmp_path, on_bad_row="skip")) == 1


def test_text_that_spells_a_token_of_pictures_is_text(qwen, tmp_path):
    """In the user's text beside a picture, and in an answer, where it is trained on."""
    texts = ("<|vision_start|>", "WORD")
    spelled, other = (load_sft(qwen, [{"messages": say(f"<image> a {x} b", f"c {x} d"), "images": [A]}], tmp_path)
                      for x in texts)
    assert len(places(spelled.tokens[0].as_py())) == len(places(other.tokens[0].as_py())) == 1
    letters = AutoTokenizer.from_pretrained(qwen)(" <|vision_start|> d", add_special_tokens=False,
                                                  split_special_tokens=True)["input_ids"]
    trained = [token for token, is_trained in zip(spelled.tokens[0].as_py(), spelled.mask[0].as_py()) if is_trained]
    assert trained[-1 - len(letters) : -1] == letters


def test_models_that_see_otherwise_are_refused(qwen, tiny_llama, tmp_path):
    ours = read_config(qwen, FLOAT32)
    with pytest.raises(ValueError, match=r"--critic-model .* must read images if --model does, and else not"):
        read_critic(tiny_llama, FLOAT32, ours)
    other = make_vision_model("qwen3_vl", tmp_path / "other")
    with pytest.raises(ValueError, match=r"--critic-model .* sees images otherwise than --model .*'patch_size': 16"):
        read_critic(other, FLOAT32, ours)
    assert read_critic(qwen, FLOAT32, ours).model_type == "qwen2_5_vl"


# --------------------------------------------------------------------------- whole runs

COMMON = ["--policy.compute-dtype", "float32", "--optim.lr", "1e-3", "--save.every", "1", "--total-steps", "3",
          "--data.max-length", "256", "--eval-every", "2", "--rows-per-step", "3"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, smollm) -> dict[str, list[str]]:
    """Each script with another family, on the rows of this file; validation shows other pictures than training."""
    folder = tmp_path_factory.mktemp("conversations")
    files = {}
    for name, rows in {"sft": SFT_ROWS, "dpo": PAIRS, "rm": PAIRS}.items():
        held_out = [rows[0] | {"images": [E, F][: len(rows[0]["images"])]}, rows[1]]
        files[name] = ["--train-data", write_rows(folder / f"{name}.parquet", rows),
                       "--val-data", write_rows(folder / f"{name}_val.parquet", held_out)]
    models = {name: make_vision_model(family, folder / family)
              for name, family in {"sft": "qwen2_5_vl", "dpo": "internvl", "rm": "qwen3_vl"}.items()}
    return {name: [name, "--model", models[name], *flags, *COMMON] for name, flags in files.items()}


@pytest.fixture(scope="module")
def runs(jobs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    launch_all(folder / "one", jobs)
    launch_all(folder / "two", {name: [*job, "--max-tokens-per-gpu", "70"] for name, job in jobs.items()}, ranks=2)
    return folder


@pytest.mark.parametrize("name", ["sft", "dpo", "rm"])
def test_two_ranks_with_small_micro_batches_train_the_same(name, runs):
    check_same_training(runs / "two" / name, runs / "one" / name, ["train/loss", "actor/grad_norm"])
    first, *_, last = metrics_of(runs / "one" / name)
    assert metrics_of(runs / "two" / name)[0]["val/loss"] == pytest.approx(first["val/loss"], rel=1e-5)
    assert last["val/loss"] < first["val/loss"]


def test_the_validation_of_sft_sees_its_own_pictures(jobs, runs):
    """Which are other ones than those of training in the same place: by transformers before the first step, and after
    the last with the weights that the run wrote."""
    model = jobs["sft"][2]
    talks = [(TALKS[0][0], bytes_of([E, F])), (TALKS[1][0], [])]
    rows = metrics_of(runs / "one/sft")
    for folder, row in ((model, rows[0]), (str(runs / "one/sft/model"), rows[-1])):
        lm, found = language_model(folder), []
        for messages, files in talks:
            inputs = seen(folder, messages, files)
            found.append(-logps(lm, inputs)[torch.tensor(is_answer(folder, inputs["input_ids"][0].tolist())[1:])])
        assert row["val/loss"] == pytest.approx(float(torch.cat(found).detach().mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_killed_run_continues_exactly(name, jobs, runs, tmp_path):
    check_exact_resume(jobs[name], runs / "one" / name, tmp_path)


def written_classifier(folder: str, model: str) -> torch.nn.Module:
    """What rm.py wrote, in the class of transformers; `model`: what it was made from."""
    weights = {}
    for file in Path(folder).glob("*.safetensors"):
        weights |= load_file(file)
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForSequenceClassification"]
    return classifier(language_model(model), weights)


def test_a_reward_model_sees_pictures(jobs, runs, world):
    """What rm.py wrote, by transformers' classifier: the rewards of its last validation, and of --reward-model.path."""
    folder = str(runs / "one/rm/model")
    pairs = [*both(PAIRS[0] | {"images": [E]}), *both(PAIRS[1])]
    theirs = written_classifier(folder, jobs["rm"][2])
    with torch.no_grad():
        rewards = [float(reward(theirs, seen(folder, *talk))) for talk in pairs]
    last = metrics_of(runs / "one/rm")[-1]
    assert last["val-core/preference/chosen_reward"] == pytest.approx(sum(rewards[::2]) / 2, abs=1e-4)
    judge = RewardModel(RewardModelConfig(path=folder), FLOAT32, world)
    shown = JudgedImages([files for _, files in pairs], judge.tokenizer)
    assert judge.score([messages for messages, _ in pairs], shown) == pytest.approx(rewards, abs=TOLERANCE)
    assert max(rewards) - min(rewards) > 0.05
    no_pictures = JudgedImages([[], *shown.files[1:]], judge.tokenizer)
    judge.score([messages for messages, _ in pairs], no_pictures)
    assert "1 places of images in the text, and 0 images" in judge.unread[0] and len(judge.unread) == 1


RL_ROWS = [
    make_row("What is <image>?", A), make_row("No picture here."), make_row("<image> and <image>", B, C),
    make_row("What is <image>?", D),
]
PPO = ["ppo", "--rollout.engine", "hf", "--rollout.max-response-length", "6", "--policy.compute-dtype", "float32",
       "--data.max-prompt-length", "200", "--reward.num-workers", "1", "--prompts-per-step", "4",
       "--samples-per-prompt", "2", "--minibatches-per-step", "2", "--optim.lr", "1e-3", "--critic-optim.lr", "1e-3",
       "--save.every", "1"]


def test_the_critic_of_ppo_sees_the_pictures(jobs, runs, tmp_path):
    """Its first values, and the scores of a reward model of the same weights, are those of transformers' classifier.
    Two steps on one rank, and one on two."""
    model, folder = jobs["rm"][2], str(runs / "one/rm/model")
    data = write_rows(tmp_path / "rows.parquet", RL_ROWS)
    flags = [*PPO, "--model", model, "--train-data", data, "--critic-model", folder, "--reward-model.path", folder,
             "--reward-model.alone", "--log.rollouts-every", "1"]
    launch_all(tmp_path / "one", {"ppo": [*flags, "--total-steps", "2"]})
    launch_all(tmp_path / "two", {"ppo": [*flags, "--total-steps", "1", "--max-tokens-per-gpu", "60"]}, ranks=2)
    first, second = metrics_of(tmp_path / "one/ppo")
    assert second["critic/grad_norm"] > 0 and second["critic/vf_loss"] != first["critic/vf_loss"]
    for name in ("critic/grad_norm", "critic/vf_loss", "critic/score/mean", "critic/values/max", "actor/grad_norm"):
        assert metrics_of(tmp_path / "two/ppo")[0][name] == pytest.approx(first[name], rel=1e-4)
    theirs = written_classifier(folder, model)
    recorded = pq.read_table(tmp_path / "one/ppo/rollouts/step_000001.parquet").to_pylist()
    assert len(recorded) == 8
    messages_of = {row["prompt"][0]["content"].replace("<image>", ""): row["prompt"] for row in RL_ROWS}
    files: list[bytes] = []
    for response in recorded:
        if response["index"] % 2 == 0:                                  # the first of a group
            files = response["images"] or []
        said = re.sub(r"<\|\w+\|>", "", response["prompt"]).removeprefix("user\n").removesuffix("\nassistant\n")
        prompt = messages_of[said]
        inputs = seen(folder, prompt, files, add_generation_prompt=True)
        with torch.no_grad():
            values = states_values(theirs, inputs, response["tokens"])
            answer = {"role": "assistant", "content": response["response"]}
            score = reward(theirs, seen(folder, [*prompt, answer], files))
        assert response["value"] == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert response["score"] == pytest.approx(float(score), abs=TOLERANCE)
    assert first["critic/values/max"] - first["critic/values/min"] > 1


# --------------------------------------------------------------------------- against TRL

def test_losses_and_gradients_are_those_of_trl(qwen, world, tmp_path):
    """TRL's SFTTrainer and DPOTrainer, which put the pictures first, on a batch that they have padded; with a reference
    that is not the policy. The template has nothing after an answer's end, which TRL would train on."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    model = shutil.copytree(qwen, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    processor, _ = load_processor(str(model))
    pairs = [row | {"prompt": say(text)} for row, text in zip(
        (PAIRS[0], PAIRS[3], PAIRS[2]), ("<image>What?", "<image>Now?", "<image><image>both"))]
    policy, frozen = (load_policy(str(model), FLOAT32, world, Weights(frozen=is_frozen)) for is_frozen in (False, True))
    theirs, reference = (AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.97)
        for weight in frozen.parameters():
            weight.to_local().mul_(0.97)
    flags = {"output_dir": tmp_path, "per_device_train_batch_size": 3, "report_to": [], "use_cpu": True, "bf16": False,
             "max_length": None, "gradient_checkpointing": False}

    def batch_of(trainer: type, config: object, **columns: str) -> tuple[object, dict]:
        rows = []
        for row in pairs:
            rows.append({ours: row[name] for ours, name in columns.items()} | {
                "prompt": say(row["prompt"][0]["content"].replace("<image>", "")),
                "images": decode(bytes_of(row["images"]))})
        more = {"ref_model": reference} if trainer is DPOTrainer else {}
        made = trainer(theirs, args=config, train_dataset=Dataset.from_list(rows), processing_class=processor, **more)
        return made, next(iter(made.get_train_dataloader()))

    sft_rows = [{"prompt": row["prompt"], "response": row["chosen"][0]["content"], "images": row["images"]}
                for row in pairs]
    trainer, batch = batch_of(SFTTrainer, SFTConfig(**flags, completion_only_loss=True), completion="chosen")
    expected = trainer.compute_loss(trainer.model, batch)
    expected.backward()
    want = gradients(theirs)
    data = load_sft(str(model), sft_rows, tmp_path)
    policy.prompts = data.images_of_all([data])
    batch, = data.minibatch(range(3), policy.lm.config, world, 10_000)
    loss = -policy(batch, 1.0)[0].sum() / batch.mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(policy.lm), want)

    config = DPOConfig(**flags, beta=0.3)
    trainer, batch = batch_of(DPOTrainer, config, chosen="chosen", rejected="rejected")
    expected = trainer.compute_loss(trainer.model, batch)
    expected.backward()
    want = gradients(theirs)
    data = load_pairs(str(model), pairs, tmp_path)
    policy.prompts = frozen.prompts = data.images_of_all([data])
    batch, = data.minibatch(range(3), policy.lm.config, world, 10_000)
    logp = segment_sum(policy(batch, 1.0)[0], batch.cu_seqlens)[batch.index.argsort()]
    ref_logp = segment_sum(frozen.score(batch, 1.0), batch.cu_seqlens)[batch.index.argsort()]
    loss = dpo.dpo_loss(logp - ref_logp, 0.3, 0.0).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(policy.lm), want)
