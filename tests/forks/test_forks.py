"""Forks of grpo.py: those of docs/forks.md do what it says, and careless ones are right or stop with one line.

The numbers are computed again from the recorded rollouts, by other means than the fork's."""

import json
import re
import signal
from itertools import groupby, islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.faulty import server
from tests.conftest import ROOT, STOPS, launch
from tests.forks.patches import DOCUMENT, apply, documented, num_added, source_of, stored
from tests.forks.rewards import TOKENS
from tests.forks.self_play import self_play, with_forgotten_baselines
from tests.forks.two_policies import two_policies
from tools import try_script

GRPO, DAPO = ((ROOT / name).read_text() for name in ("grpo.py", "dapo.py"))
BY_LENGTH = f"{try_script.__file__}:compute_score_of_some"
PROCESS, NEVER, WORDS = (f"{Path(__file__).parent}/rewards.py:{name}" for name in ("process", "never", "words"))
ENTROPY, STEPS, CURRICULUM, BEST = documented()
LENGTH, CLIP, PROCESS_REWARD, REPLAY, SFT, AVERAGE = ("by_length", "wider_clip", "process", "replay", "second_loss",
                                                      "average")
THREE_TURNS = f"{ROOT}/tests/engine/episodes_of_tests.py:three_turns"
MADE = {"two_policies": two_policies, "self_play": self_play, "forgotten_baselines": with_forgotten_baselines}
UNTIL_EVEN = f"{ROOT}/tests/forks/episodes.py:until_even"
OF_A_RANK = (r"the step has 16 responses, and rollout\.samples the 8 that this rank scored: "
             r"rollout\.numbers_of\(lambda sample: \.\.\.\) has a number for each")
UNSAVED = ["--save.hf", "never", "--save.resume", "none"]
THREE_STEPS = [*STOPS, "--total-steps", "3", "--save.every", "1"]
MOVED = [*STOPS, *UNSAVED, "--total-steps", "1", "--epochs-per-step", "3", "--optim.lr", "1e-2"]


@pytest.fixture(scope="module")
def start(tiny_llama, small_train, tmp_path_factory):
    """`start(title or name, *flags)` runs a fork and returns its run folder; with check=False, what it said."""
    forks = documented() | stored()

    def start(fork: str, *more: str, ranks: int = 1, check: bool = True, base: str = GRPO):
        folder = tmp_path_factory.mktemp("fork")
        if fork in MADE:
            source = MADE[fork](GRPO)
        else:
            source = apply(forks[fork], base)[0] if fork else base
        (folder / "mine.py").write_text(source)
        flags = ["--model", tiny_llama, "--train-data", small_train, "--prompts-per-step", "4", "--samples-per-prompt",
                 "4", "--total-steps", "2", "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
                 "--data.max-prompt-length", "200", "--rollout.max-response-length", str(TOKENS), "--optim.lr", "1e-3",
                 "--reward.function", BY_LENGTH, "--reward.num-workers", "1", "--log.rollouts-every", "1"]
        done = launch(folder / "mine.py", *flags, *more, "--run-dir", folder / "run", ranks=ranks, warm=True,
                      check=check)
        return folder / "run" if check else done

    return start


@pytest.fixture(scope="module")
def unchanged(start) -> Path:
    return start("", *STOPS, *UNSAVED, "--total-steps", "1")


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(run: Path, step: int = 1) -> list[dict]:
    return pq.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()


def said_by(done) -> str:
    """The line that a script ends with."""
    assert done.returncode
    return done.stderr.strip().splitlines()[-1].removeprefix("[rank0]: ")


def group_advantages(rows: list[dict]) -> list[float]:
    found = []
    for _, group in groupby(rows, key=lambda row: row["group"]):
        scores = [row["score"] for row in group]
        found += list((np.array(scores) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6))
    return found


def fours(numbers: list[float]) -> list[list[float]]:
    return [[*islice(numbers, i, i + 4)] for i in range(0, len(numbers), 4)]


# --------------------------------------------------------------------------- the diffs themselves

@pytest.mark.parametrize("name", documented() | stored())
def test_the_diffs_fit(name):
    diff = (documented() | stored())[name]
    assert apply(diff, source_of(name))[1] == diff, "a script's lines have moved: python -m tests.forks.patches"


def test_a_diff_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="these lines are 0 times in the source"):
        apply("@@ -1,1 +1,2 @@\n nowhere\n+new\n", GRPO)
    with pytest.raises(ValueError, match="these lines are 2 times in the source"):
        apply("@@ -1,1 +1,2 @@\n twice\n+new\n", "twice\ntwice\n")


def test_the_lines_are_counted():
    """The document says how many lines each fork has: beside a flag's two and changed imports, what is added."""
    numbers = {"Two": 2, "Three": 3, "Nineteen": 19}
    texts = re.findall(r"^## .*?\n(\w+) lines?(.*?)\n```", DOCUMENT.read_text(), re.S | re.M)
    assert len(texts) == len(documented())
    for (number, text), diff in zip(texts, documented().values()):
        before = text.partition(":")[0]
        imports = 2 if "two imports" in before else int("an import" in before)
        assert num_added(diff) == numbers[number] + 2 * ("a flag" in before) + imports, text


