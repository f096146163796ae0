"""distill.py: loss and gradient against transformers in float64, the same for any layout, several teachers, the data's
answers, dropped episodes, exact resume."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import distill
from common.batch import Batch
from common.distillation.reading import Comparison
from common.kernels import Head
from common.memory.plan import MemoryPlan
from tests.conftest import STOPS, launch, launch_all, make_tiny_llama
from tests.engine.episode_runs import FILE
from tests.scripts.test_supervised import check_exact_resume, metrics_of, weights_of
from tools import try_script

FLAGS = [
    "--prompts-per-step", "4", "--samples-per-prompt", "2", "--total-steps", "3", "--rollout.engine", "hf",
    "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length", "8",
    "--rollout.temperature", "0.7", "--optim.lr", "1e-3", "--reward.function", f"{try_script.__file__}:compute_score",
    "--reward.num-workers", "1", "--save.every", "1", "--log.rollouts-every", "1", *STOPS,
]
MIXED = ["--divergence", "jsd", "--beta", "0.3", "--reward-coef", "0.5", "--answers-per-step", "3"]


@pytest.fixture(scope="module")
def rows(small_train, tmp_path_factory) -> str:
    """Rows of two sources, with answers."""
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    table = pq.read_table(small_train).to_pylist()
    for number, row in enumerate(table):
        row["data_source"] = "first" if number % 3 else "second"
        row["extra_info"] |= {"answer": f"It is {row['reward_model']['ground_truth']}.", "number": number}
    pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


@pytest.fixture(scope="module")
def teachers(tiny_llama, tmp_path_factory) -> list[str]:
    """The student's weights with noise, and a wider model; both have the student's tokens."""
    folder = tmp_path_factory.mktemp("teachers")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "noisy")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder / "noisy")
    return [str(folder / "noisy"), make_tiny_llama(folder / "wide", hidden_size=64)]


@pytest.fixture(scope="module")
def commands(tiny_llama, rows, teachers) -> dict[str, list[str]]:
    start = ["distill", "--model", tiny_llama, "--train-data", rows, *FLAGS]
    two = ["--teacher", f"first={teachers[0]}", f"second={teachers[1]}", *MIXED]
    one = ["--teacher", teachers[1]]
    dropping = [*one, "--rollout.episode", f"{FILE}:one_reply", "--rollout.drop", "length", "--answers-per-step", "2",
                "--rollout.max-response-length", "30", "--reward.max-error-frac", "1"]
    return {
        "two": [*start, *two], "alone": [*start, *two, "--max-tokens-per-gpu", "1"],
        "ranks": [*start, *two, "--max-tokens-per-gpu", "250"],
        "dropping": [*start, *dropping], "ranks_drop": [*start, *dropping, "--max-tokens-per-gpu", "1"],
        "one": [*start, *one], "shared": [*start, *one, "--policy.share-prompt"],
        "parallel": [*start, *one, "--policy.sequence-parallel", "2"],
        "top_k": [*start, *one, "--divergence", "forward-kl", "--top-k", "16"],
        "top_k_of_student": [*start, *one, "--top-k", "16", "--top-k-of", "student"],
        "lora": [*start, *one, "--lora.rank", "4"],
        "copied": [*start, "--teacher", tiny_llama],
        "many": [*start, *one, "--minibatches-per-step", "2", "--epochs-per-step", "2", "--reward-coef", "1",
                 "--correction.preset", "bypass-pg-is", "--total-steps", "1"],
        "learns": [*start, "--teacher", teachers[0], "--optim.lr", "1e-2", "--total-steps", "6", "--save.every", "0"],
    }


@pytest.mark.parametrize("words_of", ["teacher", "student"])
@pytest.mark.parametrize("divergence", ["reverse-kl", "jsd"])
def test_best_words_leave_a_policy_alone_that_equals_its_teacher(divergence, words_of):
    """The divergence and its gradient are 0 there, and it is above 0 for other policies: log-probs of two words of
    nine. Of forward-kl only the sum of the words' probabilities has a gradient: it drops the rest."""
    args = distill.Args(model="m", train_data=("x",), teacher=("t",), divergence=divergence, top_k=2, top_k_of=words_of)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    ours = logits.clone().requires_grad_()
    value = distill.divergence_of(args)(ours.log_softmax(1), logits.log_softmax(1))
    assert torch.allclose(value, torch.zeros(5, dtype=torch.float64))
    assert torch.autograd.grad(value.sum(), ours)[0].abs().max() < 1e-12
    for _ in range(20):
        others = torch.randn(5, 9, generator=generator, dtype=torch.float64).log_softmax(1)
        assert (distill.divergence_of(args)(others, logits.log_softmax(1)) > 0).all()


