"""sft.py and dpo.py: losses against float64 oracles, the same for any layout, exact resume, what they refuse."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, Qwen3VLConfig

import dpo
import sft
from common.curriculum.sampler import PromptSampler
from common.dataset.conversations import ConversationConfig, RowParser, check_supervised, load_conversations
from common.engine.base import RolloutConfig
from common.engine.make import check_rollout
from common.model.loading import Weights, load_policy, read_config
from common.model.policy import ModelConfig
from common.segments import segment_sum
from common.tracking.logger import LogConfig
from common.tracking.preferences import preference_metrics
from common.training import Training
from tests.checkpoint.faulty import server
from tests.conftest import FAST_DTYPE, ROOT, launch, launch_all
from tools import try_script
from tools.checkpoints import export_checkpoint

ROWS = [
    {"messages": [
        {"role": "user", "content": f"Count to {n}"}, {"role": "assistant", "content": " ".join(map(str, range(n)))},
        {"role": "user", "content": "Again"}, {"role": "assistant", "content": "no " * (n % 3 + 1)},
    ]}
    for n in range(2, 14)
]
COMMON = ["--policy.compute-dtype", "float32", "--optim.lr", "1e-3", "--save.every", "1", "--total-steps", "3",
          "--data.max-length", "256", "--eval-every", "2"]
SFT = ["sft", "--rows-per-step", "5", *COMMON]
DPO = ["dpo", "--rows-per-step", "4", "--beta", "0.5", "--label-smoothing", "0.1", *COMMON]
LORA = ["--lora.rank", "4", "--total-steps", "2"]
PAIRS = [{"prompt": f"Count to {n}", "chosen": " ".join(map(str, range(n))), "rejected": "no " * (n % 3 + 1)}
         for n in range(2, 14)]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", ROWS),
            "--val-data", write(folder / "val.jsonl", ROWS[:3])]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", PAIRS),
            "--val-data", write(folder / "val.jsonl", PAIRS[:3])]


@pytest.fixture(scope="module")
def runs(files, pairs, tmp_path_factory) -> Path:
    """Of each script, `whole`: all in one micro-batch; `alone`: each sequence in its own; on two ranks: `ranks`; on two
    that hold a copy of the model each: `copies`."""
    folder = tmp_path_factory.mktemp("supervised")
    alone, budget = ["--max-tokens-per-gpu", "1"], ["--max-tokens-per-gpu", "100"]
    launch_all(folder / "one", {"whole": [*SFT, *files], "alone": [*SFT, *files, *alone],
                                "dpo_whole": [*DPO, *pairs], "dpo_alone": [*DPO, *pairs, *alone],
                                "lora": [*SFT, *files, *LORA], "dpo_lora": [*DPO, *pairs, *LORA]})
    copies = [*budget, "--policy.replicas", "2"]
    launch_all(folder / "two", {"ranks": [*SFT, *files, *budget], "dpo_ranks": [*DPO, *pairs, *budget],
                                "copies": [*SFT, *files, *copies], "dpo_copies": [*DPO, *pairs, *copies]}, ranks=2)
    return folder


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


@pytest.mark.parametrize("name", ["lora", "dpo_lora"])
def test_adapters_are_trained(name, runs, tiny_llama):
    rows, before = metrics_of(runs / "one" / name), load_file(Path(tiny_llama) / "model.safetensors")
    assert rows[-1]["val/loss"] < rows[0]["val/loss"] and rows[1]["actor/grad_norm"] > 0
    if name == "dpo_lora":                                              # at first the policy is the reference
        assert rows[0]["val-core/preference/margin"] == 0 < rows[-1]["val-core/preference/margin"]
    after = weights_of(runs / "one" / name)
    assert {x for x in after if not torch.equal(before[x], after[x])} == {x for x in after if "_proj" in x}


def check_same_training(run: Path, whole: Path, names: list[str]) -> None:
    """Two layouts: the same first step but for rounding (torch sums the squares of a norm in float32, on two ranks in
    another order). Of the weights after three steps only few may differ, as AdamW turns rounding into whole steps where
    a gradient is nearly 0."""
    ours, theirs = metrics_of(run), metrics_of(whole)
    assert len(ours) == len(theirs) == 4
    for name in names:
        assert theirs[1][name] != 0
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4 if "norm" in name else 1e-6), name
    expected = weights_of(whole)
    for name, weight in weights_of(run).items():
        assert ((weight - expected[name]).abs() > 1e-4).float().mean() < 0.01, name


@pytest.mark.parametrize("layout", ["one/alone", "two/ranks", "two/copies"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    check_same_training(runs / layout, runs / "one/whole", ["train/loss", "actor/grad_norm", "actor/entropy"])
    for ours, theirs in zip(metrics_of(runs / layout), metrics_of(runs / "one/whole")):
        assert ("val/loss" in ours) == ("val/loss" in theirs) == (ours["step"] in (0, 2, 3))
        assert ours.get("val/loss", 0) == pytest.approx(theirs.get("val/loss", 0), rel=1e-4)


def test_the_loss_and_its_gradient_are_those_of_transformers(runs, tiny_llama):
    """The first step's rows, one at a time through the Hugging Face model in float64; and the validation rows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)

    def mean_loss(rows: list[dict]) -> torch.Tensor:
        losses, count = torch.zeros((), dtype=torch.float64), 0
        for row in rows:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            encoded = tokenizer(text, return_offsets_mapping=True)
            spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text)]
            assert len(spans) == 2
            where = [t for t, (start, end) in enumerate(encoded["offset_mapping"])
                     if any(low <= start and end <= high for low, high in spans)]
            logp = model(torch.tensor([encoded["input_ids"]])).logits[0].log_softmax(-1)
            losses = losses - sum(logp[t - 1, encoded["input_ids"][t]] for t in where)
            count += len(where)
        return losses / count

    with torch.no_grad():
        assert metrics_of(runs / "one/whole")[0]["val/loss"] == pytest.approx(float(mean_loss(ROWS[:3])), rel=1e-6)
    first = metrics_of(runs / "one/whole")[1]
    loss = mean_loss([ROWS[i] for i in PromptSampler(len(ROWS), "", 0).take(5)])
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def check_exact_resume(command: list[str], whole: Path, tmp_path: Path, first_step: int = 0) -> None:
    """kill -9 as the third step is logged, then the same command again: weights and metrics byte for byte.
    `first_step`: of the first line in the log, 0 with validation."""
    script, *flags = command
    log, fault = tmp_path.with_suffix(".log"), f"log:{4 - first_step}:0:kill"
    assert server()(log, fault, f"{script}.py", *flags, "--run-dir", str(tmp_path)) == -signal.SIGKILL, log.read_text()
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2][first_step:]
    assert "resumed after step 2" in launch(f"{script}.py", *flags, "--run-dir", tmp_path, warm=True).stdout
    theirs = weights_of(whole)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(tmp_path).items())
    for ours, expected in zip(metrics_of(tmp_path), metrics_of(whole), strict=True):
        compared = {name for name in expected if not re.match(r"timing|perf|sync|sleep|rollout/tokens_per_s", name)}
        assert {name: ours[name] for name in compared} == {name: expected[name] for name in compared}


