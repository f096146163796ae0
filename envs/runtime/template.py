"""Messages to text by the chat template, and to tokens. What messages say is text: where it spells a special token, the
model reads its letters, and only the template itself writes the token.

Before a message is rendered it is guarded: a secret word goes into each special token that it spells. So the special
tokens that are whole in a rendered text are the template's own. An episode's process, which has no torch, may import
this file.
"""

import copy
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from tokenizers import AddedToken

GUARD = f"@@{secrets.token_hex(8)}"
"""What stands in rendered texts inside of a special token that a message spells. Nobody knows it who might write it."""
TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError,
                   TypeError, ValueError)
"""What a template can raise: it computes with what a row says."""


class Clock:
    """What `strftime_now` tells chat templates. It stands still: a run's prompts are the same on all of its machines,
    and after it was resumed on another day."""

    day = date.today()

    @classmethod
    def keep(cls, day: str) -> None:
        """Stand at the beginning of this day, YYYY-MM-DD."""
        cls.day = date.fromisoformat(day)

    @classmethod
    def strftime(cls, form: str) -> str:
        return datetime.combine(cls.day, datetime.min.time()).strftime(form)


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], what: str = "it", **arguments: Any) -> str:
    """The text of messages, guarded, through the tokenizer's chat template or that in `arguments`. Raises ValueError
    for messages that the template refuses or fails on; `what`: how its text calls them."""
    special = special_tokens(tokenizer)
    messages = [with_arguments(message, tokenizer, arguments.get("chat_template")) for message in messages]
    arguments = {"strftime_now": Clock.strftime, "tokenize": False} | arguments
    try:
        guarded = special.guarded(messages)
        arguments["tools"] = special.guarded(arguments.get("tools"))
        return tokenizer.apply_chat_template(guarded, **arguments)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template refuses {what}: {error}") from None
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template fails on {what} ({type(error).__name__}: {error}); "
                         f"--data.chat-template-file FILE names another") from None


def with_arguments(message: dict[str, Any], tokenizer: Any, source: str | None) -> dict[str, Any]:
    """The message with its calls' arguments in the form that the chat template takes. They come as an object or, in
    OpenAI's form, as JSON text; most templates write an object as JSON themselves, and a text a second time, so vLLM's
    server parses it. Some put a text in as it is. What a model wrote and is no JSON object stays a text."""
    if not message.get("tool_calls"):
        return message
    is_text, no_content = form_of_calls(tokenizer, source)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        given = function.get("arguments")
        in_form = text_of_arguments(given) if is_text else object_of(given)
        new = {**function, "arguments": in_form}
        if "function" in call:
            new = {**call, "function": new}
        calls.append(new)
    return message | {"tool_calls": calls, "content": message.get("content") or no_content}


def text_of_arguments(arguments: Any) -> str:
    """The arguments of a call as JSON text. None: there are none."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def object_of(arguments: Any) -> Any:
    """The arguments of a call as an object, if they are one or JSON text of one. None: there are none."""
    found = arguments or {}
    if isinstance(arguments, str) and arguments.strip():
        try:
            found = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return arguments
    if isinstance(found, dict):
        return found
    return arguments


@lru_cache(maxsize=64)
def form_of_calls(tokenizer: Any, source: str | None) -> tuple[bool, str | None]:
    """Whether the chat template puts the arguments of a call in as text (an object fails there, or becomes Python's
    form of it, with other quotes), and which content a message of calls alone has: some look for calls only beside
    None."""
    def text_with(arguments: Any, content: str | None) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        options: dict[str, Any] = {"tokenize": False, "strftime_now": Clock.strftime}
        if source:
            options["chat_template"] = source
        try:
            return tokenizer.apply_chat_template(talk, **options)
        except TEMPLATE_ERRORS:
            return ""

    for content in ("", None):
        of_object = text_with({"k9": 1}, content)
        of_text = text_with('{"k9": 1}', content)
        if "k9" in of_object + of_text:
            is_text = "'k9'" in of_object or ("k9" not in of_object and '{"k9": 1}' in of_text)
            return is_text, content
    return False, ""


class SpecialTokens:
    """The special tokens of a tokenizer, in texts."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens = {}
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special and len(token.content) > 1:
                self.tokens[token.content] = number
        # by their first characters: some models have a thousand, and all messages are searched in each turn
        texts = sorted(self.tokens, key=lambda text: (text[:3], -len(text)))  # of two that fit, the longer
        patterns = []
        for start, group in itertools.groupby(texts, key=lambda text: text[:3]):
            ends = "|".join(re.escape(text[3:]) for text in group)
            patterns.append(f"{re.escape(start)}(?:{ends})")
        if not patterns:
            patterns = ["(?!)"]  # it matches nothing
        self.pattern = re.compile("|".join(patterns))

    def guarded(self, value: Any) -> Any:
        """A message, or anything in one, as the template gets it."""
        match value:
            case str():
                while self.pattern.search(value):               # again: a token may lie inside of another one
                    value = self.pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], value)
                return value
            case dict():
                return {self.guarded(key): self.guarded(item) for key, item in value.items()}
            case list():
                return [self.guarded(item) for item in value]
        return value

    def spelled(self, text: str) -> set[str]:
        """The special tokens that messages spell, in a rendered text."""
        found = set()
        for before, after in itertools.pairwise(text.split(GUARD)):
            token = self.pattern.match(before[-1:] + after)
            if token:
                found.add(token[0])
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text, without what the tokenizer would add to it."""
        if GUARD not in text:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self.tokenizer.is_fast:
            raise ValueError(f"a message spells a special token ({', '.join(self.spelled(text))}), and the tokenizer "
                             f"of {self.tokenizer.name_or_path}, which has no tokenizer.json, cannot read it as text")
        reader, names, numbers = self.reader
        text = self.pattern.sub(lambda found: names[found[0]], text).replace(GUARD, "")
        tokens = reader(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [numbers.get(token, token) for token in tokens]

    @cached_property
    def reader(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer that knows each special token by a secret name, and by that alone; the names; and
        the number of each name -> that of the token."""
        reader = copy.deepcopy(self.tokenizer)
        names = {}
        numbers = {}
        for text, number in self.tokens.items():
            like = self.tokenizer.added_tokens_decoder[number]
            name = f"@@{secrets.token_hex(8)}"
            reader.add_tokens([AddedToken(
                name,
                special=False,
                normalized=like.normalized,
                lstrip=like.lstrip,
                rstrip=like.rstrip,
                single_word=like.single_word,
            )])
            names[text] = name
            numbers[reader.convert_tokens_to_ids(name)] = number
        return reader, names, numbers


