"""The endpoint for agents that exist already (envs/openai_agent.py), driven by the clients that they use."""

import asyncio
import base64
import importlib.util
import io
import json
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from envs.endpoint.asked import read_pictures
from envs.endpoint.server import COUNTS, FORMS, MAX_BODY, Endpoint

TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}
CALL = {"name": "weather", "arguments": '{"city": "London"}'}


def user(text: str | list) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class ScriptedChat:
    """Has what Chat has, and a function for the model: the conversation -> its reply, or a list of calls of tools, or
    None. A reply can be held back by `gate`."""

    thought = ""                                        # before each call

    def __init__(self, model: Callable, begun: list["ScriptedChat"] | None = None, role: str = ""):
        self.model, self.role = model, role
        self.begun = [] if begun is None else begun
        self.messages: list[dict] = []
        self.tools: list[Any] = []
        self.tool_calls: list[dict] = []
        self.num_tool_calls = self.num_tool_errors = self.turns = 0
        self.finish_reason, self.content, self.usage = "", "", (0, 0)
        self.asked: list[dict[str, Any]] = []
        self.gate: asyncio.Event | SimpleNamespace | None = None
        self.is_asking = False

    def begin(self, role: str = "") -> "ScriptedChat":
        sub = ScriptedChat(self.model, self.begun, role)
        sub.gate = self.gate
        self.begun.append(sub)
        return sub

    async def reply(self, *messages: dict, **options: Any) -> str | None:
        assert len(messages) >= 1 and not self.is_asking
        self.is_asking = True
        self.asked.append(options)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        self.is_asking = False
        said = self.model([*self.messages, *messages])
        if said is None:
            self.finish_reason = "length"
            return None
        self.messages += messages
        self.tool_calls = said if isinstance(said, list) else []
        self.content = "Well." if self.tool_calls else said
        text = f"{self.thought}Well. <tool_call>" if self.tool_calls else said
        self.messages.append(assistant(text))
        self.finish_reason = "stop"
        limit = options["max_tokens"]
        if limit is not None and len(text.split()) > limit:
            self.finish_reason = "length"
        self.usage = (sum(len(str(message["content"]).split()) for message in self.messages[:-1]), len(text.split()))
        self.turns += 1
        return text

    @property
    def conversations(self) -> list[list[dict]]:
        return [sub.messages for sub in self.begun]


def counting(messages: list[dict]) -> str:
    """A reply that says how many messages the model saw, and the last of them."""
    return f"{len(messages)} {messages[-1]['content']}"


def calling(messages: list[dict]) -> str | list[dict]:
    """Calls the tool first, then reports what it said."""
    return f"It is {messages[-1]['content']}." if messages[-1]["role"] == "tool" else [CALL]


def serve(agent: Callable[[Endpoint], Coroutine], model: Callable = counting, chat: ScriptedChat | None = None,
          models: dict[str, str] | None = None, keeps_temperature: bool = False,
          constrains: bool = False) -> tuple[Any, ScriptedChat, dict]:
    """What the agent returns, the model's side, and the counts."""
    chat = chat or ScriptedChat(model)

    async def run() -> tuple[Any, dict[str, int]]:
        async with Endpoint(chat, models or {"policy": ""}, keeps_temperature, "", constrains) as endpoint:
            return await endpoint.run(agent(endpoint)), endpoint.counts

    result, counts = asyncio.run(asyncio.wait_for(run(), 30))
    return result, chat, counts


def client_of(endpoint: Endpoint, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.token, **{"max_retries": 0} | more)


# --------------------------------------------------------------------------- conversations

