"""Software tasks: an issue, a repository, a shell and file tools in a sandbox; hidden tests give the reward.

    python data/toy_repositories.py --out data/toy_repositories
    --rollout.episode envs/swe.py --rollout.tool-parser hermes --rollout.tool-timeout-s 200 \\
        --train-data data/toy_repositories/train.parquet

Rows come from data/toy_repositories.py, data/swe_rows.py (SWE-bench, SWE-Gym) and data/harbor_rows.py (Harbor's task
folders). The row's prompt has the issue. `extra_info.swe` is JSON:

    repo            folder, tar archive, or "base64:" and an archive; for the jail (envs/repository/workspace.py)
    image           or an image for apptainer, with `folder` (where the repository is there) and `setup` (shell commands
                    before each operation)
    tests, patch    the hidden tests: files that are put over the model's (as `repo`; in `tests_folder` if it is there),
                    or a patch of them
    runner          "pytest" or "unittest", with `arguments`: all tests named in `passes` must pass
    command         or a shell command, which must print all lines of `expects`, or writes the reward to `reward_file`
    timeout_s       of a command of the model (30); `tests_timeout_s`: of the tests (120)

The tests run on a copy of the model's files in a fresh sandbox. Files that configure tests, such as conftest.py, are
there as in the snapshot. An exit code decides nothing: `os._exit(0)` in the repaired module makes each one 0. With
`runner` a test counts that the test runner itself reports; with `command` each program under test can print the lines,
or write the reward.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from envs import tools
from envs.programs import find_sandbox, tool_timeout_s
from envs.repository.workspace import SPARE_S, TEST_RUNNER, Container, Jail, is_passed, pack_files, read_reward

MAX_SHOWN = 8000  # characters of a tool's result
DEFAULTS: dict[str, Any] = {
    "repo": "", "image": "", "folder": "/testbed", "setup": "", "tests": "", "tests_folder": "", "patch": "",
    "runner": "", "arguments": [], "passes": [], "command": "", "expects": [], "reward_file": "",
    "timeout_s": 30.0, "tests_timeout_s": 120.0,
}
SANDBOX = find_sandbox("envs/swe.py")
if SANDBOX.url or not SANDBOX.isolated:
    raise ValueError("--rollout.episode envs/swe.py: a shell needs the sandbox of this machine, isolated: "
                     "SANDBOX_FUSION_URL and ALLOW_WEAK_SANDBOX are for single programs")
Do = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Places(tools.Limits):
    """Those of all tools together, and of the tests: each operation is a program on this machine."""

    def place(self, name, restart_clock):
        return super().place("swe", restart_clock)


PLACES = Places(at_once=SANDBOX.at_once)


async def episode(chat, row):
    """The reward is 1 if all tests pass that must, or what the task's own tests wrote."""
    task = read_task(row)
    workspace = open_workspace(task)

    async def do(operation: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(workspace.do, operation)

    try:
        chat.tools = make_tools(do, task["timeout_s"])
        num_calls = 0
        text = await chat.reply()
        while text is not None and chat.tool_calls:
            num_calls += len(chat.tool_calls)
            text = await chat.reply(*await chat.call_tools())
        async with PLACES.place("swe", chat.restart_clock):
            return await asyncio.to_thread(judge, task, workspace) | {"calls": float(num_calls)}
    finally:
        workspace.close()


def read_task(row: dict[str, Any]) -> dict[str, Any]:
    """`extra_info.swe` of a row with the defaults of what it leaves out. Raises ValueError."""
    given = json.loads(row["extra_info"]["swe"])
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise ValueError(f"extra_info.swe has {', '.join(sorted(unknown))}; it may have {', '.join(DEFAULTS)}")
    task = DEFAULTS | given
    if bool(task["repo"]) == bool(task["image"]):
        raise ValueError("extra_info.swe must have either `repo` or `image`")
    verdicts = [bool(task["runner"] and task["passes"]), bool(task["command"] and task["expects"]),
                bool(task["command"] and task["reward_file"])]
    if verdicts.count(True) != 1:
        raise ValueError("extra_info.swe must have either `runner` and `passes`, or `command` and `expects`, or "
                         "`command` and `reward_file`")
    needed_s = max(task["timeout_s"], task["tests_timeout_s"]) + SPARE_S
    if tool_timeout_s() < needed_s:
        raise ValueError(f"--rollout.tool-timeout-s {tool_timeout_s():g} must be at least {needed_s:g}: a command of "
                         f"this row may take {task['timeout_s']:g} s and its tests {task['tests_timeout_s']:g} s, and "
                         f"{SPARE_S:g} s are kept for all else")
    return task


def open_workspace(task: dict[str, Any]) -> Jail | Container:
    if task["image"]:
        return Container(task["image"], task["folder"], task["setup"])
    return Jail(pack_files(task["repo"]))


def make_tools(do: Do, timeout_s: float) -> list[Callable]:
    """What the model may call. `timeout_s`: of a shell command."""

    async def bash(command: str) -> str:
        """Run a shell command in the repository's folder and return what it prints.

        Args:
            command: For example: ls, or python3 -m unittest.
        """
        result = await do({"kind": "command", "command": command, "timeout_s": timeout_s})
        if "error" in result or "lost" in result:
            return result.get("error") or result["output"]
        ended = ""
        if result["code"] is None:
            ended = f"[ended after {timeout_s:g} s]"
        elif result["code"] != 0:
            ended = f"[exit code {result['code']}]"
        return f"{shorten(result['output'])}\n{ended}".strip() or "[it printed nothing]"

    async def read_file(path: str) -> str:
        """Return the text of a file.

        Args:
            path: In the repository's folder.
        """
        result = await do({"kind": "read", "path": path})
        return result.get("error") or shorten(result["output"])

    async def write_file(path: str, text: str) -> str:
        """Write a file, or replace all of its text.

        Args:
            path: In the repository's folder.
            text: All of its text.
        """
        result = await do({"kind": "write", "path": path, "text": text})
        return result.get("error") or result["output"] or "written"

    async def replace_text(path: str, old: str, new: str) -> str:
        """Replace a text in a file, in which it occurs once.

        Args:
            path: In the repository's folder.
            old: The text to replace, with its line breaks and indentation.
            new: What is there afterwards.
        """
        result = await do({"kind": "replace", "path": path, "old": old, "new": new})
        return result.get("error") or result["output"] or "replaced"

    made: list[Any] = [bash, read_file, write_file, replace_text]
    for tool in made:
        tool.limits = PLACES
    return made


def shorten(text: str) -> str:
    """Its begin and its end, if it is long."""
    left_out = len(text) - MAX_SHOWN
    if left_out <= 0:
        return text
    return f"{text[: MAX_SHOWN // 2]}\n[{left_out} characters left out]\n{text[-MAX_SHOWN // 2 :]}"


def judge(task: dict[str, Any], workspace: Jail | Container) -> dict[str, float]:
    """Run the hidden tests on the model's files, in a fresh workspace. Where they cannot run because of what the model
    left there, or write no reward, the score is 0 and `tests_not_run` is 1: an error would be dropped, and not teach it
    anything. `runner_changed`: tests do not count because the code under test changed the test runner."""
    tests = pack_files(task["tests"]) if task["tests"] else ""
    operation = {
        "kind": "judge", "files": workspace.packed(), "tests": tests, "tests_folder": task["tests_folder"],
        "patch": task["patch"], "runner": TEST_RUNNER if task["runner"] else "",
        "arguments": [task["runner"], *task["arguments"]], "command": task["command"],
        "reward_file": task["reward_file"], "timeout_s": task["tests_timeout_s"],
    }
    fresh = workspace.fresh(pack_files(task["repo"]) if task["repo"] else "")
    try:
        result = fresh.do(operation)
    finally:
        fresh.close()
    if "error" in result or "lost" in result:
        return {"score": 0.0, "tests_passed": 0.0, "tests_timed_out": 0.0, "tests_not_run": 1.0, "runner_changed": 0.0}
    timed_out = float(result["code"] is None)
    if task["reward_file"]:
        reward = read_reward(result.get("reward", ""))
        score = reward or 0.0
        return {"score": score, "tests_passed": score, "tests_timed_out": timed_out,
                "tests_not_run": float(reward is None), "runner_changed": 0.0}
    passed = is_passed(task, result)
    return {"score": float(all(passed)), "tests_passed": sum(passed) / len(passed), "tests_timed_out": timed_out,
            "tests_not_run": 0.0, "runner_changed": float(result.get("runner_changed", False))}
