"""Tools that misbehave, for test_tools.py, and an episode that calls what the model calls."""

import ctypes
import itertools
import os
import sys
import time


def work(kind: str) -> str:
    """Misbehave.

    Args:
        kind: How.
    """
    if kind == "hang in C":
        sum(itertools.repeat(1))  # holds the interpreter and looks for no signal
    if kind == "hang":
        time.sleep(60)
    if kind == "die":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "print":
        for _ in range(1000):
            sys.stdout.write("x" * 2**20)
    if kind == "raise":
        raise KeyError("no such thing")
    if kind == "exit":
        sys.exit(1)
    return "y" * 2**24 if kind == "much" else "fine"


async def episode(chat, row):
    chat.tools = [work]
    await chat.reply()
    while chat.tool_calls:
        await chat.reply(*[await chat.tool_call(call) for call in chat.tool_calls])
    return {"score": 1.0, "turns": chat.turns}


def plain(chat, row):
    return 1.0


async def per_token(chat, row):
    """One number for each character that the model wrote, as often as the row says, and those of the row."""
    text = await chat.reply()
    numbers = [ord(character) / 7 for character in text] * row["times"] + row["more"]
    return {"score": 1.0, "per_token": numbers, "note": [text]}
