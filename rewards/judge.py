"""A language model as judge: any server with OpenAI's chat interface (vLLM, SGLang, a provider) gives the score.

    --reward.function rewards/judge.py --reward.num-workers 1 --reward.concurrency 64 --reward.timeout-s 120
    --reward.kwargs '{"base_url": "http://HOST:8000/v1", "model": "Qwen/Qwen3-32B", "template": "judge.txt"}'

The template (text, or the path of a .txt file) names {solution} and, where wanted, {ground_truth}, {question} (from
extra_info) and {data_source}. The last match of `score_regex` in the judge's answer is the score; an answer without
one, or outside `low` to `high`, is an error and counts as such. Each worker holds --reward.concurrency requests in
flight and starts at most `requests_per_minute`; waiting for that counts for the deadline.
The key is read from the environment variable that `api_key_env` names: it is no argument and never in a message.
"""

import asyncio
import functools
import os
import re
from pathlib import Path

try:
    import openai
except ModuleNotFoundError as error:
    raise ValueError(f"--reward.function rewards/judge.py: package {error.name} is not installed; run `pip install "
                     f"openai==2.54.0`") from None

TEMPLATE = """Grade the response to the question against the reference answer.

Question: {question}

Reference answer: {ground_truth}

Response:
{solution}

Think briefly, then end with one line "Score: N", N a number from 0 (wrong) to 10 (right and well explained)."""
# "Score: 8", "**Score:** 8/10", "Score (0-10): 8". No number of a scale (0-10, 0 to 10) is a score, nor the 5 of ".5".
SCORE = (r"(?i)score(?:\s?[(\[][^)\]\n]*[)\]](?=[*_]*\s?[:=]))?\W{1,5}?"
         r"(?<!\.)(-?\d++(?:\.\d++)?+)(?!\s?[-\u2013]\s?\d|\s+to\s+\d)")
FIELDS = re.compile(r"\{(solution|ground_truth|question|data_source)\}")


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, model, base_url,
                        template=TEMPLATE, score_regex=SCORE, low=0.0, high=10.0, requests_per_minute=None,
                        max_retries=3, request_timeout_s=60.0, request=None, api_key_env="OPENAI_API_KEY") -> dict:
    """score: (N - low) / (high - low). `request`: further fields of each request, else temperature 0."""
    fields = {"solution": solution_str, "ground_truth": str(ground_truth), "data_source": data_source,
              "question": str((extra_info or {}).get("question", ""))}
    prompt = FIELDS.sub(lambda match: fields[match[1]], read_template(template))  # one pass: none inside the fields
    key = os.environ.get(api_key_env) or "no key"  # servers of one's own ask for none
    if requests_per_minute is not None:
        await wait_turn(60.0 / requests_per_minute)
    try:
        answer = await client(base_url, key, max_retries, request_timeout_s).chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], **(request or {"temperature": 0.0}))
    except openai.OpenAIError as error:
        raise RuntimeError(f"judge {model} at {base_url}: {error}".replace(key, f"${api_key_env}")) from None
    text = answer.choices[0].message.content or ""
    found = re.findall(score_regex, text)
    if not found or not low <= float(found[-1]) <= high:
        raise ValueError(f"judge {model} gave no score from {low:g} to {high:g} (score_regex {score_regex!r}): "
                         f"{text[-300:]!r}")
    return {"score": (float(found[-1]) - low) / (high - low), "judge": text[-500:]}


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


@functools.cache
def read_template(template: str) -> str:
    text = Path(template).read_text() if template.endswith(".txt") else template
    if "{solution}" not in text:
        raise ValueError(f"judge: template {template[:80]!r} must name {{solution}}; set it in --reward.kwargs")
    return text


def check(model=None, base_url=None, template=TEMPLATE, score_regex="(.)", **_) -> None:
    """Before training: ValueError for what cannot work. Also imports what the library imports late (it takes seconds),
    so that it is in no sample's deadline."""
    if not model or not base_url:
        raise ValueError(f"judge: model {model!r}, base_url {base_url!r}; both must be set in --reward.kwargs")
    if re.compile(score_regex).groups != 1:
        raise ValueError(f"judge: score_regex {score_regex!r} must have one group; set it in --reward.kwargs")
    read_template(template)
    client(base_url, "no key", 0, 1.0).chat.completions  # noqa: B018
