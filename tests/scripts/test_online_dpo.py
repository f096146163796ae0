"""online_dpo.py: losses and pairs against slow loops, the same for any layout, SPIN's answers, exact resume. As a
script under torchrun it writes the answers that each rank makes: `.../test_online_dpo.py MODEL DATA FOLDER`."""

import math
import random
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import online_dpo
from common.dataset.store import load_prompts
from common.engine.make import stop_tokens
from common.model.lora import LoRAConfig
from common.parallel import ranks
from common.prompts import DataConfig
from common.rollout import Response, Sample
from common.rollouts.answers import add_answers, answers_of
from common.rollouts.gather import gather_rollout
from common.segments import best_and_worst, group_win_rate
from tests.conftest import STOPS, launch, launch_all
from tests.engine.template_table import make_tokenizer, sources
from tests.scripts.test_supervised import check_exact_resume, metrics_of, write
from tools import try_script

ROWS = [{"prompt": f"Count to {n}", "data_source": "x", "reward_model": {"ground_truth": "1"},
         "extra_info": {"answer": " ".join(map(str, range(n)))}} for n in range(2, 14)]


@pytest.fixture(scope="module")
def flags(tiny_llama, tmp_path_factory) -> list[str]:
    return [
        "online_dpo", "--model", tiny_llama, "--train-data", write(tmp_path_factory.mktemp("rows") / "a.jsonl", ROWS),
        "--prompts-per-step", "4", "--samples-per-prompt", "4", "--total-steps", "3", "--rollout.engine", "hf",
        "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length", "8",
        "--optim.lr", "1e-3", "--reward.function", f"{try_script.__file__}:compute_score", "--reward.num-workers", "1",
        "--save.every", "1", *STOPS,
    ]


SPIN = ["--answer-key", "answer", "--refresh-reference-every", "2"]


