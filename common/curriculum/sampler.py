"""In which order rows of the training data come: the prompts of a script that samples, or the rows of another."""

from typing import Any

import numpy as np


class PromptSampler:
    """Draws indices of prompts, shuffled anew in every epoch by (seed, epoch). The next epoch fills the last incomplete
    batch of an epoch. (epoch, position) is the whole state, and all ranks draw the same indices. `data_hash` identifies
    the prompts: with other prompts, a resumed run would draw some twice in an epoch and others never.

    With `weights` a prompt whose turn comes is taken with a probability of its weight over the largest one, and passed
    over otherwise, until the next epoch. One with twice the weight is drawn twice as often, and none twice in an epoch.
    """

    def __init__(self, num_prompts: int, data_hash: str, seed: int):
        self.num_prompts = num_prompts
        self.data_hash = data_hash
        self.seed = seed
        self.epoch = self.position = 0
        self.num_passed_over = 0
        self._chances: np.ndarray | None = None

    @property
    def weights(self) -> np.ndarray | None:
        """[N] the weight of each prompt over the largest one, float32; None: all are alike. They hold until others are
        set, and must be the same on all ranks."""
        return self._chances

    @weights.setter
    def weights(self, weights: Any) -> None:
        """Raises ValueError for what are no weights."""
        if weights is None:
            self._chances = None
            return
        numbers = np.asarray(weights, dtype=np.float32)
        if numbers.shape != (self.num_prompts,):
            raise ValueError(f"sampler.weights has the shape {list(numbers.shape)}, must have a number for each of the "
                             f"{self.num_prompts} rows: [{self.num_prompts}]")
        wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
        if len(wrong):
            raise ValueError(f"sampler.weights of row {wrong[0]} is {numbers[wrong[0]]}, must be 0 or more and finite: "
                             f"run.success_rates is NaN for rows without a score yet, nan_to_num(0.5) gives them one")
        if not numbers.any():
            raise ValueError("sampler.weights is 0 for all rows: none could be drawn")
        self._chances = numbers / numbers.max()

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
            # drawn anew, not kept: a checkpoint then needs two numbers, whatever the size of the data
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_prompts)
            rest = order[self.position :]
            places = np.arange(len(rest))                               # in `rest`, of those that are taken
            if self._chances is not None:
                luck = np.random.default_rng((self.seed, self.epoch, 1)).random(self.num_prompts)[self.position :]
                places = np.flatnonzero(luck < self._chances[rest])
            places = places[: n - len(taken)]
            taken += rest[places].tolist()
            num_passed = len(rest)
            if len(taken) == n:
                num_passed = int(places[-1]) + 1
            self.position += num_passed
            self.num_passed_over += num_passed - len(places)
        return taken

    def state_dict(self) -> dict[str, int | str]:
        return {"epoch": self.epoch, "position": self.position, "num_prompts": self.num_prompts,
                "data_hash": self.data_hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data_hash"] != self.data_hash:
            raise ValueError(f"the saved run trained on {state['num_prompts']} prompts, not on the {self.num_prompts} "
                             f"that are given now; --train-data and --data.* must stay as they were, or start a new "
                             f"--run-dir")
        self.epoch, self.position = state["epoch"], state["position"]
