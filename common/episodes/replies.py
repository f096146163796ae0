"""The replies of the model in an episode: the seed of each, and what the episode gets of it."""

from collections.abc import Callable
from typing import Any

from common.parallel.ranks import seed_of
from envs.runtime.conversation import ChatTemplate, Conversation
from envs.runtime.response import Response
from envs.runtime.tool_calls import after_thinking

Parse = Callable[[str, list[dict]], tuple[str, list[dict]]]
"""A reply and the schemas of tools -> the reply's text without calls of tools, and these calls."""


def seed_of_reply(episode_seed: int, conversation: int, number: int, num_begun: int) -> int:
    """The seed of a conversation's reply of this number. A reply that is continued later, after `num_begun`
    tokens, has another seed for its rest."""
    place: list[int | str] = [number]
    if conversation:                                            # not the episode's own
        place.insert(0, f"conversation {conversation}")
    if num_begun:
        place.append(num_begun)
    return seed_of(episode_seed, *place)


def reply_of(template: ChatTemplate, parse: Parse | None, conversation: Conversation,
             response: Response) -> dict[str, Any]:
    """Add a complete reply to its conversation. Returns what the episode gets of it."""
    usage = [len(conversation.prompt) + len(conversation.tokens), len(response.tokens)]
    text = conversation.add_reply(response.tokens, response.logp, response.routing, response.mask is None)
    written_tokens = response.tokens
    if written_tokens[-1] in template.stops:
        written_tokens = written_tokens[:-1]
    written = template.tokenizer.decode(written_tokens)
    said = after_thinking(written, conversation.rendered)
    content = after_thinking(text, conversation.rendered)
    reply = {"text": text, "finish_reason": response.finish_reason, "usage": usage, "content": content}
    calls: list[dict[str, Any]] = []
    if conversation.tools and parse is not None:
        said, calls = parse(said, conversation.tools)
        reply |= {"content": said, "tool_calls": calls}
    readable = []
    for call in calls:
        if "error" not in call:
            readable.append(call)
    conversation.keep_form(written, said, readable)
    return reply
