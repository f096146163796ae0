"""The reward pool against functions that really misbehave (misbehave.py)."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.checkpoint.signals import STOP_SIGNALS
from rewards import gsm8k, load_reward, lookup
from rewards.runtime.pool import RewardConfig, RewardPool

ROOT = Path(__file__).resolve().parent.parent.parent

MISBEHAVE = str(Path(__file__).with_name("misbehave.py"))


def test_lookup_names_unknown_sources_and_the_known():
    assert lookup(["openai/gsm8k", "word_problems"])["word_problems"] is gsm8k.compute_score
    with pytest.raises(ValueError, match=r"'a/b', 'nope'.*openai/gsm8k, .*word_problems.*--reward.function"):
        lookup(["nope", "word_problems", "a/b"])


def test_load_reward_takes_a_file_and_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BASE = 40\n")
    (tmp_path / "mine.py").write_text("from neighbour_of_reward import BASE\n"
                                      "def compute_score(**kwargs): return BASE + 1\n"
                                      "def other(**kwargs): return BASE + 2\n")
    assert load_reward(f"{tmp_path}/mine.py")() == 41
    assert load_reward(f"{tmp_path}/mine.py:other")() == 42
    with pytest.raises(ValueError, match=r"no function missing in .*it has compute_score, other"):
        load_reward(f"{tmp_path}/mine.py:missing")
    with pytest.raises(ValueError, match="does not exist"):
        load_reward(f"{tmp_path}/absent.py:f")


@pytest.mark.parametrize(("signature", "rule"), [
    ("response, answer", "a function of response, answer does not take data_source, solution_str, ground_truth"),
    ("", "a function of nothing does not take data_source"), ("completions, **kwargs", "also needs completions"),
    ("data_source, solution_str, ground_truth", "does not take extra_info; it is called with data_source,"),
    ("solution_strs, ground_truths, extra_infos", "does not take data_sources; it is called with data_sources,"),
    ("*, solution_strs, bonus, **more", None), ("*texts, bonus=1, **more", None), ("*texts, key, **more", "needs key"),
])
def test_a_function_of_another_signature_is_refused_at_the_start(tmp_path, signature, rule):
    (tmp_path / "mine.py").write_text(f"def f({signature}):\n    return 1.0\n")
    for num_workers in (0, 1):
        if rule is None:
            RewardPool(f"{tmp_path}/mine.py:f", num_workers=num_workers, kwargs='{"bonus": 2}').close()
            continue
        with pytest.raises(ValueError, match=rf"^--reward.function: .*{rule}"):
            RewardPool(f"{tmp_path}/mine.py:f", num_workers=num_workers)


def test_pool_scores_in_order_of_index():
    with RewardPool(f"{MISBEHAVE}:score", num_workers=2, timeout_s=10) as pool:
        for index in (5, 0, 3, 1, 4, 2):
            pool.submit(index, "any", "slow" if index == 0 else "", str(index * 10))
        results = pool.results()
        assert results.index == [0, 1, 2, 3, 4, 5]
        assert results.scores == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        assert results.failures == [None] * 6
        assert results.wait_s > 0.1
        pool.submit(0, "any", "", "7")  # the next step starts empty, and the index is free again
        assert pool.results().scores == [7.0]
        assert pool.results().scores == []


def test_pool_counts_every_failure_and_goes_on(caplog):
    failures = {"loop": "timeout", "regex": "timeout", "exit": "crash", "segfault": "crash", "forge": "crash",
                "sys.exit": "exception", "memory": "exception", "oom killer": "crash",
                "raise": "exception", "other": "exception", "return float('nan')": "invalid", "return '1'": "invalid",
                "return float('inf')": "invalid", "return None": "invalid", "return {'acc': 1}": "invalid",
                "return 1 / 0": "exception"}
    responses = [text for response in failures for text in (response, "fine")]
    with caplog.at_level(logging.ERROR), RewardPool(f"{MISBEHAVE}:score", num_workers=2, timeout_s=4.0,
                                                            on_error="zero") as pool:
        for index, response in enumerate(responses):
            pool.submit(index, "any", response, "3.5")
        results = pool.results()
        for index in range(4):  # all workers are well again
            pool.submit(index, "any", "fine", "1")
        assert pool.results().scores == [1.0] * 4
    assert results.failures == [failures.get(response) for response in responses]
    assert results.scores == [0.0 if response in failures else 3.5 for response in responses]
    assert (results.num_timeouts, results.num_errors) == (2, 14)
    text = caplog.text
    assert text.count("no score after 4 s") == 1                       # the first of each kind, in full
    assert "misbehave.py" in text[text.index("no score after"):][:400]  # with the place where it hung
    for expected in ("exit code 3", "MemoryError", "KeyError: 'no such answer'", "ArithmeticError: another kind",
                     "ZeroDivisionError", "finite number"):
        assert expected in text, expected
    assert text.count("finite number") == 1


def test_pool_closes_the_pipes_of_dead_workers_and_of_all_at_the_end():
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        for count in range(4):
            pool.submit(count, "any", "exit", "1")
            pool.submit(count + 4, "any", "fine", "1")
            assert pool.results().failures == ["crash", None]
            assert len(os.listdir("/proc/self/fd")) == files + 2
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


def test_pool_kills_what_a_reward_started(tmp_path):
    marker = tmp_path / "written_by_a_child"
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1, timeout_s=0.5) as pool:
        pool.submit(0, "any", "child", "1", {"file": str(marker)})
        assert pool.results().failures == ["timeout"]
        time.sleep(2.5)
    assert not marker.exists()


def test_signals_that_stop_the_trainer_end_no_worker():
    """Clusters send them to all processes of a job, and the trainer needs the scores to save what is done."""
    with RewardPool(f"{MISBEHAVE}:score", num_workers=1) as pool:
        (worker,) = pool.workers.values()
        pool.submit(0, "any", "slow", "1")
        time.sleep(0.1)
        for number in STOP_SIGNALS:
            worker.process.send_signal(number)
        assert pool.results().scores == [1.0]
        assert list(pool.workers.values()) == [worker] and worker.process.poll() is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pool_takes_any_form_of_number_and_function(num_workers):
    def scores(name, *responses, **settings):
        with RewardPool(f"{MISBEHAVE}:{name}", num_workers=num_workers, **settings) as pool:
            for index, response in enumerate(responses):
                pool.submit(index, "any", response, "2")
            return pool.results()

    plain = scores("score", "return True", "return 3", "return __import__('numpy').float32(0.5)",
                   "return {'score': 0.25, 'acc': False, 'pred': 'x', 'n': 3}",
                   "return __import__('fractions').Fraction(1, 4)",
                   "return {'score': __import__('decimal').Decimal('0.5'), 'n': __import__('decimal').Decimal(2)}")
    assert plain.scores == [1.0, 3.0, 0.5, 0.25, 0.25, 0.5]
    assert plain.extras[5] == {"n": 2.0}
    assert plain.extras[3] == {"acc": 0.0, "pred": "x", "n": 3.0}
    assert scores("score", "", kwargs='{"bonus": 0.5}').scores == [2.5]
    later = scores("later", "four", "sixsix")
    assert later.scores == [4.0, 6.0]
    assert later.extras[0] == {"acc": 1.0, "pred": "2"}
    assert scores("batched", "four", "sixsix").scores == [4.0, 6.0]
    if num_workers:  # in this process it would wait for the terminal
        assert scores("score", "print").scores == [2.0]


def test_pool_runs_async_functions_together():
    """Up to --reward.concurrency of them in one worker; the results stay in order and numbers of each its own."""
    with RewardPool(f"{MISBEHAVE}:together", num_workers=1, concurrency=8, kwargs='{"pause": 0.3}') as pool:
        for index in range(24):
            pool.submit(index, "any", "x" * index, "1")
        results = pool.results()
    assert results.failures == [None] * 24
    assert max(results.scores) == 8


def test_pool_async_failures_cost_only_their_sample(caplog):
    responses = ["hang", "fine", "raise", "fine", "block", "fine", "hang"]
    with RewardPool(f"{MISBEHAVE}:together", num_workers=1, timeout_s=2.5) as pool:
        worker = next(iter(pool.workers.values())).process.pid
        for index, response in enumerate(["hang", "fine", "hang"]):
            pool.submit(index, "any", response, "1")
        assert pool.results().failures == ["timeout", None, "timeout"]
        assert next(iter(pool.workers.values())).process.pid == worker  # given up, without a kill
        for index, response in enumerate(responses):
            pool.submit(index, "any", response, "1")
        results = pool.results()
        pool.submit(0, "any", "fine", "1")
        assert pool.results().scores == [1.0]
    kinds = {"hang": "timeout", "raise": "exception", "block": "timeout"}
    assert results.failures == [kinds.get(response) for response in responses]
    assert "scored again one by one" in caplog.text  # the one that blocks the others ends in a kill


def test_pool_gives_batched_functions_what_is_queued():
    """verl's batched form: lists by those names; the first call may be small, the next takes what has piled up."""
    with RewardPool(f"{MISBEHAVE}:whole_batch", num_workers=1, concurrency=10, kwargs='{"factor": 2}') as pool:
        for index in range(25):
            pool.submit(index, f"source {index}", "", str(index), {"i": index})
        results = pool.results()
    assert results.scores == [2.0 * index for index in range(25)]
    assert [extra["source"] for extra in results.extras] == [f"source {index}" for index in range(25)]
    assert [extra["extra"] for extra in results.extras] == list(range(25))
    sizes = [extra["size"] for extra in results.extras]
    assert max(sizes) == 10
    assert abs(sum(1 / size for size in sizes) - round(sum(1 / size for size in sizes))) < 1e-9  # whole batches


