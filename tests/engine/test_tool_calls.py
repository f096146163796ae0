"""Calls of tools by vLLM's parsers: what is read, what is told to the model, and that no text ends the run."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from envs.runtime.tool_calls import after_thinking, make_parser
from tests.conftest import ROOT

vllm_logger = pytest.importorskip("vllm.logger")
CALLS = [("add", {"a": 1, "b": [2, {"c": "x"}]}), ("not_listed", {"text": 'a "quoted" </text>'})]
WRITTEN = {
    "hermes": ["<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
               for name, arguments in CALLS],
    "llama3_json": [json.dumps({"name": name, "parameters": arguments}) for name, arguments in CALLS],
    "pythonic": ["[add(a=1, b=[2, {'c': 'x'}])]", "[not_listed(text='a \"quoted\" </text>')]"],
}
BROKEN = {
    "hermes": ['I add. <tool_call>{"name": "add", "arguments": {"a": 1', "<tool_call>" * 1000,
               "<tool_call>" + "[" * 10**5, '<tool_call>{"name": 5, "arguments": 3}</tool_call>', "<tool_call>"],
    "llama3_json": ['{"name": "add", "parameters": {"a"', "{" * 5000, '{"a": 1}', "<|python_tag|>add(1)",
                    ' {"name": 5'],
    "pythonic": ["[add(a=1", "[add(1)]", "[add(a=__import__('os').getcwd())]", "[a(" * 3000],
}
PLAIN = {
    "hermes": ["The answer is 3.", "", "<tool>", '{"name": "add", "arguments": {}}'],
    "llama3_json": ["The set {1} has one.", "", "<tool_call>"],
    "pythonic": ["See [1].", "", "[1, 2]", "f(x)"],
}


@pytest.fixture(scope="module")
def tokenizer(smollm):
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return tokenizer


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read(tokenizer, name):
    parse = make_parser(name, tokenizer)
    for text, (function, arguments) in zip(WRITTEN[name], CALLS, strict=True):
        _, (call,) = parse(text)
        assert (call["name"], json.loads(call["arguments"])) == (function, arguments)
    assert make_parser("hermes", tokenizer)("\n".join(WRITTEN["hermes"]))[1][1]["name"] == "not_listed"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_broken_call_is_told_and_plain_text_is_no_call(tokenizer, name, capfd):
    """vLLM's traceback of it is not printed, whatever sets up vLLM's loggers later: the engine's start does."""
    parse = make_parser(name, tokenizer)
    vllm_logger._configure_vllm_root_logger()
    for text in BROKEN[name]:
        _, (call,) = parse(text)
        assert call["name"] == "" and text.strip()[:200] in call["error"] and len(call["error"]) < 300
    assert [parse(text) for text in PLAIN[name]] == [(text, []) for text in PLAIN[name]]
    assert "Traceback" not in "".join(capfd.readouterr())


PIECES = ["<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", "[", "]", "(", ")", ":", ",", "=", '"', "'", "\\",
          "\n", " ", '"name"', '"arguments"', '"parameters"', "add", "None", "1e999", "\ud800", "\0", "é"]


@pytest.mark.parametrize("name", WRITTEN)
def test_no_text_ends_the_run(tokenizer, name):
    parse = make_parser(name, tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from([*PIECES, *WRITTEN[name]]), max_size=12).map("".join))
    def check(text):
        for call in parse(text)[1]:
            assert isinstance(call["name"], str) and isinstance(call.get("error") or call["arguments"], str)

    check()


def test_a_parser_that_only_reads_streams_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"cohere_command4 cannot be used .*not been implemented"):
        make_parser("cohere_command4", tokenizer)


def test_a_model_family_has_its_parser(tokenizer):
    assert make_parser("qwen2", tokenizer)(WRITTEN["hermes"][0])[1][0]["name"] == "add"
    assert make_parser("llama", tokenizer)(WRITTEN["llama3_json"][0])[1][0]["name"] == "add"


def test_a_parser_that_cannot_be_used_is_refused(tokenizer, smollm):
    with pytest.raises(ValueError, match=r"--rollout.tool-parser hermez is unknown; there are .*, hermes, .*, qwen2, "):
        make_parser("hermez", tokenizer)
    with pytest.raises(ValueError, match=r"llama3_json cannot be used with this model here: .*python_tag"):
        make_parser("llama3_json", AutoTokenizer.from_pretrained(smollm))
    code = ("import sys; sys.modules['vllm'] = None\nfrom envs.runtime.tool_calls import make_parser\n"
            "try:\n    make_parser('hermes', None)\nexcept ValueError as error:\n    print(error)")
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "--rollout.tool-parser hermes is a parser of vLLM, which is not installed here\n"


@pytest.mark.parametrize(("reply", "prompt", "said"), [
    ("plain", "", "plain"), ("<think>call</think> x", "", " x"), ("call</think> x", "<think>\n", " x"),
    ("call", "... <think>\n", ""), ("a <think> call", "", "a "), ("a", "<think></think>", "a"),
])
def test_a_call_in_the_reasoning_is_none(reply, prompt, said):
    assert after_thinking(reply, prompt) == said
