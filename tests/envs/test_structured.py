"""Requests for JSON and for a tool by its name, by the three SDKs: what the model is told, what is counted."""

import json

import anthropic
import pytest
from pydantic import BaseModel

from envs.endpoint.structured import ANY_OBJECT
from tests.envs.test_endpoint import CALL, TOOL, assistant, client_of, serve, user


class Result(BaseModel):
    answer: int


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
OPENAI = {"type": "json_schema", "json_schema": {"name": "result", "schema": SCHEMA}}
TOLD = f"\n\nAnswer with JSON alone, without other text. It must satisfy this JSON schema: {json.dumps(SCHEMA)}"


def claude_of(endpoint) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0)


async def by_chat(endpoint, messages, schema=OPENAI, **more) -> str:
    async with client_of(endpoint) as client:
        done = await client.chat.completions.create(model="policy", messages=messages, response_format=schema, **more)
        return done.choices[0].message.content


async def by_responses(endpoint, messages) -> str:
    form = {"type": "json_schema", "name": "result", "schema": SCHEMA, "strict": True}
    async with client_of(endpoint) as client:
        return (await client.responses.create(model="policy", input=messages, text={"format": form})).output_text


async def by_messages(endpoint, messages) -> str:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with claude_of(endpoint) as client:
        done = await client.messages.create(model="policy", messages=messages, max_tokens=9, output_config=form)
        return done.content[0].text


def replies(*texts):
    left = list(texts)
    return lambda messages: left.pop(0)


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_a_schema_is_told_once_and_replies_that_are_no_json_are_counted(ask):
    """The next turn of the conversation is one, although the client has not seen what was added."""
    async def agent(endpoint):
        first = await ask(endpoint, [user("2 + 3?")])
        second = await ask(endpoint, [user("2 + 3?"), assistant(first), user("And 4 + 4?")])
        return first, second

    found, chat, counts = serve(agent, replies('{"answer": 5}', "It is 8."))
    assert found == ('{"answer": 5}', "It is 8.")
    (conversation,) = chat.conversations
    assert [message["content"] for message in conversation[::2]] == ["2 + 3?" + TOLD, "And 4 + 4?"]
    assert {sub["schema"] for sub in chat.begun[0].asked} == {None}
    assert (counts["structured"], counts["unparsed"], counts["conversations"], counts["errors"]) == (2, 1, 1, 0)


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_under_a_grammar_nothing_is_told(ask):
    async def agent(endpoint):
        return await ask(endpoint, [user("2 + 3?")])

    _, chat, counts = serve(agent, replies('{"answer": 5}'), constrains=True)
    assert chat.conversations[0][0]["content"] == "2 + 3?" and chat.begun[0].asked[0]["schema"] == SCHEMA
    assert (counts["structured"], counts["unparsed"]) == (1, 0)


def test_the_sdks_own_parsers_work():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            one = await client.chat.completions.parse(model="policy", messages=[user("?")], response_format=Result)
            two = await client.responses.parse(model="policy", input="?", text_format=Result)
        async with claude_of(endpoint) as client:
            three = await client.messages.parse(model="policy", messages=[user("?")], max_tokens=9,
                                                output_format=Result)
        return one.choices[0].message.parsed, two.output_parsed, three.parsed_output

    found, _, counts = serve(agent, lambda messages: '{"answer": 7}')
    assert found == (Result(answer=7),) * 3 and (counts["structured"], counts["unparsed"]) == (3, 0)


def test_any_object():
    async def agent(endpoint):
        for text in ("{}", "[1]", "5", '{"a": NaN}', "{", ""):
            await by_chat(endpoint, [user(text)], {"type": "json_object"})

    _, chat, counts = serve(agent, lambda messages: messages[-1]["content"].partition("\n")[0])
    assert chat.conversations[0][0]["content"] == "{}\n\nAnswer with a JSON object alone, without other text."
    assert (counts["structured"], counts["unparsed"]) == (6, 4)
    _, chat, _ = serve(lambda endpoint: by_chat(endpoint, [user("?")], {"type": "json_object"}), constrains=True)
    assert chat.begun[0].asked[0]["schema"] == ANY_OBJECT


def test_with_tools_a_schema_is_told_and_never_forced():
    """A grammar of the schema would make calls impossible. A call is an answer that needs no JSON."""
    def model(messages):
        return '{"answer": 1}' if messages[-1]["role"] == "tool" else [CALL]

    async def agent(endpoint):
        return await by_chat(endpoint, [user("?")], tools=[TOOL])

    _, chat, counts = serve(agent, model, constrains=True)
    assert chat.begun[0].asked[0]["schema"] is None and chat.conversations[0][0]["content"] == "?" + TOLD
    assert (counts["structured"], counts["unparsed"]) == (1, 0)


@pytest.mark.parametrize("model", [lambda messages: [CALL], lambda messages: "No."], ids=["called", "not called"])
def test_a_tool_by_its_name_is_told_and_counted(model):
    name = TOOL["function"]["name"]
    claude = {"name": name, "input_schema": TOOL["function"]["parameters"]}
    response = {"type": "function", "name": name, "parameters": TOOL["function"]["parameters"]}

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            await client.chat.completions.create(
                model="policy", messages=[user("?")], tools=[TOOL],
                tool_choice={"type": "function", "function": {"name": name}})
            await client.responses.create(model="policy", input="? ", tools=[response],
                                          tool_choice={"type": "function", "name": name})
        async with claude_of(endpoint) as client:
            await client.messages.create(model="policy", messages=[user("?  ")], max_tokens=9, tools=[claude],
                                         tool_choice={"type": "tool", "name": name})

    _, chat, counts = serve(agent, model)
    assert all(sub[0]["content"].endswith(f"\n\nCall the tool {name}.") for sub in chat.conversations)
    assert counts["not_called"] == (0 if model([]) != "No." else 3) and counts["errors"] == 0


def test_a_format_of_text_asks_for_nothing():
    async def agent(endpoint):
        return await by_chat(endpoint, [user("2 + 3?")], {"type": "text"})

    found, chat, counts = serve(agent, replies("It is 5."))
    assert found == "It is 5." and chat.conversations[0][0]["content"] == "2 + 3?"
    assert (counts["structured"], counts["errors"]) == (0, 0)
