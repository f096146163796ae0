"""distill.py with a teacher that reads something else than the policy: --context, the average of the policy, and
teachers of other tokens. Losses and gradients against transformers in float64, layouts, exact resume."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import distill
from common.distillation import contexts
from common.distillation.alignment import align
from common.distillation.spelling import SharedWords, Spelling, end_of_turn
from tests.common.other_tokenizers import make_model, save_byte_level
from tests.conftest import launch, launch_all
from tests.engine.episode_runs import FILE
from tests.scripts import contexts_of_tests
from tests.scripts.test_distill import FLAGS, kl, log_probs, rows, teachers  # noqa: F401
from tests.scripts.test_supervised import check_exact_resume, metrics_of, weights_of

OURS = contexts_of_tests.__file__
SHIPPED = contexts.__file__


@pytest.fixture(scope="module")
def other(smollm, tmp_path_factory) -> str:
    """A model whose tokenizer has other tokens, other numbers for the same ones, and another end of turn."""
    folder = tmp_path_factory.mktemp("other")
    save_byte_level(folder)
    return make_model(folder)


@pytest.fixture(scope="module")
def commands(tiny_llama, rows, teachers, other) -> dict[str, list[str]]:  # noqa: F811
    start = ["distill", "--model", tiny_llama, "--train-data", rows, *FLAGS]
    half = [*start, "--teacher", "self", "--context", f"{OURS}:every_second"]
    average = [*start, "--teacher", "self", "--context", f"{SHIPPED}:reference_answer", "--teacher-update-rate", "0.3",
               "--divergence", "jsd", "--optim.lr", "1e-2"]
    two = [*start, "--teacher", f"first={other}", f"second={teachers[1]}", "--reward-coef", "0.5"]
    return {
        "half": half, "half_alone": [*half, "--max-tokens-per-gpu", "1"],
        "half_ranks": [*half, "--max-tokens-per-gpu", "250"], "half_four": [*half, "--max-tokens-per-gpu", "1"],
        "short": [*half, "--max-context-length", "100", "--reward-coef", "0.5", "--total-steps", "1"],
        "average": average, "average_ranks": [*average, "--max-tokens-per-gpu", "250"],
        "average_first": [*average, "--total-steps", "1"],
        "lora": [*half, "--lora.rank", "4"], "shared": [*half, "--policy.share-prompt"],
        "episodes": [*half, "--rollout.episode", f"{FILE}:one_reply", "--reward.max-error-frac", "1"],
        "frozen": [*start, "--teacher", teachers[1], "--context", f"{SHIPPED}:reference_answer"],
        "two": two, "two_alone": [*two, "--max-tokens-per-gpu", "1"],
        "two_ranks": [*two, "--max-tokens-per-gpu", "250"], "two_four": [*two, "--max-tokens-per-gpu", "1"],
        "answers": [*start, "--teacher", other, "--answers-per-step", "3", "--divergence", "forward-kl",
                    "--answer-key", "answer", "--total-steps", "1"],
    }


@pytest.fixture(scope="module")
def runs(commands, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lessons")
    on_four = {name: commands.pop(name) for name in ("half_four", "two_four")}
    on_two = {name: flags for name, flags in commands.items() if name.endswith("_ranks")}
    launch_all(folder / "one", {name: flags for name, flags in commands.items() if name not in on_two})
    launch_all(folder / "two", on_two, ranks=2)
    commands |= on_four
    return folder


def recorded(folder: Path, step: int = 1) -> list[dict]:
    return pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()


def taught(model, tokenizer, messages, row):
    """[N, V]: what a teacher says of the response's own tokens after these messages."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    logits = model(torch.tensor([prompt + row["tokens"]])).logits[0, len(prompt) - 1 : -1]
    return (logits / 0.7).log_softmax(-1).detach()


