"""kto.py: its loss and its gradient against a slow loop, Hugging Face's model in float64 and TRL's own trainer; the
same for any layout, exact resume, what it refuses."""

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kto
from common.curriculum.sampler import PromptSampler
from common.dataset.conversations import ConversationConfig, RowParser, load_conversations
from common.dataset.labelled import mismatched
from common.tracking.preferences import label_metrics
from tests.conftest import launch, launch_all
from tests.scripts.test_supervised import check_exact_resume, check_same_training, metrics_of, weights_of, write

ROWS = [{"prompt": f"Count to {n}", "completion": " ".join(map(str, range(n))) if n % 3 else "no " * (n % 4 + 1),
         "label": n % 3 != 0} for n in range(2, 14)]
FLAGS = ["--rows-per-step", "4", "--beta", "0.5", "--desirable-weight", "0.8", "--undesirable-weight", "1.5",
         "--policy.compute-dtype", "float32", "--optim.lr", "1e-3", "--save.every", "1", "--total-steps", "3",
         "--data.max-length", "256", "--eval-every", "2"]
COLUMNS = {name: name for name in ("prompt", "completion", "label")}


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("labelled")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", ROWS),
            "--val-data", write(folder / "val.jsonl", ROWS[:5])]


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    command = ["kto", *FLAGS, *files]
    launch_all(folder / "one", {"whole": command, "alone": [*command, "--max-tokens-per-gpu", "1"],
                                "lora": [*command, "--lora.rank", "4"]})
    budget = [*command, "--max-tokens-per-gpu", "100"]
    launch_all(folder / "two", {"ranks": budget, "copies": [*budget, "--policy.replicas", "2"]}, ranks=2)
    return folder


def load(model: str, folder: Path, rows: list[dict]):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return load_conversations([write(folder / "rows.jsonl", rows)], tokenizer, [2], ConversationConfig(),
                              RowParser(COLUMNS, kto.parse))


