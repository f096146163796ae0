"""A Python tool: the model calls `python`, its code runs in the project's sandbox (envs/programs.py).

    --rollout.episode envs/python_tool.py --rollout.tool-parser hermes --train-data data/gsm8k/train.parquet

For models whose chat template writes tools. The last reply is scored by the reward function of the row's data_source,
or by --reward.function.
"""

import asyncio
from collections.abc import Callable

from envs import limited
from envs.programs import find_sandbox
from rewards.sandbox.sandbox import Limits

MAX_OUTPUT = 4000  # characters
SANDBOX = find_sandbox("envs/python_tool.py")


def python_tool(timeout_s: float = 10.0) -> Callable:
    """The tool. `timeout_s`: of a program."""

    @limited(at_once=SANDBOX.at_once)
    async def python(code: str) -> str:
        """Run Python code in a fresh interpreter and return what it prints. Print every value that you need.

        Args:
            code: The source of the program.
        """
        result = await asyncio.to_thread(SANDBOX.run, code, Limits(timeout_s=timeout_s))
        if result.exit_code is None:
            return f"Error: the program ran longer than {timeout_s:g} s."
        shown = result.stdout if result.exit_code == 0 else f"{result.stdout}\n{result.stderr.strip()}"
        if len(shown) > MAX_OUTPUT:
            shown = f"{shown[:MAX_OUTPUT]}\n[{len(shown) - MAX_OUTPUT} characters more]"
        return shown or "[the program printed nothing]"

    return python


async def episode(chat, row):
    """Returns the last reply, without calls: its text is scored."""
    chat.tools = [python_tool()]
    text = await chat.reply()
    while chat.tool_calls:
        results = await chat.call_tools()
        text = await chat.reply(*results)
    return text or ""
