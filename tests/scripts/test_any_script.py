"""What any script must do, also your own: `make test SCRIPT=mine.py FLAGS="--reward.function mine_rewards.py"`.
Without SCRIPT it is grpo.py."""

import ast
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.faulty import server
from tests.conftest import ROOT, STOPS, launch
from tools import try_script

SCRIPT = os.environ.get("SCRIPT", "grpo.py")
IS_SUPERVISED = try_script.is_supervised(ROOT / SCRIPT)
SAMPLES = pytest.mark.skipif(IS_SUPERVISED, reason=f"{SCRIPT} does not sample: it leaves no response out")
OWN_FLAGS = shlex.split(os.environ.get("SCRIPT_FLAGS", ""))              # after those of the tests, which they override
SIZES = ["--prompts-per-step", "4", "--samples-per-prompt", "4", "--total-steps", "2"]
# with one update from a rollout each ratio is 1, so that nothing that is made of ratios would be tested
PASSES = ["--epochs-per-step", "2"] if "epochs_per_step" in (ROOT / SCRIPT).read_text() else []


@pytest.fixture(scope="module")
def flags(tiny_llama, small_train, tmp_path_factory) -> list[str]:
    if IS_SUPERVISED:                                                   # rows for sft.py, dpo.py, kto.py and rm.py
        data = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        data.write_text("".join(json.dumps(
            {"prompt": f"Count to {n}", "response": "so " * n, "chosen": "so " * n, "rejected": "no " * (n % 3 + 1),
             "completion": "so " * n, "label": n % 2 == 0}
        ) + "\n" for n in range(2, 14)))
        return ["--model", tiny_llama, "--train-data", str(data), "--rows-per-step", "5", "--total-steps", "2",
                "--policy.compute-dtype", "float32", "--data.max-length", "128", "--optim.lr", "1e-3",
                "--save.every", "1", *OWN_FLAGS]
    return [
        "--model", tiny_llama, "--train-data", small_train, *SIZES, "--rollout.engine", "hf", "--policy.compute-dtype",
        "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length", "8", "--optim.lr", "1e-3",
        "--reward.function", f"{try_script.__file__}:compute_score_of_some", "--reward.num-workers", "1",
        "--save.every", "1", "--log.rollouts-every", "1", *STOPS, *PASSES, *OWN_FLAGS,
    ]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """Two steps in one go, every response in one micro-batch."""
    run = tmp_path_factory.mktemp("any") / "whole"
    launch(SCRIPT, *flags, "--run-dir", run, warm=True)
    return run


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


COVERED = pytest.mark.skipif(SCRIPT == "grpo.py", reason="test_scripts.py runs all variants of grpo.py on two ranks")


@pytest.mark.parametrize(("ranks", "more"), [(1, ["--max-tokens-per-gpu", "1"]), pytest.param(2, [], marks=COVERED)])
def test_the_gradient_does_not_depend_on_the_layout(ranks, more, flags, whole, tmp_path):
    """Every response in a micro-batch of its own; two ranks: the same gradient norm in the first step. After two steps
    the weights differ by rounding only, which AdamW turns into whole steps where a gradient is nearly 0."""
    launch(SCRIPT, *flags, *more, "--run-dir", tmp_path, ranks=ranks, warm=True)
    first, expected = metrics_of(tmp_path)[0], metrics_of(whole)[0]
    if not IS_SUPERVISED:
        assert first["critic/rewards/mean"] == expected["critic/rewards/mean"]
    # of ranks the squares of a norm are added in another order
    rel = 1e-4 if IS_SUPERVISED else 1e-5
    norms = {name: value for name, value in expected.items() if name.endswith("/grad_norm")}    # also of a critic
    assert {name: first[name] for name in norms} == pytest.approx(norms, rel=rel), (
        f"the gradient norm depends on {' '.join(more) or 'the number of ranks'}: a mean, a quantile or a count "
        f"is of one micro-batch or of one rank; losses.token_weights has the denominators, and other numbers are made "
        f"of all micro-batches of a mini-batch or step, with all_sum or all_gather_objects of common.parallel.ranks")
    assert first["actor/grad_norm"] > 0
    theirs = weights_of(whole)
    for name, weight in weights_of(tmp_path).items():
        assert ((weight - theirs[name]).abs() > 1e-4).float().mean() < 0.01, name


@SAMPLES
def test_what_was_left_out_has_no_gradient(flags, whole, tmp_path):
    """The first step again, with --run-zero-advantage: the same gradient norm. Weights as above."""
    if not try_script.can_compare(whole):
        pytest.skip(f"{SCRIPT} has no --run-zero-advantage, or runs with it")
    launch(SCRIPT, *flags, "--run-zero-advantage", "--run-dir", tmp_path, warm=True)
    said = try_script.compare(whole, tmp_path)
    if said.startswith("not compared"):
        pytest.skip(f"{SCRIPT}: {said}")
    assert not said.startswith(try_script.FOUND), said
    theirs = weights_of(whole)
    for name, weight in weights_of(tmp_path).items():
        assert ((weight - theirs[name]).abs() > 1e-4).float().mean() < 0.01, name