def encode_plain(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text that no chat template made, in which special tokens are read, with those that the tokenizer
    puts before a text. An end token that it puts after it is left out: the text goes on."""
    encoded = tokenizer(text, return_special_tokens_mask=True)
    tokens = encoded["input_ids"]
    added = encoded["special_tokens_mask"]
    num_kept = len(tokens)
    while num_kept and added[num_kept - 1]:
        num_kept -= 1
    return tokens[:num_kept]


def text_of(tokenizer: Any, tokens: Sequence[int], ends: Collection[int] = ()) -> str:
    """The text of tokens that a model wrote, with the special tokens that are a part of what it says (<think>, the name
    of a channel), and without those that begin, end or fill a sequence: the tokenizer's own, and `ends`."""
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *ends}
    left_out &= {*special_tokens(tokenizer).tokens.values()}
    return tokenizer.decode([token for token in tokens if token not in left_out])


def whole_rows(tokenizer: Any, conversations: Sequence[list[dict[str, Any]]], config: Any,
               encode: Callable[[int, str], list[int]] | None = None) -> tuple[list[list[int]], dict[int, str]]:
    """The tokens of whole conversations up to that at which transformers' *ForSequenceClassification with this config
    reads a score: the last that is not its padding. And the number of each that cannot be read -> why. `encode`: from
    the number of a conversation and its text to tokens, for those with images."""
    special = special_tokens(tokenizer)
    config = config.get_text_config()
    rows: list[list[int]] = []
    unread = {}
    for number, messages in enumerate(conversations):
        try:
            text = rendered(tokenizer, messages)
            row = special.encode(text) if encode is None else encode(number, text)
            check_tokens(row, tokenizer, config.vocab_size)
        except ValueError as error:
            unread[number] = str(error)
            row = [0]
        rows.append(row[: end_of(row, config.pad_token_id)])
    return rows, unread


def check_reader(tokenizer: Any, config: Any, flag: str) -> None:
    """Raises ValueError for a sequence classifier, given by `flag`, that cannot read a conversation."""
    where = f"{tokenizer.name_or_path} ({flag})"
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {where} has no chat template")
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _, unread = whole_rows(tokenizer, [example], config)
    if unread:
        raise ValueError(f"{where} cannot read a question and an answer: {unread[0]}")


def end_of(tokens: Sequence[int], padding: int | None) -> int:
    """The number of tokens up to the last that is not `padding`; at least 1."""
    end = len(tokens)
    while end > 1 and tokens[end - 1] == padding:
        end -= 1
    return end


def check_tokens(tokens: Sequence[int], tokenizer: Any, size: int | None) -> None:
    """Raises ValueError for a token beyond an embedding of `size` tokens; None: it is not known."""
    if size is not None and max(tokens, default=0) >= size:
        text = tokenizer.convert_ids_to_tokens(max(tokens))
        raise ValueError(f"the text has the token {text!r}, number {max(tokens)}, and the embedding of "
                         f"{tokenizer.name_or_path} has {size} tokens: resize it, or take the token out of the "
                         f"tokenizer or the text")


def special_tokens(tokenizer: Any) -> SpecialTokens:
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(8)
def _special_tokens(tokenizer: Any, size: int) -> SpecialTokens:
    """`size`: of the tokenizer, which may get further tokens."""
    return SpecialTokens(tokenizer)