@pytest.fixture(scope="module")
def runs(commands, tmp_path_factory) -> Path:
    folder, on_two = tmp_path_factory.mktemp("distill"), ("ranks", "parallel", "ranks_drop")
    launch_all(folder / "one", {name: flags for name, flags in commands.items() if name not in on_two})
    launch_all(folder / "two", {name: commands[name] for name in on_two}, ranks=2)
    return folder


# --------------------------------------------------------------------------- loss and gradient

def kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum(-1)


def restricted(of_model: str):
    """The same sums over 16 words."""
    def pick(logp, logq):
        words = {"teacher": logq, "student": logp}[of_model].argsort(-1, descending=True)[:, :16]
        return logp.gather(1, words), logq.gather(1, words)
    return pick


def kl_with_rest(logp, logq):
    """Over the student's 16 words, and all others as one: 1 minus theirs, which float64 can hold."""
    parts = []
    for x in restricted("student")(logp.double(), logq.double()):
        parts.append(torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1))
    return kl(*parts)


def jsd(logp, logq, beta=0.3):
    logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    return beta * kl(logq, logm) + (1 - beta) * kl(logp, logm)


DENSE = {
    "two": jsd, "one": kl,
    "top_k": lambda logp, logq: kl(*restricted("teacher")(logp, logq)[::-1]),
    "top_k_of_student": lambda logp, logq: kl_with_rest(logp, logq),
}


def log_probs(model, tokenizer, row):
    """[N, V] for the tokens of a recorded response."""
    prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
    assert len(prompt) == row["prompt_length"]
    logits = model(torch.tensor([prompt + row["tokens"]])).logits[0, len(prompt) - 1 : -1]
    return (logits / 0.7).log_softmax(-1)


