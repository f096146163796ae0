"""LangGraph's ready-made ReAct agent, with a tool. AGENT=tests/envs/agents/graph_agent.py"""

import warnings

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

warnings.filterwarnings("ignore", message=".*create_react_agent")


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def solve(row):
    agent = create_react_agent(ChatOpenAI(model="policy", max_tokens=48), [multiply])
    found = await agent.ainvoke({"messages": [("user", row["prompt"][-1]["content"])]}, {"recursion_limit": 6})
    text = found["messages"][-1].content
    is_right = row["reward_model"]["ground_truth"] in text
    return {"score": float(is_right), "messages": float(len(found["messages"]))}
