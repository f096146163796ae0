"""Score of a Python program by test cases, in the sandbox: verl's codecontests, apps, codeforces and taco.

ground_truth is a JSON text or dict in one of verl's forms:
  {"inputs": [...], "outputs": [...]}                     each input to standard input, each output expected there
  {"inputs": [...], "outputs": [...], "fn_name": "f"}     a call: a list of arguments, or text with one JSON a line
  {"assert_case": ["assert f(1) == 2", ...]}              code that calls the program's functions, one case each
  {"functional": "assert f(1) == 2\n..."}                 the same as one case
The program runs as a script in the first form, so its main block runs; in the others it is imported as a module. It
never sees an expected value and never shares a process with the verdict: outputs and results of calls are compared
here, assertions run in a second process of the sandbox that gets nothing but data from the program (harness.py), and
of its names only those that they test (asked.py).
"""

import contextlib
import json
import math
import re
import sys
import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from rewards.sandbox import asked, harness, sandbox

HARNESS = Path(asked.__file__).read_text() + Path(harness.__file__).read_text()
MAX_CASES = 10  # of which a score is made
MARGIN = 1 << 16  # characters that an output may be longer than twice the expected one (a result: 20 times) to be read


def extract_program(solution_str: str) -> str:
    """The last ```python block, else the last block of any language, else all; a block may lack its end."""
    for opening in ("```python", "```py", "```"):
        found = last_block(solution_str, opening)
        if found is not None:
            return found
    return solution_str


def last_block(text: str, opening: str) -> str | None:
    """The lines between the last `opening` line and the next ```, each character read once."""
    block = None
    start = text.find(opening)
    while start >= 0 and (begin := text.find("\n", start) + 1):
        end = text.find("```", begin)
        block = text[begin:end] if end >= 0 else text[begin:]
        start = text.find(opening, end + 3) if end >= 0 else -1
    return block


def cases_of(ground_truth: str | dict) -> list[tuple[str, str, object]]:
    """(kind, input, expected output) of each case; ValueError if it is in none of the forms."""
    truth = json.loads(ground_truth, parse_int=integer) if isinstance(ground_truth, str) else ground_truth
    if "functional" in truth:
        return [("assert", truth["functional"], None)]
    if any(truth.get("assert_case") or []):
        return [("assert", case, None) for case in truth["assert_case"]]
    inputs = truth.get("inputs", [])
    outputs = truth.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; the rule is "
                         f"as many of both and at least one, or assert_case, or functional")
    if not truth.get("fn_name"):
        return [("stdin", text_of(given), text_of(wanted)) for given, wanted in zip(inputs, outputs)]
    return [(f"{'call' if isinstance(given, str) else 'values'} {truth['fn_name']}", json.dumps(arguments_of(given)),
             wanted) for given, wanted in zip(inputs, outputs)]


def arguments_of(given: Any) -> list:
    if isinstance(given, str):
        # not splitlines(): a JSON text may hold U+2028 and other line ends of Unicode as they are
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    return given


def with_integer_keys(arguments: list) -> list:
    """JSON has made text of a dict's integer keys. APPS' harness undoes that in the first argument, and in no dict
    inside of one; here too, where all keys are what `str` makes of integers."""
    match arguments:
        case [dict(first), *others] if all(re.fullmatch(r"0|-?[1-9][0-9]{0,4000}", key) for key in first):
            return [{int(key): value for key, value in first.items()}, *others]
    return arguments


def integer(digits: str) -> int | str:
    """Some of APPS' integers have more digits than Python reads: they stay text."""
    return int(digits) if len(digits) <= sys.get_int_max_str_digits() else digits