def test_a_killed_sft_continues_exactly(files, runs, tmp_path):
    check_exact_resume([*SFT, *files], runs / "one/whole", tmp_path)


@pytest.mark.parametrize("later", [False, True])
def test_a_layer_that_is_frozen_or_trained_later_continues_exactly(later, files, tmp_path):
    """Forks that freeze a layer after the first step, and that train it from then on. Each run of three steps is
    continued from its second checkpoint."""
    layer = "policy.lm.model.layers[0].requires_grad_({})\n"
    first, then = "        num_epochs = ", "            # 1 data\n"
    mine = fork_of("sft.py", tmp_path, (first, f"        {layer.format(not later)}{first}"),
                   (then, f"{then}            if step > 0:\n                {layer.format(later)}"))
    command = [mine, *SFT[1:], *files, "--save.keep", "3", "--run-dir"]
    launch(*command, tmp_path / "whole", warm=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for folder in ("finished", "model", "checkpoints/step_000003"):
        shutil.rmtree(tmp_path / "run" / folder)
    assert "resumed after step 2" in launch(*command, tmp_path / "run", warm=True).stdout
    now = json.loads((tmp_path / "run/now.json").read_text())           # of its last moment
    assert (now["step"], now["total_steps"]) == (3, 3) and now["tokens_per_s"] > 0 and now["step_s"] > 0
    whole, ours = weights_of(tmp_path / "whole"), weights_of(tmp_path / "run")
    assert all(torch.equal(weight, whole[name]) for name, weight in ours.items())
    before = load_file(Path(files[1]) / "model.safetensors")
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


# --------------------------------------------------------------------------- dpo.py

def test_the_losses_of_pairs_are_those_of_the_papers():
    """Value and derivative, in float64, written again from the papers with numbers, one pair after the other."""
    rng, P = random.Random(0), 40
    log_ratio = torch.tensor([rng.gauss(0, 3) for _ in range(2 * P)], dtype=torch.float64, requires_grad=True)
    r = log_ratio.tolist()
    sigmoid = lambda x: 1 / (1 + math.exp(-x))                                                      # noqa: E731
    for name, beta, eps in (("dpo", 0.3, 0.0), ("dpo", 0.7, 0.2), ("ipo", 0.4, 0.0)):
        total, slopes = 0.0, []
        for i in range(P):
            h = r[2 * i] - r[2 * i + 1]
            if name == "ipo":
                total += (h - 1 / (2 * beta)) ** 2
                slope = 2 * (h - 1 / (2 * beta))
            else:
                total -= (1 - eps) * math.log(sigmoid(beta * h)) + eps * math.log(sigmoid(-beta * h))
                slope = beta * (sigmoid(beta * h) - (1 - eps))
            slopes += [slope / P, -slope / P]
        loss = dpo.LOSSES[name](log_ratio, beta, eps).mean()
        gradient = torch.autograd.grad(loss, log_ratio)[0]
        assert abs(loss.item() - total / P) < 1e-10 < abs(total)
        assert max(abs(a - b) for a, b in zip(gradient.tolist(), slopes)) < 1e-10 < max(map(abs, slopes))


def test_what_is_said_of_pairs():
    log_ratio = torch.tensor([1.0, -1, 2, 3, 0, 0, -2, -6], dtype=torch.float64)
    assert preference_metrics(log_ratio, 0.5) == {
        "preference/accuracy": (1 + 0 + 0.5 + 1) / 4, "preference/margin": (2 - 1 + 0 + 4) / 4 / 2,
        "preference/chosen_reward": 1 / 8, "preference/rejected_reward": -4 / 8,
    }


def test_pairs_need_not_share_a_micro_batch(tiny_llama, world, tmp_path):
    """The gradient of the coefficients times log-probs, every answer in a micro-batch of its own, is that of the loss
    with all pairs in one graph. The policy is not the reference: the coefficients differ from pair to pair."""
    config = ModelConfig(compute_dtype="float32")
    policy = load_policy(tiny_llama, config, world)
    reference = load_policy(tiny_llama, config, world, Weights(frozen=True))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.to_local().add_(0.05 * torch.randn_like(parameter.to_local()))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    data = load_conversations([write(tmp_path / "a.jsonl", PAIRS)], tokenizer, [2], ConversationConfig(),
                              RowParser(columns, dpo.parse, per_row=2))
    rows = [5, 0, 9]
    whole, = data.minibatch(rows, policy.lm.config, world, 10_000)
    order = whole.index.argsort()
    log_ratio = segment_sum((policy(whole, 1.0)[0] - reference.score(whole, 1.0)).double(), whole.cu_seqlens)[order]
    dpo.dpo_loss(log_ratio, 0.5, 0.1).mean().backward()
    direct = [p.grad.full_tensor().clone() for p in policy.parameters()]
    policy.zero_grad()
    leaf = log_ratio.detach().requires_grad_()
    coefficients = torch.autograd.grad(dpo.dpo_loss(leaf, 0.5, 0.1).mean(), leaf)[0].float()
    assert coefficients[::2].std() > 0.01
    alone = data.minibatch(rows, policy.lm.config, world, 1)
    assert len(alone) == 6
    for batch in alone:
        (coefficients[batch.index][batch.sequence_ids] * policy(batch, 1.0)[0]).sum().backward()
    largest = max(g.abs().max().item() for g in direct)
    for ours, theirs in zip((p.grad.full_tensor() for p in policy.parameters()), direct):
        assert (ours - theirs).abs().max() < 1e-5 * largest


@pytest.mark.parametrize("layout", ["one/dpo_alone", "two/dpo_ranks", "two/dpo_copies"])
def test_the_gradient_of_pairs_does_not_depend_on_the_layout(layout, runs):
    whole = runs / "one/dpo_whole"
    check_same_training(runs / layout, whole, ["train/loss", "actor/grad_norm", "actor/entropy"])
    ours, theirs = metrics_of(runs / layout), metrics_of(whole)
    assert [row["preference/accuracy"] for row in ours[1:]] == [row["preference/accuracy"] for row in theirs[1:]]
    for name in ("preference/margin", "preference/chosen_reward", "val-core/preference/margin"):
        assert ours[3][name] == pytest.approx(theirs[3][name], rel=1e-3) and abs(theirs[3][name]) > 0.01


def test_the_accuracy_on_pairs_rises(runs):
    first, *_, last = metrics_of(runs / "one/dpo_whole")
    assert first["val-core/preference/accuracy"] == 0.5 and first["val-core/preference/margin"] == 0   # the reference
    assert first["val/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert last["val-core/preference/accuracy"] == 1 and last["val/loss"] < first["val/loss"]


def test_the_reference_is_scored_on_all_rows_of_a_run_that_changes_its_steps(pairs, tmp_path):
    """Continued with fewer rows a step: the rows of the last steps are others than those that as many steps of this
    size have from the start. With a rate of almost 0 the policy stays the reference, and the loss log 2."""
    flags = ["dpo.py", *pairs, *COMMON, "--optim.lr", "1e-30", "--run-dir", tmp_path / "run"]
    launch(*flags, "--rows-per-step", "3", "--total-steps", "2", warm=True)
    launch(*flags, "--rows-per-step", "1", "--total-steps", "5", "--save.allow-changes", warm=True)
    found = [row["train/loss"] for row in metrics_of(tmp_path / "run") if "train/loss" in row]
    assert found == pytest.approx([math.log(2)] * 5, rel=1e-6)


@pytest.mark.sweep
def test_adapters_continue_on_their_own_base_alone(pairs, tiny_llama, tmp_path):
    """Other weights in the folder that --model names are refused, also where another run starts from the checkpoint; a
    copy of the folder elsewhere is the same base. An export, too, merges adapters with no other base."""
    base, copy = (shutil.copytree(tiny_llama, tmp_path / place / "base") for place in ("first", "second"))
    flags = ["dpo.py", *pairs[2:], *COMMON, *LORA, "--rows-per-step", "2", "--run-dir", tmp_path / "run"]
    launch(*flags, "--model", base, "--total-steps", "1", warm=True)
    assert "resumed after step 1" in launch(*flags, "--model", copy, warm=True).stdout
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    more = [*flags, "--model", base, "--total-steps", "3"]
    for others in ([], ["--run-dir", tmp_path / "other", "--save.resume", tmp_path / "run"]):
        done = launch(*more, *others, warm=True, check=False)
        assert re.search("error: .*step_000002 does not hold the weights of policy, and those", done.stderr)
    with pytest.raises(ValueError, match=r"base does not hold the weights that .*step_000001 was trained with"):
        export_checkpoint(str(tmp_path / "run/checkpoints/step_000001"), tmp_path / "out")
    export_checkpoint(str(tmp_path / "run/checkpoints/step_000001"), tmp_path / "adapters", adapter=True)
    assert "; the weights of policy" in launch(*more, "--save.allow-changes", warm=True).stdout


def fork_of(script: str, tmp_path: Path, *edits: tuple[str, str]) -> Path:
    source = (ROOT / script).read_text()
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "mine.py").write_text(source)
    return tmp_path / "mine.py"


def test_rows_that_the_reference_has_not_scored_are_refused(pairs, tmp_path):
    """A fork that draws two rows where dpo.py draws one."""
    mine = fork_of("dpo.py", tmp_path, ("run.next_rows(args.rows_per_step)", "run.next_rows(2 * args.rows_per_step)"))
    done = launch(mine, *pairs, *COMMON, "--rows-per-step", "1", "--run-dir", tmp_path / "run", warm=True, check=False)
    assert done.returncode and "the reference, which is gone, was not scored on a row of this step" in done.stderr
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1]


