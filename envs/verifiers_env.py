"""Environments of `verifiers` (Prime Intellect) with `env_response` and a rubric: the chat is their model client.

    VERIFIERS_ENV=wordle VERIFIERS_ARGS='{"max_turns": 6}'
    python data/verifiers_rows.py --out data/wordle
    --rollout.episode envs/verifiers_env.py --train-data data/wordle/train.parquet

VERIFIERS_ENV is what `verifiers.load_environment` takes, the environment's installed module. Its sampling arguments are
not used: those of --rollout hold. With tools (`ToolEnv`) --rollout.tool-parser reads the calls, the environment runs
them. Environments of `verifiers.v1` start programs of their own and are not for this file.
"""

import json
import os
import signal
import time

try:
    import verifiers.legacy as vf
    from verifiers.legacy import types
except ImportError as error:
    raise ValueError(f"--rollout.episode envs/verifiers_env.py: verifiers' packages are not installed, or not in "
                     f"PYTHONPATH ({error}); run `pip install --no-deps --target verifiers_packages -r "
                     f"requirements-verifiers.txt`, then this with PYTHONPATH=verifiers_packages") from None

NAME = os.environ.get("VERIFIERS_ENV", "")


def load() -> vf.Environment:
    """Raises ValueError for one that cannot be trained here."""
    if not NAME:
        raise ValueError("--rollout.episode envs/verifiers_env.py: the environment variable VERIFIERS_ENV names no "
                         "environment")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = vf.load_environment(NAME, **json.loads(os.environ.get("VERIFIERS_ARGS", "{}")))
    for number, handler in handlers.items():  # it sets its own, and the trainer's signals shall not end episodes
        signal.signal(number, handler)
    if environment.requires_group_rollouts:
        raise ValueError(f"--rollout.episode envs/verifiers_env.py: {NAME} has a reward of a whole group, here each "
                         f"episode must have its own")
    return environment


ENVIRONMENT = load()


class ChatClient(vf.Client):
    """verifiers' client whose model is `chat`, a conversation that only grows."""

    def setup_client(self, config):
        return config

    async def to_native_tool(self, tool):
        def call():
            """The environment runs it."""

        call.__name__ = tool.name
        schema = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        call.schema = {"type": "function", "function": schema}
        return call

    async def to_native_prompt(self, messages):
        """The messages that the chat does not have yet."""
        plain, names = [], {}
        for message in messages:
            names |= {call.id: call.name for call in message.get("tool_calls") or []}
            content = message.content or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)  # KeyError for images
            name = {"name": names[message.tool_call_id]} if message.role == "tool" else {}
            plain.append({"role": message.role, "content": content} | name)
        known = [(message["role"], message["content"]) for message in self.client.messages]
        if [(message["role"], message["content"]) for message in plain[: len(known)]] != known:
            raise ValueError(f"{NAME} changed earlier messages of the conversation, which here only grows")
        return plain[len(known) :], {}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **_):
        if not self.client.turns:
            self.client.tools = tools or []
        return await self.client.reply(*prompt)

    async def raise_from_native_response(self, response):
        if response is None:
            raise vf.OverlongPromptError(f"no reply: {self.client.finish_reason}")

    async def from_native_response(self, response):
        calls = [
            types.ToolCall(id=f"{self.client.turns}_{place}", name=call.get("name") or "",
                           arguments=call["error"] if "error" in call else call["arguments"])
            for place, call in enumerate(self.client.tool_calls)
        ]
        self.client.num_tool_calls += len(calls)
        is_cut = self.client.finish_reason == "length"
        message = types.ResponseMessage(content=response, tool_calls=calls or None, is_truncated=is_cut,
                                        finish_reason="length" if is_cut else "stop")
        return types.Response(id=str(self.client.turns), created=int(time.time()), model=NAME, message=message)

    async def close(self):
        """Nothing is open."""


async def episode(chat, row):
    """The reward is the rubric's; its metrics are logged beside it, one that is itself called `score` as `score_1`."""
    data = json.loads(row["extra_info"]["verifiers"])
    state = await ENVIRONMENT.rollout(data, ChatClient(chat), NAME, {})
    if state["error"]:
        raise state["error"]
    await ENVIRONMENT.rubric.score_rollout(state)
    metrics = {"score_1" if name == "score" else name: value for name, value in (state["metrics"] or {}).items()}
    return metrics | {"score": state["reward"]}
