"""rm.py: loss and gradient against transformers and TRL's formula in float64, the same for any layout, exact resume;
what it writes is read by --reward-model.path and ppo.py --critic-model."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GraniteConfig,
)

import rm
from common.batch import Batch
from common.checkpoint.export import export, hf_files
from common.checkpoint.own import MARK
from common.dataset.conversations import ConversationConfig, RowParser, load_conversations
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModel, RewardModelConfig
from common.model.scorer import load_scorer
from common.rollout import sum_per_response
from tests.conftest import VOCAB, launch, launch_all, save_tokenizer
from tests.scripts.test_supervised import check_exact_resume, check_same_training, metrics_of, weights_of, write
from tools.evaluation import calibration

PAIRS = [
    {"prompt": f"Count to {n}", "chosen": " ".join(map(str, range(n))), "rejected": "no " * (n % 3 + 1), "margin": m}
    for n, m in zip(range(2, 14), [0.5, None, 0.25, 1, 0.0, 0.1] * 2)
]
RM = ["rm", "--rows-per-step", "4", "--label-smoothing", "0.1", "--centre-coef", "0.05", "--policy.compute-dtype",
      "float32", "--optim.lr", "1e-3", "--save.every", "1", "--total-steps", "3", "--data.max-length", "256",
      "--eval-every", "2"]
SAMPLING = ["--rollout.engine", "hf", "--policy.compute-dtype", "float32", "--rollout.max-response-length", "6",
            "--data.max-prompt-length", "200", "--reward.num-workers", "1", "--prompts-per-step", "2",
            "--samples-per-prompt", "4", "--total-steps", "1"]
FLOAT32 = ModelConfig(compute_dtype="float32")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", PAIRS),
            "--val-data", write(folder / "val.jsonl", PAIRS[:5])]


@pytest.fixture(scope="module")
def runs(pairs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    launch_all(folder / "one", {
        "whole": [*RM, *pairs], "alone": [*RM, *pairs, "--max-tokens-per-gpu", "1"],
        "lora": [*RM, *pairs, "--lora.rank", "4"], "bf16": [*RM, *pairs, "--policy.compute-dtype", "bfloat16"],
    })
    budget = ["--max-tokens-per-gpu", "150"]
    launch_all(folder / "two", {"ranks": [*RM, *pairs, *budget],
                                "copies": [*RM, *pairs, *budget, "--policy.replicas", "2"]}, ranks=2)
    return folder


def conversations(rows: list[dict]) -> list[list[dict]]:
    """Chosen, rejected, chosen, ..."""
    return [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
            for row in rows for name in ("chosen", "rejected")]


def classifier_rewards(model, tokenizer, rows: list[dict]) -> torch.Tensor:
    """By transformers, one conversation at a time: [2 P]."""
    encoded = [tokenizer.apply_chat_template(messages, return_dict=False) for messages in conversations(rows)]
    return torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in encoded])


# --------------------------------------------------------------------------- loss and gradient

def test_the_loss_of_pairs_is_that_of_the_papers():
    """Value and derivative, in float64, written again with numbers, one pair after the other. Without smoothing it is
    the loss of TRL's RewardTrainer: -log sigmoid(chosen - rejected - margin), and its coefficient times the mean square
    of chosen + rejected."""
    rng, P = random.Random(0), 40
    rewards = torch.tensor([rng.gauss(0, 2) for _ in range(2 * P)], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([rng.random() for _ in range(P)], dtype=torch.float64)
    r = rewards.tolist()
    sigmoid = lambda x: 1 / (1 + math.exp(-x))                                                      # noqa: E731
    for eps, c in ((0.0, 0.0), (0.0, 0.3), (0.2, 0.0), (0.1, 0.02)):
        args = rm.Args(model="", train_data=(), label_smoothing=eps, centre_coef=c)
        total, slopes = 0.0, []
        for i, m in enumerate(margin.tolist()):
            d, s = r[2 * i] - r[2 * i + 1] - m, r[2 * i] + r[2 * i + 1]
            total += -(1 - eps) * math.log(sigmoid(d)) - eps * math.log(1 - sigmoid(d)) + c * s * s
            slopes += [(sigmoid(d) - (1 - eps) + 2 * c * s) / P, (1 - eps - sigmoid(d) + 2 * c * s) / P]
        loss = rm.pair_loss(rewards, margin, args).mean()
        gradient = torch.autograd.grad(loss, rewards)[0]
        assert abs(loss.item() - total / P) < 1e-10 < abs(total)
        assert max(abs(a - b) for a, b in zip(gradient.tolist(), slopes)) < 1e-10 < max(map(abs, slopes))


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|><|im_end|>", "<|im_end|>\n", "!"])
def test_what_is_trained_is_what_transformers_reads(tiny_llama, world, tmp_path, end):
    """Also where the config's padding, here the end token, is what the template ends a conversation with."""
    model = load_scorer(tiny_llama, FLOAT32, world)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{{ '" + end + "' }}{% endfor %}"
    theirs = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1, dtype=torch.float64)
    theirs.load_state_dict({name: tensor.double() for name, tensor in model.full_tensors(None)}, strict=True)
    assert theirs.config.pad_token_id == tokenizer.eos_token_id == 2
    columns = {name: name for name in ("prompt", "chosen", "rejected", "margin")}
    data = load_conversations([write(tmp_path / "a.jsonl", PAIRS)], tokenizer, [2], ConversationConfig(),
                              RowParser(columns, rm.parse, per_row=2, padding=theirs.config.pad_token_id))
    minibatch = data.minibatch(range(4), model.lm.config, world, 10_000)
    batch = Batch.cat(minibatch.microbatches)
    found = sum_per_response(batch, model.score(batch), 8)
    with torch.no_grad():
        assert found.tolist() == pytest.approx(classifier_rewards(theirs, tokenizer, PAIRS[:4]).tolist(), abs=2e-6)