# --------------------------------------------------------------------------- a fork of an older grpo.py

def test_a_fork_that_imports_torch_first(start):
    """Its command line is checked after the imports, and it trains as grpo.py does."""
    flags = [*UNSAVED, "--total-steps", "1"]
    ours, theirs = (metrics_of(start(fork, *flags))[0] for fork in ("", "older"))
    assert ours["actor/grad_norm"] == theirs["actor/grad_norm"] > 0
    for wrong, words in {"--modle": "did you mean --model", "--clip-low=2": "--clip-low 2.0 must be in [0, 1]",
                         "--seed=-1": "--seed -1 must be at least 0", "--eval-n=8": "--val-data",
                         "--val-data=none.parquet": "none.parquet"}.items():
        done = start("older", wrong, check=False)
        assert done.returncode == 2, done.stderr
        assert said_by(done).startswith("error: ") and words in said_by(done)


# --------------------------------------------------------------------------- the forks of the document

@pytest.fixture(scope="module")
def moved(start) -> Path:
    """grpo.py with two large updates from a rollout."""
    return start("", *MOVED)


@pytest.mark.parametrize("title", [LENGTH, ENTROPY, CLIP])
def test_the_small_forks_run(start, moved, title):
    """On the same rollout, with another gradient."""
    run = start(title, *MOVED)
    assert [row["tokens"] for row in rows_of(run)] == [row["tokens"] for row in rows_of(moved)]
    assert 0 < metrics_of(run)[0]["actor/grad_norm"] != pytest.approx(metrics_of(moved)[0]["actor/grad_norm"], rel=1e-4)


