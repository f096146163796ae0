"""Runs the episodes of episodes_of_tests.py on an engine that is awake."""

import itertools
from dataclasses import replace
from pathlib import Path

from common.metrics import Meter
from common.model.reward_model import RewardModelConfig
from common.prompts import Prompt, TemplateConfig
from common.rollout import Sample
from common.rollouts.episodes import start_episodes
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring, start_rollout
from rewards.runtime.pool import RewardConfig

FILE = Path(__file__).parent / "episodes_of_tests.py"


def make_prompt(tokenizer, number: int, **columns) -> Prompt:
    messages = [{"role": "user", "content": f"Game {number}. What is {number} + 2?"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Prompt(tokens, "word_problems", "2", {}, messages, {"number": number, **columns})


def with_tools(tokenizer, folder: Path) -> str:
    """A file with the tokenizer's chat template, which also shows tools."""
    file = folder / "tools.jinja"
    shown = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    file.write_text(shown + tokenizer.chat_template)
    return str(file)


class Runs:
    """Runs episodes; each ends with its processes."""

    def __init__(self, engine, tokenizer, world, stops, max_length: int = 400):
        self.engine, self.tokenizer, self.world = engine, tokenizer, world
        self.stops, self.max_length = stops, max_length

    def __call__(self, name: str, prompts: list[Prompt], num_samples: int = 1, stop=lambda: False, metrics=None,
                 reward_model=None, model=None, template: str = "", **flags) -> list[Sample]:
        """`name`: of an episode of episodes_of_tests.py, or FILE.py. `model`: a reward model, and its flags.
        `template`: file of a chat template."""
        episode = name if ".py" in name else f"{FILE}:{name}"
        config = replace(self.engine.config, episode=episode, **flags)
        scoring = Scoring(self.tokenizer, RewardConfig(num_workers=1, max_error_frac=1.0),
                          reward_model or RewardModelConfig(), [],
                          config.episode)
        scoring.model = model
        scoring.episodes = start_episodes(
            config, self.tokenizer, TemplateConfig(chat_template_file=template), self.stops, self.max_length, self.world
        )
        rows = range(len(prompts))
        try:
            pending = start_rollout(
                RolloutSource(self.engine, scoring, prompts, stop), RolloutRequest(rows, num_samples, config, (1, 2))
            )
            if stop():
                return pending.samples
            meter = Meter()
            rollout = pending.collect(meter)
            if metrics is not None:
                metrics.update(meter.reduce())
            return rollout.samples
        finally:
            scoring.close()


def runs_of(mask: list[bool]) -> list[tuple[bool, int, int]]:
    """(value, start, end) of each stretch of equal values."""
    edges = [i for i in range(len(mask)) if i == 0 or mask[i] != mask[i - 1]] + [len(mask)]
    return [(mask[a], a, b) for a, b in itertools.pairwise(edges)]
