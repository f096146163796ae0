"""The code rewards: cases worked by hand, and attacks through the pool."""

import json
import sys
import time

import pytest

from common.rollout import Sample
from common.rollouts.validation import acc_and_vote, metrics_of
from rewards import code
from rewards.runtime.pool import RewardPool
from rewards.runtime.replies import reply_of
from rewards.sandbox import sandbox
from tests.rewards.jail_tools import needs_isolation

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


ADD = "```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8"], "outputs": ["3\n", "7\n", "11\n", "15"]}
CALL = {"inputs": [[[1, 2], 3], "[4]\n5"], "outputs": [[1, 2, 3], [[4, 5]]], "fn_name": "f"}
ASSERT = {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]}


@needs_isolation
@pytest.mark.parametrize(("response", "truth", "score", "verdict"), [
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
    ("```python\nprint(int(input()) + 1)\n```", {"inputs": ["1" + "0" * 5000], "outputs": ["1" + "0" * 4999 + "1"]},
     1.0, "passed"),                                                     # Python itself reads 4,300 digits
    ("```python\ndef f(n): return n and 1 + f(n - 1)\nprint(f(5000))\n```", {"inputs": [""], "outputs": ["5000"]}, 1.0,
     "passed"),                                                          # and goes 1,000 calls deep
    ("```python\nprint('a\\n b ')\n```", {"inputs": [""], "outputs": [["a", "b"]]}, 1.0, "passed"),
    ("```python\nfrom __future__ import annotations\ndef f(a: List[int], b): print('noise'); return (*a, b)\n```",
     CALL, 1.0, "passed"),
    ("```python\nclass Solution:\n    def f(self, a, b): return a + [b]\n```", CALL, 1.0, "passed"),
    ("```python\ndef f(a, b): return a + b\n```",
     {"inputs": ['"a\u2028b"\n"c"'], "outputs": ["a\u2028bc"], "fn_name": "f"}, 1.0, "passed"),
    # APPS' own harness compares values, and LiveCodeBench's reads JSON on both sides
    ("```python\ndef f(a, b): return str(int(a) + int(b))\n```",
     {"inputs": [["123", "456"]], "outputs": ["579"], "fn_name": "f"}, 1.0, "passed"),
    ("```python\ndef f(text): return text[::-1]\n```", {"inputs": [['"ab"']], "outputs": ['"ba"'], "fn_name": "f"}, 1.0,
     "passed"),
    ("```python\ndef f(a, b): return int(a) + int(b)\n```",
     {"inputs": ['"123"\n"456"'], "outputs": ["579"], "fn_name": "f"}, 1.0, "passed"),
    ("```python\ndef f(a, b): return str(int(a) + int(b))\n```",
     {"inputs": ['"123"\n"456"'], "outputs": ["579"], "fn_name": "f"}, 0.0, "wrong answer"),
    ("```python\ndef f(a, b): return a\n```", CALL, 0.0, "wrong answer"),
    ("```python\ndef g(a, b): return a\n```", CALL, 0.0, "wrong answer"),
    ("```python\ndef f(x): return x + 1\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 1.0, "passed"),
    ("```python\ndef f(x): return 2\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 0.0, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", {"functional": f"assert f(1{'0' * 5000}) == 1{'0' * 4999}1"}, 1.0,
     "passed"),
    ("```python\ndef f(x): return 2\n```", ASSERT, 0.5, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", ASSERT | {"inputs": ["", ""], "outputs": [None, None]}, 1.0, "passed"),
    ("```python\nimport sys; sys.exit(0)\n```", {"functional": "assert False"}, 0.0, "exit code 1"),
    ("```python\nimport os; os._exit(0)\n```", {"functional": "assert False"}, 0.0, "exit code 1"),
])
def test_code_scores_cases_worked_by_hand(response, truth, score, verdict):
    timeout_s = 1.0 if verdict == "timeout" else 20.0
    result = code.compute_score("apps", response, truth, timeout_s=timeout_s, total_s=60.0)
    assert result == {"score": score, "acc": score == 1.0, "verdict": verdict, "case_timeout": verdict == "timeout"}


@needs_isolation
def test_the_verdicts_on_programs_are_no_votes():
    """Three of eight programs are right. Were verdicts answers, "passed" would be the most frequent one: maj@8 = 1."""
    responses = [ADD] * 3 + ["print(4)"] * 2 + ["raise SystemExit(1)"] * 2 + ["raise SystemExit(2)"]
    rows = []
    for i, response in enumerate(responses):
        reply = reply_of("code", code.compute_score("apps", response, SUMS, max_cases=1, timeout_s=20.0, total_s=60.0))
        sample = Sample(i, 0, 0, None, score=reply["score"], extras=reply["extra"])
        rows.append(("apps", 0, *acc_and_vote(sample)))
    metrics = metrics_of(rows, greedy=False)
    assert metrics["val-core/apps/acc/mean@8"] == 3 / 8 and metrics["val-core/apps/acc/best@8/mean"] == 1.0
    assert not [name for name in metrics if "maj" in name]


@needs_isolation
def test_code_all_or_nothing_and_the_number_of_cases(monkeypatch):
    three = "```python\nprint(3)\n```"
    assert code.compute_score("apps", three, SUMS, continuous=False)["score"] == 0.0
    times = {"timeout_s": 20, "total_s": 60}
    assert code.compute_score("apps", three, SUMS, continuous=False, max_cases=1, **times)["score"] == 1.0
    assert code.compute_score("apps", ADD, SUMS, continuous=False, **times)["score"] == 1.0
    deadlines = []

    def slow(program, given, limits, isolated, forks):
        deadlines.append(limits.timeout_s)
        time.sleep(0.2)
        return sandbox.Result(0 if len(deadlines) < 4 else None, "3", "")

    monkeypatch.setattr(sandbox, "run", slow)
    result = code.compute_score("apps", three, {"inputs": [""] * 9, "outputs": ["3"] * 9}, timeout_s=20, total_s=20.1)
    assert result == {"score": 3 / 9, "acc": False, "verdict": "timeout", "case_timeout": True}
    assert deadlines[0] == 20                              # of the case
    assert 19.5 > deadlines[3] > 0                         # what is left of all cases' time
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
        "from rewards import code; from rewards.sandbox import sandbox\n"
        "import functools\n"
        "code.sandbox.Limits = functools.partial(sandbox.Limits, threads=8, file_mb=1, folder_mb=1)\n"
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


# programs that do not compute f, for `assert f(1) == 2` and `assert f(2) == 3`
FAKES = {
    "exec is print": "exec = print",
    "exec does nothing": "def exec(*a): pass",
    "compile empties the case": "def compile(*a): return 'pass'",
    "an == that is always true": "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
    "an int with such an ==": "class Yes(int):\n    def __eq__(self, other): return True\n"
                              "    __hash__ = int.__hash__\ndef f(x): return Yes(0)",
    "mock.ANY": "from unittest import mock\ndef f(x): return mock.ANY",
    "the caller's variables": "import os, sys\nprint('\\n' + sys._getframe(1).f_locals['secret'], flush=True)\n"
                              "os._exit(0)",
    "the caller's constants": "import re, sys\ntext = str(sys._getframe(1).f_code.co_consts)\n"
                              "def f(x): return int(re.search(rf'assert f.{x}. == (.)', text)[1])",
    "standard input again": "import os\nprint('\\n' + os.pread(0, 100, 0).decode(), flush=True)\nos._exit(0)",
    "at exit": "import atexit, os, sys\nframe = sys._getframe(1)\natexit.register(lambda: (print('\\n' + "
               "frame.f_locals['secret'], flush=True), os._exit(0)))",
    "main.py": "import re\ntext = open('/box/main.py').read()\n"
               "def f(x): return int(re.search(rf'assert f.{x}. == (.)', text)[1])",
    "another thread": "import os, sys, threading, time\nframe = sys._getframe(1)\ndef late():\n    "
                      "print('\\n' + frame.f_locals['secret'], flush=True)\n    os._exit(0)\n"
                      "def f(x):\n    late()",
    "exit code 0": "import os\nos._exit(0)",
    "killing the judge": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM)",
    "the judge's files": "import glob, os, re\ntext = ''.join(open(name, errors='replace').read() for name in "
                         "glob.glob('/box/*') + glob.glob('/proc/*/fd/*'))\n"
                         "def f(x): return int(re.search(rf'assert f.{x}. == (.)', text)[1])",
}


@needs_isolation
@pytest.mark.parametrize("fake", FAKES)
def test_assertions_cannot_be_faked(fake):
    truth = {"functional": "assert f(1) == 2\nassert f(2) == 3"}
    result = code.compute_score("mbpp", f"```python\n{FAKES[fake]}\n```", truth, timeout_s=20, total_s=60)
    assert result["score"] == 0.0


@needs_isolation
def test_a_program_gives_an_assertion_no_name_that_it_was_not_asked_for():
    """It is asked for what it defines. Here `pack` of the harness, in its own process, adds `set` to that."""
    program = """
import __main__
honest = __main__.pack
def similar(a, b): return None
def pack(value, refer):
    if isinstance(value, dict) and "similar" in value:
        value = {**value, "set": lambda *_: 0}
    return honest(value, refer)
__main__.pack = pack
"""
    truth = {"functional": "assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))"}
    result = code.compute_score("mbpp", f"```python\n{program}\n```", truth, timeout_s=20, total_s=60)
    assert result["score"] == 0.0


@needs_isolation
def test_the_judge_cannot_be_looked_into():
    """ptrace and process_vm_readv are refused, and starting a process is; the program says so itself."""
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tries():
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    errors = []
    parent = os.getppid()
    for call in (lambda: libc.ptrace(16, parent, 0, 0), lambda: libc.syscall(number, parent, 0, 0, 0, 0, 0)):
        assert call() == -1
        errors.append(ctypes.get_errno())
    try:
        os.fork()
    except PermissionError:
        return errors
"""
    assert code.compute_score("mbpp", program, {"functional": "assert tries() == [1, 1]"}, timeout_s=20,
                              total_s=60)["score"] == 1.0


@needs_isolation
def test_names_of_python_decide_no_assertion():
    """`isclose`, `all`, `len` and `set` of the program are not taken, but a function that has to be called `sum` is."""
    program = "def isclose(*a): return True\nall = any = isclose\ndef set(x): return 0\ndef f(x): return [x]\n" \
              "def sum(a, b): return 7 if b else 8\n"
    cases = ["assert isclose(f(1), 2)", "assert all([f(1) == 2])", "assert set(f(1)) == set([2, 3])",
             "assert any(f(0))", "assert sum(1, 2) == 7",
             "def check(candidate):\n    assert candidate(1, 0) == 8\ncheck(sum)"]
    result = code.compute_score("mbpp", program, {"assert_case": cases}, timeout_s=20, total_s=60)
    assert result["score"] == 2 / 6


@needs_isolation
@pytest.mark.parametrize(("inputs", "types"), [
    ([{"1": 2, "-3": 4}, {"1": 2}], ["int int", "str"]),                # APPS' harness looks at the first one only
    ('{"10": 1}\n[{"1": 2}]', ["int", "list"]),
    ([{"1": {"2": 3}}], ["int"]), ([{"1": 2, "a": 3}], ["str str"]), ([{"01": 2}], ["str"]),
    ([{"9" * 5000: 2}], ["str"]), ([[{"1": 2}]], ["list"]), ([{}], [""]), ([], []),
])
def test_a_function_gets_its_dict_with_integer_keys(inputs, types):
    program = "def f(*arguments):\n    return [' '.join(type(key).__name__ for key in a) if isinstance(a, dict) else " \
              "type(a).__name__ for a in arguments]"
    truth = {"inputs": [inputs], "outputs": [types], "fn_name": "f"}
    assert code.compute_score("apps", program, truth, timeout_s=20)["verdict"] == "passed"
    same = {"inputs": [[{"1": [2], "3": {"4": 5}}]], "outputs": [{"1": [2], "3": {"4": 5}}], "fn_name": "f"}
    assert code.compute_score("apps", "def f(x): return {1: x[1], 3: {4: 5}}", same, timeout_s=20)["score"] == 1.0


# As LiveCodeBench's and APPS' harnesses import them: of two modules' names the later one's, a module's own name last.
GRANTED = """
print(ascii_lowercase[:3], capwords("a b"), string.digits, add(1, 2), itemgetter(1)("ab"), operator.mul(2, 3))
print(deepcopy([1]), copy.copy([2]), choice([3]), random.choice([4]), mean([1, 3]), statistics.median([1, 2, 9]))
print(timedelta(days=2).days, datetime.datetime(2024, 2, 29).day, findall("a.", "abac"), re.sub("a", "b", "a"))
print(sub(7, 2), gcd(4, 6), pow(2, 5, 7), math.pow(2, 5), Counter("aa")["a"], next(count(5)), reduce(add, [1, 2, 3]))
print(nsmallest(1, [3, 2]), heapq.nlargest(1, [3, 2]), bisect.bisect_left([1, 2], 2), bisect_right([1, 2], 2))
print(StringIO("x").read(), io.BytesIO(b"y").read(), maxsize == sys.maxsize, loads("[1]"), json.dumps({}), List[int])
print(stdin.readline().strip(), time.time() > 0, fractions.Fraction(1, 2), open is io.open)
print(type(compile("1", "", "eval")))
"""
GIVES = """
abc A B 0123456789 3 b 6
[1] [2] 3 4 2 2
2 29 ['ab', 'ac'] b
5 2 4 32.0 2 5 6
[2] [3] 1 2
x b'y' True [1] {} typing.List[int]
word True 1/2 True
<class 'code'>
"""


@needs_isolation
def test_programs_get_the_names_that_benchmarks_give_them():
    inside = "class A:\n    def solve(self):\n        exec(" + repr(GRANTED) + ")\nA().solve()"
    for program in (GRANTED, inside):
        truth = {"inputs": ["word\n"], "outputs": [GIVES]}
        assert code.compute_score("livecodebench", program, truth, timeout_s=20)["verdict"] == "passed"
    names = ("search", "add", "path", "mode", "f")  # of methods, and of what re, operator, sys and statistics have
    program = "class Solution:\n" + "".join(
        f"    def {name}(self, x: Optional[int]) -> List[int]: return [x, ascii_lowercase[x], mean([x])]\n"
        for name in names)
    for name in names:
        truth = {"inputs": ["2"], "outputs": ['[2, "c", 2]'], "fn_name": name}
        assert code.compute_score("livecodebench", program, truth, timeout_s=20)["verdict"] == "passed", name


@needs_isolation
def test_assertions_get_none_of_the_further_names():
    """`add` is the program's also where that decides the verdict, what it imported is its own, `mean` is nobody's."""
    program = "from operator import mul\nfrom math import gcd\ndef add(a, b): return a * b\ndef f(x): return [x]\n"
    right = ["wanted = 6\nassert add(2, 3) == wanted", "assert mul(2, 3) == 6", "assert gcd(2, 4) == 2"]
    wrong = ["assert mean(f(3)) == 3", "assert choice(f(3)) == 3", "assert time"]
    for case in right + wrong:
        result = code.compute_score("mbpp", program, {"functional": case}, timeout_s=20)
        assert result["acc"] == (case in right), case


RIGHT = '''
import json as function
import unittest
from collections import Counter, namedtuple
Pair = namedtuple("Pair", "a b")
json = 3
class Node:
    """A tree."""
    def __init__(self, value): self.value, self.left = value, None
def depth(node): return 1 + depth(node.left) if node else 0
def sort_in_place(values): values.sort()
def three(): yield from (1, 2, 3)
def types(x): return {"list": [1.5, None], "tuple": Pair(1, 2), "set": {1}, "dict": Counter("aab"), "b": b"x",
                      "complex": 1j, "bool": True, "range": range(3), "array": __import__("numpy").arange(3),
                      "big": 10 ** 5000}[x]
def fail(x): raise ValueError("no")
class Solution:
    def twice(self, x): return 2 * x
if __name__ == "__main__":
    n = int(input())
    unittest.main()
'''
CASES = """
import datetime
assert depth(None) == 0
root = Node(4)
root.left = Node(3)
assert depth(root) == 2 and root.left.value == 3 and isinstance(root, Node)
values = [3, 1, 2]
assert sort_in_place(values) is None
assert values == [1, 2, 3]
assert list(three()) == [1, 2, 3] and next(three()) == 1
assert types("list") == [1.5, None] and types("tuple") == (1, 2) and types("set") == {1}
assert types("dict") == {"a": 2, "b": 1} and types("b") == b"x" and types("complex") == 1j
assert types("range") == range(3) and types("array") == [0, 1, 2]
assert types("bool") is True and types("big") == 10 ** 5000
assert Solution().twice(x=4) == 8
try:
    fail(1)
except ValueError as error:
    assert str(error) == "no"
else:
    assert False
"""


@needs_isolation
def test_programs_are_imported_as_modules():
    """A main block with input(), unittest.main() or sys.exit() does not run; helpers may have any name."""
    result = code.compute_score("mbpp", RIGHT, {"assert_case": [CASES, CASES + "assert Solution().twice(1) == 3"]},
                                timeout_s=20, total_s=60)
    assert result["score"] == 0.5
    for end in ("import sys\nif __name__ == '__main__':\n    sys.exit(f(int(input())))", "function = json = 7",
                "import json\njson.dumps = lambda *a, **k: '3'"):
        program = f"def f(a, b): return (*a, b)\n{end}\n"
        assert code.compute_score("apps", program, CALL, timeout_s=20, total_s=60)["score"] == 1.0, end
    script = "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()\n"
    assert code.compute_score("apps", script, SUMS, timeout_s=20, total_s=60)["score"] == 1.0


@needs_isolation
def test_an_assertion_that_cannot_be_judged_is_an_error_and_no_score():
    for case, message in (("assert f(lambda x: x) == 1", "function cannot be given to the program"),
                          ("assert f(1) ==", "invalid syntax")):
        with pytest.raises(RuntimeError, match=f"cannot be judged: .*{message}"):
            code.compute_score("mbpp", "def f(g): return g(1)", {"functional": case}, timeout_s=20, total_s=60)
    hostile = "def f(g): raise SyntaxError('assertion')"   # the program cannot make itself such an error
    assert code.compute_score("mbpp", hostile, {"functional": "f(1)"}, timeout_s=20, total_s=60)["score"] == 0.0


@needs_isolation
def test_hostile_output_is_a_wrong_answer():
    """Neither an error nor a cost: deep nesting, megabytes of lines, numbers that no float holds."""
    call = {"inputs": [[1]], "outputs": [3], "fn_name": "f"}
    write = "import os\nfor d in range(3, 9):\n    try: os.write(d, b'%s')\n    except OSError: pass\nos._exit(0)"
    for text in ("[' * 0 + b'[' * 100000 + b'\\n", '{"value": ["handle", 3]}\\n', '{}\\n', '3\\n',
                 '{"value": ["tuple", 1, ["list"]]}\\n', '{"value": ["Decimal", "x"]}\\n', "7" * 9000 + "\\n",
                 '{"value": ["Decimal", "sNaN"]}\\n', '{"value": ["Fraction", "1e5000"]}\\n'):
        result = code.compute_score("apps", write % text, call, timeout_s=20, total_s=60)
        assert result["score"] == 0.0, text
    start = time.process_time()
    assert not code.same_text("1\n" * (8 << 20), "1\n" * 100)
    assert not code.same_value('{"value": ["list"' + ", 1" * (4 << 20) + "]}", [1])
    assert not code.same_value("[" * 100_000, [1])
    assert not code.same_value('{"value": ["Fraction", "1e9999999"]}', [1])
    assert time.process_time() - start < 0.5


def test_extract_program_takes_no_time():
    start = time.process_time()
    for text in ("```python" * 20_000, "```python\n" * 20_000, "```\n" * 50_000, "```python " * 20_000 + "\n",
                 "`" * 200_000):
        code.extract_program(text)
    assert time.process_time() - start < 0.5
    assert code.extract_program("```\na\n```\n```py\nb\n```\n```python\nc\n```\n```python x\nd") == "d"
    assert code.extract_program("```cpp\na\n```") == "a\n"
    assert code.extract_program("```") == "```"


@pytest.mark.parametrize(("text", "wanted", "same"), [
    ("1000000500.0", "1000000007", False),
    ("1000000500", "1000000007.0", False),
    ("1000000007.0", "1000000007", True),
    ("3", "3.0", True),
    ("0.3333334", "0.3333333", True),
    ("2.9999999", "3.0", True),
    ("2.99", "3.0", False),
    ("1e3", "1000", True),
    ("nan", "3", False),
    ("10000000000000001", "10000000000000000.0", False),
])
def test_numbers_in_outputs(text, wanted, same):
    assert code.same_text(text, wanted) == same
