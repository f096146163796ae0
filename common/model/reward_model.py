"""A reward model: any sequence classifier with one label, sharded beside the policy, run on packed conversations."""

from dataclasses import dataclass

from transformers import AutoTokenizer, PretrainedConfig

from common.batch import Batch
from common.model.loading import SCORED, load_critic, read_config
from common.model.policy import ModelConfig
from common.parallel.ranks import World, all_max
from common.prompts import Prompt

MAX_TOKENS = 16384
"""Token budget of one forward on one rank."""


@dataclass
class RewardModelConfig:
    path: str = ""
    """Hugging Face folder or hub name of a sequence classifier with one label, scored in float32. Empty: none."""
    weight: float = 1.0
    """Factor of its score, which is added to that of the reward function."""
    alone: bool = False
    """The reward is the model's score alone: no reward function is run."""

    def __post_init__(self):
        if self.alone and not self.path:
            raise ValueError("--reward-model.alone needs --reward-model.path")


def check_reward_model(config: RewardModelConfig, model_config: ModelConfig) -> PretrainedConfig:
    """The config of the model at `config.path`. Raises ValueError for one that cannot score."""
    hf_config = read_config(config.path, model_config, "--reward-model.path", SCORED)
    if not AutoTokenizer.from_pretrained(config.path, trust_remote_code=model_config.trust_remote_code).chat_template:
        raise ValueError(f"the tokenizer of {config.path} (--reward-model.path) has no chat template")
    return hf_config


class RewardModel:
    """Scores conversations in the model's own chat template and tokens."""

    def __init__(self, config: RewardModelConfig, model_config: ModelConfig, world: World):
        self.weight, self.world = config.weight, world
        self.tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=model_config.trust_remote_code)
        self.model = load_critic(config.path, model_config, world, frozen=True)

    def score(self, prompts: list[Prompt], texts: list[str]) -> list[float]:
        """One score per response. All ranks call this together, each with its own responses (or none)."""
        conversations = [
            self.tokenizer.apply_chat_template(
                [*prompt.messages, {"role": "assistant", "content": text}], tokenize=True, return_dict=False
            )
            for prompt, text in zip(prompts, texts)
        ]
        groups: list[list[Batch]] = []
        room = 0
        for tokens in conversations:
            # The critic gives a value to a token from the tokens before it. With one more token, its value is read at
            # the end of the conversation.
            row = Batch.build([tokens], [[0]])
            if len(row.tokens) > room:
                groups.append([])
                room = MAX_TOKENS
            groups[-1].append(row)
            room -= len(row.tokens)
        dummy = Batch.build([[0]], [[0]])
        groups += [[dummy]] * (int(all_max([len(groups)])[0]) - len(groups))    # as many on every rank
        scores: list[float] = []
        for group in groups:
            batch = Batch.cat(group).to(self.world.device)
            scores += self.model.score(batch)[batch.mask].tolist()
        return scores[: len(prompts)]
