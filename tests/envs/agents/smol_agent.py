"""smolagents' ToolCallingAgent: a plain function, which runs in a thread. AGENT=tests/envs/agents/smol_agent.py"""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def solve(row):
    model = OpenAIServerModel("policy", max_tokens=48)
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=3, verbosity_level=0)
    text = str(agent.run(row["prompt"][-1]["content"]))
    return {"score": float(row["reward_model"]["ground_truth"] in text), "steps": float(agent.step_number)}
