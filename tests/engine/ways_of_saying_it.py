"""The same conversation of two turns over three APIs, without their clients. Agents of test_endpoint.py."""

import os

import httpx


async def post(path, body):
    key = os.environ["OPENAI_API_KEY"]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        answer = await client.post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/{path}", json={"model": "policy"} | body)
    return answer.json()


def said(role, text):
    return {"role": role, "content": text}


async def chat(row):
    messages = [said("system", "Be short."), *row["prompt"]]
    answer = await post("chat/completions", {"messages": messages, "max_tokens": 20})
    messages += [answer["choices"][0]["message"], said("user", "Again.")]
    answer = await post("chat/completions", {"messages": messages, "max_completion_tokens": 20})
    return float(answer["usage"]["total_tokens"])


async def responses(row):
    body = {"instructions": "Be short.", "max_output_tokens": 20}
    answer = await post("responses", body | {"input": row["prompt"]})
    items = [*row["prompt"], *answer["output"], said("user", "Again.")]
    answer = await post("responses", body | {"input": items})
    return float(answer["usage"]["total_tokens"])


async def messages(row):
    body = {"system": "Be short.", "max_tokens": 20}
    answer = await post("messages", body | {"messages": row["prompt"]})
    history = [*row["prompt"], said("assistant", answer["content"]), said("user", "Again.")]
    answer = await post("messages", body | {"messages": history})
    return float(answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"])
