"""Episodes with tools, FILE.py:NAME. They have a file of their own: what makes schemas is imported for a whole file."""

import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


async def with_tools(chat, row):
    chat.tools = [add]
    text = await chat.reply(max_tokens=8)
    results = [await chat.tool_call(call) for call in row["calls"]]
    await chat.reply(*results, max_tokens=8)
    return {"score": 1.0, "results": " / ".join(result["content"] for result in results), "text": text}


async def slow_tool(chat, row):
    chat.tools = [slow]
    await chat.reply(max_tokens=2)
    result = await chat.tool_call({"name": "slow", "arguments": "{}"})
    await chat.reply(result, max_tokens=2)
    return {"score": 1.0, "result": result["content"]}


def slow() -> str:
    """Take a minute."""
    time.sleep(60)
    return "done"


async def late_tools(chat, row):
    await chat.reply(max_tokens=2)
    chat.tools = [add]
    await chat.reply({"role": "user", "content": "Add."}, max_tokens=2)
    return 1.0
