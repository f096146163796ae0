"""Episodes that the tests run, FILE.py:NAME."""

import asyncio
import ctypes
import json
import os
import random

import numpy


async def three_turns(chat, row):
    """Three replies of at most 6 tokens. What tools take is random, and decides nothing."""
    await chat.reply(max_tokens=6)
    for word in ("Higher.", "Lower."):
        await asyncio.sleep(random.random() * row.get("max_sleep_s", 0.0))
        await chat.reply({"role": "user", "content": word}, max_tokens=6)
    replies = [message["content"] for message in chat.messages if message["role"] == "assistant"]
    scores = [sum(map(ord, text)) % 7 for text in replies]
    return {"score": scores[-1], "num_messages": len(chat.messages), "pred": replies[-1][:1], "turn_scores": scores}


async def fixed(chat, row):
    """As many turns of as many tokens as the row says, with tools that sleep, in one of `one_in` episodes."""
    await chat.reply(max_tokens=row["tokens"])
    for seconds in row["sleeps"][: row["turns"] - 1]:
        await asyncio.sleep(seconds if random.random() * row.get("one_in", 1) < 1 else 0.0)
        await chat.reply({"role": "user", "content": "Higher. Try again."}, max_tokens=row["tokens"])
    return 0.0


async def long_talk(chat, row):
    """Three replies of any length, each with a message that depends on the one before."""
    text = await chat.reply()
    for _ in range(2):
        text = await chat.reply({"role": "user", "content": f"{len(text)}."})
    return sum(map(ord, text or "")) % 7


async def moody(chat, row):
    """The same, with another message every time."""
    await chat.reply()
    for _ in range(2):
        await chat.reply({"role": "user", "content": f"{random.SystemRandom().random()}."})
    return 1.0


async def endless(chat, row):
    """Talks until there is no reply. Returns why."""
    text = await chat.reply(max_tokens=5)
    while text is not None:
        text = await chat.reply({"role": "user", "content": "Go on."}, max_tokens=5)
    assert chat.turns == sum(message["role"] == "assistant" for message in chat.messages)
    return {"score": 1.0, "why": chat.finish_reason, "left": chat.tokens_left}


async def opened(chat, row):
    """A first message of the row's text, then a short one; and what the model wrote back to it."""
    first = await chat.reply({"role": "user", "content": row["text"]}, max_tokens=4)
    why = chat.finish_reason
    text = await chat.reply({"role": "user", "content": "Short."}, max_tokens=4)
    text = await chat.reply({"role": "user", "content": row["text"][:100] + text}, max_tokens=4)
    said = [message["content"] for message in chat.messages if message["role"] == "user"]
    return {"score": 1.0, "first": str(first is not None), "why": why, "num_said": len(said)}


async def misbehave(chat, row):
    """What `row["kind"]` says, after a reply."""
    await chat.reply(max_tokens=2)
    kind = row["kind"]
    if kind == "raise":
        raise KeyError("the user's own mistake")
    if kind == "hang":
        ctypes.CDLL(None).sleep(60)
    if kind == "wait":
        await asyncio.sleep(60)
    if kind == "die":
        os._exit(3)
    if kind == "print":
        for _ in range(1000):
            print("x" * 2**20)
    if kind == "shell":
        os.system("yes | head -c 100000000 1>&2; sleep 60 &")
    if kind == "much":
        await chat.reply({"role": "user", "content": "x" * 2**24})
    if kind == "number":
        return "not a number"
    if kind == "none":
        return None
    return 0.5


def plain(chat, row):
    return 1.0


async def with_critics(chat, row):
    """An answer, two critics at the same time, one of them twice, and another answer."""
    answer = await chat.reply(max_tokens=6)
    critics = [chat.begin("critic"), chat.begin("critic")]
    judged = await asyncio.gather(*(
        critic.reply({"role": "user", "content": f"{n}: is {answer} right?"}, max_tokens=8)
        for n, critic in enumerate(critics)
    ))
    await critics[1].reply({"role": "user", "content": "Sure?"}, max_tokens=5)
    answer = await chat.reply({"role": "user", "content": f"They say {judged}."}, max_tokens=6)
    usage = [number for part in chat.all for number in part.usage]
    return {"score": 1.0, "answer": answer, "judged": json.dumps(judged), "usage": usage}


async def twins(chat, row):
    """The same question in two conversations at the same time."""
    others = [chat.begin(), chat.begin()]
    texts = await asyncio.gather(*(
        other.reply({"role": "user", "content": "Say a word."}, max_tokens=12) for other in others
    ))
    return {"score": 1.0, "same": float(texts[0] == texts[1])}


async def leaves_a_reply(chat, row):
    """Ends while the model writes in another conversation."""
    await chat.reply(max_tokens=3)
    reply = chat.begin().reply({"role": "user", "content": "Write."}, max_tokens=60)
    task = asyncio.create_task(reply)
    await asyncio.sleep(0)
    return {"score": 1.0, "is_done": float(task.done())}


async def only_others(chat, row):
    """Nothing in its own conversation."""
    other = chat.begin()
    text = await other.reply({"role": "user", "content": "Other?"}, max_tokens=4)
    return {"score": 1.0, "text": text}


async def cold(chat, row):
    """A reply of the run's temperature, one that is greedy, and another of the run's."""
    await chat.reply(max_tokens=6)
    cold = await chat.reply({"role": "user", "content": "Again."}, max_tokens=6, temperature=0.0)
    await chat.reply({"role": "user", "content": "Again."}, max_tokens=6)
    return {"score": 1.0, "cold": cold}


async def misaddress(chat, row):
    """The second message has the row's role and content."""
    await chat.reply(max_tokens=2)
    await chat.reply({"role": row["role"], "content": row["content"]}, max_tokens=2)
    return 1.0


async def stops(chat, row):
    await chat.reply(max_tokens=6, stop=["e"])
    return 1.0


async def rolls_dice(chat, row):
    await chat.reply(max_tokens=2)
    return {"score": 1.0, "dice": [random.random(), float(numpy.random.rand())]}


async def another(chat, row):
    await chat.reply(max_tokens=2)
    return 0.25


async def one_reply(chat, row):
    """One reply. The code of every third row then fails."""
    await chat.reply()
    assert row["extra_info"]["number"] % 3
    return 1.0


async def greedy_or_not(chat, row):
    await chat.reply(temperature=0.0 if row["content"] == "cold" else None)
    return 1.0


async def two_temperatures(chat, row):
    """Three replies, the second one with another temperature."""
    text = await chat.reply(max_tokens=20)
    for temperature in (0.9, None):
        message = {"role": "user", "content": f"{len(text or '')}."}
        text = await chat.reply(message, max_tokens=20, temperature=temperature)
    return sum(map(ord, text or "")) % 7
