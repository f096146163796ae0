"""Programs with the tests' feedback: the model sees the first test that fails and may write its program again.

    python data/mbpp.py --out data/mbpp
    --rollout.episode envs/code_feedback.py --rollout.max-turns 4 --train-data data/mbpp/train.parquet

Rows of all forms that rewards/code.py scores, and as many of their tests. Programs run in its sandbox (envs/programs.py
says which, and how many at the same time). With --rollout.tool-timeout-s T, the tests of a program may take T - 5 s.
"""

import asyncio
import time

from envs import tools
from envs.programs import find_sandbox, tool_timeout_s
from rewards.code import MAX_CASES, cases_of, extract_program, judge
from rewards.sandbox.sandbox import Limits

CASE_S = 4.0  # seconds of one test
SPARE_S = 5.0  # seconds of --rollout.tool-timeout-s for all but the tests
MAX_SHOWN = 1000  # characters of a test
LATE = "no time left"
SANDBOX = find_sandbox("envs/code_feedback.py")
if tool_timeout_s() < CASE_S + SPARE_S:
    raise ValueError(f"--rollout.episode envs/code_feedback.py: --rollout.tool-timeout-s {tool_timeout_s():g} must be "
                     f"at least {CASE_S + SPARE_S:g}: a test may take {CASE_S:g} s, and {SPARE_S:g} s are kept for all "
                     f"else")
PLACES = tools.Limits(at_once=SANDBOX.at_once)


async def episode(chat, row):
    """The reward is the share of tests that the last program passes, as rewards/code.py counts it. A turn's reward, for
    `grpo_variants.py --advantage-per-step`, is the share of tests that the turn's program passes."""
    cases = cases_of(row["reward_model"]["ground_truth"])[:MAX_CASES]
    text = await chat.reply()
    turn_scores = []
    while text is not None:
        async with PLACES.place("code_feedback", chat.restart_clock):
            verdicts = await asyncio.to_thread(run_tests, extract_program(text), cases, chat.timeout_s - SPARE_S)
        turn_scores.append(verdicts.count("passed") / len(cases))
        if turn_scores[-1] == 1.0:
            break
        first = next(place for place, verdict in enumerate(verdicts) if verdict != "passed")
        text = await chat.reply({"role": "user", "content": feedback(cases[first], verdicts[first])})
    score = turn_scores[-1] if turn_scores else 0.0
    return {"score": score, "acc": float(score == 1.0), "programs": chat.turns, "turn_scores": turn_scores}


def run_tests(program: str, cases: list[tuple], total_s: float) -> list[str]:
    """The result of each test, "passed" or an error; nothing after a test that took too long, or for which the time of
    all tests did not last (LATE)."""
    end = time.monotonic() + total_s
    verdicts = []
    for case in cases:
        timeout_s = min(CASE_S, end - time.monotonic())
        verdict = "timeout"
        if timeout_s > 0.1:  # in less no program starts
            verdict = judge(program, case, Limits(timeout_s=timeout_s), SANDBOX.url, SANDBOX.isolated)
        if verdict == "timeout":
            verdicts.append(LATE if verdicts and timeout_s < CASE_S else verdict)
            break
        verdicts.append(verdict)
    return verdicts


def feedback(case: tuple, verdict: str) -> str:
    kind, given, wanted = case
    if kind == "assert":
        test = given
    else:
        test = f"input:\n{given:.{MAX_SHOWN}}\nexpected output:\n{wanted}"
    found = f"Your program fails this test ({verdict})"
    if verdict == LATE:
        found = "Your program is too slow: the tests together took too long, and this one did not end"
    return f"{found}:\n{test:.{MAX_SHOWN}}\nCorrect it, and write the whole program in one ```python block."
