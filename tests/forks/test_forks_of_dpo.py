"""Forks of dpo.py, SimPO and ORPO: the losses are those of TRL, values and gradients, also of a whole step; the same
for any layout; exact resume. Careless versions are refused, or `make test` finds them."""

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.curriculum.sampler import PromptSampler
from common.losses import derivative
from tests.conftest import launch
from tests.forks.patches import apply, source_of, stored
from tests.scripts.test_supervised import (
    PAIRS,
    answer_logp,
    check_exact_resume,
    check_same_training,
    metrics_of,
    write,
)

FORKS = {"simpo": ["--beta", "2.0", "--gamma", "0.7"], "orpo": ["--beta", "0.3"]}
FLAGS = ["--rows-per-step", "4", "--policy.compute-dtype", "float32", "--optim.lr", "1e-3", "--save.every", "1",
         "--total-steps", "3", "--data.max-length", "256", "--eval-every", "2"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_llama) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    return ["--model", tiny_llama, "--train-data", write(folder / "train.jsonl", PAIRS),
            "--val-data", write(folder / "val.jsonl", PAIRS[:3])]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    """Name -> file of each fork."""
    folder, found = tmp_path_factory.mktemp("forks"), {}
    for name, diff in stored().items():
        if name.startswith("dpo/"):
            found[name.removeprefix("dpo/")] = folder / f"{name.removeprefix('dpo/')}.py"
            found[name.removeprefix("dpo/")].write_text(apply(diff, source_of(name))[0])
    return found


@pytest.fixture(scope="module")
def runs(scripts, pairs, tmp_path_factory) -> Path:
    """Of each fork `whole`: all in one micro-batch; `alone`: each answer in its own; `ranks`: on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in FORKS.items():
        command = [scripts[name], *FLAGS, *pairs, *flags, "--run-dir"]
        launch(*command, folder / f"{name}_whole", warm=True)
        launch(*command, folder / f"{name}_alone", "--max-tokens-per-gpu", "1", warm=True)
        launch(*command, folder / f"{name}_ranks", "--max-tokens-per-gpu", "100", ranks=2, warm=True)
    return folder


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def losses_of_trl(monkeypatch) -> dict[str, Callable]:
    """The losses of pairs, of mean log p of chosen and of rejected answers, in float64: TRL's ORPO casts to float32."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    on_cpu = SimpleNamespace(device="cpu")
    simpo = SimpleNamespace(accelerator=on_cpu, loss_type="simpo", beta=2.0, simpo_gamma=0.7, label_smoothing=0.0,
                            alpha=0.0)
    orpo = SimpleNamespace(accelerator=on_cpu, beta=0.3)
    return {"simpo": lambda chosen, rejected: CPOTrainer.cpo_loss(simpo, chosen, rejected)[0],
            "orpo": lambda chosen, rejected: -chosen - ORPOTrainer.odds_ratio_loss(orpo, chosen, rejected)[0]}


@pytest.mark.parametrize("name", FORKS)
def test_the_losses_of_pairs_are_those_of_trl(name, scripts, losses_of_trl):
    mean_logp = -(3 * torch.randn(80, dtype=torch.float64, generator=torch.manual_seed(0))).exp()   # of 1e-4 to 1e3
    mean_logp.requires_grad_()
    args = SimpleNamespace(beta={"simpo": 2.0, "orpo": 0.3}[name], gamma=0.7)
    ours = getattr(module_of(scripts[name]), f"{name}_loss")(mean_logp, args)
    theirs = losses_of_trl[name](mean_logp[0::2], mean_logp[1::2])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    of_ours, of_theirs = (torch.autograd.grad(x.mean(), mean_logp)[0] for x in (ours, theirs))
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-9, atol=1e-15)
    assert ours.std() > 0.1 and of_ours.abs().max() > 1e-3


