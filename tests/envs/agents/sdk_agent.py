"""OpenAI's SDK: a history, and a sub-agent that criticises the answer. AGENT=tests/envs/agents/sdk_agent.py"""

from openai import AsyncOpenAI


async def solve(row):
    async with AsyncOpenAI() as client:
        async def ask(messages, model="policy"):
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=24)
            return answer.choices[0].message.content

        history = [{"role": "system", "content": "Answer with one number."}, *row["prompt"][-1:]]
        answer = await ask(history)
        history.append({"role": "assistant", "content": answer})
        critic = await ask([{"role": "user", "content": f"Is this short? Say yes or no: {answer}"}], "policy:critic")
        history.append({"role": "user", "content": f"A critic says: {critic[:40]} Answer again, shorter."})
        answer = await ask(history)
    right = row["reward_model"]["ground_truth"] in answer
    return {"score": -len(answer) / 100, "length": float(len(answer)), "acc": float(right)}
