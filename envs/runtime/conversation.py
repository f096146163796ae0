"""Conversations of several turns as tokens. The model's text is never encoded again: between two of its turns only the
new messages are rendered and encoded. The tokens of users and tools have mask False."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

Message = dict[str, Any]
PLACE = "@@what the model wrote"


@dataclass
class EpisodeConfig:
    """Episodes of many turns instead of single responses."""

    episode: str = ""
    """File and name of `async def episode(chat, row)`, path/to/file.py:name, see docs/environments.md. Default: no
    episodes; the model writes one response to each prompt."""
    max_turns: int = 16
    """Most replies of the model in an episode. --rollout.max-response-length bounds the tokens of an episode, including
    the tokens of users and tools."""
    tool_timeout_s: float = 30.0
    """Seconds that an episode's own code, including its tools, may take between two replies before its process is
    killed."""
    episodes_at_once: int = 64
    """Episodes that one engine runs at the same time, each in its own process."""
    lockstep: bool = False
    """Wait for the tools of all episodes before each step of the engine. Then a run repeats byte for byte. Otherwise
    the times at which tools end decide what is decoded together, and so how it is rounded."""
    drop: tuple[Literal["timeout", "length", "turns", "error"], ...] = ()
    """Episodes that end for these reasons are excluded from the loss and their group's statistics (compact
    filtering)."""
    rewritten_history: Literal["split", "append", "error"] = "split"
    """What to do if the chat template later writes earlier turns differently, for example without their reasoning.
    split: the episode becomes several sequences, each as the model saw it. append: the model sees its own tokens.
    error: stop."""
    tool_parser: str = ""
    """vLLM's parser of tool calls, by name (hermes, llama3_json, ...), for episodes with chat.tools."""


class ChatTemplate:
    """The text that the chat template renders, and its tokens."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], stops: Sequence[int]):
        """`arguments`: of `apply_chat_template`; `stops`: ids that end a reply."""
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.stops = set(stops)

    def render(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """The text up to the start of the model's next turn."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=True, **self.arguments
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses an episode's messages ({roles}): {error}") from None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def after_reply(self, messages: Sequence[Message], new: Sequence[Message], tools: list[dict] | None) -> str:
        """The text between the reply that ends `messages` and the next reply. Raises ValueError for a chat template
        that leaves a reply out or writes it twice."""
        place = PLACE
        while any(place in str(message) for message in [*messages, *new]):
            place += "@"
        with_place = [*messages[:-1], messages[-1] | {"content": place}, *new]
        pieces = self.render(with_place, tools).split(place)
        if len(pieces) != 2:
            raise ValueError(f"the chat template writes the last reply {len(pieces) - 1} times, must be once: "
                             f"--data.chat-template-file FILE names another")
        return pieces[1]


@dataclass
class Conversation:
    """One episode: its messages, and the sequence of tokens that the model sees, which grows turn by turn."""

    template: ChatTemplate
    on_rewriting: str  # --rollout.rewritten-history
    prompt: list[int]  # tokens before the first reply
    messages: list[Message]
    tools: list[dict] | None = None  # JSON schemas
    tokens: list[int] = field(default_factory=list)  # after the prompt
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    left_behind: list["Conversation"] = field(default_factory=list)  # sequences before the history was rewritten
    rendered: str = ""  # the text that the model saw before its last reply
    routing: Any = None  # as the engine told it with the last reply: of all tokens up to there

    def begin(self, new: Sequence[Message], tools: list[dict] | None) -> list[int]:
        """The tokens before the first reply. Without new messages and tools they are the prompt's tokens in the
        data."""
        self.tools = tools
        self.rendered = self.template.render([*self.messages, *new], tools)
        return self.template.encode(self.rendered) if new or tools else self.prompt

    def between(self, new: Sequence[Message]) -> list[int] | None:
        """Tokens between the last reply and the next reply, without the end token that the model sampled. None: the
        chat template now renders text that the model has seen differently, and the conversation must be split."""
        text = self.messages[-1]["content"]
        between = self.template.after_reply(self.messages, new, self.tools)
        rendered = self.template.render([*self.messages, *new], self.tools)
        written = rendered.removeprefix(self.rendered).removesuffix(between)
        # a template may take away white space around a reply
        is_rewritten = self.rendered + written + between != rendered or written.strip() != text.strip()
        if is_rewritten and self.on_rewriting == "error":
            raise ValueError(
                f"the chat template writes an earlier turn differently now ({len(self.messages)} messages): "
                f"--rollout.rewritten-history split trains several sequences, append keeps the tokens as they are"
            )
        self.rendered = rendered
        if is_rewritten and self.on_rewriting == "split":
            return None
        last = self.tokens[-1]
        if last in self.template.stops:
            between = between.removeprefix(self.template.tokenizer.decode([last]))
        return self.template.encode(between)

    def add_messages(self, new: Sequence[Message], between: list[int] | None) -> None:
        """Add messages, with their tokens as `between` returned them."""
        self.messages += new
        if between is None:
            before = Conversation(self.template, "", self.prompt, [], None, self.tokens, self.logp, self.mask)
            before.routing, self.routing = self.routing, None
            self.left_behind.append(before)
            self.prompt = self.template.encode(self.rendered)
            self.tokens, self.logp, self.mask = [], [], []
            return
        self.tokens += between
        self.logp += [0.0] * len(between)
        self.mask += [False] * len(between)

    def add_reply(self, tokens: Sequence[int], logp: Sequence[float], routing: Any = None) -> str:
        """Add the tokens that the model sampled. Returns their text, without special tokens."""
        self.routing = routing
        self.tokens += tokens
        self.logp += logp
        self.mask += [True] * len(tokens)
        text = self.template.decode(tokens)
        self.messages.append({"role": "assistant", "content": text})
        return text

    @property
    def num_tokens(self) -> int:
        """Of all its sequences, prompts left out."""
        return len(self.tokens) + sum(len(before.tokens) for before in self.left_behind)
