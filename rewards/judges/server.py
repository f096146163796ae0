"""Requests to the server of a judge."""

import asyncio
import functools
import os
from typing import Any, NamedTuple

try:
    import openai
except ModuleNotFoundError as error:
    raise ValueError(f"--reward.function rewards/judge.py: package {error.name} is not installed; run `pip install "
                     f"openai==2.54.0`") from None


class Server(NamedTuple):
    """Where a judge is, and how it is asked."""

    model: str
    base_url: str
    requests_per_minute: float | None
    max_retries: int
    request_timeout_s: float
    api_key_env: str

    async def ask(self, prompt: str, options: dict[str, Any]) -> str:
        """The judge's answer. Raises RuntimeError if there is none."""
        key = os.environ.get(self.api_key_env) or "no key"  # servers of one's own ask for none
        if self.requests_per_minute is not None:
            await wait_turn(60.0 / self.requests_per_minute)
        server = client(self.base_url, key, self.max_retries, self.request_timeout_s)
        try:
            answer = await server.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], **options)
        except openai.OpenAIError as error:
            raise RuntimeError(
                f"judge {self.model} at {self.base_url}: {error}".replace(key, f"${self.api_key_env}")) from None
        return answer.choices[0].message.content or ""


@functools.cache
def client(base_url: str, key: str, max_retries: int, request_timeout_s: float) -> openai.AsyncOpenAI:
    """Retries with growing pauses on 408, 409, 429, 5xx and lost connections, as the server's Retry-After says."""
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=max_retries, timeout=request_timeout_s)


next_turn = 0.0


async def wait_turn(interval_s: float) -> None:
    """Requests of this worker start at least interval_s apart."""
    global next_turn
    now = asyncio.get_running_loop().time()
    turn = max(now, next_turn)
    next_turn = turn + interval_s
    await asyncio.sleep(turn - now)