def test_a_conversation_goes_on_and_others_begin():
    """History, a sub-agent with a role, and a branch that leaves out a turn: three conversations, each as it was
    asked, and only new messages are given to the model."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            async def ask(messages, model="policy"):
                answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=24)
                return answer.choices[0].message.content

            history = [{"role": "developer", "content": "Be short."}, user("Hello.")]
            history.append(assistant(await ask(history)))
            critic = await ask([user("Is it short?")], "policy:critic")
            history.append(user([{"type": "text", "text": critic}]))
            history.append(assistant((await ask(history)) + "  \n"))  # frameworks trim, or do not
            history.append(user("Bye."))
            last = await ask(history)
            return last, await ask([*history[:3], user("Another way.")])

    (last, other), chat, counts = serve(agent)
    assert (last, other) == ("6 Bye.", "4 Another way.")
    system = {"role": "system", "content": "Be short."}
    main = [system, user("Hello."), assistant("2 Hello."), user("1 Is it short?"), assistant("4 1 Is it short?"),
            user("Bye."), assistant("6 Bye.")]
    critic = [user("Is it short?"), assistant("1 Is it short?")]
    branch = [*main[:3], user("Another way."), assistant("4 Another way.")]
    assert chat.conversations == [main, critic, branch]
    assert [sub.role for sub in chat.begun] == ["", "critic", ""]
    assert [sub.turns for sub in chat.begun] == [3, 1, 1]
    assert counts == dict.fromkeys(COUNTS, 0) | {"requests": 5, "conversations": 3}


def test_requests_at_the_same_time():
    """Eight sub-agents, and two continuations of the same conversation: the second begins its own."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            async def ask(*messages):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                return answer.choices[0].message.content

            many = await asyncio.gather(*[ask(user(f"Task {number}.")) for number in range(8)])
            start = [user("Task 0."), assistant(many[0])]
            return many, await asyncio.gather(ask(*start, user("a")), ask(*start, user("b")))

    (many, both), chat, counts = serve(agent)
    assert many == [f"1 Task {number}." for number in range(8)] and both == ["3 a", "3 b"]
    assert sorted(sub.turns for sub in chat.begun) == [1] * 8 + [2]
    assert counts["conversations"] == 9 and counts["repeated"] == 0


def test_the_same_question_again_is_another_sample():
    """An agent takes a vote: at the same time, and later."""
    replies = iter("abcd")

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            def ask():
                return client.chat.completions.create(model="policy", messages=[user("Vote.")])

            answers = [*await asyncio.gather(ask(), ask(), ask()), await ask()]
            return [answer.choices[0].message.content for answer in answers], {answer.id for answer in answers}

    (votes, ids), chat, counts = serve(agent, lambda messages: next(replies))
    assert sorted(votes) == ["a", "b", "c", "d"] and len(ids) == 4 == len(chat.begun)
    assert counts["repeated"] == 0


def test_a_lost_answer_is_kept_for_the_repeat():
    """The client gives up while the model writes, by a time-out of its own, and asks again: the SDK by its retries, and
    a client that only closes its connection. The conversation has one sample."""
    def run(ask: Callable[[Endpoint], Coroutine]):
        chat = ScriptedChat(counting)

        async def agent(endpoint):
            chat.gate = SimpleNamespace(wait=lambda: asyncio.sleep(2.5))  # from the request on, however late it comes
            return await ask(endpoint)

        return serve(agent, chat=chat)

    async def by_sdk(endpoint):
        async with client_of(endpoint, timeout=1.0, max_retries=8) as client:
            answer = await client.chat.completions.create(model="policy", messages=[user("Hello.")])
            return answer.choices[0].message.content

    async def by_hand(endpoint):
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(base_url=endpoint.url, headers=headers) as client:
            body = {"model": "policy", "messages": [user("Hello.")]}
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
            answer = await client.post("/v1/chat/completions", json=body, timeout=60)
            return answer.json()["choices"][0]["message"]["content"]

    for ask in (by_sdk, by_hand):
        text, chat, counts = run(ask)
        assert text == "1 Hello."
        assert chat.conversations == [[user("Hello."), assistant("1 Hello.")]]
        assert counts["repeated"] == counts["aborted"] == counts["requests"] - 1 >= 1
        assert counts["errors"] == 0


# --------------------------------------------------------------------------- chat completions

async def tool_loop(client: openai.AsyncOpenAI, **more: Any) -> tuple[str, list[dict]]:
    """An agent's loop, as its documentation has it."""
    messages: list[Any] = [user("How is the weather in London?")]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], **more)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content, messages
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"})


