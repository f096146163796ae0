"""Rows of verl's multi-turn data: the tools of `extra_info.tools_kwargs`, the user of `extra_info.interaction_kwargs`.

    --rollout.episode envs/verl_tools.py --rollout.tool-parser hermes --train-data gsm8k_multiturn/train.parquet

verl names the classes of tools in a YAML file; here the tools are the functions of TOOLS, and the users the functions
of INTERACTIONS, under verl's names. A row that asks for another tool or user is an error. A tool gets the row's
`create_kwargs` and `execute_kwargs`; `calc_reward_kwargs` and `release_kwargs` must be empty. Without an interaction
the last reply is scored by the reward function of the row's data_source, or by --reward.function.
"""

from collections.abc import Callable

from rewards.gsm8k import compute_score

NO_SANDBOX = ""
try:  # once and not in each episode
    from envs.python_tool import python_tool
except ValueError as error:  # rows without code_interpreter need no sandbox
    NO_SANDBOX = str(error)


def calc_gsm8k_reward(ground_truth: str) -> Callable:
    def tool(answer: str) -> str:
        """A tool for calculating the reward of gsm8k: 1.0 if the answer is correct, else 0.0.

        Args:
            answer: The model's answer to the GSM8K math problem, a number.
        """
        return f"Current parsed {answer=} reward={compute_score('', f'#### {answer}', ground_truth):.1f}"

    return tool


def code_interpreter(ground_truth: str = "", timeout: float = 10.0) -> Callable:
    """`timeout`: seconds of a program. Raises ValueError where programs cannot run."""
    if NO_SANDBOX:
        raise ValueError(f"extra_info.tools_kwargs: code_interpreter needs a sandbox: {NO_SANDBOX}")
    if not timeout > 0:
        raise ValueError(f"extra_info.tools_kwargs: code_interpreter has timeout {timeout}; must be above 0 (seconds)")
    return python_tool(timeout)


TOOLS = {"calc_gsm8k_reward": calc_gsm8k_reward, "code_interpreter": code_interpreter}
"""verl's name of a tool -> a function that takes the row's arguments and returns the tool."""


def gsm8k(text: str, ground_truth: str, query: str = "") -> tuple[float, str]:
    """The user of verl's Gsm8kInteraction: the score of a reply, and the next message if it is not right."""
    score = compute_score("", text if "####" in text else f"#### {text}", ground_truth)
    return score, "Your response is incorrect! You need to reflect on your answer and try again."


INTERACTIONS = {"gsm8k": gsm8k}


async def episode(chat, row):
    """The reward is the interaction's, or that of the last reply."""
    extra_info = row["extra_info"]
    chat.tools = tools_of(extra_info.get("tools_kwargs") or {})
    interaction = without_nulls(extra_info.get("interaction_kwargs"))
    name = interaction.pop("name", "gsm8k" if interaction else None)  # verl's default
    if name and name not in INTERACTIONS:
        raise ValueError(f"extra_info.interaction_kwargs: name {name!r} is not in {', '.join(INTERACTIONS)} "
                         f"(INTERACTIONS in envs/verl_tools.py)")
    text = await chat.reply()
    score = 0.0
    while text is not None:
        if chat.tool_calls:
            text = await chat.reply(*await chat.call_tools())
            continue
        if not name:
            return text
        score, answer = INTERACTIONS[name](text, **interaction)
        if score == 1.0:
            break
        text = await chat.reply({"role": "user", "content": answer})
    return {"score": score, "acc": score} if name else ""


def without_nulls(kwargs: dict | None) -> dict:
    """In parquet every row has the keys of all rows; keys of other rows are null."""
    return {key: value for key, value in (kwargs or {}).items() if value is not None}


def tools_of(tools_kwargs: dict) -> list[Callable]:
    tools = []
    for name, kwargs in without_nulls(tools_kwargs).items():
        if name not in TOOLS:
            raise ValueError(f"extra_info.tools_kwargs: {name!r} is not in {', '.join(TOOLS)} (TOOLS in "
                             f"envs/verl_tools.py)")
        unused = [key for key in ("calc_reward_kwargs", "release_kwargs") if without_nulls(kwargs.get(key))]
        if unused:
            raise ValueError(f"extra_info.tools_kwargs: {name} has {', '.join(unused)}, which mean nothing here: the "
                             f"reward is the episode's, and a tool ends with it")
        tool = TOOLS[name](**without_nulls(kwargs.get("create_kwargs")), **without_nulls(kwargs.get("execute_kwargs")))
        tool.__name__ = name
        tools.append(tool)
    return tools