@pytest.mark.parametrize("name", FORKS)
def test_the_first_step_is_that_of_transformers_with_trl(name, runs, tiny_llama, losses_of_trl):
    """Loss and gradient norm, of the mean log p of an answer's tokens by Hugging Face's model in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    rows = [PAIRS[i] for i in PromptSampler(len(PAIRS), "", 0).take(4)]
    chosen, rejected = (torch.stack([answer_logp(model, x["prompt"], x[column]).mean() for x in rows])
                        for column in ("chosen", "rejected"))
    loss = losses_of_trl[name](chosen, rejected).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    first = metrics_of(runs / f"{name}_whole")[1]
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("name", FORKS)
@pytest.mark.parametrize("layout", ["alone", "ranks"])
def test_the_gradient_does_not_depend_on_the_layout(name, layout, runs):
    check_same_training(runs / f"{name}_{layout}", runs / f"{name}_whole", ["train/loss", "actor/grad_norm"])


@pytest.mark.parametrize("name", FORKS)
def test_pairs_are_learnt(name, runs):
    first, *_, last = metrics_of(runs / f"{name}_whole")
    assert last["val/loss"] < first["val/loss"]
    assert last["val-core/preference/margin"] > first["val-core/preference/margin"] != 0


def test_a_killed_run_continues_exactly(scripts, pairs, runs, tmp_path):
    script = str(scripts["orpo"].with_suffix(""))
    check_exact_resume([script, *FLAGS, *pairs, *FORKS["orpo"]], runs / "orpo_whole", tmp_path / "run")


def test_an_answer_that_is_certain(scripts):
    """Its odds are infinite, and have a bound."""
    mean_logp = torch.tensor([0.0, -1.0, -2.0, 0.0], dtype=torch.float64, requires_grad=True)
    loss = module_of(scripts["orpo"]).orpo_loss(mean_logp, SimpleNamespace(beta=0.3))
    assert loss.isfinite().all()
    slope = -1 - 0.3 / (1 - math.exp(-2))                               # where the rejected answer is certain
    assert derivative(loss.mean(), mean_logp).tolist() == pytest.approx([-1 / 2, 0, slope / 2, 0], abs=1e-5)


# --------------------------------------------------------------------------- careless ones

def test_odds_of_a_ratio_to_a_reference_are_refused(scripts, pairs, tmp_path):
    """At first the policy is the reference, and log p / p_ref is 0, of which there are no odds."""
    done = launch(scripts["orpo_with_a_reference"], *FLAGS, *pairs, "--run-dir", tmp_path / "run", warm=True,
                  check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: the loss's derivative by the log-prob or reward of answer 0 of this step, -[\d.]+, is "
                        r"nan: the loss must have a finite slope there", done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(("fork", "expected"), [
    ("simpo_over_prompts", r"AttributeError: ConversationSet has no lengths: write answer_lengths\(numbers\) for the "
                           r"tokens of answers, sequence_lengths\[numbers\] for these and the prompts'"),
    ("two_passes", r"error: the phase update_actor has 2 passes, and the coefficients of all of them were made from "
                   r"log-probs or rewards of before the first: one phase a pass, and score before each"),
])
def test_what_would_be_wrong_in_silence_is_refused(fork, expected, scripts, pairs, tmp_path):
    done = launch(scripts[fork], *FLAGS, *pairs, "--run-dir", tmp_path / "run", warm=True, check=False)
    assert done.returncode and re.fullmatch(expected, done.stderr.strip().splitlines()[-1]), done.stderr


def test_pairs_of_a_micro_batch_are_found(scripts, pairs, tmp_path):
    """Two answers need not share a micro-batch: `make test` sees another gradient."""
    command = [scripts["simpo_in_the_update"], *FLAGS, *pairs, "--total-steps", "1", "--run-dir"]
    launch(*command, tmp_path / "whole", warm=True)
    launch(*command, tmp_path / "alone", "--max-tokens-per-gpu", "1", warm=True)
    whole, alone = (metrics_of(tmp_path / name)[1]["actor/grad_norm"] for name in ("whole", "alone"))
    assert whole != pytest.approx(alone, rel=1e-2)
