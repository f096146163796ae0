"""Programs with the tests' feedback: the model sees the first test that fails and may write its program again.

    python data/mbpp.py --out data/mbpp
    --rollout.episode envs/code_feedback.py --rollout.max-turns 4 --train-data data/mbpp/train.parquet

Rows of all forms that rewards/code.py scores. Programs run in its sandbox (envs/programs.py says which). With
--rollout.tool-timeout-s T, the tests of a program may take T - 5 s.
"""

import asyncio
import time

from envs.programs import find_sandbox
from rewards.code import cases_of, extract_program, judge
from rewards.runtime.sandbox import Limits

CASE_S = 4.0  # seconds of one test
MAX_SHOWN = 1000  # characters of a test
SANDBOX = find_sandbox("envs/code_feedback.py")


async def episode(chat, row):
    """The reward is the share of tests that the last program passes, as rewards/code.py counts it. A turn's reward, for
    `grpo_variants.py --advantage-per-step`, is the share of tests that the turn's program passes."""
    cases = cases_of(row["reward_model"]["ground_truth"])
    text = await chat.reply()
    turn_scores = []
    while text is not None:
        verdicts = await asyncio.to_thread(run_tests, extract_program(text), cases, chat.timeout_s - 5)
        turn_scores.append(verdicts.count("passed") / len(cases))
        if turn_scores[-1] == 1.0:
            break
        first = next(place for place, verdict in enumerate(verdicts) if verdict != "passed")
        text = await chat.reply({"role": "user", "content": feedback(cases[first], verdicts[first])})
    score = turn_scores[-1] if turn_scores else 0.0
    return {"score": score, "acc": float(score == 1.0), "programs": chat.turns, "turn_scores": turn_scores}


def run_tests(program: str, cases: list[tuple], total_s: float) -> list[str]:
    """The result of each test, "passed" or an error; nothing after a test that took too long."""
    end = time.monotonic() + total_s
    verdicts = []
    for case in cases:
        limits = Limits(timeout_s=min(CASE_S, max(0.1, end - time.monotonic())))
        verdicts.append(judge(program, case, limits, SANDBOX.url, SANDBOX.isolated))
        if verdicts[-1] == "timeout":
            break
    return verdicts


def feedback(case: tuple, verdict: str) -> str:
    kind, given, wanted = case
    if kind == "assert":
        test = given
    else:
        test = f"input:\n{given:.{MAX_SHOWN}}\nexpected output:\n{wanted}"
    return (f"Your program fails this test ({verdict}):\n{test:.{MAX_SHOWN}}\nCorrect it, and write the whole program "
            f"in one ```python block.")
