"""An OpenEnv server, `python openenv_server.py PORT`: a word is to be guessed, letter by letter or at once."""

import sys

import uvicorn
from openenv.core.env_server import Action, Observation, State, create_fastapi_app
from openenv.core.env_server.interfaces import Environment

WORDS = ["tree", "river", "stone"]


class Guess(Action):
    message: str


class Seen(Observation):
    text: str = ""
    tries: int = 0


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.word, self.found, self.tries = "", set(), 0

    def reset(self, seed=None, episode_id=None, start="", **options):
        self.word, self.found = WORDS[seed or 0], set(start)
        return self.look(0.0, False)

    def step(self, action, timeout_s=None, **options):
        self.tries += 1
        if action.message == "crash":
            raise OSError("the disk is full")
        new = (set(action.message) & set(self.word)) - self.found
        self.found |= new
        is_over = self.found >= set(self.word)
        return self.look(len(new) / len(set(self.word)) if new else None, is_over)

    def look(self, reward, is_over):
        text = "".join(letter if letter in self.found else "_" for letter in self.word)
        return Seen(text=text, tries=self.tries, reward=reward, done=is_over)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Words, Guess, Seen, max_concurrent_envs=3)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
