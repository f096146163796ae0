"""Environments of `verifiers`: `load_environment` with a game, with tools, and two that cannot be trained."""

import verifiers.legacy as vf
from datasets import Dataset


class Halves(vf.MultiTurnEnv):
    """A number is to be guessed; the answers say which side. The right one ends the game with a last word."""

    async def setup_state(self, state):
        state["guesses"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1].content
        state["guesses"].append(guess)
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        word = "Higher." if guess.isdigit() and int(guess) < int(state["answer"]) else "Lower."
        return [{"role": "user", "content": word}]


class Forgetful(Halves):
    """Earlier messages are left out."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


async def found(completion, answer) -> float:
    return float(any(message.role == "assistant" and message.content == answer for message in completion))


async def num_guesses(state) -> float:
    return float(len(state["guesses"]))


def score(state) -> float:
    """It has no weight."""
    return 7.0


def last_is_right(completion, answer) -> float:
    return float(completion[-1].content == answer)


def all_alike(completions) -> list[float]:
    return [1.0 for _ in completions]


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One number.
        second: The other one.
    """
    return first + second


def divide(first: int, second: int) -> float:
    """Divide two numbers.

    Args:
        first: One number.
        second: The other one.
    """
    return first / second


def load_environment(kind: str = "game", max_turns: int = 5) -> vf.Environment:
    rows = Dataset.from_list([{"question": f"A number from 0 to {top}?", "answer": str(top // 2), "info": {"top": top}}
                              for top in (10, 20, 30)])
    if kind == "tools":
        return vf.ToolEnv(tools=[add, divide], dataset=rows, rubric=vf.Rubric(funcs=[last_is_right]),
                          max_turns=max_turns)
    kinds = {"game": Halves, "forgetful": Forgetful, "group": Halves}
    funcs = [all_alike] if kind == "group" else [found, num_guesses, score]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, -0.25, 0.0][: len(funcs)])
    return kinds[kind](dataset=rows, system_prompt="Guess.", rubric=rubric, max_turns=max_turns)
