"""Conversations through published chat templates: `python -m tests.engine.template_table` writes
tests/evidence/templates.md.

The oracle is the template itself: it renders each conversation whole, with `tool_calls` and reasoning in fields of
their own, and what it writes between two generation prompts is what the model would have sampled. An episode's
`Conversation`, which only ever sees that text, must arrive at the same tokens, or say why not.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from envs.runtime.conversation import ChatTemplate, Conversation
from envs.runtime.tool_calls import after_thinking

FOLDER = Path(__file__).parent / "templates"
PAGE = Path(__file__).parent.parent.parent / "tests/evidence/templates.md"
BAR = "[|\uff5c]"  # DeepSeek's is a wide one
SPECIAL = (rf"<{BAR}[^<>\s'\"{{}}]{{1,40}}{BAR}>|<[a-z_]+\|>|<\|[a-z_]+>|</?s>|<(?:bos|eos)>|<(?:start|end)_of_\w+>"
           r"|\[/?INST\]")
PLAIN = r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>"
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}},
                   "required": ["city"]}}}]
HEADER = """# Chat templates

What an episode's conversation becomes with the chat templates of published models; `python -m
tests.engine.template_table` writes this page. The tokenizer has letters and the special tokens of the template. The
model's replies are what the template itself writes for them.

* **works**: the tokens are those of the template's own rendering of the whole conversation.
* **keeps**: it works, and the model sees all that it wrote, where the template's own rendering later leaves some out.
* **splits**: the template later writes earlier turns differently, most often without their reasoning; each part is
  trained as the model saw it (`--rollout.rewritten-history`). *white space*: that is all that differs. *only here*: its
  own rendering, with `tool_calls` and reasoning in fields, would not differ. *at 2*: before the second reply.
* **no form**: the template itself has no way to write this conversation, even with all fields.
* **refused**: one line says why, and the episode, or the run, ends.
* **WRONG**: no message, and the model sees something else than the template's own rendering.
"""


KINDS = ("splits, only here", "splits, white space", "keeps", "works")


class Turn(NamedTuple):
    """Messages for the model, then its reply."""

    new: list[dict[str, Any]]
    text: str = ""
    calls: tuple[str, ...] = ()  # cities, for the tool
    thoughts: str = ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def result(text: str) -> dict[str, str]:
    return {"role": "tool", "name": "weather", "content": text}


CONVERSATIONS = {
    "three turns": [Turn([user("How are you?")], "Well, thanks."), Turn([user("And today?")], "Fine."),
                    Turn([user("Good.")])],
    "system": [Turn([{"role": "system", "content": "Be brief."}, user("How are you?")], "Well."),
               Turn([user("And today?")])],
    "a tool": [Turn([user("Weather in Rome?")], calls=("Rome",)), Turn([result("It rains.")], "Rain in Rome."),
               Turn([user("Thanks.")])],
    "two calls": [Turn([user("Rome and Bern?")], calls=("Rome", "Bern")),
                  Turn([result("It rains."), result("It snows.")], "Rain and snow."), Turn([user("Thanks.")])],
    "reasoning, a tool": [Turn([user("Weather in Rome?")], calls=("Rome",), thoughts="I must ask."),
                          Turn([result("It rains.")], "Rain in Rome.", thoughts="Now I know."),
                          Turn([user("Thanks.")])],
}


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the template's special tokens."""
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(letters, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>",
                                        clean_up_tokenization_spaces=False)
    special = [AddedToken(text, special=True, normalized=False) for text in sorted(set(re.findall(SPECIAL, template)))]
    marks = [AddedToken(text, special=False, normalized=False) for text in sorted(set(re.findall(PLAIN, template)))]
    tokenizer.add_tokens(special + marks)
    tokenizer.chat_template = template
    return tokenizer


def whole(turn: Turn) -> dict[str, Any]:
    """The model's reply as a message with all fields that templates read."""
    calls = [{"id": f"call{place}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
             for place, city in enumerate(turn.calls)]
    thoughts = {"reasoning_content": turn.thoughts, "thinking": turn.thoughts} if turn.thoughts else {}
    return {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {}) | thoughts


def find_end(written: str, turn: Turn, following: list[dict]) -> re.Match | None:
    """The first special token after the reply's last word; calls may be followed by marks of their own."""
    place = written.rfind(following[0]["content"]) if following else -1
    words = [text for text in (turn.text, *turn.calls) if text and text in written]
    start = max([written.rfind(text) + len(text) for text in words], default=len(written))
    marks = [*re.compile(SPECIAL).finditer(written, start, place if place >= 0 else len(written))]
    if turn.calls:
        marks = [mark for mark in marks if "call" not in mark[0] or mark[0] == "<|call|>"] or marks
    return marks[0] if marks else None


def sampled(template: ChatTemplate, messages: list[dict], turn: Turn, following: list[dict],
            tools: list[dict] | None) -> tuple[str, str]:
    """What the model writes in this turn, and its end token. Raises ValueError where the template has no form for
    it."""
    before = template.render(messages, tools)
    own = template.render([*messages, whole(turn)], tools)
    followed = template.render([*messages, whole(turn), *following], tools)
    for text in (turn.text, *turn.calls):
        if own.count(text) <= before.count(text) and text:
            raise ValueError(f"it leaves out the model's {'call' if turn.calls else 'text'}")
    # from the last message on: before it, a template may write earlier turns differently as soon as a reply follows
    before, own = (text[text.rindex(messages[-1]["content"]) :] for text in (before, own))
    same = next((place for place, (one, other) in enumerate(zip(before, own)) if one != other), len(before))
    # some turns end with the mark that begins the next one, which depends on who speaks then
    end = find_end(own, turn, [])
    last = find_end(followed, turn, following)
    if end is None:
        raise AssertionError(f"no end token in {own[same:]!r}")
    written = own[same : end.start()]
    if before[same:].lstrip().startswith("<think>"):  # the prompt opens the reasoning, which this reply has not
        written = f"{turn.thoughts or 'Hm.'}\n</think>\n\n{written}"
    end = last or end
    return written + end[0], end[0]


def plain(text: str) -> str:
    """Without the white space that differs where a template strips a reply."""
    return re.sub(r"\s+", "", text)


def difference(here: str, expected: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(here, expected)) if a != b), min(len(here), len(expected)))
    start = max(same - 40, 0)
    return f"{here[start : same + 50]!r}; its own rendering: {expected[start : same + 50]!r}"


def try_conversation(source: str, turns: list[Turn], has_tools: bool) -> str:
    """What happens: works, splits, refused: why, or WRONG: what differs."""
    tokenizer = make_tokenizer(source)
    tools = TOOLS if has_tools else None
    template = ChatTemplate(tokenizer, {}, [])
    conversation = Conversation(template, "split", [], [])
    messages: list[dict] = []
    status, seen = "works", ""
    splits: list[str] = []  # numbers of turns
    for number, turn in enumerate(turns):
        try:
            if number:
                between = conversation.between(turn.new)
            else:
                conversation.prompt, between = conversation.begin(turn.new, tools), []
        except ValueError as error:
            return f"refused: {error}"
        conversation.add_messages(turn.new, between)
        messages = [*messages, *turn.new]
        try:
            expected = template.render(messages, tools)
        except (ValueError, jinja2.TemplateError) as error:
            return f"no form: {error}"
        here = tokenizer.decode([*conversation.prompt, *conversation.tokens])
        is_rewritten = not plain(expected).startswith(plain(seen))  # by the template itself
        if between is None:
            splits.append(str(number + 1))
            kind = "splits" if is_rewritten else "splits, white space"
            kind = "splits, only here" if expected.startswith(seen) else kind
            status = min(status, kind, key=["splits", *KINDS].index)
        if plain(here) != plain(expected):
            if is_rewritten and plain(here).startswith(plain(seen)):
                status = "keeps"
            else:
                return f"WRONG: {'after a split, ' if splits else ''}{difference(here, expected)}"
        if number + 1 < len(turns):
            try:
                text, end = sampled(template, messages, turn, turns[number + 1].new, tools)
            except ValueError as error:
                return f"no form: {error}"
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            template.stops = {tokens[-1]}
            assert tokenizer.decode(tokens[-1:]) == end
            conversation.add_reply(tokens, [0.0] * len(tokens))
            calls = [{"name": "weather", "arguments": json.dumps({"city": city})} for city in turn.calls]
            written = text.removesuffix(end)
            said = after_thinking(written, conversation.rendered)
            if calls:  # a parser of tools leaves the text before them
                said = re.split(r"<[^<>]*tool_?calls?[^<>]*>|\[TOOL_CALLS\]|[{\[(]|weather", said)[0]
            conversation.keep_form(written, said, calls)
            messages.append(whole(turn))
            seen = here + text
    return f"{status} at {' and '.join(splits)}" if splits else status


def sources() -> dict[str, str]:
    """Name -> template: the files of this folder, and those in the package trl where it is installed."""
    files = {file.stem: file for file in FOLDER.glob("*.jinja")}
    spec = importlib.util.find_spec("trl")
    for folder in spec.submodule_search_locations if spec else []:
        others = {file.stem: file for file in Path(folder, "chat_templates").glob("*.jinja")}
        files = {name: file for name, file in others.items() if not name.endswith("_training")} | files
    return {name: files[name].read_text() for name in sorted(files)}


def try_all(source: str) -> dict[str, str]:
    found = {}
    for name, turns in CONVERSATIONS.items():
        has_tools = any(turn.calls for turn in turns)
        found[name] = try_conversation(source, turns, has_tools)
    return found


def main() -> None:
    rows = {name: try_all(source) for name, source in sources().items()}
    lines = [HEADER, f"| template | {' | '.join(CONVERSATIONS)} |", "| --- " * (len(CONVERSATIONS) + 1) + "|"]
    notes: dict[str, int] = {}
    like: dict[str, list[str]] = {}                                     # the cells of a row -> its templates
    for name, found in rows.items():
        cells = []
        for status in found.values():
            kind, _, note = status.partition(": ")
            number = notes.setdefault(note, len(notes) + 1) if note else 0
            cells.append(f"{kind} ({number})" if note else kind)
        like.setdefault(" | ".join(cells), []).append(name)
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in like.items()]
    lines += ["", *(f"{number}. `{note}`" for note, number in notes.items()), ""]
    PAGE.write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