def test_a_killed_run_continues_exactly(flags, whole, tmp_path):
    """kill -9 as the second step is logged, then the same command again: weights and metrics byte for byte."""
    log = tmp_path / "log"
    assert server()(log, "log:2:0:kill", SCRIPT, *flags, "--run-dir", tmp_path) == -signal.SIGKILL, log.read_text()
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]
    assert "resumed after step 1" in launch(SCRIPT, *flags, "--run-dir", tmp_path, warm=True).stdout
    differing = []
    for ours, expected in zip(metrics_of(tmp_path), metrics_of(whole), strict=True):
        for name, value in expected.items():
            if not re.match(r"timing|perf|sync|sleep|rollout/tokens_per_s", name) and ours[name] != value:
                differing.append(f"{name} of step {ours['step']} is {ours[name]:.6g}, without the kill {value:.6g}")
    assert not differing, (
        f"a resumed run is another one in {len(differing)} numbers: {'; '.join(differing[:3])}: what a step knows of "
        f"earlier ones must be written to run.script_state before run.finish, and read from run.resume() before the "
        f"loop; what it draws must come from seed_of(args.seed, step, NAME)")
    theirs = weights_of(whole)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(tmp_path).items())


@SAMPLES
@pytest.mark.parametrize("flags", [["--run-dir", "runs/mine"], ["--run_dir=x"], ["--log.rollouts-every", "0"],
                                   ["--loss", "gspo", "--log.rollouts_every=2"]])
def test_flags_that_make_try_needs_itself_are_refused(flags):
    with pytest.raises(SystemExit, match=r"^error: --(run-dir|log.rollouts-every) cannot be given here: the "):
        try_script.main([str(ROOT / SCRIPT), *flags])


@SAMPLES
def test_the_ten_questions_are_answered_in_numbers(whole):
    """What `make try` prints of a run."""
    said = try_script.describe(whole)
    print(said)                                                         # pytest -s shows it
    answers = dict(re.split(r" {2,}", line, maxsplit=1) for line in said.splitlines())
    assert len(answers) == 12
    assert re.fullmatch(r"[1-9]\d*, of [1-9]\d* sampled on all ranks", answers["tokens with a gradient"])
    num_trained, num_ended = map(int, answers["stop tokens trained"].split(" of "))
    assert num_trained or not num_ended, f"{SCRIPT} trains no stop token: a response could not learn where to end"
    if answers["old log-probs"] != "no ratio was reported":
        assert re.fullmatch(r"\|ratio - 1\| is at most [\d.e-]+", answers["old log-probs"])
    difference = float(re.search(r"differ by at most (.*?) nats", answers["temperature"])[1])
    assert difference < 1e-4, (
        f"the log-probs of engine and trainer differ by {difference} nats: policy(microbatch, temperature) must get "
        f"the temperature at which the tokens were sampled, and rollout.samples the prompt")


def clips_of_microbatches(source: str) -> list[int]:
    """The lines that clip gradients in a loop that adds them up: what they leave depends on the order."""
    def inside(node: ast.AST) -> list[ast.AST]:
        """All nodes, but for those of loops in it."""
        found = []
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.For):
                found += [child, *inside(child)]
        return found

    found = []
    for loop in ast.walk(ast.parse(source)):
        if not isinstance(loop, ast.For):
            continue
        calls = [node for node in inside(loop) if isinstance(node, ast.Call)]
        names = [(ast.unparse(call.func).split(".")[-1], call.lineno) for call in calls]
        if any(name == "backward" for name, _ in names):
            found += [line for name, line in names if name.startswith(("clip_grad_norm", "clip_grad_value"))]
    return found


def test_gradients_of_single_micro_batches_are_not_clipped():
    """Below its bound a clip does nothing: on a tiny model the comparison of layouts need not see it."""
    lines = clips_of_microbatches((ROOT / SCRIPT).read_text())
    assert not lines, (f"{SCRIPT}, line {lines[0]}, clips the gradient of a micro-batch, added to those before: the "
                       f"result depends on the token budget; --optim.max-grad-norm clips that of the whole mini-batch")


def test_a_clip_of_a_micro_batch_is_found():
    source = (ROOT / "grpo.py").read_text()
    line = next(line for line in source.splitlines(keepends=True) if ".backward()" in line)
    indent = line[: len(line) - len(line.lstrip())]
    clipped = source.replace(line, f"{line}{indent}torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)\n")
    step = "update.optimizer_step("
    after = source.replace(step, f"clip_grad_norm_(policy.parameters(), 1.0); {step}")
    assert len(clips_of_microbatches(clipped)) == 1 and not clips_of_microbatches(after)


def test_every_flag_of_the_script_is_read():
    """A flag that the script declares, and neither it nor anything that it passes `args` to reads, has no effect."""
    source = (ROOT / SCRIPT).read_text()
    args = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args")
    declared = {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)}
    shared = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    unread = {name for name in declared if not re.search(rf"\bargs\.{name}\b", source + shared)}
    assert not unread, f"{SCRIPT} never reads args.{sorted(unread)[0]}"
