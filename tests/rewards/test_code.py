"""The code rewards: cases worked by hand, and attacks through the pool."""

import json
import sys
import time

import pytest

from rewards import code
from rewards.runtime import sandbox
from rewards.runtime.pool import RewardPool
from tests.rewards.jail_tools import needs_isolation

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


ADD = "```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8"], "outputs": ["3\n", "7\n", "11\n", "15"]}
CALL = {"inputs": [[[1, 2], 3], "[4]\n5"], "outputs": [[1, 2, 3], [[4, 5]]], "fn_name": "f"}
ASSERT = {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]}


@needs_isolation
@pytest.mark.parametrize(("response", "truth", "score", "pred"), [
    (ADD, SUMS, 1.0, "passed"),
    (ADD, json.dumps(SUMS), 1.0, "passed"),
    ("first\n```\nprint(0)\n```\nbetter\n" + ADD, SUMS, 1.0, "passed"),
    (ADD.removesuffix("```"), SUMS, 1.0, "passed"),                                        # cut off
    ("print(3)", SUMS, 0.25, "wrong answer"),
    ("```python\nprint(3)\nraise SystemExit(1)\n```", SUMS, 0.0, "exit code 1"),
    ("I cannot.", SUMS, 0.0, "exit code 1"),
    ("```python\nwhile True: pass\n```", SUMS, 0.0, "timeout"),
    ("```python\nprint('0.1000000001 2')\n```", {"inputs": [""], "outputs": ["0.1 2"]}, 1.0, "passed"),
    ("```python\nprint('1000000001')\n```", {"inputs": [""], "outputs": ["1000000000"]}, 0.0, "wrong answer"),
    ("```python\nprint(input()[:3])\n```", '{"inputs": [1' + "0" * 5000 + '], "outputs": [100]}', 1.0, "passed"),
    ("```python\nprint('a\\n b ')\n```", {"inputs": [""], "outputs": [["a", "b"]]}, 1.0, "passed"),
    ("```python\nfrom __future__ import annotations\ndef f(a: List[int], b): print('noise'); return (*a, b)\n```",
     CALL, 1.0, "passed"),
    ("```python\nclass Solution:\n    def f(self, a, b): return a + [b]\n```", CALL, 1.0, "passed"),
    ("```python\ndef f(a, b): return a\n```", CALL, 0.0, "wrong answer"),
    ("```python\ndef g(a, b): return a\n```", CALL, 0.0, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 1.0, "passed"),
    ("```python\ndef f(x): return 2\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 0.0, "exit code 1"),
    ("```python\ndef f(x): return 2\n```", ASSERT, 0.5, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", ASSERT | {"inputs": ["", ""], "outputs": [None, None]}, 1.0, "passed"),
    ("```python\nimport sys; sys.exit(0)\n```", {"functional": "assert False"}, 0.0, "ended before the assertions"),
    ("```python\nimport os; os._exit(0)\n```", {"functional": "assert False"}, 0.0, "ended before the assertions"),
])
def test_code_scores_cases_worked_by_hand(response, truth, score, pred):
    result = code.compute_score("apps", response, truth, timeout_s=1.0 if pred == "timeout" else 20.0, total_s=60.0)
    assert result == {"score": score, "acc": score == 1.0, "pred": pred, "case_timeout": pred == "timeout"}


@needs_isolation
def test_code_all_or_nothing_and_the_number_of_cases(monkeypatch):
    three = "```python\nprint(3)\n```"
    assert code.compute_score("apps", three, SUMS, continuous=False)["score"] == 0.0
    assert code.compute_score("apps", three, SUMS, continuous=False, max_cases=1)["score"] == 1.0
    assert code.compute_score("apps", ADD, SUMS, continuous=False)["score"] == 1.0
    deadlines = []
    monkeypatch.setattr(sandbox, "run", lambda program, given, limits, isolated: deadlines.append(limits.timeout_s) or
                        time.sleep(0.2) or sandbox.Result(0 if len(deadlines) < 4 else None, "3", ""))
    result = code.compute_score("apps", three, {"inputs": [""] * 9, "outputs": ["3"] * 9}, timeout_s=2, total_s=2.1)
    assert result == {"score": 3 / 9, "acc": False, "pred": "timeout", "case_timeout": True}
    assert deadlines[0] == 2                               # of the case
    assert 1.5 > deadlines[3] > 0                          # what is left of all cases' time
    assert len(deadlines) == 4                             # the first time-out ends the sample
    for truth in ({"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {}):
        with pytest.raises(ValueError, match="as many of both"):
            code.compute_score("apps", ADD, truth)


ATTACKS = {
    "loop": "while True: pass",
    "fork": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "output": "while True: print('x' * 1000)",
    "home": "import os; print(open(os.path.expanduser('~/.bashrc')).read())",
    "environment": "import os; print(os.environ['HOME_OF_SECRETS'])",
    "socket": "import socket; socket.create_connection(('127.0.0.1', 22)); print(3)",
    "parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "delete": "import shutil; shutil.rmtree('/usr'); shutil.rmtree('/root')",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit": "import os; os._exit(0)",
}


@needs_isolation
def test_attacks_through_the_pool_are_scored_and_not_errors(monkeypatch, tmp_path):
    """A hostile program is a wrong program: score 0 and no failure; the same workers then score a right one."""
    monkeypatch.setenv("HOME_OF_SECRETS", "3")
    (tmp_path / "small.py").write_text(
        "from rewards import code; from rewards.runtime import sandbox\n"
        "import functools\n"
        "code.sandbox.Limits = functools.partial(sandbox.Limits, processes=8, file_mb=1, folder_mb=1)\n"
        "compute_score = code.compute_score\n")
    with RewardPool(f"{tmp_path}/small.py", num_workers=2, timeout_s=20,
                    kwargs='{"timeout_s": 2.5, "memory_mb": 200}') as pool:
        workers = {worker.process.pid for worker in pool.workers.values()}
        for index, attack in enumerate(ATTACKS.values()):
            pool.submit(index, "apps", f"```python\n{attack}\n```", SUMS)
        results = pool.results()
        pool.submit(0, "apps", ADD, SUMS)
        assert pool.results().scores == [1.0]
        assert workers <= {worker.process.pid for worker in pool.workers.values()}
    assert results.failures == [None] * len(ATTACKS)
    assert results.scores == [0.0] * len(ATTACKS)
    timeouts = [name for name, extra in zip(ATTACKS, results.extras) if extra["case_timeout"]]
    assert {"loop", "fork"} <= set(timeouts)
