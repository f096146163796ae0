"""Conversations through published chat templates: tests/evidence/templates.md says what happens, and nothing new
goes wrong."""

import re

import jinja2
import pytest

from envs.runtime.conversation import Conversation
from envs.runtime.template import GUARD, rendered, special_tokens
from tests.engine.template_table import (
    CONVERSATIONS,
    FOLDER,
    PAGE,
    TOOLS,
    ChatTemplate,
    make_tokenizer,
    sampled,
    sources,
    try_all,
    try_conversation,
    user,
    whole,
)


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", sources())
def test_the_page_says_what_happens(name):
    found = try_all(sources()[name])
    kinds = [status.partition(": ")[0] for status in found.values()]
    (row,) = re.findall(rf"^\| (?:\w+, )*{name}(?:, \w+)* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [re.sub(r" \(\d+\)$", "", cell) for cell in row.split(" | ")] == kinds
    assert "WRONG" not in kinds
    page = PAGE.read_text()
    assert all(status.partition(": ")[2] in page for status in found.values())


def test_the_oracle_writes_what_models_write():
    """Calls and ends as the models' cards show them."""
    known = {
        "qwen2_5": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
                    "<|im_end|>"),
        "glm4moe": ("\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
                    "</tool_call><|observation|>", "<|observation|>"),
        "gemma4_v5": ('<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>', "<|tool_response>"),
        "gptoss": (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', "<|call|>"),
    }
    first, second, _ = CONVERSATIONS["a tool"]
    for name, expected in known.items():
        template = ChatTemplate(make_tokenizer(source(name)), {}, [])
        assert sampled(template, first.new, first, second.new, TOOLS) == expected, name
    assert whole(first)["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}


def test_faults_are_found(monkeypatch):
    """Of templates, and of the conversation's own tokens."""
    chatml = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{{ '<|im_start|>assistant\n' }}")
    turns = CONVERSATIONS["three turns"]
    assert try_conversation(chatml, turns, False) == "works"
    deaf = chatml.replace("{{ m.content }}", "{{ m.content if m.role != 'user' or loop.first }}")
    assert try_conversation(deaf, turns, False).startswith("refused: the chat template does not show the model")
    short = chatml.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else m.content[:20] }}")
    assert try_conversation(short, turns, False) == "works"
    later = "{% if m.role == 'user' or m.content != 'Fine.' or loop.last %}{{ m.content }}{% else %}..{% endif %}"
    assert try_conversation(chatml.replace("{{ m.content }}", later), turns, False) == "splits at 3"
    doubled = chatml.replace("{{ m.content }}", later.replace("..", "Fine. Fine."))
    assert try_conversation(doubled, turns, False) == "splits at 3"
    between = Conversation.between
    monkeypatch.setattr(Conversation, "between", lambda self, new: between(self, new)[:-1])
    assert try_conversation(chatml, turns, False) == "works"  # a line end at the end is white space
    monkeypatch.setattr(Conversation, "between", lambda self, new: between(self, new)[:-3])
    assert try_conversation(chatml, turns, False).startswith("WRONG: ")
    monkeypatch.setattr(Conversation, "between", lambda self, new: between(self, [user("Else?")]))
    assert try_conversation(chatml, turns, False).startswith("WRONG: ")


TALK = [{"role": "user", "content": " a <b> | c\n"}, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nFine."},
        {"role": "user", "content": "[x] <think>"}]


@pytest.mark.parametrize("name", sources())
def test_no_message_writes_a_special_token(name):
    """Ordinary messages have the tokens that transformers gives them. In another one, each special token of the model
    is its letters: there are as many special tokens as with a word in its place, and the text is the same."""
    tokenizer = make_tokenizer(sources()[name])
    special = special_tokens(tokenizer)
    try:
        expected = tokenizer.apply_chat_template(TALK, return_dict=False, add_generation_prompt=True)
    except jinja2.TemplateError:                                        # one that takes lists of parts alone
        with pytest.raises(ValueError, match="the chat template refuses it"):
            rendered(tokenizer, TALK, add_generation_prompt=True)
        return
    assert special.encode(rendered(tokenizer, TALK, add_generation_prompt=True)) == expected
    count = {}
    for text in ("WORD", *special.tokens):
        for where in ("user", "assistant"):
            talk = [TALK[0] | {"content": f"a {text}b"} if where == "user" else TALK[0],
                    {"role": "assistant", "content": f"{text}\n c" if where == "assistant" else "yes"}, TALK[2]]
            written = rendered(tokenizer, talk, add_generation_prompt=True)
            tokens = special.encode(written)
            found = tokenizer.decode(tokens), [token for token in tokens if token in special.tokens.values()]
            want = count.setdefault(where, found)
            assert found == (want[0].replace("WORD", text), want[1]), (text, where)
            is_shown = text in tokenizer.decode(tokens) and text != "WORD"  # some take lists of parts alone
            assert special.spelled(written) == ({text} if is_shown and GUARD in written else set())
            assert not is_shown or GUARD in written or text in want[0]
    assert len(special.tokens) > 1 and count["user"][1]
