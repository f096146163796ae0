"""A reward model: any sequence classifier with one label, sharded beside the policy, run on packed conversations."""

from dataclasses import dataclass

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from common.batch import Batch
from common.model.loading import SCORED, load_critic, read_config
from common.model.offload import OffloadedTensors
from common.model.policy import ModelConfig
from common.parallel.ranks import World, all_max
from common.prompts import Prompt


@dataclass
class RewardModelConfig:
    path: str = ""
    """Hugging Face folder or hub name of a sequence classifier with one label, scored in float32. Empty: none."""
    weight: float = 1.0
    """Factor of its score, which is added to that of the reward function."""
    alone: bool = False
    """The reward is the model's score alone: no reward function is run."""
    max_tokens: int = 16384
    """Token budget of one forward on one rank."""
    offload: bool = False
    """Keep its weights in pinned host memory except while it scores."""

    def __post_init__(self):
        if self.alone and not self.path:
            raise ValueError("--reward-model.alone needs --reward-model.path")


def check_reward_model(config: RewardModelConfig, model_config: ModelConfig, ranks: int) -> float:
    """Refuse what cannot score. Returns the GiB that it keeps on each GPU while the engine is awake."""
    if not config.path:
        return 0.0
    hf_config = read_config(config.path, model_config, "--reward-model.path", SCORED)
    if not _tokenizer(config, model_config).chat_template:
        raise ValueError(f"the tokenizer of {config.path} (--reward-model.path) has no chat template")
    with torch.device("meta"):
        model = AutoModel.from_config(hf_config, trust_remote_code=model_config.trust_remote_code)
        weights = sum(p.numel() for p in model.parameters())
    itemsize = getattr(torch, model_config.compute_dtype).itemsize
    return 0.0 if config.offload else weights * itemsize / ranks / 2**30


def _tokenizer(config: RewardModelConfig, model_config: ModelConfig) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(config.path, trust_remote_code=model_config.trust_remote_code)


class RewardModel:
    """Scores conversations in the model's own chat template and tokens."""

    def __init__(self, config: RewardModelConfig, model_config: ModelConfig, world: World):
        check_reward_model(config, model_config, world.size)
        self.weight, self.max_tokens, self.world = config.weight, config.max_tokens, world
        self.tokenizer = _tokenizer(config, model_config)
        self.model = load_critic(config.path, model_config, world, frozen=True)
        self.weights = OffloadedTensors(self.model.parameters) if config.offload else None
        if self.weights is not None:
            self.weights.to_host()

    def score(self, prompts: list[Prompt], texts: list[str]) -> list[float]:
        """One score per response. All ranks call this together, each with its own responses (or none)."""
        conversations = [
            self.tokenizer.apply_chat_template(
                [*prompt.messages, {"role": "assistant", "content": text}], tokenize=True, return_dict=False
            )
            for prompt, text in zip(prompts, texts)
        ]
        # The critic gives a value to a token from the tokens before it. With one more token, its value is read at the
        # end of the conversation.
        rows = [Batch.build([tokens], [[0]], index=[i]) for i, tokens in enumerate(conversations)]
        groups, room = [], 0
        for row in rows:
            if not groups or len(row.tokens) > room:
                groups.append([])
                room = self.max_tokens
            groups[-1].append(row)
            room -= len(row.tokens)
        dummy = Batch.build([[0]], [[0]])
        scores = []
        if self.weights is not None:
            self.weights.to_device()
            self.weights.wait()
        for number in range(int(all_max([len(groups)])[0])):                    # as many on every rank
            batch = Batch.cat(groups[number] if number < len(groups) else [dummy])
            values = self.model.score(batch.to(self.world.device))[batch.mask.to(self.world.device)]
            scores += values.tolist() if number < len(groups) else []
        if self.weights is not None:
            self.weights.to_host()
        return scores