def text_of(value: object) -> str:
    """APPS gives a case's text as one string or as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, continuous=True, max_cases=MAX_CASES,
                  timeout_s=4.0, total_s=8.0, memory_mb=1024, sandbox_fusion_url=None,
                  allow_weak_sandbox=False) -> dict:
    """score: the share of the first max_cases that pass (verl's `continuous`), else 1 if all do. timeout_s is each
    case's, total_s all cases' together (keep it below --reward.timeout-s); the first time-out ends the sample.
    `verdict`: of the first case that fails, or "passed". It is no "pred": programs that fail alike are no common
    answer, so there is no maj@N."""
    isolated = sandbox_fusion_url or sandbox.isolation(allow_weak_sandbox)
    program = extract_program(solution_str)
    cases = cases_of(ground_truth)[:max_cases]
    start = time.monotonic()
    passed = 0
    first = "passed"  # the verdict on the first case that fails
    for case in cases:
        left_s = total_s - (time.monotonic() - start)
        limits = sandbox.Limits(min(timeout_s, max(0.1, left_s)), memory_mb)
        verdict = judge(program, case, limits, sandbox_fusion_url, isolated)
        passed += verdict == "passed"
        if verdict != "passed":
            first = verdict if first == "passed" else first
            if verdict == "timeout" or not continuous:
                break
    acc = passed == len(cases)
    return {"score": passed / len(cases) if continuous else float(acc), "acc": acc, "verdict": first,
            "case_timeout": first == "timeout"}


def judge(program: str, case: tuple[str, str, object], limits: sandbox.Limits, url: str | None, isolated: bool) -> str:
    """"passed" or what went wrong in one case of `cases_of`. RuntimeError where there is no verdict."""
    kind, given, wanted = case
    kind, _, name = kind.partition(" ")
    role = {"stdin": "run", "call": "serve", "values": "serve", "assert": "judge"}[kind]
    main = f"{HARNESS}\n\nmain({role!r}, {program!r}{', asked_by' if role == 'judge' else ''})\n"
    if role == "serve":
        values = with_integer_keys(json.loads(given, parse_int=integer))
        arguments = ["list", *(harness.pack(value, no_handle) for value in values)]
        given = json.dumps(["list", "call_named", name, arguments]) + "\n"
    if url:
        result = sandbox.run_remote(url, main, given, limits)
    else:
        result = sandbox.run(main, given, limits, isolated, forks=kind == "assert")
    if result.exit_code is None:
        return "timeout"
    if kind == "assert" and result.exit_code == harness.CANNOT_JUDGE:
        raise RuntimeError(f"this assertion cannot be judged: {result.stderr[-300:].strip()}")
    if result.exit_code != 0:
        return f"exit code {result.exit_code}"
    if kind == "stdin":
        return "passed" if same_text(result.stdout, wanted) else "wrong answer"
    if role == "serve":
        # where arguments are values, as in APPS, a text is the result itself and may be JSON too; else it is JSON
        forms = [wanted, json.dumps(wanted)] if kind == "values" else [wanted]
        return "passed" if any(same_value(result.stdout, form) for form in forms) else "wrong answer"
    return "passed"


def no_handle(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is no JSON data")


def same_value(reply: str, wanted: object) -> bool:
    """The program's reply to a call against the expected value, a JSON text or a value; APPS wraps some in a list."""
    if isinstance(wanted, str):
        with contextlib.suppress(ValueError):        # a bare string is itself
            wanted = json.loads(wanted, parse_int=integer)
    text = json.dumps(wanted)
    wanted = json.loads(text, parse_int=integer)     # tuples to lists, keys to text: as the value went
    if len(reply) > 20 * len(text) + MARGIN:
        return False
    try:
        value = plain(json.loads(reply, parse_int=integer)["value"])
        return value == wanted or [value] == wanted or same_number(str(value), str(wanted))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return False  # whatever a program writes is an answer


def plain(packed: object) -> object:
    """The value of `harness.pack`ed plain data. Another kind is a LookupError: no honest reply to a call has one, and a
    Fraction of "1e999999999" would take minutes to read."""
    if not isinstance(packed, list):
        return packed
    kind, *items = packed
    return {"list": list, "tuple": tuple, "dict": dict}[kind](map(plain, items))


def same_text(text: str, wanted: str) -> bool:
    """Equal lines but for white space at ends; or equal words, of which decimal fractions may differ by 1e-6."""
    if len(text) > 2 * len(wanted) + MARGIN:
        return False
    lines, wanted_lines = ([line.strip() for line in x.strip().splitlines()] for x in (text, wanted))
    if lines == wanted_lines:
        return True
    words = text.split()
    wanted_words = wanted.split()
    return len(words) == len(wanted_words) and all(
        a == b or same_number(a, b) for a, b in zip(words, wanted_words))


def same_number(text: str, wanted: str) -> bool:
    """Decimal fractions within 1e-6, absolute or relative. Where one is written as an integer, the values are equal."""
    fractions = [any(mark in number for mark in ".e") for number in (text, wanted)]
    try:
        if all(fractions):
            return math.isclose(float(text), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
        return any(fractions) and Decimal(text) == Decimal(wanted)
    except (ValueError, InvalidOperation):
        return False


def check(sandbox_fusion_url=None, allow_weak_sandbox=False, **_) -> None:
    """Before training: RuntimeError if programs cannot be isolated."""
    sandbox_fusion_url or sandbox.isolation(allow_weak_sandbox)
