"""What bounds the reward pool: lost rewards, their share, reward dicts, long errors, leftovers and secrets."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rewards import lookup
from rewards.runtime import process
from rewards.runtime.pool import RewardConfig, RewardPool
from rewards.runtime.replies import MAX_NAMES
from rewards.runtime.scores import check_error_frac

ROOT = Path(__file__).resolve().parent.parent.parent

MISBEHAVE = str(Path(__file__).with_name("misbehave.py"))


def test_pool_leaves_lost_rewards_out_unless_told_otherwise():
    """Only counted here: one bad row on one of many ranks is no reason to stop."""
    def results(**settings):
        with RewardPool(f"{MISBEHAVE}:score", num_workers=1, **settings) as pool:
            for index, response in enumerate(["raise", "fine", "raise", "other"]):
                pool.submit(index, "any", response, "1")
            return pool.results()

    lost = results()
    assert RewardConfig().on_error == "drop"                            # what users get
    assert [math.isnan(score) for score in lost.scores] == [True, False, True, True]
    assert lost.scores[1] == 1.0
    assert lost.first_failure.strip().endswith("KeyError: 'no such answer'")
    assert results(on_error="zero").scores == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match=r"(?s)--reward.on-error is stop.*KeyError: 'no such answer'"):
        results(on_error="stop")


def test_the_share_of_errors_is_judged_over_all_ranks():
    check_error_frac(1, 64, 0.5, "")
    check_error_frac(32, 64, 0.5, "")
    check_error_frac(0, 0, 0.0, "")
    with pytest.raises(RuntimeError, match=r"(?s)^52% .*33 of 64 on all ranks.*--reward.max-error-frac 0.5.*KeyError"):
        check_error_frac(33, 64, 0.5, "KeyError: 'no such answer'")
    with pytest.raises(RuntimeError, match="see the other ranks"):
        check_error_frac(1, 64, 0.0, "")


def test_reward_dicts_are_bounded(caplog):
    """Some tens of names in all; those of the trainer's own metrics are not taken; numbers have a finite mean."""
    many = "return {'score': 1, **{f'k{__import__(\"os\").urandom(8)}': 1.0 for _ in range(2000)}}"
    own = "return {'score': 1, 'error_frac': 0.5, 'acc': 1, 'pred': 'x' * 10**6, 'big': 1e308, 'nan': float('nan')}"
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        pool.submit(0, "any", own, "1")
        for index in range(1, 20):
            pool.submit(index, "any", many, "1")
        results = pool.results()
    assert results.scores == [1.0] * 20
    assert len(set().union(*results.extras)) <= MAX_NAMES
    assert results.extras[0].keys() == {"acc", "pred", "big", "nan"}
    assert (results.extras[0]["acc"], results.extras[0]["big"]) == (1.0, "1e+308")
    assert len(results.extras[0]["pred"]) <= 10_000
    assert caplog.text.count("key 'error_frac' of a reward dict is left out") == 1


def test_ints_and_fractions_larger_than_any_float_are_infinite(caplog):
    """Beside the score a text, as all that is not finite; as a score a failure that shows the number."""
    huge = ["return {'score': 1, 'n': 10**400, 'm': -10**5000}", "return 10**400",
            "return -__import__('fractions').Fraction(10**400, 3)"]
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        for index, text in enumerate(huge):
            pool.submit(index, "any", text, "1")
        results = pool.results()
    assert results.failures == [None, "invalid", "invalid"]
    assert results.extras[0] == {"n": "inf", "m": "-inf"}
    assert "score returned 1000000000" in caplog.text
    assert "; the rule is a finite number of at most 1e+09" in caplog.text


def test_rewards_without_a_finite_sum_are_failures(tmp_path):
    twin = shutil.copy(MISBEHAVE, tmp_path / "twin.py")
    with RewardPool((f"{MISBEHAVE}:score", f"{twin}:score"), num_workers=1, weights=(1.0, 1.0)) as pool:
        for index, number in enumerate(["1e308", "-1e308", "1e10", "9e8", "1.0"]):
            pool.submit(index, "any", f"return {number}", "1")
        results = pool.results()
    assert results.failures == ["invalid", "invalid", "invalid", "invalid", None]
    assert results.scores[4] == 2.0