def test_the_mixtures_of_jsd_tend_to_the_two_divergences():
    """As the paper says: with beta -> 0, jsd / beta is KL(teacher || student); with beta -> 1, jsd / (1 - beta) is
    KL(student || teacher). All three are 0 between equal distributions, and their gradient is."""
    generator = torch.Generator().manual_seed(3)
    ours, theirs = (torch.randn(5, 9, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    forward, reverse = (distill.DIVERGENCES[name](ours, theirs, 0.5) for name in ("forward-kl", "reverse-kl"))
    assert torch.allclose(forward, torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(1))
    assert torch.allclose(reverse, torch.nn.functional.kl_div(theirs, ours, reduction="none", log_target=True).sum(1))
    jsd = distill.DIVERGENCES["jsd"]
    assert torch.allclose(jsd(ours, theirs, 1e-6) / 1e-6, forward, rtol=1e-3)
    assert torch.allclose(jsd(ours, theirs, 1 - 1e-6) / 1e-6, reverse, rtol=1e-3)
    assert not torch.allclose(forward, reverse, rtol=0.1)
    for divergence in distill.DIVERGENCES.values():
        logits = theirs.clone().requires_grad_()
        value = divergence(logits.log_softmax(1), theirs, 0.3)
        (grad,) = torch.autograd.grad(value.sum(), logits)
        assert max(float(value.detach().abs().max()), float(grad.abs().max())) < 1e-12


@pytest.mark.parametrize("name", DENSE)
def test_loss_and_gradient_are_those_of_whole_distributions(name, runs, tiny_llama, teachers):
    """The first step's sequences, as recorded, one at a time through transformers' models in float64."""
    recorded = pq.read_table(runs / "one" / name / "rollouts/step_000001.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    student, *taught = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                        for path in (tiny_llama, *teachers))
    teacher = {"first": taught[0], "second": taught[1]} if name == "two" else {"first": taught[1], "second": taught[1]}
    scores = {}
    for row in recorded[:8]:
        scores.setdefault(row["group"], []).append(row["score"])
    total, divergence, count = 0.0, 0.0, 0
    for row in recorded:
        logp, logq = (log_probs(model, tokenizer, row) for model in (student, teacher[row["data_source"]]))
        value = DENSE[name](logp, logq).sum()
        divergence, count = divergence + value.item(), count + len(row["tokens"])
        if name == "two" and row["group"] in scores:                    # a sampled response
            advantage = row["score"] - sum(scores[row["group"]]) / 2
            value = value - 0.5 * advantage * logp.gather(1, torch.tensor(row["tokens"])[:, None]).sum()
        total = total + value
    assert len(recorded) == (11 if name == "two" else 8)
    (total / count).backward()
    norm = sum(p.grad.square().sum() for p in student.parameters()).sqrt().item()
    first = metrics_of(runs / "one" / name)[0]
    assert first["distillation/loss"] == pytest.approx(divergence / count, rel=1e-5) and divergence / count > 0.01
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    if name == "two":
        assert {len(set(group)) for group in scores.values()} == {1, 2}     # some groups have advantages


def test_dropped_episodes_are_in_no_loss_and_in_no_denominator(runs, tiny_llama, teachers):
    """--rollout.drop length. Episodes whose code failed have no score, and like the data's answers they are trained."""
    recorded = pq.read_table(runs / "one/dropping/rollouts/step_000001.parquet").to_pylist()
    kept = [row for row in recorded if row["end_reason"] != "length"]
    assert {row["end_reason"] for row in recorded} == {"length", "done", "error", None} and len(recorded) == 10
    assert [row["index"] for row in recorded if row["trained"] and any(row["trained"])] == [r["index"] for r in kept]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                        for path in (tiny_llama, teachers[1]))
    pairs = [(log_probs(student, tokenizer, row), log_probs(teacher, tokenizer, row).detach()) for row in kept]
    loss = sum(kl(logp, logq).sum() for logp, logq in pairs) / sum(len(row["tokens"]) for row in kept)
    loss.backward()
    norm = sum(p.grad.square().sum() for p in student.parameters()).sqrt().item()
    first = metrics_of(runs / "one/dropping")[0]
    assert first["distillation/loss"] == pytest.approx(loss.item(), rel=1e-5) and loss > 0.01
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("layout", "whole"), [
    ("one/alone", "two"), ("two/ranks", "two"), ("one/shared", "one"), ("two/parallel", "one"),
    ("two/ranks_drop", "dropping"),
])
def test_the_gradient_does_not_depend_on_the_layout(layout, whole, runs):
    """Micro-batches of one sequence, so that each lacks a teacher; ranks; shared prompts; sequences that are cut."""
    ours, theirs = metrics_of(runs / layout), metrics_of(runs / "one" / whole)
    for name in ("distillation/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4), name
    assert len(ours) == len(theirs) == 3
    expected = weights_of(runs / "one" / whole)
    for name, weight in weights_of(runs / layout).items():              # AdamW turns rounding into whole steps
        assert ((weight - expected[name]).abs() > 1e-4).float().mean() < 0.02, name


def test_the_divergence_falls_without_any_reward(runs, tiny_llama, teachers):
    rows = metrics_of(runs / "one/learns")
    assert rows[-1]["distillation/loss"] < 0.7 * rows[0]["distillation/loss"]
    assert not any(row["critic/advantages/max"] for row in rows)
    assert max(row["critic/score/max"] for row in rows) > 0             # scored, and not learned from


def test_a_teacher_that_is_the_student_teaches_nothing(runs):
    first, *_ = metrics_of(runs / "one/copied")
    assert abs(first["distillation/loss"]) < 1e-6 and first["actor/grad_norm"] < 1e-4


def test_several_updates_with_rewards_and_weights(runs):
    row, = metrics_of(runs / "one/many")
    assert row["actor/grad_norm"] > 0 and row["critic/advantages/max"] > 0 and row["rollout_corr/rollout_is_mean"] > 0


def test_adapters_learn_and_the_rest_stays(runs, tiny_llama):
    before = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    after = weights_of(runs / "one/lora")
    assert {x for x in after if not torch.equal(before[x], after[x])} == {x for x in after if "_proj" in x}
    assert metrics_of(runs / "one/lora")[0]["actor/grad_norm"] > 0


def test_the_engine_is_compared_on_what_it_sampled_alone(runs):
    """The data's answers have no log-prob of the engine."""
    for row in metrics_of(runs / "one/two"):
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_a_killed_run_continues_exactly(commands, runs, tmp_path):
    check_exact_resume(commands["two"], runs / "one/two", tmp_path, first_step=1)


# --------------------------------------------------------------------------- flags and memory

@pytest.mark.parametrize(("flags", "rule"), [
    ({}, "--teacher  must be one model, or several DATA_SOURCE=PATH"),
    ({"teacher": ("a=x", "b")}, "--teacher a=x b must be one model"),
    ({"teacher": ("a=x", "a=y")}, "--teacher a=x a=y must be one model"),
    ({"teacher": ("t",), "beta": 1.0}, r"--beta 1.0 must be in \(0, 1\)"),
    ({"teacher": ("t",), "top_k": -1}, "--top-k -1"),
    ({"teacher": ("t",), "reward_coef": 1.0}, "--samples-per-prompt 1 must be at least 2"),
    ({"teacher": ("m",), "lora": distill.Args("", ()).lora.__class__(rank=4)}, "--teacher m is --model, which is held"),
    ({"teacher": ("a=x", "b=y"), "policy": distill.Args("", ()).policy.__class__(sequence_parallel=2)},
     "several --teacher need --policy.sequence-parallel 1, not 2"),
])
def test_flags_that_cannot_work_are_refused(flags, rule):
    with pytest.raises(ValueError, match=rule):
        distill.check(distill.Args(model="m", train_data=("x",), **flags))


@pytest.mark.parametrize(("flags", "rule"), [
    (["--teacher", "first=TEACHER"], "must name each data_source of --train-data and no other: first, second"),
    (["--teacher", "TEACHER", "--answers-per-step", "1", "--answer-key", "no"],
     "has no text in extra_info['no'] (--answer-key)"),
])
def test_data_that_does_not_fit_is_refused(flags, rule, tiny_llama, rows, teachers, tmp_path):
    flags = [flag.replace("TEACHER", teachers[0]) for flag in flags]
    done = launch("distill.py", "--model", tiny_llama, "--train-data", rows, *FLAGS, *flags, "--run-dir", tmp_path,
                  warm=True, check=False)
    assert done.returncode != 0 and rule in done.stdout + done.stderr


def test_the_plan_has_teachers_heads_and_hidden_states(tiny_llama, teachers):
    """Beside the engine the weights alone, two bytes each; in the update also a whole head and 100 hidden states, and
    what the kernel holds: the head's gradient in float32 and chunks."""
    config, wide = AutoConfig.from_pretrained(tiny_llama), AutoConfig.from_pretrained(teachers[1])
    args = distill.Args(model=tiny_llama, train_data=("x",))
    plan = MemoryPlan(args, config, 1, 64, frozen=(teachers[1],))
    count = AutoModelForCausalLM.from_config(wide).num_parameters()
    assert plan.beside_engine()["frozen models"] * 2**30 == 2 * count
    assert plan.update(100)["frozen models"] * 2**30 == pytest.approx(2 * (count + 64 * (wide.vocab_size + 100)))
    without = MemoryPlan(args, config, 1, 64)
    more = plan.update(100)["log-prob tiles"] - without.update(100)["log-prob tiles"]
    assert more * 2**30 == pytest.approx(4 * config.vocab_size * 32 + 8 * 256 * 2**20)


def test_a_batch_is_dealt_to_its_teachers():
    """Of two teachers the second has no sequence, and reads a dummy; the divergences come back in their order."""
    batch = Batch.build([[1, 2]] * 3, [[3], [4, 5], [6]])
    batch.response_extra["teacher"] = torch.tensor([2, 0, 2])
    read = []

    class Teacher:
        def __init__(self, number):
            self.number = number

        def hidden_states(self, part):
            read.append((self.number, part.tokens[part.mask].tolist(), len(part)))
            return torch.zeros(int(part.mask.sum()), 1)

        def free_unsharded(self):
            pass

    heads = [Head(torch.tensor([[0.0], [0.0]])) for _ in range(3)]
    args = distill.Args(model="m", train_data=("x",), teacher=("a=x", "b=y", "c=z"))
    comparison = Comparison([Teacher(n) for n in range(3)], [None] * 3, distill.divergence_of(args), 1.0)
    found = comparison.of(batch, batch, heads)
    assert read == [(0, [4, 5], 1), (1, [], 1), (2, [3, 6], 2)]
    hidden = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    values = found(hidden, Head(torch.tensor([[1.0], [0.0]])))
    logp = torch.stack([hidden[:, 0], torch.zeros(4)], dim=1).log_softmax(1)
    want = (logp.exp() * (logp - torch.tensor(0.5).log())).sum(1)
    assert values.tolist() == pytest.approx(want.tolist(), abs=1e-6)