def prompts_of(path: str, folder: Path) -> dict[str, dict]:
    """The rendered prompt of each row of data -> the row."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    table = pq.read_table(folder).to_pylist()
    return {tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False): row
            for row in table}


def row_of(data: dict) -> dict:
    return {"prompt": data["prompt"], "data_source": data["data_source"], "extra_info": data["extra_info"],
            "ground_truth": data["reward_model"]["ground_truth"]}


def grad_norm(model) -> float:
    return sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()


# --------------------------------------------------------------------------- contexts

def test_loss_and_gradient_are_those_of_the_policy_with_more_in_its_prompt(runs, tiny_llama, rows):  # noqa: F811
    """Half of the responses have a lesson; the tokens are the sampled ones under both prompts."""
    data, tokenizer = prompts_of(tiny_llama, rows), AutoTokenizer.from_pretrained(tiny_llama)
    student, teacher = (AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64) for _ in range(2))
    found = recorded(runs / "one/half")
    total, count = 0.0, 0
    for row in found:
        told = [{"index": other["index"], "score": other["score"], "text": other["response"]}
                for other in found if other["group"] == row["group"]]
        own = [response for response in told if response["index"] == row["index"]]
        others = [response for response in told if response["index"] != row["index"]]
        messages = contexts_of_tests.every_second(row_of(data[row["prompt"]]), own + others)
        if messages is None:
            continue
        total = total + kl(log_probs(student, tokenizer, row), taught(teacher, tokenizer, messages, row)).sum()
        count += len(row["tokens"])
    (total / count).backward()
    first = metrics_of(runs / "one/half")[0]
    assert first["distillation/loss"] == pytest.approx(total.item() / count, rel=1e-5) and total / count > 0.01
    assert first["actor/grad_norm"] == pytest.approx(grad_norm(student), rel=1e-4)
    assert first["distillation/taught_frac"] == pytest.approx(count / sum(len(row["tokens"]) for row in found))
    assert [any(row["trained"] or ()) for row in found] == [row["index"] % 2 == 0 for row in found]


def test_the_average_follows_the_policy(runs, tiny_llama, rows):  # noqa: F811
    """The loss of step 2: the policy has made a step, and the teacher 0.3 of it."""
    data, tokenizer = prompts_of(tiny_llama, rows), AutoTokenizer.from_pretrained(tiny_llama)
    load = AutoModelForCausalLM.from_pretrained
    student = load(runs / "one/average_first/model", dtype=torch.float64)
    losses = {}
    for share in (0.0, 0.3, 1.0):                   # also of a teacher that stands still, and of the policy itself
        teacher = load(tiny_llama, dtype=torch.float64)
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs += share * (ours - theirs)
        total, count = 0.0, 0
        for row in recorded(runs / "one/average", step=2):
            messages = contexts.reference_answer(row_of(data[row["prompt"]]), [])
            logp = log_probs(student, tokenizer, row).detach()
            logq = taught(teacher, tokenizer, messages, row)
            logm = ((logq.exp() + logp.exp()) / 2).log()
            total, count = total + (kl(logq, logm) + kl(logp, logm)).sum().item() / 2, count + len(row["tokens"])
        losses[share] = total / count
    loss = metrics_of(runs / "one/average")[1]["distillation/loss"]
    assert loss == pytest.approx(losses[0.3], rel=1e-4)
    assert min(abs(loss - losses[0.0]), abs(loss - losses[1.0])) > 0.01 * loss


def test_a_killed_average_continues_exactly(commands, runs, tmp_path):
    check_exact_resume(commands["average"], runs / "one/average", tmp_path, first_step=1)


def test_a_response_without_a_lesson_has_its_reward_alone(runs):
    """No prompt of --context is as short as this: every loss is that of the policy gradient."""
    row, = metrics_of(runs / "one/short")
    assert row["distillation/taught_frac"] == 0 and "distillation/loss" not in row and row["actor/grad_norm"] > 0


def test_episodes_have_lessons(runs):
    """Also those whose code failed: what they said is theirs."""
    for row in metrics_of(runs / "one/episodes"):
        assert row["distillation/loss"] > 0 and row["actor/grad_norm"] > 0


def test_adapters_teach_themselves_and_another_model_may_see_more(runs):
    assert metrics_of(runs / "one/lora")[0]["actor/grad_norm"] > 0
    assert metrics_of(runs / "one/frozen")[0]["distillation/loss"] > 0.01


# --------------------------------------------------------------------------- other tokens

def spelt_loss(student, teacher, ours, theirs, words, prompt, response, data):
    """The divergence at each span of a response, summed: the policy's events and the teacher's, one after the other."""
    found = align(response, ours, theirs, words)
    render = theirs.tokenizer.apply_chat_template
    text = render(data["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    p, q = ((model(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1] / 0.7).softmax(-1)
            for model, before, tokens in ((student, prompt, response), (teacher, text, found.tokens)))
    values, singles = [], 0
    for span in range(found.num_spans):
        at = [t for t, number in enumerate(found.ours) if number == span]
        there = [t for t, number in enumerate(found.theirs) if number == span]
        is_single = len(at) == len(there) == 1 and words.partner.get(response[at[0]]) == found.tokens[there[0]]
        singles += is_single
        if is_single:
            a, b = p[at[0]][words.ours], q[there[0]][words.theirs].detach()
        else:
            a = torch.stack([p[t, response[t]] for t in at]).prod()[None]
            b = torch.stack([q[t, found.tokens[t]] for t in there]).prod()[None].detach()
        a, b = (torch.cat([x, 1 - x.sum()[None]]) for x in (a, b))
        values.append((a, b))
    return values, sum(span >= 0 for span in found.ours), singles


def test_a_teacher_of_other_tokens_is_compared_at_the_same_texts(runs, tiny_llama, other, teachers, rows):  # noqa: F811
    """One of two teachers, and a policy gradient whose mean is over all tokens."""
    data, tokenizer = prompts_of(tiny_llama, rows), AutoTokenizer.from_pretrained(tiny_llama)
    their_tokenizer = AutoTokenizer.from_pretrained(other)
    ours = Spelling(tokenizer, end_of_turn(tiny_llama, tokenizer, {}), "m")
    theirs = Spelling(their_tokenizer, end_of_turn(other, their_tokenizer, {}), "t")
    words = SharedWords(ours, theirs)
    student, *taught_by = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                           for path in (tiny_llama, other, teachers[1]))
    found = recorded(runs / "one/two")
    scores = {}
    for row in found:
        scores.setdefault(row["group"], []).append(row["score"])
    total, count, pulled, everything, num_singles, num_spans = 0.0, 0, 0.0, 0, 0, 0
    for row in found:
        logp = log_probs(student, tokenizer, row)
        if row["data_source"] == "second":
            total, count = total + kl(logp, log_probs(taught_by[1], tokenizer, row).detach()).sum(), count + len(logp)
        else:
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            values, num_taught, singles = spelt_loss(
                student, taught_by[0], ours, theirs, words, prompt, row["tokens"], data[row["prompt"]])
            total, count = total + sum(kl(a.log(), b.log()) for a, b in values), count + num_taught
            num_singles, num_spans = num_singles + singles, num_spans + len(values)
        advantage = row["score"] - sum(scores[row["group"]]) / 2
        pulled = pulled - 0.5 * advantage * logp.gather(1, torch.tensor(row["tokens"])[:, None]).sum()
        everything += len(logp)
    (total / count + pulled / everything).backward()
    first = metrics_of(runs / "one/two")[0]
    assert first["distillation/loss"] == pytest.approx(total.item() / count, rel=1e-5) and total / count > 0.01
    assert first["distillation/taught_frac"] == pytest.approx(count / everything)
    assert first["actor/grad_norm"] == pytest.approx(grad_norm(student), rel=1e-4)
    assert 0 < num_singles < num_spans


def test_the_datas_answers_are_compared_too(runs):
    row, = metrics_of(runs / "one/answers")
    assert 0.5 < row["distillation/taught_frac"] <= 1 and row["distillation/loss"] > 0.01


# --------------------------------------------------------------------------- layouts and refusals

def check_layout(ours: Path, whole: Path) -> None:
    for one, other in zip(metrics_of(ours), metrics_of(whole), strict=True):
        for name in ("distillation/loss", "distillation/taught_frac", "actor/grad_norm", "critic/score/mean"):
            assert one[name] == pytest.approx(other[name], rel=2e-4), (one["step"], name)
    expected = weights_of(whole)
    for name, weight in weights_of(ours).items():                       # AdamW turns rounding into whole steps
        assert ((weight - expected[name]).abs() > 1e-4).float().mean() < 0.02, name


@pytest.mark.parametrize(("layout", "whole"), [
    ("one/half_alone", "half"), ("two/half_ranks", "half"), ("one/shared", "half"), ("two/average_ranks", "average"),
    ("one/two_alone", "two"), ("two/two_ranks", "two"),
])
def test_the_gradient_does_not_depend_on_the_layout(layout, whole, runs):
    check_layout(runs / layout, runs / "one" / whole)


@pytest.mark.sweep
@pytest.mark.parametrize("whole", ["half", "two"])
def test_nor_on_four_ranks(whole, commands, runs, tmp_path):
    launch_all(tmp_path, {whole: commands[f"{whole}_four"]}, ranks=4)
    check_layout(tmp_path / whole, runs / "one" / whole)


@pytest.mark.parametrize(("flags", "rule"), [
    ({"teacher": ("self",)}, "--teacher self and --context none: self needs a --context"),
    ({"teacher": ("a=self", "b=x"), "context": "c.py:f"}, "--teacher a=self b=x and --context c.py:f: .* needs one"),
    ({"teacher": ("self",), "context": "c.py:f", "teacher_update_rate": 1.5}, "--teacher-update-rate 1.5 must be in"),
    ({"teacher": ("self",), "context": "c.py:f", "max_context_length": -1}, "--max-context-length -1 must be at least"),
    ({"teacher": ("self",), "context": "c.py:f", "teacher_update_rate": 0.1,
      "lora": distill.Args("", ()).lora.__class__(rank=4)}, "--teacher-update-rate 0.1: the average has no adapters"),
    ({"teacher": ("self",), "context": "c.py:f", "policy": distill.Args("", ()).policy.__class__(sequence_parallel=2)},
     "--context needs --policy.sequence-parallel 1, not 2"),
])
def test_flags_that_cannot_work_are_refused(flags, rule):
    with pytest.raises(ValueError, match=rule):
        distill.check(distill.Args(model="m", train_data=("x",), **flags))


@pytest.mark.parametrize(("flags", "rule"), [
    (["--teacher", "TEACHER", "--teacher-update-rate", "0.1"], "--teacher-update-rate 0.1 does nothing with --teacher"),
    (["--teacher", "TEACHER", "--max-context-length", "9"], "--max-context-length 9 does nothing without --context"),
    (["--teacher", "self", "--context", f"{OURS}:none"], "no function none in"),
    (["--teacher", "self", "--context", f"{OURS}:broken"], "what it returned for row"),
    (["--teacher", "OTHER", "--policy.sequence-parallel", "2"], "needs --policy.sequence-parallel 1, not 2"),
    (["--teacher", "OTHER", "--rollout.episode", f"{FILE}:one_reply"], "does not go with --rollout.episode"),
])
def test_what_cannot_be_read_is_refused(flags, rule, tiny_llama, rows, teachers, other, tmp_path):  # noqa: F811
    names = {"TEACHER": teachers[0], "OTHER": other}
    flags = [names.get(flag, flag) for flag in flags]
    done = launch("distill.py", "--model", tiny_llama, "--train-data", rows, *FLAGS, *flags, "--run-dir", tmp_path,
                  ranks=2 if "--policy.sequence-parallel" in flags else 0, warm=True, check=False)
    assert done.returncode != 0 and rule in done.stdout + done.stderr


def test_the_contexts_say_what_a_teacher_needs():
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "ground_truth": "5",
           "extra_info": {}}
    own = {"index": 1, "score": 1.0, "text": "own"}
    siblings = [{"index": 0, "score": None, "text": "zero"}, {"index": 2, "score": 1.0, "text": "two"}]
    *before, answer, again = contexts.sibling_success(row, [own, *siblings])
    assert before == row["prompt"] and answer == {"role": "assistant", "content": "two"} and again == row["prompt"][1]
    assert contexts.sibling_success(row, [own, siblings[0]]) is None
    *_, answer, again = contexts.sibling_success(row, [own | {"feedback": "off by one"}, siblings[0]])
    assert answer["content"] == "own" and again["content"] == "off by one\n\nq"
    assert contexts.reference_answer(row, [own])[-2]["content"] == "5"
    assert contexts.reference_answer(row | {"extra_info": {"answer": "x+y"}}, [own])[-2]["content"] == "x+y"
    assert row["prompt"][1] == {"role": "user", "content": "q"}         # the row itself stays