def test_a_reference_with_other_tokens_is_refused(pairs, tiny_llama, tmp_path):
    """A fork's second model, of the same sizes, whose tokenizer has two tokens' numbers exchanged."""
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["\u0120to"], vocab["\u0120no"] = vocab["\u0120no"], vocab["\u0120to"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    mine = fork_of("dpo.py", tmp_path, ("\"reference\", args.model", f"\"reference\", {str(other)!r}"))
    done = launch(mine, *pairs, *COMMON, "--run-dir", tmp_path / "run", warm=True, check=False)
    assert done.returncode == 2 and "other must have the tokens of --model: only one has" in done.stderr


def answer_logp(model, prompt: str, answer: str) -> torch.Tensor:
    """log p [n] of the tokens of a message and its end, by Hugging Face's model and templates."""
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    given = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    texts = before, f"{answer}<|im_end|>"
    first, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    of_all = model(torch.tensor([first + rest])).logits[0].log_softmax(-1)
    return of_all[len(first) - 1 : -1].gather(1, torch.tensor(rest)[:, None])[:, 0]


def test_a_term_of_the_log_prob_alone_has_its_gradient(pairs, runs, tmp_path, tiny_llama):
    """A fork that adds the chosen answers' negative log-likelihood (RPO): at the first step, where the reference is the
    policy, the gradient is -(0.4 beta) / P (c - r) - 1 / P c, with the gradients of Hugging Face's model in float64."""
    line = "args.label_smoothing).mean()\n            coeff"
    mine = fork_of("dpo.py", tmp_path, (line, line.replace("\n", " - logp[0::2].mean()\n")))
    launch(mine, *DPO[1:], *pairs, "--total-steps", "1", "--run-dir", tmp_path / "run", warm=True)
    row = metrics_of(tmp_path / "run")[1]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    rows = [PAIRS[i] for i in PromptSampler(len(PAIRS), "", 0).take(4)]
    chosen, rejected = (torch.stack([answer_logp(model, x["prompt"], x[name]).sum() for x in rows])
                        for name in ("chosen", "rejected"))
    slope = 0.5 * (0.5 - 0.9)                                           # beta (sigmoid(0) - (1 - eps))
    (slope * (chosen - rejected) - chosen).mean().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert row["train/loss"] == pytest.approx(math.log(2) - chosen.mean().item(), rel=1e-6)
    assert row["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics_of(runs / "one/dpo_whole")[1]["actor/grad_norm"] != pytest.approx(float(norm), rel=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize(("script", "line", "other", "failing"), [
    ("sft.py", "(loss * weight).sum()", "loss.sum() / microbatch.mask.sum()", {"1-more0", "2-more1"}),
    ("dpo.py", "(run.world.size * loss.sum())", "loss.sum()", {"2-more1"}),
])
def test_make_test_finds_forks_whose_gradient_depends_on_the_layout(script, line, other, failing, tmp_path):
    """`make test SCRIPT=mine.py`: a mean over a micro-batch, and FSDP's mean over ranks. All other tests pass."""
    mine = fork_of(script, tmp_path, (line, other))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/scripts/test_any_script.py"],
        cwd=ROOT, env=os.environ | {"SCRIPT": str(mine)}, capture_output=True, text=True, timeout=300,
    )
    found = set(re.findall(r"^(?:FAILED|ERROR) .*?::(\S+)", done.stdout, re.MULTILINE))
    assert found == {f"test_the_gradient_does_not_depend_on_the_layout[{name}]" for name in failing}, done.stdout