def test_the_gradient_is_that_of_transformers_classifier(tiny_llama, world, tmp_path):
    """In float64, all pairs in one graph there; here every answer in a micro-batch of its own, and all in one."""
    model = load_scorer(tiny_llama, FLOAT32, world)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    columns = {name: name for name in ("prompt", "chosen", "rejected", "margin")}
    data = load_conversations([write(tmp_path / "a.jsonl", PAIRS)], tokenizer, [2], ConversationConfig(),
                              RowParser(columns, rm.parse, per_row=2))
    rows, args = [5, 0, 9], rm.Args(model="", train_data=(), label_smoothing=0.1, centre_coef=0.05)
    margin = rm.margins_of(data, rows)
    assert margin.tolist() == [0.1, 0.5, 1.0] and rm.margins_of(data, [1]).tolist() == [0.0]

    theirs = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1, dtype=torch.float64)
    theirs.load_state_dict({name: tensor.double() for name, tensor in model.full_tensors(None)}, strict=True)
    expected = classifier_rewards(theirs, tokenizer, [PAIRS[row] for row in rows])
    rm.pair_loss(expected, margin, args).mean().backward()
    want = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(gradient.abs().max() for gradient in want.values())

    for budget, count in ((1, 6), (10_000, 1)):
        model.zero_grad()
        microbatches = data.minibatch(rows, model.lm.config, world, budget)
        assert len(microbatches) == count
        found = torch.zeros(6, dtype=torch.float64)
        for batch in microbatches:
            found[batch.index] = model.score(batch)[batch.mask].double()
        assert (found - expected.detach()).abs().max() < 1e-5 < found.std()
        leaf = found.requires_grad_()
        coefficients = torch.autograd.grad(rm.pair_loss(leaf, margin, args).mean(), leaf)[0].float()
        for batch in microbatches:
            (coefficients[batch.index][batch.sequence_ids] * model(batch)).sum().backward()
        ours = {f"model.{name}": p.grad.full_tensor() for name, p in model.lm.named_parameters()}
        ours["score.weight"] = model.critic.head.weight.grad.full_tensor()
        assert ours.keys() == want.keys()
        for name, gradient in ours.items():
            assert (gradient - want[name]).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("layout", ["one/alone", "two/ranks", "two/copies"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    whole = runs / "one/whole"
    check_same_training(runs / layout, whole, ["train/loss", "actor/grad_norm"])
    for name in ("preference/margin", "val-core/preference/chosen_reward"):
        assert metrics_of(runs / layout)[3][name] == pytest.approx(metrics_of(whole)[3][name], rel=1e-3)


@pytest.mark.parametrize("name", ["whole", "lora", "bf16"])
def test_the_accuracy_rises(name, runs):
    first, *_, last = metrics_of(runs / "one" / name)
    assert last["val/loss"] < first["val/loss"]
    assert last["val-core/preference/margin"] > first["val-core/preference/margin"]
    if name != "lora":
        assert last["val-core/preference/accuracy"] == 1 and last["val-aux/preference/ece"] > 0


def test_centring_holds_the_rewards_near_0(pairs, tmp_path):
    flags = [*RM, *pairs, "--total-steps", "12", "--eval-every", "0"]
    launch_all(tmp_path, {"held": [*flags, "--centre-coef", "1"], "free": [*flags, "--centre-coef", "0"]})
    sums = {}
    for name in ("held", "free"):
        last = metrics_of(tmp_path / name)[-1]
        sums[name] = abs(last["val-core/preference/chosen_reward"] + last["val-core/preference/rejected_reward"])
    assert sums["held"] < 0.5 * sums["free"]


def test_a_killed_run_continues_exactly(pairs, runs, tmp_path):
    check_exact_resume([*RM, *pairs], runs / "one/whole", tmp_path)


# --------------------------------------------------------------------------- what it writes

@pytest.mark.parametrize("name", ["whole", "lora"])
def test_the_written_model_gives_the_rewards_of_the_run(name, runs, world):
    """By transformers, and by --reward-model.path, which packs: the mean rewards of the last validation."""
    folder, last = runs / "one" / name / "model", metrics_of(runs / "one" / name)[-1]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rewards = classifier_rewards(model, tokenizer, PAIRS[:5])
    packed = RewardModel(RewardModelConfig(path=str(folder)), FLOAT32, world).score(conversations(PAIRS[:5]))
    assert packed == pytest.approx(rewards.tolist(), abs=1e-5) and rewards.std() > 0.1
    for i, kind in enumerate(("chosen", "rejected")):
        assert last[f"val-core/preference/{kind}_reward"] == pytest.approx(rewards[i::2].mean().item(), abs=1e-4)
    margin = torch.tensor([row["margin"] or 0.0 for row in PAIRS[:5]], dtype=torch.float64)
    args = rm.Args(model="", train_data=(), label_smoothing=0.1, centre_coef=0.05)
    assert last["val/loss"] == pytest.approx(rm.pair_loss(rewards.double(), margin, args).mean().item(), abs=1e-4)


def test_the_head_stays_in_float32(runs):
    tensors = load_file(runs / "one/bf16/model/model.safetensors")
    assert {name for name, x in tensors.items() if x.dtype == torch.float32} == {"score.weight"}
    assert {x.dtype for x in tensors.values()} == {torch.float32, torch.bfloat16}
    assert json.loads((runs / "one/bf16/model/config.json").read_text())["dtype"] == "bfloat16"


def test_a_family_without_a_classifier_in_transformers(world, tmp_path):
    """It is written under the name by which vLLM takes it; the rewards are the head on transformers' hidden states."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(GraniteConfig(**sizes)).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    scorer = load_scorer(str(tmp_path / "source"), FLOAT32, world)
    files = hf_files(str(tmp_path / "source"), scorer.lm.config, tokenizer, "float32")
    export(scorer, files, tmp_path / "model", world)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["architectures"] == ["GraniteForSequenceClassification"]
    theirs = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.float64)
    head = load_file(tmp_path / "model/model.safetensors")["score.weight"].double()
    want = []
    for messages in conversations(PAIRS[:3]):
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            want.append(float(theirs(torch.tensor([tokens])).last_hidden_state[0, -1] @ head[0]))
    found = RewardModel(RewardModelConfig(path=str(tmp_path / "model")), FLOAT32, world).score(conversations(PAIRS[:3]))
    assert found == pytest.approx(want, abs=1e-5) and max(want) - min(want) > 0.05


def test_it_is_a_reward_model_and_a_critic(tiny_llama, small_train, runs, tmp_path):
    folder = str(runs / "one/whole/model")
    flags = ["--model", tiny_llama, "--train-data", small_train, *SAMPLING]
    alone = ["--reward-model.path", folder, "--reward-model.alone"]
    launch_all(tmp_path, {"grpo": ["grpo", *flags, *alone], "ppo": ["ppo", *flags, *alone, "--critic-model", folder],
                          "zero": ["ppo", *flags, *alone]})
    for name in ("grpo", "ppo"):
        row, = metrics_of(tmp_path / name)
        assert row["reward/model"] == pytest.approx(row["critic/score/mean"]) and abs(row["reward/model"]) > 0.01
    row, zero = metrics_of(tmp_path / "ppo")[0], metrics_of(tmp_path / "zero")[0]
    assert zero["critic/values/mean"] == 0 != row["critic/values/mean"]        # without it, values begin at 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["one/whole", "two/ranks", "one/bf16", "one/lora"])
def test_a_checkpoint_becomes_the_model_that_the_run_wrote(name, runs, tmp_path):
    """That of the last step, to the last bit, types and other files included; and transformers reads it."""
    launch("-m", "tools.checkpoints", "export", runs / name, tmp_path / "out")
    found, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", runs / name / "model"))
    assert found.keys() == want.keys() and "score.weight" in found
    for key, tensor in want.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    for file in (runs / name / "model").iterdir():
        if file.name != MARK:                                               # it has the weights' checksum
            assert file.name == "model.safetensors" or (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_adapters_of_a_reward_model_are_not_exported_alone(runs, tmp_path):
    done = launch("-m", "tools.checkpoints", "export", runs / "one/lora", tmp_path / "out", "--adapter", check=False)
    assert done.returncode == 2 and "whose head is trained beside the adapters" in done.stderr
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- rows, flags, calibration

@pytest.mark.parametrize(("row", "rule"), [
    ({"prompt": "hi", "chosen": "yes", "rejected": "yes"}, "chosen and rejected are the same"),
    ({"prompt": "hi", "chosen": "yes"}, "rejected is None"),
    ({"prompt": "hi", "chosen": "yes", "rejected": "no", "margin": "big"}, "margin is 'big'; it must be a finite"),
    ({"prompt": "hi", "chosen": "yes", "rejected": "no", "margin": math.nan}, "margin is nan; it must be a finite"),
])
def test_a_bad_pair_is_named(row, rule, tiny_llama):
    with pytest.raises(ValueError, match=rule):
        rm.parse(row, AutoTokenizer.from_pretrained(tiny_llama), {})


def test_the_tokens_are_those_that_a_reward_model_reads(tiny_llama, tmp_path):
    """The whole conversation as the chat template renders it, and one more token, the only masked one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    columns = {name: name for name in ("prompt", "chosen", "rejected", "margin")}
    rows = [*PAIRS[:2], {"chosen": conversations(PAIRS)[0], "rejected": conversations(PAIRS)[1]}]
    data = load_conversations([write(tmp_path / "a.jsonl", rows)], tokenizer, [2], ConversationConfig(),
                              RowParser(columns, rm.parse, per_row=2))
    want = [tokenizer.apply_chat_template(messages, return_dict=False) for messages in conversations(PAIRS[:2])]
    for ids, tokens, mask in zip([*want, *want[:2]], data.tokens.to_pylist(), data.mask.to_pylist(), strict=True):
        assert tokens == [*ids, 2] and mask == [False] * len(ids) + [True]


@pytest.mark.parametrize(("flags", "message"), [
    ({"label_smoothing": 0.5}, r"--label-smoothing 0.5 must be in \[0, 0.5\)"),
    ({"centre_coef": -1.0}, "--centre-coef -1.0 at least 0"),
    ({"data": rm.PairConfig(max_length=256, template="plain")}, "leave out --data.template"),
    ({"data": rm.PairConfig(max_length=256, on_long_row="truncate")}, "leave out --data.template"),
    ({"rows_per_step": 0}, "--rows-per-step 0 must be at least 1"),
])
def test_flags_that_cannot_work_are_refused(flags, message, tiny_llama):
    with pytest.raises(ValueError, match=message):
        rm.check(rm.Args(**{"model": tiny_llama, "train_data": ("x",), "data": rm.PairConfig(max_length=256)} | flags))


def test_calibration_by_hand():
    """Differences with probabilities 0.55, 0.58, 0.92 and a tie: bins from 0.5 and from 0.9."""
    logit = lambda p: math.log(p / (1 - p))                                                         # noqa: E731
    differences = [logit(0.55), -logit(0.58), logit(0.92), logit(0.96), 0.0]
    rewards = torch.tensor([x for d in differences for x in (1 + d, 1.0)], dtype=torch.float64)
    found = calibration(rewards)
    low, high = ((0.55 + 0.58 + 0.5) / 3, (1 + 0 + 0.5) / 3), ((0.92 + 0.96) / 2, 1.0)
    assert found == pytest.approx({
        "preference/ece": 3 / 5 * abs(low[0] - low[1]) + 2 / 5 * abs(high[0] - high[1]),
        "calibration/0.5/confidence": low[0], "calibration/0.5/accuracy": low[1], "calibration/0.5/frac": 3 / 5,
        "calibration/0.9/confidence": high[0], "calibration/0.9/accuracy": high[1], "calibration/0.9/frac": 2 / 5,
    })


def test_the_head_is_drawn_from_the_seed(tiny_llama, world):
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(dict(load_scorer(tiny_llama, FLOAT32, world).full_tensors(None))["score.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 32) and 0.1 < heads[0].std() < 0.25                      # 33 ** -0.5 = 0.17


def test_the_weights_of_all_layouts_are_complete(runs):
    names = {name: set(weights_of(runs / name)) for name in ("one/whole", "two/ranks", "one/lora")}
    assert names["one/whole"] == names["two/ranks"] == names["one/lora"] and "score.weight" in names["one/whole"]
