"""Environments: one file each, with `async def episode(chat, row)` for --rollout.episode FILE.py:episode.

    async def episode(chat, row):
        text = await chat.reply({"role": "user", "content": "Think of a number ..."}, max_tokens=64)
        return 1.0 if row["extra_info"]["secret"] in (text or "") else 0.0

`chat` is a `Chat` of envs/runtime/chat.py, `row` the row of the data with every column. It returns what a reward
function does: a number, or a dict with `score`. Every episode runs in a process of its own: state is local variables.
"""

from envs.limits import limited

__all__ = ["limited"]