def test_a_process_reward(start):
    """Each token's advantage is its group's number and the whitened reward-to-go; what has a constant score runs, too.
    Two ranks compute the same."""
    flags = ["--reward.function", PROCESS, *UNSAVED]
    run, on_two = start(PROCESS_REWARD, *flags), start(PROCESS_REWARD, *flags, ranks=2)
    rows = rows_of(run)
    assert any(len({row["score"] for row in group}) == 1 for _, group in groupby(rows, key=lambda row: row["group"]))
    assert all(row["trained"] for row in rows)
    to_go = np.array([np.cumsum(json.loads(row["reward_parts"])["process"][::-1])[::-1] for row in rows])
    whitened = (to_go - to_go.mean()) / np.sqrt(to_go.var(ddof=1) + 1e-8)
    expected = np.array(group_advantages(rows))[:, None] + 0.5 * whitened
    np.testing.assert_allclose([row["token_advantage"] for row in rows], expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(metrics_of(run), metrics_of(on_two), strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)


@pytest.fixture(scope="module")
def replayed(start) -> Path:
    return start(REPLAY, *STOPS, "--total-steps", "3", "--save.every", "1")


def test_a_replay_buffer(replayed):
    """The two groups that differ most come back in the next step, with the log-probs that the engine gave them."""
    steps = [rows_of(replayed, step) for step in (1, 2, 3)]
    assert [len(rows) for rows in steps] == [16, 24, 24]
    for before, rows in pairwise(steps):
        groups = [[*group] for _, group in groupby(before[:16], key=lambda row: row["group"])]
        spreads = [-np.std([row["score"] for row in group]) for group in groups]
        best = [groups[i] for i in np.argsort(spreads, kind="stable")[:2]]
        assert [row["tokens"] for row in rows[16:]] == [row["tokens"] for group in best for row in group]
        again = [row for row in rows[16:] if row["trained"]]
        assert again
        for row in again:
            assert row["old_logp"] == row["rollout_logp"]
        assert max(abs(ratio - 1) for row in again for ratio in row["ratio"]) > 1e-3
        assert all(abs(ratio - 1) < 1e-4 for row in rows[:16] for ratio in row["ratio"] or [])
    assert [row["prompt_length/mean"] for row in metrics_of(replayed)] == pytest.approx(
        [np.mean([row["prompt_length"] for row in rows[:16]]) for rows in steps])


def test_scores_of_reasoning_steps(start):
    """Each word of the text is a step; its number is relative to those of all words of the group."""
    flags = ["--reward.function", WORDS, *UNSAVED, "--total-steps", "1"]
    run, on_two = start(STEPS, *flags), start(STEPS, *flags, ranks=2)
    rows = rows_of(run)
    for (_, group), whole in zip(groupby(rows, key=lambda row: row["group"]), fours(group_advantages(rows))):
        group = [*group]
        parts = [json.loads(row["reward_parts"]) for row in group]
        scores = np.concatenate([part["step_scores"] for part in parts])
        for row, part, advantage in zip(group, parts, whole):
            relative = (np.array(part["step_scores"]) - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            got = [] if row["token_advantage"] is None else np.array(row["token_advantage"]) - advantage
            ends = np.cumsum([len(text) for text in row["token_texts"]])
            for end, number in zip(ends, got):
                step = np.searchsorted(part["step_ends"], end)
                want = relative[step] if step < len(relative) else 0.0
                assert number == pytest.approx(want, abs=1e-4)
    assert metrics_of(run)[0]["actor/grad_norm"] == pytest.approx(metrics_of(on_two)[0]["actor/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("fork", [CURRICULUM, "weights_after_the_step"])
def test_a_curriculum(start, tmp_path, fork):
    """Rows are passed over, those of the metrics' pools have the scores of the rollouts, and a killed run goes on, also
    where the weights are set at the end of a step, for the next one."""
    run = start(fork, *THREE_STEPS)
    rows = [row for step in (1, 2, 3) for row in rows_of(run, step)]
    means = {row["prompt"]: [r["score"] for r in rows if r["prompt"] == row["prompt"]] for row in rows}
    assert len(means) == 12                                             # an epoch has 32 rows: none comes twice
    last = metrics_of(run)[-1]
    assert last["curriculum/too_easy_frac"] == sum(np.mean(scores) >= 0.95 for scores in means.values()) / 32
    assert last["curriculum/too_hard_frac"] == sum(np.mean(scores) <= 0.05 for scores in means.values()) / 32
    assert last["curriculum/unseen_frac"] == 20 / 32
    survives_a_kill(run, tmp_path)


def test_weights_that_are_none_are_refused(start):
    flags = [*STOPS, *UNSAVED]
    said = said_by(start("rates_without_a_score", *flags, check=False))
    assert said == ("error: sampler.weights of row 0 is nan, must be 0 or more and finite: run.success_rates is NaN "
                    "for rows without a score yet, nan_to_num(0.5) gives them one")
    said = said_by(start("rates_of_a_rank", *flags, ranks=2, check=False))
    assert "run.sample: the rows differ between ranks" in said


def test_maxrl(start):
    """(r - mean) / mean of each group, 0 where no response is correct; a killed run would have nothing to know. Without
    a bound of the mean such groups are 0 / 0, and their responses count as without a reward: it is right, too."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1"]
    run = start("maxrl", *flags, ranks=2)
    rows, seen = rows_of(run), set()
    for _, group in groupby(rows, key=lambda row: row["group"]):
        scores = [row["score"] for row in group]
        seen.add(np.mean(scores))
    for _, group in groupby(rows, key=lambda row: row["group"]):
        group = [*group]
        mean = np.mean([row["score"] for row in group])
        expected = [(row["score"] - mean) / mean if mean else 0.0 for row in group]
        assert [row["advantage"] or 0.0 for row in group] == pytest.approx(expected, abs=1e-4)   # None: it did not run
    assert min(seen) == 0 < max(seen) and len(seen) > 2
    said = said_by(start("maxrl_without_a_bound", *flags, check=False))
    assert re.fullmatch(r"error: its advantage is nan for response \d+ at its token \d+: .*", said)


def test_echo(start, tiny_llama):
    """The tokens that the user wrote between two replies are predicted, and nothing before the first one: the loss is
    that of Hugging Face's model in float64, on two ranks, and in micro-batches of one sequence. With a mean over each
    micro-batch it is not."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1", "--rollout.episode", THREE_TURNS, "--rollout.max-response-length",
             "60", "--echo-coef", "0.5"]
    run = start("echo", *flags, ranks=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    total = count = 0
    for row in rows_of(run):
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([prompt + row["tokens"]])
        logp = model(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
        is_other = ~torch.tensor(row["mask"])
        total -= logp[is_other].sum().item()
        count += int(is_other.sum())
    first = metrics_of(run)[0]
    assert count > 100 and first["actor/echo_loss"] == pytest.approx(total / count, rel=1e-5)
    alone = metrics_of(start("echo", *flags, "--max-tokens-per-gpu", "1"))[0]
    without = metrics_of(start("echo", *flags, "--echo-coef", "0"))[0]
    assert alone["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-4)
    assert without["actor/grad_norm"] != pytest.approx(first["actor/grad_norm"], rel=1e-2)
    careless = [metrics_of(start("echo_of_a_microbatch", *flags, *more))[0]["actor/grad_norm"]
                for more in ([], ["--max-tokens-per-gpu", "1"])]
    assert careless[0] != pytest.approx(careless[1], rel=1e-3)          # make test finds it


def test_echo_in_the_first_mask_is_refused(start):
    """One mask for the sampled tokens and the others: what was not sampled has no log-prob to weigh."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1", "--rollout.episode", THREE_TURNS, "--rollout.max-response-length",
             "60"]
    said = said_by(start("echo_in_the_mask", *flags, check=False))
    assert said == ("error: token_weights: a mask is True on a token that the policy did not sample, whose log-prob is "
                    "0: combine it with microbatch.mask")


def test_a_length_penalty_by_difficulty(start):
    """A token costs 0.01 times the share of the group that is correct, and at least one of four. With the tokens of
    this rank's responses alone, on two ranks, the run ends."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1"]
    run = start("length_by_difficulty", *flags, ranks=2)
    shares = set()
    for _, group in groupby(rows_of(run), key=lambda row: row["group"]):
        group = [*group]
        share = max(np.mean([row["score"] for row in group]), 0.25)
        shares.add(share)
        expected = [row["score"] - 0.01 * share * row["response_length"] for row in group]
        assert [row["reward"] for row in group] == pytest.approx(expected, abs=1e-6)
    assert len(shares) > 2
    said = said_by(start("length_of_a_rank", *flags, ranks=2, check=False))
    assert re.fullmatch(rf"(\[rank \d\] )?error: .*mine.py:\d+: {OF_A_RANK}", said), said


def test_a_penalty_for_turns(start):
    """Each reply of the model costs 0.05, on two ranks. From the replies of a rank's own episodes the same on one rank;
    on two the run ends."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1", "--rollout.episode", UNTIL_EVEN, "--rollout.max-response-length",
             "60"]
    run, seen = start("turns", *flags, ranks=2), set()
    for row in rows_of(run):
        num_replies = sum(is_own for is_own, _ in groupby(row["mask"]))
        seen.add(num_replies)
        assert row["reward"] == pytest.approx(row["score"] - 0.05 * num_replies, abs=1e-6)
    assert len(seen) > 2
    careless = start("turns_of_a_rank", *flags)
    key = lambda row: (row["group"], row["index"])                                                  # noqa: E731
    ours, theirs = ([row["reward"] for row in sorted(rows_of(x), key=key)] for x in (run, careless))
    assert ours == theirs
    said = said_by(start("turns_of_a_rank", *flags, ranks=2, check=False))
    assert re.fullmatch(rf"(\[rank \d\] )?error: .*mine.py:\d+: {OF_A_RANK}", said), said


def test_replaying_the_best_responses(start, tmp_path):
    """The best responses of a step come back once; the policy's term is divided by fresh tokens alone."""
    run = start(BEST, *THREE_STEPS)
    steps = [rows_of(run, step) for step in (1, 2, 3)]
    for before, rows in pairwise(steps):
        fresh = before[:16]
        groups = [[*group] for _, group in groupby(fresh, key=lambda row: row["group"])]
        best = [row for group in groups for row in group if row["score"] == max(r["score"] for r in group) > 0]
        assert [row["tokens"] for row in rows[16:]] == [row["tokens"] for row in best] != []
        assert all(row["advantage"] == 0 for row in rows[16:])
    for numbers, rows in zip(metrics_of(run), steps):
        fresh = rows[:16]
        assert numbers["critic/score/mean"] == pytest.approx(np.mean([row["score"] for row in fresh]))
        tokens = sum(len(row["tokens"]) for row in fresh)
        loss = -sum(sum(row["token_advantage"]) for row in fresh) / tokens                  # the ratio is 1
        assert numbers["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    survives_a_kill(run, tmp_path)


def test_a_replay_buffer_survives_a_kill(replayed, tmp_path):
    survives_a_kill(replayed, tmp_path)


def survives_a_kill(whole: Path, tmp_path: Path, step: int = 2) -> None:
    """kill -9 as this one of three steps is logged, then the same command again: metrics byte for byte."""
    flags = json.loads((whole / "config.json").read_text())
    command = [whole.parent / "mine.py", "--model", flags["model"], "--train-data", *flags["train_data"],
               "--prompts-per-step", "4", "--samples-per-prompt", "4", "--total-steps", "3", "--rollout.engine", "hf",
               "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200", "--rollout.max-response-length",
               str(TOKENS), "--optim.lr", "1e-3", "--reward.function", BY_LENGTH, "--reward.num-workers", "1",
               "--log.rollouts-every", "1", *STOPS, "--save.every", "1", "--run-dir", tmp_path / "run"]
    log = tmp_path / "log"
    assert server()(log, f"log:{step}:0:kill", *command) == -signal.SIGKILL, log.read_text()
    assert f"resumed after step {step - 1}" in launch(*command, warm=True).stdout
    for ours, theirs in zip(metrics_of(tmp_path / "run"), metrics_of(whole), strict=True):
        compared = {name for name in theirs if not re.match(r"timing|perf|sync|sleep|rollout/tokens_per_s", name)}
        assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}


def test_two_policies(start, tmp_path):
    """Each is sampled with its own weights, though both have the same number of updates; they differ after the first
    step; a killed run goes on with both."""
    run = start("two_policies", *THREE_STEPS)
    for numbers in metrics_of(run):
        assert max(numbers["actor/engine_is_off_by"], numbers["rival/engine_is_off_by"]) < 1e-4
    entropies = [(numbers["actor/entropy"], numbers["rival/entropy"]) for numbers in metrics_of(run)]
    assert abs(entropies[2][0] - entropies[2][1]) > 1e-3 and metrics_of(run)[2]["rival/grad_norm"] > 0
    survives_a_kill(run, tmp_path)


def test_self_play_with_a_baseline_of_each_role(start, tmp_path):
    """The rival's advantages are those of its rewards less a moving mean, which a killed run goes on with. Where the
    checkpoints lack the baselines, it does not: `make test` finds it."""
    run = start("self_play", *THREE_STEPS)
    baselines, seen = {"actor": 0.0, "rival": 0.0}, set()
    for step, numbers in enumerate(metrics_of(run), 1):
        rewards = [row["reward"] for row in rows_of(run, step)]                             # the rival's
        assert {*rewards} <= {-1.0, 0.0, 1.0}
        for name, sign in (("actor", -1), ("rival", 1)):                                    # a game of zero sum
            baselines[name] = 0.95 * baselines[name] + 0.05 * sign * np.mean(rewards)
            assert numbers[f"{name}/baseline"] == pytest.approx(baselines[name], abs=1e-9)
        for row in rows_of(run, step):
            if row["advantage"] is not None:
                assert row["advantage"] == pytest.approx(row["reward"] - baselines["rival"], abs=1e-6)
        assert numbers["rival/grad_norm"] > 0 < numbers["actor/grad_norm"]
        seen |= {*rewards}
    assert len(seen) == 3 and abs(baselines["rival"]) > 1e-3
    survives_a_kill(run, tmp_path, step=3)


def test_forgotten_baselines_are_found(start, tmp_path):
    with pytest.raises(AssertionError, match="baseline"):
        survives_a_kill(start("forgotten_baselines", *THREE_STEPS), tmp_path, step=3)


def test_a_teacher_that_averages_the_policy(start, tmp_path):
    """It is the policy at first, then behind it; a killed run goes on with it."""
    run = start(AVERAGE, *THREE_STEPS)
    norms = [numbers["actor/grad_norm"] for numbers in metrics_of(run)]
    plain = [numbers["actor/grad_norm"] for numbers in metrics_of(start("", *THREE_STEPS, *UNSAVED))]
    assert norms[0] == pytest.approx(plain[0], rel=1e-5) and norms[1] != pytest.approx(plain[1], rel=1e-3)
    survives_a_kill(run, tmp_path)


def test_an_average_in_a_frozen_model_is_refused(start):
    """In bfloat16 it would hardly move, and a resumed run would begin it anew."""
    said = said_by(start("average_in_a_frozen_model", *STOPS, *UNSAVED, check=False))
    assert said == ("RuntimeError: this script has changed the weights of teacher, which no checkpoint holds: load it "
                    "with run.load_average (float32, for an average over steps), or with run.load_frozen(..., "
                    "is_saved=True) (for copies of other weights)")


def test_a_length_penalty_that_adapts(start, tmp_path):
    """Its factor follows the mean length of each step, of all ranks; a killed run goes on with it."""
    run, coef = start("length_budget", *THREE_STEPS), 0.0
    for step, numbers in enumerate(metrics_of(run), 1):
        rows = rows_of(run, step)
        over = [row["response_length"] / 6 - 1 for row in rows]
        assert numbers["length/coef"] == pytest.approx(coef)
        assert [row["reward"] for row in rows] == pytest.approx([r["score"] - coef * x for r, x in zip(rows, over)])
        coef = max(0.0, coef + 0.5 * np.mean(over))
    assert coef > 0
    survives_a_kill(run, tmp_path)


def test_a_kl_in_the_advantage(start):
    """That of the policy that sampled, half as much in the second of two steps, once for several passes."""
    flags = [*STOPS, *UNSAVED, "--epochs-per-step", "2", "--optim.lr", "1e-2"]
    rows = rows_of(start("kl_in_the_advantage", *flags, ranks=2), 2)
    kl = [np.subtract(row["old_logp"], row["ref_logp"]) for row in rows]
    assert max(np.abs(x).max() for x in kl) > 0.1
    for row, advantage, of_tokens in zip(rows, group_advantages(rows), kl):
        np.testing.assert_allclose(row["token_advantage"], advantage - 0.1 / 2 * of_tokens, rtol=1e-4, atol=1e-5)
    done = start("kl_in_the_advantage_of_each_pass", *flags, check=False)
    assert said_by(done) == ("error: the phase update_actor changes microbatch.advantage, and each of its 2 passes "
                             "(--epochs-per-step) would change it again: give the new numbers a variable of their own")
    assert "step 1" not in done.stdout


def test_two_temperatures_in_a_group(start):
    """Half of each group is hot, both halves have one baseline, and each is scored at the temperature that sampled it.
    Where it is not, or for several passes the old policy's log-probs are not, `make try` and `make test` find it."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1", "--epochs-per-step", "2"]
    run = start("two_temperatures", *flags, "--run-zero-advantage", "--kl-loss-coef", "0.1", ranks=2)
    rows = rows_of(run)
    for row in rows:
        np.testing.assert_allclose(row["old_logp"], row["rollout_logp"], atol=1e-4)
        np.testing.assert_allclose(row["ref_logp"], row["rollout_logp"], atol=1e-4)     # it is the policy in step 1
    by_prompt = sorted(rows, key=lambda row: (row["prompt"], row["index"]))
    expected = []
    for _, group in groupby(by_prompt, key=lambda row: row["prompt"]):
        scores = np.array([row["score"] for row in group])
        assert len(scores) == 4
        expected += list((scores - scores.mean()) / (scores.std(ddof=1) + 1e-6))
    assert [row["advantage"] for row in by_prompt] == pytest.approx(expected, abs=1e-5)
    for fork in ("two_temperatures_at_one", "two_temperatures_in_the_update"):
        said = try_script.describe(start(fork, *flags))
        assert re.search(r"^temperature .* nats: far more than rounding: other tokens, temperatures or prompts were "
                         r"scored than sampled$", said, re.M), said


def test_forking_tokens(start):
    """The loss is the mean over the fifth of a step's tokens with the highest entropy, on two ranks too. Of each
    micro-batch, in a narrower mask: `make try` and `make test` find it."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1"]
    run = start("forking_tokens", *flags, ranks=2)
    rows = rows_of(run)
    entropies = np.concatenate([row["entropy"] for row in rows])
    is_fork = entropies >= np.quantile(entropies, 0.8)
    assert 0.15 < is_fork.mean() < 0.25
    advantages = np.concatenate([row["token_advantage"] for row in rows])
    assert metrics_of(run)[0]["actor/pg_loss"] == pytest.approx(-advantages[is_fork].mean(), abs=1e-5)
    fork = "forking_tokens_of_a_microbatch"
    said = try_script.compare(start(fork, *flags), start(fork, *flags, "--run-zero-advantage"))
    assert said.startswith(try_script.FOUND)


def test_a_clip_by_quantiles(start):
    """A tenth of a mini-batch's ratios is below the lower bound and a tenth above the upper one, in dapo.py on two
    ranks. Those of a micro-batch: `make test` finds it, because it has two passes; in one, each ratio is 1."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1", "--epochs-per-step", "2", "--optim.lr", "1e-2"]
    run = start("clip_by_quantile", *flags, ranks=2, base=DAPO)
    rows, numbers = rows_of(run), metrics_of(run)[0]
    ratio, advantage, clipped = (np.concatenate([row[name] for row in rows])
                                 for name in ("ratio", "token_advantage", "clipped"))
    low, high = np.exp(np.quantile(np.log(ratio), [0.1, 0.9]))
    assert low < 0.99 and high > 1.01
    assert (numbers["actor/clip_low"], numbers["actor/clip_high"]) == pytest.approx((low, high), rel=1e-4)
    is_at_bound = np.minimum(np.abs(ratio - low), np.abs(ratio - high)) < 1e-4
    expected = np.where(advantage > 0, ratio > high, ratio < low) & (advantage != 0)
    assert expected.any() and (clipped == expected)[~is_at_bound].all()
    whole, cut = (metrics_of(start("clip_by_quantile_of_a_microbatch", *flags, *more, base=DAPO))[0]
                  for more in ([], ["--max-tokens-per-gpu", "1"]))
    assert whole["actor/grad_norm"] != pytest.approx(cut["actor/grad_norm"], rel=1e-3)


def sft_loss(rows: list[dict]) -> float:
    """The mean of -log p over the tokens of correct responses."""
    return -np.mean([x for row in rows if row["score"] > 0 for x in row["old_logp"]])


def test_a_second_loss_with_a_mask_of_its_own(start, unchanged):
    """The mean is over the tokens of correct responses, with and without an advantage, on two ranks too."""
    run = start(SFT, *STOPS, *UNSAVED, ranks=2)
    for step, numbers in enumerate(metrics_of(run), 1):
        rows = rows_of(run, step)
        assert all(row["trained"] is not None for row in rows)
        assert numbers["actor/sft_loss"] == pytest.approx(0.1 * sft_loss(rows), rel=1e-4)
    rows, first = rows_of(unchanged), metrics_of(unchanged)[0]
    assert any(row["score"] > 0 and row["trained"] is None for row in rows)    # what would be missing
    assert metrics_of(run)[0]["actor/pg_loss"] == pytest.approx(first["actor/pg_loss"], abs=1e-6)
    assert metrics_of(run)[0]["actor/grad_norm"] != pytest.approx(first["actor/grad_norm"], rel=1e-3)


# --------------------------------------------------------------------------- careless ones

CANARY = ("error: a response whose advantage is 0 has a gradient, and others like it were left out of this update "
          "(skip_zero_advantage): a term of the loss is not proportional to the advantage, or advantages were written "
          "after run.to_minibatches; give skip_zero_advantage=False to run.to_minibatches")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("fork", "wrong_step"), [
    ("process_after_dealing", 1), ("process_in_the_loss", 1), ("bonus_from_the_second_step", 2),
    ("average_left_out", 2),                                        # it is the policy in the first step
    ("replay_one_mask", 2),                                         # nothing is replayed in the first step
])
def test_a_gradient_on_what_was_left_out_ends_the_first_wrong_step(start, fork, wrong_step, ranks):
    """Before its optimizer step, on whichever rank it is."""
    done = start(fork, "--reward.function", PROCESS, *UNSAVED, ranks=ranks, check=False)
    assert done.returncode and CANARY in done.stderr, done.stderr      # ranks may write into one line
    assert len(re.findall(r"^step +\d", done.stdout, re.M)) == wrong_step - 1


def test_a_selection_that_comes_too_late_is_refused(start):
    said = said_by(start("replay_late", *UNSAVED, check=False))
    assert said == ("error: Rollout.cat, select and take would lose the fields ['mine'] of rollout.batch: write them "
                    "afterwards")


def test_a_mask_of_what_was_left_out_is_refused(start):
    said = said_by(start("sft_left_out", *STOPS, *UNSAVED, check=False))
    assert re.fullmatch(r"error: token_weights with masks: \d+ responses of this mini-batch were left out because "
                        r"their advantage is 0, .* give skip_zero_advantage=False to run.to_minibatches", said)


def test_a_field_that_would_be_lost_is_refused(start):
    said = said_by(start("undeclared_field", *UNSAVED, check=False))
    assert said == ("AttributeError: Batch has no field 'mine', and the ranks would not exchange it: "
                    "write batch.extra['mine'] for a number per token, "
                    "batch.response_extra['mine'] for a number per response")


def test_fields_of_a_forks_own_reach_the_rank_that_trains(start):
    """The fork compares them there, on both ranks."""
    run = start("own_field", *STOPS, *UNSAVED, "--run-zero-advantage", ranks=2)
    for step, numbers in enumerate(metrics_of(run), 1):
        assert numbers["mine/responses"] == sum(row["trained"] is not None for row in rows_of(run, step)) > 0


@pytest.mark.parametrize("fork", ["sft_only_those_that_run", SFT, PROCESS_REWARD, ENTROPY])
def test_the_same_gradient_with_all_responses(start, fork):
    """The comparison of `make try` and `make test`: it finds a term on a few responses, none of which is the canary."""
    reward = PROCESS if fork == PROCESS_REWARD else BY_LENGTH
    flags = ["--reward.function", reward, *UNSAVED, "--total-steps", "1"]
    said = try_script.compare(start(fork, *flags), start(fork, *flags, "--run-zero-advantage"))
    none_left_out = "not compared: in each step all responses ran, or no response has a gradient"
    expected = {
        ENTROPY: r"the same gradient norms, [\d.]+ in step 1, with --run-zero-advantage; [1-9]\d* responses were left "
                 r"out without it",
        PROCESS_REWARD: none_left_out, SFT: none_left_out,
    }.get(fork, r"the loss has a gradient on responses that were left out: give skip_zero_advantage=False to "
                r"run.to_minibatches \(gradient norm of step 1 [\d.]+, with --run-zero-advantage [\d.]+\); or it is .*")
    assert re.fullmatch(expected, said), said


def test_no_gradient_at_all_is_not_the_same_gradient(start):
    flags = ["--reward.function", NEVER, *UNSAVED]
    said = try_script.compare(start("", *flags), start("", *flags, "--run-zero-advantage"))
    assert said == "not compared: in each step all responses ran, or no response has a gradient"


def test_an_update_of_its_own_is_right(start, unchanged):
    """The supervised loss after the policy's update: over the tokens of correct responses, under its own metrics."""
    run, none = start("sft_update_of_its_own", *STOPS, *UNSAVED, ranks=2), start(
        "sft_update_of_its_own", *STOPS, *UNSAVED, "--reward.function", NEVER)
    first, plain, rows = metrics_of(run)[0], metrics_of(unchanged)[0], rows_of(run)
    assert first["sft/grad_norm"] > 0 and first["sft/entropy"] > 0 and first["sft/lr"] == 1e-3
    for name in ("entropy", "grad_norm", "pg_loss", "lr"):
        assert first[f"actor/{name}"] == pytest.approx(plain[f"actor/{name}"], rel=1e-5, abs=1e-7), name
    # the policy has moved by one step of 1e-3 since these log-probs were sampled
    expected = -np.mean([x for row in rows if row["score"] > 0 for x in row["rollout_logp"]])
    assert first["sft/loss"] == pytest.approx(0.1 * expected, rel=0.02)
    assert [row["sft/loss"] for row in metrics_of(none)] == [0, 0]


@pytest.mark.parametrize("fork", ["no_stats", "other_stats"])
def test_statistics_may_be_absent_or_others(start, fork):
    """The run ends, it is recorded, and `make try` says what there is."""
    run = start(fork, *STOPS, *UNSAVED)
    rows, answers = rows_of(run), try_script.describe(run)
    assert all(row["ratio"] is None and row["clipped"] is None for row in rows)
    assert any(row["trained"] for row in rows)
    assert re.search(r"^old log-probs +no ratio was reported$", answers, re.M)
    assert ("mine/ratio" in metrics_of(run)[0]) == (fork == "other_stats")


TWICE = (r"error: run.sample was called twice with the seed \(0,\): both calls would draw the same random numbers; "
         r"give it a further number after the step, another in each call")


RATIO_OF_1 = (r"error: the phase update_actor comes after an optimizer step on these responses, and "
              r"microbatch.old_logp is None: the current policy would be taken for the one before, and each ratio be "
              r"1: make num_updates the number of optimizer steps on a rollout")


@pytest.mark.parametrize(("fork", "ranks", "expected"), [
    ("sampled_twice", 1, TWICE), ("two_temperatures_in_one_pass", 1, TWICE),
    ("two_temperatures_uncollected", 1, r"error: run.sample: the responses of the call before are not collected, and "
                                        r"the scores of both would be mixed up: call run.collect\(pending\) before "
                                        r"the next run.sample"),
    ("length_budget_too_late", 1, r"RuntimeError: run.script_state was changed after run.finish, which saves it: "
                                  r"write it before"),
    ("old_logp_with_a_gradient", 1, r"error: microbatch.old_logp has a gradient of its own, which would flow into the "
                                    r"pass that made it: use policy.score\(microbatch, temperature\) for .*"),
    ("samples_taken_out", 1, r"error: there are \d+ responses, and one has the number \d+: take none out of "
                             r"rollout.samples; rollout.select drops groups, a score of NaN drops a response"),
    ("state_by_number", 1, r"error: a checkpoint's state has the key 0, which a resumed run would find as a text: .*"),
    ("rows_of_a_rank", 2, r"error: run.sample: the rows differ between ranks: take them from run.next_rows, or draw "
                          r"them with the same seed on all ranks, np.random.default_rng\(seed_of\(args.seed, .*"),
    ("state_of_a_rank", 2, r"error: run.script_state differs between ranks, and a checkpoint holds that of the first: "
                           r".*"),
    ("lengths_of_sequences", 1, r"AttributeError: Batch has no lengths: write response_lengths, the tokens that the "
                                r"policy sampled, or sequence_lengths, with the prompt's"),
    ("positions_of_sequences", 1, r"AttributeError: Batch has no position_ids: write segment_cumsum\(.*\), which is 1 "
                                  r"at the first token that the policy sampled, or sequence_positions, which begin with"
                                  r" the prompt"),
    ("row_of_a_batch", 1, r"AttributeError: Batch has no row: write rollout.row\[batch.index.cpu\(\)\] for the row of "
                          r"the data; image_row is -1 without images"),
    ("bonus_with_a_gradient", 1, r"error: the advantage has a gradient, which would flow into what it was made of \(a "
                                 r"log-prob, an entropy, a value\): write .detach\(\) after that, or .*"),
    ("scheduler_of_its_own", 1, r"error: this script has set the learning rate 0.0005, and optimizer_step sets 0.001, "
                                r"by its `config` and the step: give it replace\(args.optim, lr=RATE, .*"),
    ("optimizer_of_its_own", 1, r"error: the phase update_actor: no checkpoint holds this optimizer, and a resumed run "
                                r"would begin it anew: use that of run.load_policy, or put yours there before .*"),
    ("in_loss_of_factors", 1, r"error: run.to_minibatches: in_loss is torch.float64 of shape \[16\], must be "
                              r"torch.bool of shape \[16\]: .*"),
    ("advantages_of_groups", 1, r"error: to_tokens: the numbers have the shape \[4, 4\], must be \[S\], one for each "
                                r"response of the step: flatten\(\) makes \[S\] of \[P, G\]"),
    ("whitened_with_prompts", 2, r"error: the advantage is -?[\d.]+ on every token that the policy did not sample, as "
                                 r"if a mean was taken over these, too: whiten\(advantage, batch.mask\) is over .*"),
    ("four_minibatches", 1, RATIO_OF_1),
    ("four_passes", 1, RATIO_OF_1),
])
def test_what_would_be_wrong_in_silence_is_refused(start, fork, ranks, expected):
    """Each response twice in its group; baselines that a resumed run would not find, or that are another rank's."""
    done = start(fork, *STOPS, *UNSAVED, ranks=ranks, check=False)
    assert done.returncode
    assert re.search(expected, done.stderr), done.stderr               # ranks may write into one line


def test_the_ratio_of_a_response(start, unchanged):
    """GSPO's, the geometric mean over the tokens that were sampled: where it is 1, its gradient is that of grpo.py's
    ratios. On two ranks, too."""
    run = start("lengths_of_responses", *STOPS, *UNSAVED, "--total-steps", "1", ranks=2)
    expected = metrics_of(unchanged)[0]["actor/grad_norm"]
    assert metrics_of(run)[0]["actor/grad_norm"] == pytest.approx(expected, rel=1e-5) and expected > 0


def test_a_narrower_mask_before_the_ranks_exchange(start):
    """Responses that are left out count with as many tokens as the others: the first four."""
    flags = [*STOPS, *UNSAVED, "--total-steps", "1"]
    run, all_ran = start("first_tokens", *flags, ranks=2), start("first_tokens", *flags, "--run-zero-advantage")
    assert try_script.compare(run, all_ran).startswith("the same gradient norms, ")
    rows = rows_of(all_ran)
    total = sum(sum(row["token_advantage"][:4]) for row in rows)
    counted = sum(min(row["response_length"], 4) for row in rows)
    assert metrics_of(run)[0]["actor/pg_loss"] == pytest.approx(-total / counted, abs=1e-6)
    assert counted < sum(row["response_length"] for row in rows)


def test_a_learning_rate_of_its_own(start):
    """A function of the step, in the config of optimizer_step: nobody sets another, also after a resume."""
    run = start("rate_of_its_own", *THREE_STEPS)
    assert [numbers["actor/lr"] for numbers in metrics_of(run)] == pytest.approx([1e-3, 1e-4, 1e-5])


def test_a_step_may_keep_few_groups_or_none(start):
    """8 mini-batches of no response, then of 4: no gradient, then that of 4 updates."""
    run = start("groups_dropped", *STOPS, *UNSAVED, "--minibatches-per-step", "8", "--run-zero-advantage")
    none, few = metrics_of(run)
    assert none["actor/grad_norm"] == 0 < few["actor/grad_norm"]
    assert "critic/rewards/mean" not in none and not any(np.isnan([*none.values(), *few.values()]))
    assert len(rows_of(run, 2)) == 4


def test_an_update_may_end_early(start, unchanged):
    """After the first of three passes, when a KL is too large for example: that pass was the whole update."""
    numbers, expected = (metrics_of(run)[0] for run in (
        start("stopped_early", *STOPS, *UNSAVED, "--total-steps", "1", "--epochs-per-step", "3"), unchanged))
    assert numbers["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert numbers["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=1e-4)
