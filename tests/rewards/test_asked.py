"""Which names of assertions a program gives, and programs that tried to give others: values worked by hand."""

import builtins

import pytest

from rewards import code
from rewards.sandbox import harness
from rewards.sandbox.asked import asked_by
from tests.rewards.jail_tools import needs_isolation

MBPP_PLUS = """
import numpy as np
def is_floats(x): return isinstance(x, float) or all(isinstance(i, float) for i in [x])
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp): atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp)
    else:
        assert out == exp
inputs = [[10, 15]]
results = [6]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion({name}(*inp), exp, 0)
"""
HUMANEVAL = "METADATA = {{}}\ndef check(candidate):\n    assert abs(candidate(1, 2) - 3) < 1e-6\ncheck({name})"


@pytest.mark.parametrize(("case", "names"), [
    ("assert all([f(1) == 2, f(2) == 3]) == True", ["f"]),
    ("assert sum([f(1) == 2, f(2) == 3]) == 2", ["f"]),
    ("assert bool(f(3) == 9) == True", ["f"]),
    ("assert set([f(1) == 2]) == {True}", ["f"]),
    ("assert isclose(f(2), 1.414, rel_tol=1e-3) == True", ["f"]),
    ("assert len(f([1, 2, 3])) == 3", ["f"]),
    ("assert isinstance(f(1), int)", ["f"]),
    ("assert sum(f(i) for i in range(3)) == 3", ["f"]),
    ("assert abs(f(2) - 1.4) == 0 and round(f(2), 1) == 1.4 and str(f(2)) == '1.4'", ["f"]),
    ("def check(candidate, measure):\n    assert measure(candidate([1])) == 1\ncheck(f, len)", ["f"]),
    ("root = Node(1)\nassert depth(root) == 1", ["Node", "depth"]),
    (MBPP_PLUS.format(name="f"), ["f"]),
    (HUMANEVAL.format(name="f"), ["f"]),
    # the task's function has a name of Python's or a library's: MBPP's tasks 126, 105, 498, 612, and its forms
    ("assert sum(10, 15) == 6", ["sum"]),
    ("assert count([True, False, True]) == 2", ["count"]),
    ("assert 1 == gcd(12, 17)", ["gcd"]),
    ("assert sorted(merge([1], [2])) == [1, 2]", ["merge"]),
    ("assert merge([2, 1]) == sorted([2, 1])", ["merge"]),
    ("assert sorted([2, 1]) == merge([2, 1])", ["merge"]),
    ("assert all([sum(1, 2) == 3, sum(2, 2) == 4])", ["sum"]),
    ("assert count(list('abc')) == 3", ["count"]),
    ("assert filter([0, 1]) == [1]", ["filter"]),
    ("out = lcm(4, 6)\nassert out == 12 and len([out]) == 1", ["lcm"]),
    ("assert all(prod(x) == y for x, y in zip([[1, 2]], [2]))", ["prod"]),
    (MBPP_PLUS.format(name="count"), ["count"]),
    (MBPP_PLUS.format(name="sum"), ["sum"]),
    (HUMANEVAL.format(name="sum"), ["sum"]),
    ("assert 1 + 1 == 2", []),
])
def test_the_program_gives_its_own_names_only(case, names):
    known: dict = {}
    harness.import_into(known, harness.STARRED, harness.MODULES)
    assert asked_by(case, known.keys() | vars(builtins).keys()).names == names


ATTACKS = [
    ("class np:\n    allclose = lambda *a: True", "assert np.allclose(f(1), 2.0)"),
    ("class cmath:\n    isclose = lambda *a: True", "assert cmath.isclose(f(1), 3)"),
    ("class statistics:\n    mean = lambda *a: 3", "assert statistics.mean(f(1)) == 3"),
    ("def len(x): return 3", "assert len(f([1, 2, 3])) == 3"),
    ("def isinstance(*a): return True", "assert isinstance(f(1), int)"),
    ("def zip(*a): return []", "for a, b in zip([1], [2]):\n    assert f(a) == b"),
    ("def sum(*a): return 3", "assert sum(f(i) for i in range(3)) == 3"),
    ("def f(x): raise StopIteration", "assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (2, 3)]))"),
    ("def f(x): raise StopIteration", "for a, b in zip(map(f, [1, 2]), [2, 3]):\n    assert a == b"),
    # results that take what no data takes: a wrong answer, and no lack of a verdict
    ("class L:\n    def __getitem__(self, i): return [1]\ndef f(x): return L()", "assert f(1)[0:2] == [1, 2]"),
    ("class L:\n    def sort(self, key): pass\ndef f(x): return L()",
     "r = f(1)\nr.sort(key=lambda x: x)\nassert r == [1]"),
    ("class f:\n    def __init__(self, x): pass\n    def sort(self, key): pass",
     "r = f(1)\nr.sort(key=lambda x: x)\nassert r == [1]"),
    # the library of the assertions does not answer in the program's place
    ("", "assert gcd(12, 17) == 1"),
    ("def sorted(*a): return None\ndef merge(*a): return None", "assert merge([2, 1]) == sorted([2, 1])"),
]


@needs_isolation
@pytest.mark.parametrize(("program", "case"), ATTACKS)
def test_a_program_decides_no_verdict(program, case):
    program = "def f(x): return None\n" + program
    assert code.compute_score("mbpp", program, {"functional": case}, timeout_s=20, total_s=60)["score"] == 0.0


@needs_isolation
@pytest.mark.parametrize(("program", "case"), [
    ("def max(a, b): return a if a > b else b\ndef len(x): return 7\ndef f(a, b): return [max(a, b)]",
     "assert f(1, 2) == [2] and len(f(1, 2)) == 1"),
    ("def sum(a, b): return a + b", HUMANEVAL.format(name="sum")),
    ("def sum(a, b): return 6", MBPP_PLUS.format(name="sum")),
    ("class Queue:\n    def push(self, x): return x\nqueue = Queue()", "assert queue.push(3) == 3"),
    ("def f(x): return x", "assert np.allclose(f(1.0), 1.0) and statistics.mean(f([1, 3])) == 2"),
    ("class V:\n    def __getitem__(self, i): return [1, 2, 3][i]",
     "assert V()[:2] == [1, 2] and V()[::-1] == [3, 2, 1]"),
    ("def g():\n    yield 1", "i = g()\nassert next(i) == 1\ntry: next(i)\nexcept StopIteration: pass\nelse: assert 0"),
])
def test_right_programs_pass(program, case):
    assert code.compute_score("mbpp", program, {"functional": case}, timeout_s=20, total_s=60)["score"] == 1.0