def test_tools():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            return await tool_loop(client, parallel_tool_calls=True)

    (text, messages), chat, counts = serve(agent, calling)
    assert text == "It is rain in London."
    (sub,) = chat.begun
    call_id = messages[1].tool_calls[0].id
    result = {"role": "tool", "name": "weather", "content": "rain in London", "tool_call_id": call_id}
    assert sub.messages[1:3] == [assistant("Well. <tool_call>"), result]
    assert len(call_id) == 9 and call_id.isalnum() and messages[1].content == "Well."
    assert [(tool.__name__, tool.schema) for tool in sub.tools] == [("weather", TOOL)]
    assert chat.num_tool_calls == 1 and counts["conversations"] == 1


def test_a_call_that_cannot_be_read_is_text_and_counted():
    for broken in ({"name": "", "error": "cut off"}, {"name": "weather", "arguments": "[1]"},
                   {"name": "weather", "arguments": '{"city'}):
        async def agent(endpoint):
            async with client_of(endpoint) as client:
                return await tool_loop(client)

        (text, _), chat, _ = serve(agent, lambda messages, broken=broken: [broken])
        assert text == "Well. <tool_call>" and (chat.num_tool_calls, chat.num_tool_errors) == (1, 1)


def test_tool_choice_none_leaves_the_text_as_it_is():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            return await tool_loop(client, tool_choice="none")

    (text, _), chat, _ = serve(agent, calling)
    assert text == "Well. <tool_call>" and chat.begun[0].tools and chat.num_tool_calls == 0


def test_a_call_that_is_shown_as_text_comes_without_the_reasoning(monkeypatch):
    """An answer that stands in the reasoning alone would be taken for the model's."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            return await tool_loop(client)

    monkeypatch.setattr(ScriptedChat, "thought", "<think>Is it 42? </think>")
    (text, _), _, _ = serve(agent, lambda messages: [{"name": "", "error": "cut off"}])
    assert text == "Well. <tool_call>"


def test_a_call_that_the_client_hopes_for():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            return await tool_loop(client, tool_choice="required")

    (text, _), _, counts = serve(agent, calling)
    assert text == "It is rain in London." and counts["not_called"] == 1 and counts["requests"] == 2


def test_history_that_the_model_did_not_write():
    """A worked example with a call: its arguments are an object, as chat templates take them."""
    example = {"id": "a", "type": "function", "function": CALL}

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            await client.chat.completions.create(model="policy", messages=[
                user("?"), {"role": "assistant", "content": None, "tool_calls": [example]},
                {"role": "tool", "tool_call_id": "a", "content": "sun"}, user("And now?"),
            ])

    _, chat, _ = serve(agent)
    function = {"name": "weather", "arguments": {"city": "London"}}
    given = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    assert chat.begun[0].messages[1:3] == [
        given, {"role": "tool", "content": "sun", "tool_call_id": "a", "name": "weather"}
    ]


def test_streams():
    """Text, calls, usage; the conversation goes on as without a stream."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            found = []
            messages: list[Any] = [user("How is the weather in London?")]
            for _ in range(2):
                pieces = [piece async for piece in await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL], stream=True,
                    stream_options={"include_usage": True},
                )]
                deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
                text = "".join(delta.content or "" for delta in deltas)
                calls = [call for delta in deltas for call in delta.tool_calls or []]
                found.append((text, calls, pieces[-1].usage, pieces[-2].choices[0].finish_reason))
                messages.append(assistant(text) | {"tool_calls": [
                    {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in calls
                ]})
                messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
            async with client.chat.completions.stream(model="policy", messages=[user("Hi.")]) as stream:
                final = await stream.get_final_completion()
            return found, final.choices[0].message.content

    (((first, calls, usage, reason), second), final), _, counts = serve(agent, calling)
    assert first == "Well." and reason == "tool_calls" and calls[0].function.arguments == CALL["arguments"]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 2, 8)
    assert second[0] == "It is rain." and second[1] == [] and second[3] == "stop"
    assert final == "Well." and counts["conversations"] == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_options_reach_the_model(keeps):
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            def ask(**more):
                return client.chat.completions.create(model="policy", messages=[user("one two three")], **more)

            short = await ask(max_completion_tokens=2)
            stopped = await ask(stop=["two", "three"], temperature=0.5)
            return (short.choices[0], short.usage), stopped.choices[0]

    ((short, usage), stopped), chat, counts = serve(agent, keeps_temperature=keeps)
    assert short.finish_reason == "length" and (usage.prompt_tokens, usage.completion_tokens) == (3, 4)
    assert (stopped.message.content, stopped.finish_reason) == ("1 one ", "stop")
    assert [sub.asked for sub in chat.begun] == [
        [{"max_tokens": 2, "stop": [], "temperature": None, "schema": None}],
        [{"max_tokens": None, "stop": ["two", "three"], "temperature": 0.5 if keeps else None, "schema": None}],
    ]
    assert counts["temperatures"] == 1


