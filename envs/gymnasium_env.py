"""Games with `reset` and `step`, Gymnasium's toy texts here: python data/toy_text.py --out data/toy_text

    --rollout.episode envs/gymnasium_env.py --rollout.max-turns 20 --train-data data/toy_text/train.parquet

`play` serves any class whose observations and actions are text. extra_info of a row: `game`, Gymnasium's name; `seed`;
`options`, the game's arguments as JSON.
"""

import json
import re

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ValueError(f"--rollout.episode envs/gymnasium_env.py: package {error.name} is not installed; run `pip "
                     f"install gymnasium==1.4.0`") from None

ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "FrozenLake8x8": ["left", "down", "right", "up"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
}
NO_ACTION = {"Taxi": -10.0}
"""The reward of a reply that names no action, 0 if the game is not here. It must be at most that of the worst action:
otherwise a model learns to say nothing where moves cost something, as Taxi's do (-1, forbidden ones -10)."""


async def play(chat, game, seed: int) -> float:
    """The sum of the rewards of a game that is played in text."""
    observation, _ = game.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over and (text := await chat.reply({"role": "user", "content": observation})) is not None:
        observation, reward, terminated, truncated, _ = game.step(text)
        total += reward
        is_over = terminated or truncated
    return float(total)


class Words(gymnasium.Wrapper):
    """A toy text: it shows its picture, and its actions are words."""

    def __init__(self, name: str, **options):
        super().__init__(gymnasium.make(name, render_mode="ansi", **options))
        game = name.partition("-")[0]
        self.actions = ACTIONS[game]
        self.no_action = NO_ACTION.get(game, 0.0)

    def reset(self, **options):
        _, info = self.env.reset(**options)
        return self.look(), info

    def step(self, text: str):
        words = [word for word in re.findall(r"[a-z]+", text.lower()) if word in self.actions]
        if not words:
            return f"Write one of {', '.join(self.actions)}.", self.no_action, False, False, {}
        _, *rest = self.env.step(self.actions.index(words[-1]))
        return self.look(), *rest

    def look(self) -> str:
        """The picture as text; brackets replace the colour that marks a place."""
        return re.sub(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", r"[\1]", self.env.render()).strip()


async def episode(chat, row):
    """The reward is the sum of the game's rewards, and of NO_ACTION's."""
    game = row["extra_info"]
    return await play(chat, Words(game["game"], **json.loads(game["options"])), game["seed"])
