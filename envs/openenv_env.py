"""Environments of an OpenEnv server whose actions and observations are text: each episode is a session of its own.

    OPENENV_SERVER=http://127.0.0.1:8000
    --rollout.episode envs/openenv_env.py --rollout.max-turns 20 --train-data ...

The server says which fields it has. The model's text is the action's only text, or the field that the environment
variable OPENENV_ACTION names. It is shown the observation's only text, or the field of OPENENV_OBSERVATION; without
either, all fields as JSON. extra_info of a row: `seed`, and `options`, further arguments of the server's `reset` as
JSON; both may be missing. The server must accept as many sessions (`max_concurrent_envs`) as episodes run at once.
"""

import json
import os
from typing import Any

try:
    import httpx
    from openenv.core import GenericEnvClient
except ImportError as error:
    raise ValueError(f"--rollout.episode envs/openenv_env.py: OpenEnv's packages are not installed, or not in "
                     f"PYTHONPATH ({error}); run `pip install --no-deps --target openenv_packages -r "
                     f"requirements-openenv.txt`, then this with PYTHONPATH=openenv_packages") from None

SERVER = os.environ.get("OPENENV_SERVER", "")
COMMON = ("done", "reward", "metadata")  # that every observation has, and that are not shown


def text_fields(schema: dict[str, Any]) -> list[str]:
    return [name for name, field in schema["properties"].items() if field.get("type") == "string"]


def choose_fields() -> tuple[str, str]:
    """Names of the action's text, and of the observation's, or "" for all of it. Raises ValueError for a server that
    does not answer, or where the action's text is none or several fields."""
    if not SERVER.startswith(("http://", "https://")):
        raise ValueError(f"--rollout.episode envs/openenv_env.py: the environment variable OPENENV_SERVER is "
                         f"{SERVER!r}, must be the server's URL, such as http://127.0.0.1:8000")
    try:
        schema = httpx.get(f"{SERVER.rstrip('/')}/schema").raise_for_status().json()
    except httpx.HTTPError as error:
        raise ValueError(f"--rollout.episode envs/openenv_env.py: no OpenEnv server answers at OPENENV_SERVER="
                         f"{SERVER}: {error}") from None
    found = []
    for kind in ("action", "observation"):
        texts = text_fields(schema[kind])
        chosen = os.environ.get(f"OPENENV_{kind.upper()}") or (texts[0] if len(texts) == 1 else "")
        is_unknown = chosen not in schema[kind]["properties"]
        if is_unknown and (chosen or kind == "action"):
            raise ValueError(f"--rollout.episode envs/openenv_env.py: the {kind}'s text is the field {chosen!r}, must "
                             f"be one of {', '.join(texts) or 'none'}: the environment variable OPENENV_{kind.upper()} "
                             f"names it")
        found.append(chosen)
    return found[0], found[1]


ACTION, OBSERVATION = choose_fields()


def shown(observation: dict[str, Any]) -> str:
    if OBSERVATION:
        return str(observation[OBSERVATION])
    return json.dumps({name: value for name, value in observation.items() if name not in COMMON}, ensure_ascii=False)


async def episode(chat, row):
    """The reward is the sum of the server's rewards. A turn's reward, for `grpo_variants.py --advantage-per-step`, is
    what the server gave for it; null counts as 0."""
    extra_info = row.get("extra_info") or {}
    options = json.loads(extra_info.get("options") or "{}")
    if extra_info.get("seed") is not None:
        options["seed"] = extra_info["seed"]
    turn_scores = []
    async with GenericEnvClient(base_url=SERVER, message_timeout_s=chat.timeout_s) as client:
        result = await client.reset(**options)
        while not result.done:
            text = await chat.reply({"role": "user", "content": shown(result.observation)})
            if text is None:
                break
            result = await client.step({ACTION: text})
            turn_scores.append(float(result.reward or 0.0))
    return {"score": sum(turn_scores), "turn_scores": turn_scores}
