"""An agent that exists already, trained as it is: it talks with the model through OpenAI's or Anthropic's API.

    AGENT=my_agent.py:solve          --rollout.episode envs/openai_agent.py [--rollout.tool-parser hermes]
    AGENT="python my_agent.py"       --rollout.episode envs/openai_agent.py

The environment variable AGENT names a function, `async def solve(row)`, or a plain `def`, which runs in a thread; it
returns what an episode returns. Or AGENT is the command line of a program: the variable ROW is the row as JSON, and the
last line that the program prints is its result as JSON. AGENT=row takes the command line of each row's
`extra_info.agent`; then rows are code, and must be trusted like it.

OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and those of Azure name the episode's own server
(envs/endpoint/server.py) while the agent runs, and stand for it while its file is imported (envs/endpoint/clients.py):
a client that is made without an address asks the model that is trained. OpenAI's and Anthropic's clients of other
servers are refused, unless AGENT_OUTSIDE="HOST ..." names them; the values that the variables had before are in
OUTSIDE_OPENAI_API_KEY, OUTSIDE_OPENAI_BASE_URL and so on.
Its name is `policy`; AGENT_MODELS="gpt-4o gpt-4o-mini=critic" adds the names that an agent has in its code, each with
the role of what is sampled under it. A request for `policy:critic` has the role critic, too.

A request for JSON (`response_format`, `text.format`, `output_config.format`) has its schema written into the prompt;
AGENT_STRUCTURED=constrain samples under its grammar instead, and needs --correction.weights token.

The run's --rollout.temperature counts, not a request's: AGENT_TEMPERATURE=1 obeys the requests, and then what is
sampled with another temperature than the run's is not trained.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rewards import load_function

try:
    from envs.endpoint.clients import Placeholder
    from envs.endpoint.server import Endpoint
    from envs.endpoint.structured import MODES
except ModuleNotFoundError as error:
    raise ValueError(f"--rollout.episode envs/openai_agent.py needs a package: pip install {error.name}") from None

FLAG = "--rollout.episode envs/openai_agent.py"
MAX_PRINTED = 2**24  # bytes of the result line
MAX_ERRORS = 10_000  # bytes of what a program writes to stderr, its last ones
MAX_ROW = 2**17 - 16  # bytes: Linux takes no longer variable
LAZY = ("openai.resources", "openai.resources.chat.completions", "anthropic.resources", "anyio._backends._asyncio",
        "httpcore", "httpcore2", "h11")
"""What the clients import at their first request: here it is imported once instead, before episodes are forked, which
saves each 0.4 s of its 0.45 s of CPU."""
TRUNCATED = """{} of the model's answers in this episode were cut off or found no room \
(--rollout.max-response-length, or the request's own limit), on which many agents raise. By default such an episode is \
dropped, so that nothing teaches the model to be shorter: --reward.on-error zero scores it with 0."""
DRAIN_S = 1.0  # after a program has ended, what it started may hold its output open

Solve = Callable[[dict[str, Any]], Any]


def find_agent(agent: str) -> tuple[Solve | None, list[str]]:
    """AGENT's function, or its command line; neither if each row has its own. Raises ValueError."""
    words = shlex.split(agent)
    if not words:
        raise ValueError(f"{FLAG}: the environment variable AGENT names no agent: FILE.py:NAME, a command line, or row")
    if words == ["row"]:
        return None, []
    if len(words) == 1 and words[0].partition(":")[0].endswith(".py"):
        solve = load_function(words[0], f"{FLAG}: AGENT", "solve")
        try:
            inspect.signature(solve).bind(None)
        except TypeError as error:
            raise ValueError(f"{FLAG}: AGENT {agent} is called with one argument, the row: {error}") from None
        return solve, []
    if not shutil.which(words[0]):
        raise ValueError(f"{FLAG}: AGENT {agent}: there is no program {words[0]}")
    return None, words


def load_clients() -> None:
    """Import the rest of the clients that the agent's file has imported."""
    for name in LAZY:
        package = name.partition(".")[0]
        if package in sys.modules or (package not in ("openai", "anthropic") and importlib.util.find_spec(package)):
            importlib.import_module(name)