# --------------------------------------------------------------------------- errors

def status_of(error: openai.APIStatusError) -> tuple[int, str]:
    return error.status_code, error.body["code"]


def test_errors_are_in_the_form_of_the_api_and_counted():
    async def agent(endpoint):
        found = []

        async def fails(**request):
            request = {"model": "policy", "messages": [user("Hello.")]} | request
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**request)
            found.append(status_of(caught.value))

        picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        async with client_of(endpoint) as client:
            await fails(model="gpt-4o")
            await fails(messages=[user(picture)])
            await fails(messages=[{"role": "judge", "content": "x"}])
            await fails(messages=[])
            await fails(messages="Hello.")
            await fails(n=2)
            await fails(top_p=0.5)
            await fails(max_tokens=0)
            await fails(temperature=3)
            await fails(stop=[""])
            await fails(tool_choice={"type": "function", "function": {"name": "other"}}, tools=[TOOL])
            await fails(tools=[{"type": "custom", "custom": {"name": "x"}}])
            await fails(response_format={"type": "grammar"})
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="policy", input="x")
        async with client_of(endpoint, max_retries=2) as client:
            client.api_key = "none"
            await fails()
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(base_url=endpoint.url, headers=headers) as client:
            for body in (b"{", b"[1]", b"null", b'{"model": "policy"}', b"[" * 10**5, b"\xff"):
                answer = await client.post("/v1/chat/completions", content=body)
                assert answer.json()["error"]["type"] == "invalid_request_error" and answer.status_code == 400
            large = await client.post("/v1/chat/completions", content=b"x" * (MAX_BODY + 1))
            assert large.status_code == 413 and large.json()["error"]["code"] == "not_served"
        return found

    found, chat, counts = serve(agent)
    value, form = "unsupported_value", "invalid_request"
    assert found == [
        (404, "model_not_found"), (400, "unsupported_content"), (400, form), (400, "malformed"), (400, "malformed"),
        (400, value), (400, value), (400, form), (400, form), (400, form), (400, form), (400, value),
        (400, value), (401, "invalid_api_key"),
    ]
    assert counts["errors"] == counts["requests"] == len(found) + 8 and chat.begun == []