def test_make_try_names_what_tests_a_script_that_does_not_sample():
    with pytest.raises(SystemExit, match=r"^error: .*sft.py does not sample, and .*: make test SCRIPT="):
        try_script.main([str(ROOT / "sft.py")])


def test_a_killed_dpo_continues_exactly(pairs, runs, tmp_path):
    check_exact_resume([*DPO, *pairs], runs / "one/dpo_whole", tmp_path)


def test_a_signal_ends_the_validation_of_pairs(tiny_llama):
    """It is seen before each part of the rows is scored; other phases go on to a safe point of their own."""
    args = dpo.Args(model=tiny_llama, train_data=("x",))
    run = SimpleNamespace(watchdog=SimpleNamespace(signal=15), val_set=[0], hf_config=None, world=None)
    assert dpo.score_rows(args, run, None, [0], [0], "testing") is None
    validation = SimpleNamespace(args=args, run=run, rows=[0], ref_logp=torch.zeros(2))
    assert dpo.PairValidation.__call__(validation, None, 0) is None


USER, GOOD, BAD = ({"role": role, "content": text} for role, text in
                   (("user", "hi"), ("assistant", "yes"), ("assistant", "no")))


@pytest.mark.parametrize("row", [
    {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
])
def test_pairs_may_be_text_or_messages(row):
    class Tokenizer:
        def __init__(self):
            self.added_tokens_decoder = {}

        def __len__(self):
            return 0

        def apply_chat_template(self, messages, add_generation_prompt=False, **_):
            return "".join(f"{x['role'][0]}:{x['content']};" for x in messages) + "a:" * add_generation_prompt

    assert dpo.parse(row, Tokenizer(), {}) == [[("u:hi;a:", False), (f"{x};", True)] for x in ("yes", "no")]


@pytest.mark.parametrize(("row", "rule"), [
    ({"prompt": "hi", "chosen": "yes", "rejected": "yes"}, "chosen and rejected are the same"),
    ({"prompt": "hi", "chosen": "yes"}, "rejected is None"),
    ({"prompt": 3, "chosen": "yes", "rejected": "no"}, "prompt is 3"),
])
def test_a_bad_pair_is_named(row, rule):
    with pytest.raises(ValueError, match=rule):
        dpo.parse(row, None, {})


@pytest.mark.parametrize(("script", "flags", "message"), [
    ("sft", {"rows_per_step": 0}, "--rows-per-step 0 must be at least 1"),
    ("dpo", {"total_steps": 0}, "--total-steps 0 must be at least 1"),
    ("dpo", {"beta": 0.0}, "--beta 0.0 must be above 0"),
    ("dpo", {"label_smoothing": 0.5}, r"--label-smoothing 0.5 must be in \[0, 0.5\)"),
    ("dpo", {"label_smoothing": 0.1, "loss": "ipo"}, "--label-smoothing 0.1 .*0 for --loss ipo"),
    ("sft", {"log": LogConfig(rollouts_every=0)}, "--log.rollouts-every 0: there are no rollouts here"),
    ("dpo", {"log": LogConfig(rollouts_max=9)}, "--log.rollouts-max 9: there are no rollouts here"),
    ("dpo", {"policy": ModelConfig(router_replay="old-logp")}, "--policy.router-replay: there are no log-probs"),
    ("sft", {"max_length": 5000}, "--data.max-length 5000 exceeds the model's context of 1024 tokens"),
])
def test_flags_that_cannot_work_are_refused(script, flags, message, tiny_llama):
    module, check = {"sft": (sft, check_supervised), "dpo": (dpo, dpo.check)}[script]
    args = module.Args(model=tiny_llama, train_data=("x",))
    args.data.max_length = flags.pop("max_length", 512)
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(args, **flags))


