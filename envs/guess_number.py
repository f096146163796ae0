"""Guess the number: each guess is answered with Higher or Lower.

    python data/guess_number.py --out data/guess_number
    --rollout.episode envs/guess_number.py --rollout.max-turns 8 --train-data data/guess_number/train.parquet
"""

import math
import re


async def episode(chat, row):
    """The reward is 1 if the number is found within the turns. A turn's reward, for `grpo_variants.py
    --advantage-per-step`, is 1 for a guess that agrees with the answers so far."""
    secret = row["extra_info"]["secret"]
    low, high = -math.inf, math.inf
    turn_scores = []
    is_found = False
    text = await chat.reply(max_tokens=32)
    while text is not None:
        guesses = re.findall(r"\d{1,9}", text)
        guess = int(guesses[-1]) if guesses else math.nan
        turn_scores.append(float(low < guess < high))
        is_found = guess == secret
        if is_found:
            break
        if guess < secret:
            answer, low = "Higher.", max(low, guess)
        elif guess > secret:
            answer, high = "Lower.", min(high, guess)
        else:
            answer = "Write a number."
        text = await chat.reply({"role": "user", "content": answer}, max_tokens=32)
    score = float(is_found)
    return {"score": score, "acc": score, "guesses": chat.turns, "turn_scores": turn_scores}
