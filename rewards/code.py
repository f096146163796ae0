"""Score of a Python program by test cases, in the sandbox: verl's codecontests, apps, codeforces and taco.

ground_truth is a JSON text or dict in one of verl's forms:
  {"inputs": [...], "outputs": [...]}                     each input to standard input, each output expected there
  {"inputs": [...], "outputs": [...], "fn_name": "f"}     a call: a list of arguments, or text with one JSON a line
  {"assert_case": ["assert f(1) == 2", ...]}              code run after the program, one case each
  {"functional": "assert f(1) == 2\n..."}                 the same as one case
The expected outputs never enter the sandbox. Assertions must, and run in the program's own process: it cannot pass by
ending early, but one that takes its caller apart could.
"""

import contextlib
import json
import math
import re
import secrets
import sys
import time

from rewards.runtime import sandbox

IMPORTS = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, operator, random, re, string, sys
from math import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from typing import *
from builtins import *
import math
"""  # what such tasks take for granted
# the solution's source is data here, so that its __future__ imports stay legal
SOLUTION = IMPORTS + "exec(compile({program!r}, 'solution.py', 'exec'))\n"
CALL = SOLUTION + """
function = globals().get({name!r}) or Solution().{name}
print("\\n" + json.dumps(function(*json.loads(sys.stdin.read())), default=list))
"""
ASSERT = IMPORTS + """
def check(secret):
    exec(compile({program!r}, 'solution.py', 'exec'), globals())
    exec(compile({case!r}, 'case.py', 'exec'), globals())
    print("\\n" + secret)
check(sys.stdin.readline())
"""


def extract_program(solution_str: str) -> str:
    """The last ```python block, else the last block of any language, else all; a block may lack its end."""
    for opening in ("```python", "```py", "```"):
        blocks = re.findall(re.escape(opening) + r"[^\n]*\n(.*?)(?:```|\Z)", solution_str, flags=re.DOTALL)
        if blocks:
            return blocks[-1]
    return solution_str


def cases_of(ground_truth: str | dict) -> list[tuple[str, str, object]]:
    """(kind, input, expected output) of each case; ValueError if it is in none of the forms."""
    truth = json.loads(ground_truth, parse_int=integer) if isinstance(ground_truth, str) else ground_truth
    if "functional" in truth:
        return [("assert", truth["functional"], None)]
    if any(truth.get("assert_case") or []):
        return [("assert", case, None) for case in truth["assert_case"]]
    inputs, outputs = truth.get("inputs", []), truth.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; the rule is "
                         f"as many of both and at least one, or assert_case, or functional")
    if not truth.get("fn_name"):
        return [("stdin", text_of(given), text_of(wanted)) for given, wanted in zip(inputs, outputs)]
    return [(f"call {truth['fn_name']}", json.dumps(
        [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given), wanted)
        for given, wanted in zip(inputs, outputs)]


def integer(digits: str) -> int | str:
    """Some of APPS' integers have more digits than Python reads: they stay text."""
    return int(digits) if len(digits) <= sys.get_int_max_str_digits() else digits


def text_of(value: object) -> str:
    """APPS gives a case's text as one string or as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, continuous=True, max_cases=10,
                  timeout_s=4.0, total_s=8.0, memory_mb=1024, sandbox_fusion_url=None,
                  allow_weak_sandbox=False) -> dict:
    """score: the share of the first max_cases that pass (verl's `continuous`), else 1 if all do. timeout_s is each
    case's, total_s all cases' together (keep it below --reward.timeout-s); the first time-out ends the sample."""
    isolated = sandbox_fusion_url or sandbox.isolation(allow_weak_sandbox)
    program = extract_program(solution_str)
    cases = cases_of(ground_truth)[:max_cases]
    start, passed, pred = time.monotonic(), 0, "passed"
    for case in cases:
        limits = sandbox.Limits(min(timeout_s, max(0.1, total_s - (time.monotonic() - start))), memory_mb)
        verdict = judge(program, *case, limits, sandbox_fusion_url, isolated)
        passed += verdict == "passed"
        if verdict != "passed":
            pred = verdict if pred == "passed" else pred
            if verdict == "timeout" or not continuous:
                break
    acc = passed == len(cases)
    return {"score": passed / len(cases) if continuous else float(acc), "acc": acc, "pred": pred,
            "case_timeout": pred == "timeout"}


def judge(program: str, kind: str, given: str, wanted: object, limits: sandbox.Limits, url: str | None,
          isolated: bool) -> str:
    """"passed" or what went wrong in one case."""
    kind, _, name = kind.partition(" ")
    if kind == "assert":
        wanted = secrets.token_hex()
        program, given = ASSERT.format(program=program, case=given), wanted
    elif kind == "call":
        program = CALL.format(program=program, name=name)
    result = (sandbox.run_remote(url, program, given, limits) if url
              else sandbox.run(program, given, limits, isolated))
    if result.exit_code is None:
        return "timeout"
    if result.exit_code != 0:
        return f"exit code {result.exit_code}"
    if kind == "stdin":
        return "passed" if same_text(result.stdout, wanted) else "wrong answer"
    last = result.stdout.rstrip().rpartition("\n")[2]
    if kind == "assert":
        return "passed" if last == wanted else "ended before the assertions"
    return "passed" if same_value(last, wanted) else "wrong answer"


def same_value(text: str, wanted: object) -> bool:
    """A returned value against the expected one, a JSON text or a value; APPS wraps some in a list."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if isinstance(wanted, str):
        with contextlib.suppress(ValueError):  # a bare string is itself
            wanted = json.loads(wanted)
    wanted = json.loads(json.dumps(wanted))    # tuples to lists, keys to text: as the value went
    return value == wanted or [value] == wanted or same_number(str(value), str(wanted))


def same_text(text: str, wanted: str) -> bool:
    """Equal lines but for white space at ends; or equal words, of which decimal fractions may differ by 1e-6."""
    lines, wanted_lines = ([line.strip() for line in x.strip().splitlines()] for x in (text, wanted))
    if lines == wanted_lines:
        return True
    words, wanted_words = text.split(), wanted.split()
    return len(words) == len(wanted_words) and all(
        a == b or same_number(a, b) for a, b in zip(words, wanted_words))


def same_number(text: str, wanted: str) -> bool:
    """Decimal fractions within 1e-6, absolute or relative; integers must be equal as text."""
    if not any(mark in text + wanted for mark in ".e"):
        return False
    try:
        return math.isclose(float(text), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def check(sandbox_fusion_url=None, allow_weak_sandbox=False, **_) -> None:
    """Before training: RuntimeError if programs cannot be isolated."""
    sandbox_fusion_url or sandbox.isolation(allow_weak_sandbox)
