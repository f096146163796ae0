"""As many turns of as many tokens as the row says: an agent of OpenAI's SDK, and the same as a coroutine. Both return
the CPU seconds of their process."""

import time

from openai import AsyncOpenAI

ANSWER = {"role": "user", "content": "Higher. Try again."}


async def solve(row):
    messages = [*row["prompt"]]
    async with AsyncOpenAI() as client:
        for turn in range(row["turns"]):
            messages += [ANSWER] if turn else []
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=row["tokens"])
            messages.append(answer.choices[0].message)
    return {"score": 0.0, "cpu_s": time.process_time()}


async def episode(chat, row):
    main = chat.begin()
    await main.reply(*row["prompt"], max_tokens=row["tokens"])
    for _ in range(row["turns"] - 1):
        await main.reply(ANSWER, max_tokens=row["tokens"])
    return {"score": 0.0, "cpu_s": time.process_time()}