@pytest.mark.parametrize(("bad", "failure"), [
    ("segfault", "crash"), ("loop", "timeout"), ("raise", "exception"), ("short", "exception")])
def test_pool_a_batch_that_fails_costs_only_the_failing_sample(bad, failure):
    with RewardPool(f"{MISBEHAVE}:whole_batch", num_workers=1, timeout_s=4.0) as pool:
        for index in range(6):
            pool.submit(index, "any", bad if index == 3 else "", "5", {"i": index})
        results = pool.results()
    assert results.failures == [failure if index == 3 else None for index in range(6)]
    assert results.scores[:3] + results.scores[4:] == [5.0] * 5


def test_keywords_go_to_the_functions_that_name_them(tmp_path):
    functions = (f"{MISBEHAVE}:score", f"{MISBEHAVE}:whole_batch")
    with RewardPool(functions, num_workers=1, kwargs='{"bonus": 0.5, "factor": 10}') as pool:
        pool.submit(0, "any", "", "2", {"i": 0})
        assert pool.results().scores == [2.5 + 20.0]
    with pytest.raises(ValueError, match=r"--reward\.kwargs bonsu: no reward function of this run takes it"):
        RewardPool(functions, num_workers=1, kwargs='{"bonsu": 0.5}')
    assert lookup(["openai/gsm8k", "countdown"], '{"method": "flexible"}')
    with pytest.raises(ValueError, match=r"--reward\.kwargs method: no reward function"):
        lookup(["countdown"], '{"method": "flexible"}')
    with RewardPool(num_workers=1, kwargs='{"method": "flexible"}') as pool:  # countdown has no such keyword
        pool.submit(0, "openai/gsm8k", "12", "12")
        pool.submit(1, "countdown", "<answer>3 + 4</answer>", {"target": 7, "numbers": [3, 4]})
        assert pool.results().scores == [1.0, 1.0]
    (tmp_path / "open.py").write_text("def check(): raise SystemExit\ndef f(**kwargs): return kwargs['anything']\n")
    with RewardPool(f"{tmp_path}/open.py:f", num_workers=1, kwargs='{"anything": 3}') as pool:
        pool.submit(0, "any", "", "")
        assert pool.results().scores == [3.0]  # and a user's own `check` is not ours to call