def test_long_exceptions_are_cut_and_interrupts_named(caplog):
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        worker = next(iter(pool.workers.values())).process.pid
        for index, response in enumerate(["long", "interrupt", "fine"]):
            pool.submit(index, "any", response, "1")
        results = pool.results()
        assert next(iter(pool.workers.values())).process.pid == worker
    assert results.failures == ["exception", "exception", None]
    assert "failed (ValueError; " in caplog.text
    assert "failed (KeyboardInterrupt; " in caplog.text
    assert "characters left out" in results.first_failure
    assert len(results.first_failure) < 11_000


def test_nothing_outlives_a_worker(tmp_path, monkeypatch):
    """No temporary folder of a killed worker, and no daemon that left its process group."""
    marker = tmp_path / "written_by_a_daemon"
    monkeypatch.setattr(process, "own_folder", lambda: str(tmp_path))
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        pool.submit(0, "any", "temporary", "1")
        pool.submit(1, "any", "daemon", "1", {"file": str(marker)})
        assert pool.results().failures == ["crash", None]
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    time.sleep(2.5)
    assert not marker.exists()


# a trainer with a reward worker and an episode, each with a daemon and a temporary file of its own
TRAINER = """
import os, sys
from envs.runtime.processes import EpisodeProcesses
from rewards.runtime.pool import RewardPool
reward, episode, end = sys.argv[1:]
pool = RewardPool(reward, num_workers=1)
pool.submit(0, "any", "", "")
assert pool.results().scores == [1.0]
processes = EpisodeProcesses(episode, 60.0)
processes.start(0, {"row": {}, "messages": [], "tokens_left": 100})
assert processes.events(60.0)[0][1]["messages"] == []
print(os.environ["TMPDIR"], os.listdir(os.environ["TMPDIR"]), flush=True)
eval(end)
"""
LEAVES = """
import subprocess, tempfile
def leave():
    tempfile.mkdtemp()
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
def score(data_source, solution_str, ground_truth, extra_info=None):
    leave()
    return 1.0
async def episode(chat, row):
    leave()
    await chat.reply()
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "1 / 0", "sys.exit(0)"])
def test_nothing_outlives_a_trainer(end, tmp_path):
    """However it ends, and though its cleaner gets a SIGTERM before, which clusters send to all processes."""
    def started() -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.environ().get("MARK") == str(tmp_path):
                    found.append(each)
        return found

    (tmp_path / "leaves.py").write_text(LEAVES)
    files, mark = tmp_path / "files", {"MARK": str(tmp_path), "TMPDIR": str(tmp_path / "files")}
    files.mkdir()
    names = f"{tmp_path}/leaves.py:score", f"{tmp_path}/leaves.py:episode"
    command = [sys.executable, "-c", TRAINER, *names, f"(sys.stdin.readline(), {end})"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | mark, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as trainer:
        assert "plainrl_" in trainer.stdout.readline()
        wait_for(lambda: len(started()) == 9)           # it, the cleaner, a worker, two for an episode, four daemons
        (cleaner,) = [each.pid for each in started() if each.cmdline()[1:3] == ["-I", "-S"]]
        wait_for(lambda: blocks(cleaner, signal.SIGTERM))
        os.kill(cleaner, signal.SIGTERM)
        trainer.communicate("go\n", timeout=60)
    wait_for(lambda: not [*started(), *files.iterdir()])


def blocks(pid: int, number: int) -> bool:
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return bool(int(mask, 16) & 1 << number - 1)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_keywords_may_name_environment_variables(tmp_path, monkeypatch):
    """The value is looked up where it is used; what the trainer holds and writes down has the name."""
    (tmp_path / "keyed.py").write_text("def score(solution_str, key, **_):\n    return {'score': 1.0, 'key': key}\n")
    monkeypatch.setenv("MY_KEY", "sk-SECRET")
    kwargs = '{"key": {"env": "MY_KEY"}}'
    for num_workers in (0, 1):
        with RewardPool(f"{tmp_path}/keyed.py:score", num_workers=num_workers, kwargs=kwargs) as pool:
            pool.submit(0, "any", "", "")
            assert pool.results().extras == [{"key": "sk-SECRET"}]
            assert "sk-SECRET" not in repr(pool.scorer_args)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises((RuntimeError, ValueError), match=r"--reward\.kwargs key: .* variable MY_KEY is not set"):
        RewardPool(f"{tmp_path}/keyed.py:score", num_workers=1, kwargs=kwargs)
    with pytest.raises(ValueError, match="MY_KEY is not set"):
        lookup(["openai/gsm8k"], '{"method": {"env": "MY_KEY"}}')