@pytest.fixture(scope="module")
def runs(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    launch_all(folder / "one", {
        "dpo": [*flags, "--beta", "0.5"],
        "alone": [*flags, "--beta", "0.5", "--max-tokens-per-gpu", "1", "--total-steps", "2"],
        "sppo": [*flags, "--loss", "sppo-exact", "--refresh-reference-every", "1", "--beta", "1"],
        "spin": [*flags, *SPIN],
    })
    launch_all(folder / "two", {"dpo": [*flags, "--beta", "0.5", "--total-steps", "2"]}, ranks=2)
    return folder


def test_the_loss_of_sppo_is_that_of_the_paper():
    """By loops: eta = 1 / beta, the win rate over the group with ties as one half, log Z = eta / 2. Then the
    paper's eta on rewards 1 1 0 0, and a pair: half of what TRL's sppo_hard aims at, which has no win over itself."""
    for beta, rewards in ((0.4, [0.3, -1.0, 0.3, 2.0, 0.1]), (0.001, [1.0, 1.0, 0.0, 0.0]), (0.1, [5.0, 2.0])):
        log_ratio = torch.linspace(-2, 1, len(rewards), dtype=torch.float64, requires_grad=True)
        group = torch.zeros(len(rewards), dtype=torch.int64)
        loss = online_dpo.sppo_loss(log_ratio, beta, torch.tensor(rewards, dtype=torch.float64), group)
        slopes = torch.autograd.grad(loss.sum(), log_ratio)[0]
        for i, own in enumerate(rewards):
            wins = [1.0 if own > other else 0.5 if own == other else 0.0 for other in rewards]
            aim = (sum(wins) / len(wins) - 0.5) / beta
            assert loss[i].item() == pytest.approx((log_ratio[i].item() - aim) ** 2, rel=1e-12)
            assert slopes[i].item() == pytest.approx(2 * (log_ratio[i].item() - aim), rel=1e-12)
    start = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = online_dpo.sppo_loss(start, 0.001, torch.tensor([1.0, 1, 0, 0]).double(), torch.tensor([0, 0, 0, 0]))
    assert torch.autograd.grad(-loss.sum(), start)[0].tolist() == pytest.approx([500, 500, -500, -500])
    pair = online_dpo.sppo_loss(torch.zeros(2), 0.1, torch.tensor([5.0, 2.0]), torch.tensor([0, 0]))
    assert pair.sqrt().tolist() == pytest.approx([0.25 / 0.1, 0.25 / 0.1])  # the win over itself is one half


def test_a_win_rate_is_that_of_the_own_group():
    nan = math.nan
    x = torch.tensor([1.0, 3, 1, 2, nan, 1, 7, nan], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 0, 0, 1, 2, 3])
    rates = group_win_rate(x, group).tolist()
    assert rates[:4] == pytest.approx([1 / 3, 3 / 4, 1 / 3, 5 / 6]) and rates[5:7] == [1 / 4, 1 / 2]
    assert math.isnan(rates[4]) and math.isnan(rates[7])


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_the_loss_of_sppo_exact_is_its_closed_form(shift):
    """Value and derivative in float64, one response after the other; a group of three and one of two. What is added to
    all rewards changes nothing, also where exp(reward) is infinite or 0."""
    rng = random.Random(0)
    group, beta = torch.tensor([0, 1, 0, 1, 0]), 0.4
    log_ratio = torch.tensor([rng.gauss(0, 2) for _ in range(5)], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([rng.gauss(0, 1) for _ in range(5)], dtype=torch.float64)
    loss = online_dpo.sppo_exact_loss(log_ratio, beta, rewards + shift, group)
    slopes = torch.autograd.grad(loss.sum(), log_ratio)[0].tolist()
    for i in range(5):
        mates = [math.exp(rewards[j] / beta) for j in range(5) if group[j] == group[i]]
        aim = rewards[i].item() / beta - math.log(sum(mates) / len(mates))
        assert abs(loss[i].item() - (log_ratio[i].item() - aim) ** 2) < 1e-10 * max(1, abs(shift)) < loss[i]
        assert abs(slopes[i] - 2 * (log_ratio[i].item() - aim)) < 1e-10 * max(1, abs(shift)) < abs(slopes[i])


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_aim_of_sppo_exact_is_a_distribution(beta):
    """Where the loss is 0, a group's mean of p / p_ref is 1, and two responses differ by their rewards' difference by
    beta: p = p_ref exp(R / beta) / Z, the paper's update with eta = 1 / beta."""
    rewards, group = torch.tensor([1.0, 0, 0, 1, 0.3], dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    log_ratio = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    loss = online_dpo.sppo_exact_loss(log_ratio, beta, rewards, group)
    aim = -torch.autograd.grad(loss.sum(), log_ratio)[0] / 2                # of a square, half of its slope at 0
    assert aim.exp().mean().item() == pytest.approx(1, rel=1e-12)
    assert (aim - aim[1]).tolist() == pytest.approx([1 / beta, 0, 0, 1 / beta, 0.3 / beta], rel=1e-12, abs=1e-12)


def test_the_best_and_the_worst_of_a_group_are_a_pair():
    """Groups: a clear pair; two equal best (the first of them); no two rewards differ; one reward left; none."""
    lost = math.nan
    rewards = torch.tensor([0.5, 0.1, 0.9, 1, 0, 1, 2, 2, lost, 3, lost, lost], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4])
    assert best_and_worst(rewards, group).tolist() == [2, 1, 3, 4]
    assert best_and_worst(rewards[6:], group[6:]).tolist() == []


def run_on(data: str, tokenizer, stops: list[int], world: ranks.World, **flags) -> SimpleNamespace:
    """What answers are made from, of a run on these files. `stops`: ids that end a response."""
    config = DataConfig(**flags)
    args = SimpleNamespace(data=config, rollout=SimpleNamespace(max_response_length=100))
    return SimpleNamespace(tokenizer=tokenizer, args=args, world=world, step=0, first_step=0,
                           train_set=load_prompts([data], tokenizer, config),
                           engine=SimpleNamespace(stop_token_ids=stops))


def responses_of_two(run: SimpleNamespace, scores: list[float]) -> list[Sample]:
    """Responses to the prompts of the rows 7 and 8, as many to each."""
    prompts, half = run.train_set[7:9], len(scores) // 2
    return [Sample(i, i // half, 7 + i // half, prompts[i // half], Response([5], [-0.5], "stop"), score=score)
            for i, score in enumerate(scores)]


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> str:
    answers = [*map(str, range(7)), "yes", "no no"]
    rows = [row | {"extra_info": {"answer": answer}} for row, answer in zip(ROWS, answers)]
    return write(tmp_path_factory.mktemp("answered") / "a.jsonl", rows)


def test_the_data_answers_every_response_of_a_prompt(world, tiny_llama, answered):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    run = run_on(answered, tokenizer, stop_tokens(tiny_llama, tokenizer), world)
    samples = responses_of_two(run, [0.0, 1.0, math.nan, 0.5])
    both, pairs = add_answers(gather_rollout(samples), run, "answer")
    assert pairs.tolist() == [4, 0, 4, 1, 5, 3]                             # the lost response has no pair
    texts = [tokenizer.decode(sample.response.tokens) for sample in both.samples[4:]]
    assert texts == ["yes<|im_end|>", "no no<|im_end|>"]
    assert [sample.prompt for sample in both.samples[4:]] == run.train_set[7:9]
    assert both.scores[4:].isnan().all() and both.group.tolist() == [0, 0, 1, 1, 2, 3]


def test_rows_without_an_answer_are_named_in_the_first_step(world, tiny_llama, tmp_path):
    """Also those that a later step would draw: with the corrected data the run would not continue."""
    rows = [row | {"extra_info": {"answer": "yes"}} for row in ROWS[:4]]
    rows[2] |= {"extra_info": {"answer": None}}
    rows[3] |= {"extra_info": {}}
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    run = run_on(write(tmp_path / "a.jsonl", rows), tokenizer, stop_tokens(tiny_llama, tokenizer), world)
    rule = r"row 2 of --train-data has no text in extra_info\['answer'\] \(--answer-key\); 2 of this rank's 4 rows"
    for make in (partial(answers_of, run, [0]), partial(add_answers, gather_rollout([]), run)):
        with pytest.raises(ValueError, match=rule):
            make("answer")


def test_a_long_answer_ends_where_a_response_does(world, tiny_llama, answered):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    run = run_on(answered, tokenizer, stop_tokens(tiny_llama, tokenizer), world)
    whole = answers_of(run, [8], "answer").samples[0].response
    run.args.rollout.max_response_length = len(whole.tokens) - 1
    cut = answers_of(run, [8], "answer").samples[0].response
    assert (cut.tokens, cut.logp, cut.finish_reason) == (whole.tokens[:-1], whole.logp[:-1], "length")
    assert whole.finish_reason == "stop" and len(cut.tokens) > 1


GEMMA = """{% for m in messages %}<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@pytest.mark.parametrize(("template", "end", "eos"), [
    (sources()["phi3"], "<|end|>", "</s>"), (GEMMA, "<end_of_turn>", "</s>"), (GEMMA, "<end_of_turn>", None),
])
def test_the_data_ends_its_answers_as_the_model_ends_its_turns(template, end, eos, world, tmp_path):
    """Where that is not the tokenizer's end token, which may also follow it (phi3) or not exist."""
    tokenizer = make_tokenizer(template)
    tokenizer.eos_token = eos
    stops = [tokenizer.convert_tokens_to_ids(end), *([tokenizer.eos_token_id] if eos else [])]
    data = write(tmp_path / "a.jsonl", [ROWS[0] | {"extra_info": {"answer": text}} for text in ("It is 4.", "No")])
    answers = answers_of(run_on(data, tokenizer, stops, world), [1, 0], "answer").samples
    assert [tokenizer.decode(sample.response.tokens) for sample in answers] == [f"No{end}", f"It is 4.{end}"]
    whole = tokenizer.apply_chat_template(
        [*answers[1].prompt.messages, {"role": "assistant", "content": "It is 4."}], return_dict=False)
    seen = answers[1].prompt.tokens + answers[1].response.tokens
    assert seen == whole[: len(seen)] and len(answers[1].response.logp) == len("It is 4.") + 1


def test_answers_in_chatml_and_in_plain_text_end_with_the_end_token(world, smollm, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    texts = ["yes", " 4\n", "", "def f(x):\n    return x\n\n\n", "\u00e9\U0001f600 <b>"]
    data = write(tmp_path / "a.jsonl", [ROWS[0] | {"extra_info": {"answer": text}} for text in texts])
    for form in ("chat", "plain"):
        run = run_on(data, tokenizer, stop_tokens(smollm, tokenizer), world, template=form)
        found = [sample.response.tokens for sample in answers_of(run, [*range(len(texts))], "answer").samples]
        assert found == [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]


def test_a_group_on_both_ranks_of_an_engine_has_one_answer(tiny_llama, answered, tmp_path):
    """With --rollout.tp 2 an engine's ranks take turns, so that the first group begins on rank 0, the second on rank 1,
    and each rank holds responses of both."""
    launch("tests/scripts/test_online_dpo.py", tiny_llama, answered, tmp_path, ranks=2, warm=True)
    shares = [torch.load(tmp_path / f"answers_{rank}.pt") for rank in range(2)]
    assert [share["mine"] for share in shares] == [[(6, 2, 7, "yes<|im_end|>")], [(7, 3, 8, "no no<|im_end|>")]]
    for share in shares:
        assert share["group"] == [0, 0, 0, 1, 1, 1, 2, 3]
        assert share["pairs"] == [6, 0, 6, 1, 6, 2, 7, 3, 7, 4, 7, 5]


@pytest.mark.parametrize("layout", ["one/alone", "two/dpo"])
def test_the_gradient_does_not_depend_on_the_layout(layout, runs):
    ours, theirs = metrics_of(runs / layout), metrics_of(runs / "one/dpo")
    for step in (0, 1):
        for name, rel in (("train/loss", 1e-5), ("preference/margin", 1e-3), ("actor/grad_norm", 1e-4)):
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=rel), (step, name)
        assert ours[step]["preference/pairs"] == theirs[step]["preference/pairs"] > 1
    assert abs(theirs[1]["preference/margin"]) > 0.01


def test_the_margin_is_0_where_the_policy_is_the_reference(runs):
    """At first the policy is the reference. SPIN's is refreshed after the second step, sppo's after each."""
    dpo, spin, sppo = (metrics_of(runs / "one" / name) for name in ("dpo", "spin", "sppo"))
    assert dpo[0]["preference/margin"] == 0 and dpo[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert dpo[2]["preference/margin"] != dpo[1]["preference/margin"] != 0
    assert [row["preference/margin"] == 0 for row in spin] == [True, False, True]
    assert spin[1]["preference/accuracy"] > 0.8 and spin[0]["preference/pairs"] == 16
    assert [row["actor/kl_loss"] for row in sppo] == [0, 0, 0] != [row["actor/kl_loss"] for row in dpo]
    assert max(row["training/rollout_probs_diff_max"] for row in spin) < 1e-4      # answers of the data are left out
    for row in dpo:                                                         # on policy: the ratio is 1
        assert row["actor/pg_clipfrac"] == 0


def test_the_log_ratio_of_a_response_is_of_all_its_tokens(flags, runs, tmp_path):
    """Those that are rejected leave the update, not the margin. A run without rejection continues, as at its first step
    the policy is still the reference; the third step is compared with that of a run that rejects nothing."""
    shutil.copytree(runs / "one/alone", tmp_path / "run")
    reject = ["--correction.reject", "k2", "--correction.reject-over", "token", "--correction.reject-above", "0"]
    launch("online_dpo.py", *flags[1:], "--beta", "0.5", *reject, "--run-dir", tmp_path / "run",
           "--save.allow-changes", warm=True)
    ours, theirs = metrics_of(tmp_path / "run")[2], metrics_of(runs / "one/dpo")[2]
    assert ours["rollout_corr/rollout_rs_masked_fraction"] > 0.1 and theirs["preference/margin"] != 0
    for name, rel in (("train/loss", 1e-5), ("preference/margin", 1e-3), ("preference/chosen_reward", 1e-3)):
        assert ours[name] == pytest.approx(theirs[name], rel=rel), name
    assert ours["actor/grad_norm"] != pytest.approx(theirs["actor/grad_norm"], rel=0.01)


def test_a_killed_run_with_a_refreshed_reference_continues_exactly(flags, runs, tmp_path):
    check_exact_resume([*flags, *SPIN], runs / "one/spin", tmp_path, first_step=1)


@pytest.mark.parametrize(("change", "message"), [
    ({"beta": 0.0}, "--beta 0.0 must be above 0"),
    ({"refresh_reference_every": -1}, "--refresh-reference-every -1 at least 0"),
    ({"refresh_reference_every": 2, "lora": LoRAConfig(rank=4)}, r"-every 2 at least 0 \(0 with --lora.rank: its ref"),
    ({"loss": "sppo", "answer_key": "a"}, "--answer-key a is for losses of pairs"),
    ({"samples_per_prompt": 1}, "at least 2"),
])
def test_flags_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        online_dpo.check(online_dpo.Args(model="m", train_data=("x",), **change))


if __name__ == "__main__":
    world = ranks.init()
    model, data, folder = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    run = run_on(data, tokenizer, stop_tokens(model, tokenizer), world)
    of_rank = [s for s in responses_of_two(run, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]) if s.index % 2 == world.rank]
    both, pairs = add_answers(gather_rollout(of_rank), run, "answer")
    made = [(s.index, s.group, s.row, tokenizer.decode(s.response.tokens)) for s in both.samples[3:]]
    found = {"mine": made, "group": both.group.tolist(), "pairs": pairs.tolist()}
    torch.save(found, f"{folder}/answers_{world.rank}.pt")
    ranks.shutdown()
