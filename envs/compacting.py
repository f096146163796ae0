"""A long conversation in a short context: it is begun anew with the model's own summary when it has grown.

    python data/guess_number.py --out data/guess_number --largest 100
    COMPACT_TOKENS=150 ... --rollout.episode envs/compacting.py --rollout.max-turns 12 \\
        --train-data data/guess_number/train.parquet

The game is that of envs/guess_number.py. When a conversation has COMPACT_TOKENS tokens (150), the model is asked for a
summary, and goes on in a new one that shows it the task and this summary. Each conversation is a sequence with the
episode's advantage, so the model is trained to write summaries with which it wins. `compactions` counts them.

An agent that compacts its history by itself needs none of this: through envs/openai_agent.py a request whose history is
another one begins a conversation (docs/environments.md).
"""

import math
import os
import re
from typing import Any

MOST_TOKENS = int(os.environ.get("COMPACT_TOKENS", "150"))
if MOST_TOKENS < 1:
    raise ValueError(f"--rollout.episode envs/compacting.py: COMPACT_TOKENS {MOST_TOKENS} must be at least 1")
ASK = "Summarise in one sentence what you know so far."
GO_ON = "{task}\nWhat you know so far: {summary}"


class Compacting:
    """Of an episode: the conversation that goes on, and how often it was begun anew."""

    def __init__(self, chat: Any, task: str, most_tokens: int):
        self.first = chat
        self.chat = chat
        self.task = task
        self.most_tokens = most_tokens
        self.num_compactions = 0

    async def reply(self, text: str, max_tokens: int) -> str | None:
        """The model's answer to a text of the user's, after a summary if the conversation has grown."""
        if self.chat.turns and sum(self.chat.usage) >= self.most_tokens:
            summary = await self.chat.reply({"role": "user", "content": f"{text}\n{ASK}"}, max_tokens=max_tokens)
            if summary is None:
                return None
            self.chat = self.first.begin("compacted")
            self.num_compactions += 1
            text = GO_ON.format(task=self.task, summary=summary)
        messages = [{"role": "user", "content": text}] if text else []
        return await self.chat.reply(*messages, max_tokens=max_tokens)


async def episode(chat, row):
    """The reward is 1 if the number is found within the turns, of which summaries are some."""
    secret = row["extra_info"]["secret"]
    game = Compacting(chat, row["prompt"][-1]["content"], MOST_TOKENS)
    guess: float = math.nan
    guesses = 0
    text = await game.reply("", max_tokens=32)
    while text is not None:
        guesses += 1
        numbers = re.findall(r"\d{1,9}", text)
        guess = int(numbers[-1]) if numbers else math.nan
        if guess == secret:
            break
        answer = "Write a number."
        if numbers:
            answer = "Higher." if guess < secret else "Lower."
        text = await game.reply(answer, max_tokens=32)
    score = float(guess == secret)
    return {"score": score, "acc": score, "guesses": guesses, "compactions": game.num_compactions}