def test_epochs_below_0_are_refused():
    """Before, they were one step."""
    args = sft.Args(model="x", train_data=("x",), total_epochs=-1.0)
    with pytest.raises(ValueError, match=r"^--total-epochs -1.0 must be at least 0$"):
        Training(args).load_data(lambda files: ROWS, 1)


def test_the_context_of_other_models(tmp_path):
    """Of one that also reads images, and of one with LongRoPE, whose frequencies are others beyond 4,096 tokens: vLLM
    would take them for all sequences, and the trainer for whole rows."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope["original_max_position_embeddings"] = 4096
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1, "intermediate_size": 64}
    Phi3Config(**sizes, max_position_embeddings=131072, rope_parameters=rope).save_pretrained(tmp_path / "phi3")
    Qwen3VLConfig().save_pretrained(tmp_path / "qwen3_vl")
    args = sft.Args(model=str(tmp_path / "qwen3_vl"), train_data=("x",))
    check_supervised(args)
    args.model, args.data.max_length = str(tmp_path / "phi3"), 4096
    check_supervised(args)
    args.data.max_length = 4097
    with pytest.raises(ValueError, match="4097 exceeds the model's context of 4096 tokens"):
        check_supervised(args)
    world = SimpleNamespace(size=1, num_samplers=0, device=torch.device("cpu"))
    config = RolloutConfig(engine="hf", max_response_length=4000)
    hf_config = read_config(args.model, args.policy)
    assert check_rollout(config, hf_config, world, 96) == 4096
    with pytest.raises(ValueError, match="exceed the model's context of 4096 tokens"):
        check_rollout(config, hf_config, world, 97)


@pytest.mark.slow
def test_two_steps_on_the_135m_model(smollm, tmp_path):
    """The same four rows twice: their loss falls, and the chosen answers gain on the rejected ones."""
    rows = [{"prompt": f"What is {n} + 2?", "response": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(4)]
    pairs = [{"prompt": x["prompt"], "chosen": x["response"], "rejected": "I do not know."} for x in rows]
    flags = ["--model", smollm, "--total-steps", "2", "--optim.lr", "1e-5", "--save.hf", "never", "--save.every", "0",
             *FAST_DTYPE]
    launch_all(tmp_path, {
        "sft": ["sft", *flags, "--rows-per-step", "4", "--train-data", write(tmp_path / "rows.jsonl", rows)],
        "dpo": ["dpo", *flags, "--rows-per-step", "4", "--train-data", write(tmp_path / "pairs.jsonl", pairs)],
        "online_dpo": [
            "online_dpo", *flags, "--train-data", write(tmp_path / "prompts.jsonl", [
                {"prompt": x["prompt"], "data_source": "x", "reward_model": {"ground_truth": "1"}} for x in rows]),
            "--prompts-per-step", "2", "--samples-per-prompt", "4", "--rollout.engine", "hf",
            "--rollout.max-response-length", "8", "--reward.num-workers", "0",
            "--reward.function", f"{try_script.__file__}:compute_score", "--policy.share-prompt",
        ],
    })
    first, second = metrics_of(tmp_path / "sft")
    assert second["train/loss"] < first["train/loss"] and first["actor/grad_norm"] > 0
    first, second = metrics_of(tmp_path / "dpo")
    assert second["preference/margin"] > 0 == first["preference/margin"]
    first, second = metrics_of(tmp_path / "online_dpo")
    assert first["preference/pairs"] > 0 < first["actor/grad_norm"] and second["preference/margin"] != 0
