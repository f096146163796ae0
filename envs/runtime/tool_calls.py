"""Tool calls in a model's text, read by vLLM's parsers: each family of models writes them in its own form."""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

FAMILIES = {
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "smollm3": "hermes",
}
"""A model's `model_type` -> the name of its parser, if they differ."""
STARTS = {"llama3_json": r"\s*\{|<\|python_tag\|>", "pythonic": r"\s*\[\w+\("}
"""How a reply with calls begins, for parsers that do not say it by one of START_TOKENS; of others: <tool_call>."""
START_TOKENS = ("tool_call_start_token", "tool_calls_start_token", "bot_string", "bot_token", "tc_start")


def after_thinking(reply: str, prompt: str) -> str:
    """What the model says after its reasoning: a call inside <think> is none. A prompt may open it."""
    if "</think>" in reply:
        return reply.rpartition("</think>")[2]
    if prompt.rstrip().endswith("<think>"):
        return ""
    return reply.partition("<think>")[0]


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """The parser of --rollout.tool-parser: vLLM's name, or a model's `model_type`. Its input is a reply, with its
    special tokens and without its end token, and the tools' schemas, which a few parsers need for the types of
    arguments. It returns the text without calls, and the calls, {"name", "arguments": JSON text}; if the reply begins a
    call and none can be read, one {"name": "", "error"}. Raises ValueError if there is no such parser or it cannot be
    used."""
    name = FAMILIES.get(name, name)
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ModuleNotFoundError:
        raise ValueError(f"--rollout.tool-parser {name} is a parser of vLLM, which is not installed here") from None
    if name not in ToolParserManager.list_registered():
        known = ", ".join(sorted({*ToolParserManager.list_registered(), *FAMILIES}))
        raise ValueError(f"--rollout.tool-parser {name} is unknown; there are {known}")
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        # It logs a traceback for each broken call. A level would not last: the engine's start sets vLLM's anew.
        logging.getLogger(type(parser).__module__).addFilter(lambda record: False)
        parser.extract_tool_calls("", ChatCompletionRequest.model_construct(messages=[], tools=[], tool_choice="auto"))
    # of a package that is not here, of a token the model lacks, of a parser that only reads streams
    except (ModuleNotFoundError, RuntimeError) as error:
        raise ValueError(f"--rollout.tool-parser {name} cannot be used with this model here: {error}") from None
    tokens = [re.escape(getattr(parser, key)) for key in START_TOKENS if hasattr(parser, key)]
    start = re.compile(STARTS.get(name) or "|".join(tokens) or "<tool_call>")

    def parse(text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[dict[str, Any]]]:
        request = ChatCompletionRequest.model_construct(messages=[], tools=list(tools), tool_choice="auto")
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError):
            found = parser.extract_tool_calls(text, request)
            calls = [{"name": x.function.name, "arguments": x.function.arguments} for x in found.tool_calls]
            if calls:
                return (found.content or "").strip(), calls
        begins_call = start.match if name in STARTS else start.search
        if begins_call(text):
            return text, [{"name": "", "error": f"this call of a tool cannot be read: {text.strip():.200}"}]
        return text, []

    return parse
