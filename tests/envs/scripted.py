"""Conversations with an environment in its real process, whose model is a script."""

import time
from collections.abc import Sequence
from typing import Any

from envs.runtime.processes import EpisodeProcesses
from tests.conftest import ROOT

Reply = str | list[dict[str, str]] | None


class Player:
    """The processes of one environment. `play` and `play_all` talk to them."""

    def __init__(self, spec: str, timeout_s: float = 30.0, writing_s: float = 0.0):
        """`writing_s`: seconds that the model takes for a reply; nothing is heard meanwhile."""
        self.writing_s = writing_s
        self.processes = EpisodeProcesses(str(ROOT / spec), timeout_s)
        self.tools: list[dict[str, Any]] = []
        """The schemas that episodes gave with their first reply."""

    def play(self, row: dict[str, Any], replies: Sequence[Reply]) -> tuple[dict[str, Any], list[str]]:
        (found,) = self.play_all([(row, replies)])
        return found

    def play_all(self, scripts: Sequence[tuple[dict[str, Any], Sequence[Reply]]]) -> list[tuple[dict, list[str]]]:
        """What each episode sent last, and what it said to the model. A reply is a text, which is cut off if it ends
        with three points, or a list of calls of tools; after the last one there is no turn left."""
        said: list[list[str]] = [[] for _ in scripts]
        left = [list(replies) for _, replies in scripts]
        ended = {}
        for number, (row, _) in enumerate(scripts):
            prompt = [dict(message) for message in row.get("prompt", [])]
            self.processes.start(number, {"row": row, "messages": prompt, "tokens_left": 100})
        while len(ended) < len(scripts):
            for number, message in self.processes.events(10.0):
                if "messages" not in message:
                    ended[number] = message
                    continue
                self.tools += message.get("tools", [])
                said[number] += [new["content"] for new in message["messages"]]
                reply = left[number].pop(0) if left[number] else None
                answer = {"conversation": message["conversation"], "text": reply, "tokens_left": 50,
                          "finish_reason": "turns" if reply is None else "stop"}
                if isinstance(reply, str):
                    answer["usage"] = [len(" ".join(map(str, said[number])).split()), len(reply.split())]  # words
                    if reply.endswith("..."):
                        answer["finish_reason"] = "length"
                if isinstance(reply, list):
                    answer |= {"text": "<tool_call>", "tool_calls": reply}
                time.sleep(self.writing_s)
                self.processes.tell(number, answer)
        return [(ended[number], said[number]) for number in range(len(scripts))]

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_) -> None:
        self.processes.close()
