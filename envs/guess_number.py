"""Guess the number: each guess is answered with Higher or Lower.

    python data/guess_number.py --out data/guess_number
    --rollout.episode envs/guess_number.py --rollout.max-turns 8 --train-data data/guess_number/train.parquet
"""

import re


async def episode(chat, row):
    """The reward is 1 if the number is found in the turns that there are."""
    secret = row["extra_info"]["secret"]
    text = await chat.reply(max_tokens=32)
    while text is not None:
        guesses = re.findall(r"\d{1,9}", text)
        if not guesses:
            answer = "Write a number."
        elif int(guesses[-1]) == secret:
            return {"score": 1.0, "acc": 1.0, "guesses": chat.turns}
        else:
            answer = "Higher." if int(guesses[-1]) < secret else "Lower."
        text = await chat.reply({"role": "user", "content": answer}, max_tokens=32)
    return {"score": 0.0, "acc": 0.0, "guesses": chat.turns}