def test_the_loss_of_rows_is_that_of_the_paper():
    """Value and derivative, in float64, written again from equation 8 with numbers, one row after the other."""
    rng, S = random.Random(0), 30
    log_ratio = torch.tensor([rng.gauss(0, 3) for _ in range(S)], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([rng.random() < 0.6 for _ in range(S)])
    args = SimpleNamespace(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    total, slopes = 0.0, []
    for r, is_good in zip(log_ratio.tolist(), label.tolist()):
        v = 1 / (1 + math.exp(-0.3 * (r - 1.5))) if is_good else 1 / (1 + math.exp(-0.3 * (1.5 - r)))
        weight = 1.2 if is_good else 0.7
        total += weight - weight * v
        slopes.append((-1 if is_good else 1) * weight * 0.3 * v * (1 - v) / S)
    loss = kto.kto_loss(log_ratio, torch.tensor(1.5, dtype=torch.float64), label, args).mean()
    gradient = torch.autograd.grad(loss, log_ratio)[0]
    assert abs(loss.item() - total / S) < 1e-12 < loss.item()
    assert max(abs(a - b) for a, b in zip(gradient.tolist(), slopes)) < 1e-12 < max(map(abs, slopes))


def test_the_kl_is_not_below_zero_and_has_no_gradient():
    logp = torch.tensor([-3.0, -5.0, -1.0])
    assert kto.kl_estimate(logp, torch.tensor([-4.0, -4.0, -4.0])).item() == 1
    assert kto.kl_estimate(logp, torch.tensor([-1.0, -1.0, -1.0])).item() == 0


def test_what_is_said_of_rows():
    log_ratio = torch.tensor([3.0, 1, -1, 4], dtype=torch.float64)
    label = torch.tensor([True, True, False, False])
    kl = torch.tensor(2.0)
    assert label_metrics(log_ratio, kl, label, 0.5) == {
        "preference/kl": 2, "preference/accuracy": 2 / 4, "preference/chosen_reward": 1,
        "preference/rejected_reward": 3 / 4, "preference/margin": 1 / 4,
    }
    assert label_metrics(log_ratio, kl, torch.ones(4, dtype=torch.bool), 0.5).keys() == {
        "preference/kl", "preference/accuracy", "preference/chosen_reward"}


def test_prompts_with_the_answers_of_other_rows(tiny_llama, tmp_path):
    """Each conversation is the text of one row's prompt and of the answer of the row before it, cut at the end."""
    data = load(tiny_llama, tmp_path, ROWS)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    rows = [5, 0, 9]
    mixed = mismatched(data, rows, 1000)
    for i, row in enumerate(rows):
        given = [{"role": "user", "content": ROWS[row]["prompt"]}]
        prompt = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        answer = f"{ROWS[rows[i - 1]]['completion']}<|im_end|>"
        tokens, mask = mixed.tokens[i].as_py(), mixed.mask[i].as_py()
        assert tokenizer.decode(tokens) == f"{prompt}{answer}\n"
        assert tokenizer.decode([t for t, m in zip(tokens, mask) if m]) == answer
    longest = max(map(len, mixed.tokens.to_pylist()))
    short = mismatched(data, rows, longest - 3)
    assert [x[: longest - 3] for x in mixed.tokens.to_pylist()] == short.tokens.to_pylist()
    assert [x[: longest - 3] for x in mixed.mask.to_pylist()] == short.mask.to_pylist()


def test_three_steps_are_those_of_trl(tiny_llama, tmp_path):
    """TRL's KTOTrainer trains for three steps on the rows in the order in which kto.py draws them, and so does kto.py:
    losses, gradient norms, the KL and the weights. The template has nothing after an answer's end, on which TRL would
    train."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model = shutil.copytree(tiny_llama, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("""'<|im_end|>' + '\n'""", "'<|im_end|>'"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert shown.endswith("<|im_end|>"), shown
    drawn = [ROWS[i] for i in PromptSampler(len(ROWS), "", 0).take(12)]
    talk = [{"prompt": [{"role": "user", "content": row["prompt"]}],
             "completion": [{"role": "assistant", "content": row["completion"]}], "label": row["label"]}
            for row in drawn]
    config = KTOConfig(
        output_dir=tmp_path / "trl", per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, beta=0.5,
        desirable_weight=0.8, undesirable_weight=1.5, lr_scheduler_type="constant", logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", max_length=256, disable_tqdm=True,
        weight_decay=0.0, max_grad_norm=1.0,
    )
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = KTOTrainer(theirs, args=config, ref_model=reference, train_dataset=Dataset.from_list(talk),
                         processing_class=tokenizer)
    trainer.train()
    expected = [line for line in trainer.state.log_history if "loss" in line]
    data = write(tmp_path / "rows.jsonl", ROWS)
    launch("kto.py", *FLAGS, "--model", model, "--train-data", data, "--eval-every", "0", "--run-dir",
           tmp_path / "run", warm=True)
    ours = metrics_of(tmp_path / "run")
    assert len(ours) == len(expected) == 3
    for mine, other in zip(ours, expected):
        assert mine["train/loss"] == pytest.approx(other["loss"], rel=1e-4)     # TRL writes so many digits
        assert mine["actor/grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert mine["preference/kl"] == pytest.approx(other["kl"], abs=2e-3)
        for name in ("chosen", "rejected"):
            assert mine.get(f"preference/{name}_reward", 0) == pytest.approx(other.get(f"rewards/{name}", 0), rel=2e-3)
    assert max(line["kl"] for line in expected) > 0.1
    weights = weights_of(tmp_path / "run")
    before = load_file(model / "model.safetensors")
    for name, weight in theirs.state_dict().items():
        if name in weights:                                             # AdamW turns rounding into whole steps
            assert ((weight - weights[name]).abs() > 1e-4).float().mean() < 0.01, name
            assert not torch.equal(weights[name], before[name]), name


@pytest.mark.parametrize("layout", ["one/alone", "two/ranks", "two/copies"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    check_same_training(runs / layout, runs / "one/whole", ["train/loss", "actor/grad_norm", "actor/entropy"])
    ours, theirs = metrics_of(runs / layout), metrics_of(runs / "one/whole")
    for name in ("preference/kl", "preference/chosen_reward", "val-core/preference/margin", "val/loss"):
        assert ours[3][name] == pytest.approx(theirs[3][name], rel=1e-3) and abs(theirs[3][name]) > 0.01


def test_the_rewards_of_labels_part(runs):
    for name in ("whole", "lora"):
        first, *_, last = metrics_of(runs / "one" / name)
        assert first["val-core/preference/margin"] == 0 == first["val-core/preference/kl"]          # the reference
        assert last["val-core/preference/margin"] > 0 and last["val/loss"] < first["val/loss"]


def test_a_killed_kto_continues_exactly(files, runs, tmp_path):
    check_exact_resume(["kto", *FLAGS, *files], runs / "one/whole", tmp_path)


@pytest.mark.parametrize(("row", "words"), [
    ({"label": "yes"}, "label is 'yes'; it must be true for an answer that is desired, else false"),
    ({"label": None}, "label is None; it must be true"),
    ({"completion": None}, "completion is None; it must name a column of strings or lists"),
    ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
     "the prompt ends with a message of the assistant"),
])
def test_rows_that_cannot_be_used_are_refused(row, words, tiny_llama, tmp_path):
    with pytest.raises(ValueError, match=words):
        load(tiny_llama, tmp_path, [ROWS[0] | row])


@pytest.mark.parametrize(("flags", "words"), [
    (["--rows-per-step", "1"], "--rows-per-step 1 must be at least 2: the KL is estimated with the answers of other"),
    (["--undesirable-weight", "0"], "--undesirable-weight 0.0 must be above 0"),
    (["--beta", "0"], "--beta 0.0 must be above 0"),
])
def test_flags_that_cannot_work_are_refused(flags, words, files):
    done = launch("kto.py", *FLAGS, *files, *flags, warm=True, check=False)
    assert done.returncode == 2 and words in done.stderr


def test_dpo_names_the_script_of_kto(files):
    done = launch("dpo.py", *files, "--loss", "kto", warm=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("KTO, whose rows are no pairs, is a script of its own, kto.py")


def test_labels_may_be_numbers(tiny_llama, tmp_path):
    data = load(tiny_llama, tmp_path, json.loads(json.dumps([row | {"label": int(row["label"])} for row in ROWS])))
    assert data.label.tolist() == [row["label"] for row in ROWS]
