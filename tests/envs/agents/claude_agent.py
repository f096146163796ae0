"""Anthropic's SDK: its loop of tools. AGENT=tests/envs/agents/claude_agent.py"""

from anthropic import AsyncAnthropic

MULTIPLY = {
    "name": "multiply", "description": "Multiply two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


async def solve(row):
    messages = [{"role": "user", "content": row["prompt"][-1]["content"]}]
    async with AsyncAnthropic() as client:
        for _ in range(3):
            async with client.messages.stream(
                model="policy", max_tokens=48, system="Be short.", messages=messages, tools=[MULTIPLY]
            ) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": run(call.input)} for call in calls]
            messages.append({"role": "user", "content": results})
    text = "".join(block.text for block in answer.content if block.type == "text")
    return {"score": float(row["reward_model"]["ground_truth"] in text), "messages": float(len(messages))}


def run(arguments):
    try:
        return str(arguments["a"] * arguments["b"])
    except (KeyError, TypeError) as error:
        return f"Error: {error}"