def test_no_room_and_no_turn_left():
    """The SDK's own name for it; a shorter message of the same conversation still gets its reply."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            def ask(*messages):
                return client.chat.completions.create(model="policy", messages=messages)

            first = (await ask(user("Hello."))).choices[0].message.content
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(user("Hello."), assistant(first), user("long"))
            assert caught.value.code == "context_length_exceeded" and "maximum context length" in str(caught.value)
            return (await ask(user("Hello."), assistant(first), user("short"))).choices[0].message.content

    def model(messages):
        return None if messages[-1]["content"] == "long" else counting(messages)

    text, chat, counts = serve(agent, model)
    assert text == "3 short" and len(chat.begun) == 1
    assert (counts["errors"], counts["conversations"]) == (1, 1)


def test_what_the_model_cannot_do_ends_the_episode():
    def model(messages):
        raise ValueError("the chat template refuses")

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            try:
                await client.chat.completions.create(model="policy", messages=[user("Hello.")])
            except openai.InternalServerError:
                await asyncio.sleep(60)

    with pytest.raises(ValueError, match="the chat template refuses"):
        serve(agent, model)


def test_who_made_the_endpoint_hears_of_a_refusal_first():
    """It can stop its agent before that sees the error."""
    heard = []

    async def run():
        async with Endpoint(ScriptedChat(lambda messages: None), {"policy": ""}, on_refusal=heard.append) as endpoint:
            async def agent():
                async with client_of(endpoint) as client:
                    try:
                        await client.chat.completions.create(model="policy", messages=[user("Hello.")])
                    except openai.BadRequestError as error:
                        return [*heard, error.code]
            return await endpoint.run(agent())

    assert asyncio.run(run()) == ["context_length_exceeded"] * 2


@pytest.mark.parametrize("ends_s", [0.1, 60.0])
def test_an_episode_without_time_cancels_its_agent(ends_s):
    """What the agent does at its end is waited for, but not for long."""
    done = []

    async def agent():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(ends_s)
            done.append("folder removed")

    async def run():
        async with Endpoint(ScriptedChat(counting), {"policy": ""}) as endpoint:
            async with asyncio.timeout(0.2):
                await endpoint.run(agent())

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert time.monotonic() - start < 10 and done == ["folder removed"] * (ends_s < 1)


def test_after_the_end():
    """A reply that is being sampled as the agent ends is kept; a new request is refused."""
    chat = ScriptedChat(counting)
    left = {}

    async def agent(endpoint):
        chat.gate = asyncio.Event()
        client = client_of(endpoint)

        def ask(text):
            return asyncio.create_task(client.chat.completions.create(model="policy", messages=[user(text)]))

        async def late():
            while not endpoint.has_ended:
                await asyncio.sleep(0.01)
            left["late"] = ask("late")
            await asyncio.wait([left["late"]])
            chat.gate.set()
            await left["early"]

        left["early"] = ask("early")
        left["task"] = asyncio.create_task(late())
        while not chat.begun:
            await asyncio.sleep(0.01)
        return 1.0

    result, _, counts = serve(agent, chat=chat)
    assert result == 1.0 and chat.conversations == [[user("early"), assistant("1 early")]]
    assert status_of(left["late"].exception()) == (410, "episode_ended") and counts["errors"] == 1


def test_models():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            names = [model.id async for model in await client.models.list()]
            one = await client.models.retrieve("gpt-4o")
            messages = []
            for name in ("gpt-4o", "mini:latest", "gpt-4o:planner", "gpt-4o:planner"):
                messages.append(user("Hello."))
                answer = await client.chat.completions.create(model=name, messages=messages)
                messages.append(assistant(answer.choices[0].message.content))
            return names, one.id

    names, chat, _ = serve(agent, models={"policy": "", "gpt-4o": "", "mini:latest": "critic"})
    assert names == (["policy", "gpt-4o", "mini:latest"], "gpt-4o")
    assert [(sub.role, sub.turns) for sub in chat.begun] == [("", 1), ("critic", 1), ("planner", 2)]


# --------------------------------------------------------------------------- responses

FLAT_TOOL = {"type": "function", **TOOL["function"], "strict": False}


def test_responses_with_tools_two_ways():
    """All items sent back, and previous_response_id: the same conversation."""
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            items: list[Any] = [user("How is the weather in London?")]
            found = []
            for way in ("items", "previous"):
                first = await client.responses.create(
                    model=f"policy:{way}", input=items, instructions="Be short.", tools=[FLAT_TOOL]
                )
                (call,) = [item for item in first.output if item.type == "function_call"]
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
                more = {"input": [*items, *first.output, result]}
                if way == "previous":
                    more = {"previous_response_id": first.id, "input": [result]}
                second = await client.responses.create(
                    model=f"policy:{way}", instructions="Be short.", tools=[FLAT_TOOL], **more
                )
                found.append((first.output_text, call.arguments, second.output_text, second.status,
                              second.usage.total_tokens))
            return found

    found, chat, counts = serve(agent, calling)
    assert found == [("Well.", CALL["arguments"], "It is rain.", "completed", 14)] * 2
    assert [sub.turns for sub in chat.begun] == [2, 2] and [sub.role for sub in chat.begun] == ["items", "previous"]
    for sub in chat.begun:
        assert [message["role"] for message in sub.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert sub.messages[3] | {"tool_call_id": ""} == {"role": "tool", "content": "rain", "name": "weather",
                                                          "tool_call_id": ""}
        assert sub.tools[0].schema == TOOL
    assert counts["conversations"] == 2


def test_responses_as_streams_and_errors():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            async with client.responses.stream(model="policy", input="How is it?", tools=[FLAT_TOOL]) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            cut = await client.responses.create(model="policy", input="Long.", max_output_tokens=1)
            found = []
            for more in ({"previous_response_id": "resp_x"}, {"tools": [{"type": "web_search"}]}, {"background": True},
                         {"input": [{"type": "item_reference", "id": "x"}]}):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.responses.create(**{"model": "policy", "input": "x"} | more)
                found.append(status_of(caught.value))
            return kinds, final, cut, found

    (kinds, final, cut, found), _, _ = serve(agent, calling)
    assert [item.type for item in final.output] == ["message", "function_call"] and final.output_text == "Well."
    assert final.output[1].arguments == CALL["arguments"]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert found == [(404, "not_found"), (400, "unsupported_value"), (400, "unsupported_value"),
                     (400, "unsupported_content")]


# --------------------------------------------------------------------------- Anthropic's messages

def png_of(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), colour).save(file, "PNG")
    return file.getvalue()


def test_pictures_are_the_same_in_each_form():
    """Of users and in the results of tools, as each API's reference writes them."""
    red, blue = png_of("red"), png_of("blue")
    data = {file: base64.b64encode(file).decode() for file in (red, blue)}
    url = {file: f"data:image/png;base64,{text}" for file, text in data.items()}
    source = {file: {"type": "base64", "media_type": "image/png", "data": text} for file, text in data.items()}
    call = {"name": "look", "arguments": "{}"}
    chat = [user([{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url[red]}}]),
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": {"url": url[blue]}}]}]
    items = [user([{"type": "input_text", "text": "See "},
                   {"type": "input_image", "image_url": url[red], "detail": "auto"}]),
             {"type": "function_call", "call_id": "a"} | call,
             {"type": "function_call_output", "call_id": "a",
              "output": [{"type": "input_image", "image_url": url[blue]}]}]
    blocks = [user([{"type": "text", "text": "See "}, {"type": "image", "source": source[red]}]),
              {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
              user([{"type": "tool_result", "tool_use_id": "a",
                     "content": [{"type": "image", "source": source[blue]}]}])]
    bodies = {"/v1/chat/completions": {"messages": chat}, "/v1/responses": {"input": items},
              "/v1/messages": {"messages": blocks, "max_tokens": 9}}
    for path, body in bodies.items():
        asked = FORMS[path].read(body, {})
        found = read_pictures(asked.messages)
        assert [message["content"] for message in found] == [["See ", red], "", [blue]], path
        assert [message["role"] for message in found] == ["user", "assistant", "tool"]


def test_a_conversation_with_pictures_goes_on():
    """Pictures are compared with the rest of the history, and only new ones are read. A bad one is a 400."""
    def part(file):
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            async def ask(*messages):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                return assistant(answer.choices[0].message.content)

            history = [user([part(png_of("red"))])]
            history.append(await ask(*history))
            for bad in (png_of("red")[:60], b"no picture"):
                with pytest.raises(openai.BadRequestError, match="picture cannot be read"):
                    await ask(*history, user([part(bad)]))
            history += [user([{"type": "text", "text": "And "}, part(png_of("blue"))])]
            history.append(await ask(*history))
            with pytest.raises(openai.BadRequestError, match="the model takes text alone here"):
                await ask({"role": "system", "content": [part(png_of("red"))]}, user("Hello."))
            await ask(user([part(png_of("green"))]), *history[1:], user("Bye."))           # another picture

    _, chat, counts = serve(agent, lambda messages: f"{len(messages)}")
    main, other = (conversation for conversation in chat.conversations if conversation)
    assert [message["content"] for message in main] == [[png_of("red")], "1", ["And ", png_of("blue")], "3"]
    assert [message["content"] for message in other][::2] == [[png_of("green")], ["And ", png_of("blue")], "Bye."]
    assert counts["conversations"] == 2 and counts["errors"] == 3


@pytest.mark.skipif(not importlib.util.find_spec("anthropic"), reason="anthropic is not installed: make test")
def test_anthropics_client():
    import anthropic

    tool = {"name": "weather", "description": "Tell the weather.", "input_schema": TOOL["function"]["parameters"]}

    async def agent(endpoint):
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as client:
            common = {"model": "policy", "max_tokens": 50, "tools": [tool],
                      "system": [{"type": "text", "text": "Be short."}]}
            messages: list[Any] = [user("How is the weather in London?")]
            first = await client.messages.create(messages=messages, **common)
            call = first.content[1]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            async with client.messages.stream(messages=messages, **common) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                second = await stream.get_final_message()
            async with client.messages.stream(messages=[user("Again.")], **common) as stream:
                third = await stream.get_final_message()
            errors = []
            for more in ({"messages": [user("x"), assistant("y")]}, {"model": "claude"},
                         {"extra_body": {"top_k": 3}},
                         {"tools": [{"type": "bash_20250124", "name": "bash"}]}):
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await client.messages.create(**common | {"messages": [user("x")]} | more)
                errors.append((caught.value.status_code, caught.value.body["error"]["type"]))
            client.api_key = "none"
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**common | {"messages": [user("x")]})
            return first, text, second, third, errors

    (first, text, second, third, errors), chat, counts = serve(agent, calling)
    assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
    assert first.content[1].input == {"city": "London"}
    assert text == "It is rain." == second.content[0].text and second.stop_reason == "end_turn"
    assert (second.usage.input_tokens, second.usage.output_tokens) == (11, 3)
    assert third.content[1].input == {"city": "London"} and third.stop_reason == "tool_use"
    assert errors == [(400, "invalid_request_error"), (404, "not_found_error"), (400, "invalid_request_error"),
                      (400, "invalid_request_error")]
    assert [sub.turns for sub in chat.begun] == [2, 1] and chat.begun[0].tools[0].schema == TOOL
    assert chat.begun[0].messages[0] == {"role": "system", "content": "Be short."}
    assert counts["errors"] == 5