def find_models(names: str) -> dict[str, str]:
    """The names under which the model is known -> its role."""
    pairs = [name.partition("=") for name in names.split()]
    return {"policy": ""} | {name: role for name, _, role in pairs}


AGENT = os.environ.get("AGENT", "")
PLACEHOLDER = Placeholder(f"{FLAG}: AGENT {AGENT}", os.environ.get("AGENT_OUTSIDE", ""))
with PLACEHOLDER.imports():
    SOLVE, COMMAND = find_agent(AGENT)
    if SOLVE is not None:
        load_clients()
MODELS = find_models(os.environ.get("AGENT_MODELS", ""))
KEEPS_TEMPERATURE = os.environ.get("AGENT_TEMPERATURE") == "1"
STRUCTURED = os.environ.get("AGENT_STRUCTURED", "prompt")
if STRUCTURED not in MODES:
    raise ValueError(f"{FLAG}: the environment variable AGENT_STRUCTURED is {STRUCTURED!r}; there are "
                     f"{' and '.join(MODES)}")


async def episode(chat, row):
    """The agent's result, and beside its score the numbers of requests (envs/endpoint/server.py, COUNTS)."""
    async with Endpoint(chat, MODELS, KEEPS_TEMPERATURE, PLACEHOLDER.key, STRUCTURED == "constrain") as endpoint:
        PLACEHOLDER.leads_to(endpoint.url, endpoint.token)
        try:
            result = await endpoint.run(run_agent(row))
        except Exception as error:
            if endpoint.counts["truncated"]:
                error.add_note(TRUNCATED.format(endpoint.counts["truncated"]))
            raise
    if not endpoint.counts["requests"]:
        raise RuntimeError("the agent ended without a request to the model: its client must take its address from "
                           "OPENAI_BASE_URL or ANTHROPIC_BASE_URL")
    if isinstance(result, str):
        return result
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    return values | {f"endpoint/{name}": float(count) for name, count in endpoint.counts.items()}


async def run_agent(row: dict[str, Any]) -> Any:
    if SOLVE is None:
        return await run_program(COMMAND or command_of(row), row)
    if inspect.iscoroutinefunction(SOLVE):
        return await SOLVE(row)
    return await asyncio.to_thread(SOLVE, row)


def command_of(row: dict[str, Any]) -> list[str]:
    command = (row.get("extra_info") or {}).get("agent")
    if not isinstance(command, str) or not shlex.split(command):
        raise ValueError(f"AGENT=row: the row's extra_info.agent is {command!r:.100}, and must be a command line")
    return shlex.split(command)


async def run_program(command: list[str], row: dict[str, Any]) -> Any:
    """The result that a program prints last. Raises RuntimeError with the end of its stderr if it fails."""
    text = json.dumps(row, default=str)
    if len(text.encode()) > MAX_ROW:
        raise ValueError(f"the row has {len(text.encode())} bytes as JSON, and a program's variable ROW holds "
                         f"{MAX_ROW}: make the agent a function, AGENT=FILE.py:NAME")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=os.environ | {"ROW": text}
    )
    printed, errors = bytearray(), bytearray()
    readers = [asyncio.create_task(keep_last(process.stdout, printed, MAX_PRINTED)),
               asyncio.create_task(keep_last(process.stderr, errors, MAX_ERRORS))]
    code = await process.wait()
    await asyncio.wait(readers, timeout=DRAIN_S)
    said = f"\n{errors.decode(errors='replace')}"
    if code:
        raise RuntimeError(f"{shlex.join(command)} ended with {code}{said}")
    last = printed.decode(errors="replace").strip().rpartition("\n")[2]  # JSON may hold other line ends of Unicode
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        last = repr(last)[:500] if last else "nothing"
        raise RuntimeError(f"{shlex.join(command)} printed {last} last, and must print its result as one line of "
                           f"JSON{said}") from None


async def keep_last(stream: asyncio.StreamReader, kept: bytearray, most: int) -> None:
    """Read all of it, and keep its last bytes."""
    while data := await stream.read(2**16):
        kept += data
        del kept[: max(len(kept) - most, 0)]