def test_pool_in_process_counts_errors_too():
    with RewardPool(f"{MISBEHAVE}:score", num_workers=0) as pool:
        for index, response in enumerate(["raise", "fine", "return None"]):
            pool.submit(index, "any", response, "1")
        assert pool.results().failures == ["exception", None, "invalid"]
        with pytest.raises(KeyboardInterrupt):      # here it is the user's own
            pool.submit(0, "any", "interrupt", "1")


CHANGING = """
def change(ground_truth, extra_info):
    extra_info["l"].append(len(ground_truth))
    extra_info.setdefault("new", []).append(1)
    ground_truth.append({})
    return len(extra_info["l"]) * 100 + len(ground_truth) * 10 + len(extra_info["new"])
def f(data_source, solution_str, ground_truth, extra_info): return change(ground_truth, extra_info)
async def g(data_source, solution_str, ground_truth, extra_info): return change(ground_truth, extra_info)
def many(data_sources, solution_strs, ground_truths, extra_infos):
    scores = list(map(change, ground_truths, extra_infos))
    if "bad" in solution_strs:
        raise ValueError("bad")
    return scores
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_changes_what_it_gets_changes_it_for_no_other_call(tmp_path, num_workers):
    """Four samples have one prompt, so the same ground truth and extra_info; and functions follow one another, or a
    second call follows a batch that failed. Each sees a list of 1 and a truth of 1: 2 and 2 after its change."""
    (tmp_path / "mine.py").write_text(CHANGING)
    truth, info = [1], {"l": [1]}
    for names, wanted in (["f"], 221), (["g"], 221), (["many"], 221), (["f", "g", "many"], 663):
        specs = [f"{tmp_path}/mine.py:{name}" for name in names]
        with RewardPool(specs, num_workers=num_workers, on_error="zero") as pool:
            for i, text in enumerate(["a", "b", "bad" if names == ["many"] else "c", "d"]):
                pool.submit(i, "", text, truth, info)
            scores = pool.results().scores
        assert scores == [wanted, wanted, 0.0 if names == ["many"] else wanted, wanted], names
    assert (truth, info) == ([1], {"l": [1]})


def test_pool_combines_weighted_functions():
    functions = (f"{MISBEHAVE}:score", f"{MISBEHAVE}:later")
    with RewardPool(functions, weights=(1.0, 0.5), num_workers=1) as pool:
        pool.submit(0, "any", "four", "3")
        results = pool.results()
    assert results.scores == [3.0 + 0.5 * 4]
    assert results.extras[0] == {"misbehave.score": 3.0, "misbehave.later": 4.0, "misbehave.later/acc": 1.0,
                                 "misbehave.later/pred": "3"}
    with pytest.raises(ValueError, match=r"--reward.weights has 1 numbers, --reward.function 2"):
        RewardPool(functions, weights=(1.0,))


def test_functions_that_are_called_alike_are_refused(tmp_path):
    """Each has its own number: of two with one name only the second would be seen, under the name of both."""
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info): return {number}\n")
    for num_workers in (0, 1):
        with pytest.raises(ValueError, match=r"^--reward.function \S+ \S+: two are called mine.compute_score, and"):
            RewardPool([*map(str, files)], num_workers=num_workers)
    files[1] = files[1].rename(tmp_path / "b/other.py")
    with RewardPool([*map(str, files)], num_workers=1) as pool:
        pool.submit(0, "any", "", "")
        assert pool.results().extras == [{"mine.compute_score": 0.0, "other.compute_score": 1.0}]


def test_pool_uses_the_table_without_a_function():
    with RewardPool(num_workers=1) as pool:
        pool.submit(0, "word_problems", "#### 12", "12")
        pool.submit(1, "word_problems", "#### 13", "12")
        pool.submit(2, "unknown", "#### 12", "12")
        results = pool.results()
    assert results.scores[:2] == [1.0, 0.0]
    assert results.failures == [None, None, "exception"]


def test_pool_stops_before_training_if_the_file_cannot_be_loaded(tmp_path):
    (tmp_path / "broken.py").write_text("import os\nimport a_module_that_is_not_there\n")
    with pytest.raises(ValueError, match=r"^--reward.function .*broken.py:f cannot be imported: line 2: "
                       "ModuleNotFoundError: .*a_module_that_is_not_there'; `python .*broken.py` shows where$"):
        RewardPool(f"{tmp_path}/broken.py:f", num_workers=2)
    (tmp_path / "broken.py").write_text("def f(): pass\n")
    with pytest.raises(ValueError, match=r"^--reward.function .*broken.py:g: no function g in .*; it has f$"):
        RewardPool(f"{tmp_path}/broken.py:g", num_workers=2)
    with pytest.raises(ValueError, match="no such file"):
        RewardPool(f"{tmp_path}/absent.py:f")
    with pytest.raises(ValueError, match="must be a JSON object"):
        RewardPool(kwargs="method=flexible")
    with pytest.raises(ValueError, match=r"--reward.timeout-s 0 above 0"):
        RewardPool(timeout_s=0)


def test_pool_refuses_an_index_twice():
    with RewardPool(num_workers=1) as pool:
        pool.submit(0, "word_problems", "#### 12", "12")
        with pytest.raises(ValueError, match="sample 0 was submitted twice"):
            pool.submit(0, "word_problems", "#### 12", "12")


def test_workers_are_light_and_several():
    """Under 40 MB each, and nothing heavy imported: the training script is not imported again."""
    with RewardPool(f"{MISBEHAVE}:environment", num_workers=2) as pool:
        for index in range(200):
            pool.submit(index, "any", "", "")
        results = pool.results()
    assert max(results.scores) < 40_000
    assert {extra["heavy"] for extra in results.extras} == {""}
    assert {extra["oom"] for extra in results.extras} == {"1000"}  # when memory runs out, it goes before the trainer
    pids = {int(extra["pid"]) for extra in results.extras}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # close() ended them


def test_workers_die_with_a_killed_trainer():
    """SIGKILL to the trainer while a worker is in an endless loop leaves no process behind."""
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from rewards.runtime.pool import RewardPool
pool = RewardPool({MISBEHAVE + ":score"!r}, num_workers=1, timeout_s=600)
print(next(iter(pool.workers.values())).process.pid, flush=True)
pool.submit(0, "any", "loop", "1")
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(trainer.stdout.readline())
    time.sleep(0.5)
    os.kill(pid, 0)  # it is there
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "the worker outlived its trainer"
        time.sleep(0.05)


def test_reward_config_fits_the_pool():
    pool = RewardPool(**vars(RewardConfig(num_workers=0)))
    pool.submit(0, "word_problems", "#### 12", "12")
    assert pool.results().scores == [1.0]