def test_messages_without_a_client():
    """The same over HTTP: results of several tools and a text in one message, stop texts, an error's form."""
    body = {"model": "policy", "max_tokens": 9, "stop_sequences": ["Four"], "messages": [
        user("One."),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                          {"type": "tool_use", "id": "a", "name": "weather", "input": {}},
                                          {"type": "tool_use", "id": "b", "name": "time", "input": {}}]},
        user([{"type": "tool_result", "tool_use_id": "a", "content": "Two."},
              {"type": "tool_result", "tool_use_id": "b"}, {"type": "text", "text": "Three Four"}]),
    ]}

    async def agent(endpoint):
        async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-api-key": endpoint.token}) as client:
            answer = await client.post("/v1/messages", json=body)
            error = await client.post("/v1/messages", json=body | {"max_tokens": None})
            counted = await client.post("/v1/messages/count_tokens", json=body)
            return answer.json(), error.json(), counted.json()

    (answer, error, counted), chat, _ = serve(agent)
    assert (answer["content"], answer["stop_reason"], answer["stop_sequence"]) == (
        [{"type": "text", "text": "5 Three "}], "stop_sequence", "Four")
    required = {"type": "invalid_request_error", "message": "max_tokens: field required"}
    assert error == {"type": "error", "error": required}
    assert counted["error"]["type"] == "not_found_error"
    assert [(m["role"], m["content"], m.get("name")) for m in chat.begun[0].messages[2:5]] == [
        ("tool", "Two.", "weather"), ("tool", "", "time"), ("user", "Three Four", None)]
