"""A reward model: any sequence classifier with one label, sharded beside the policy, run on packed conversations."""

from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from common.batch import Batch
from common.flags.model import ModelConfig, RewardModelConfig
from common.forward.vision import FAMILIES
from common.model.flops import check_context, context_length
from common.model.loading import SCORED, Weights, load_critic, read_config, read_tokenizer
from common.packing import Sequences, plan_step
from common.parallel.ranks import World, all_max
from envs.runtime.template import check_reader, whole_rows

MAX_TOKENS = 16384
"""Token budget of one forward on one rank."""


def check_reward_model(config: RewardModelConfig, model_config: ModelConfig, longest: int) -> PretrainedConfig:
    """The config of the model at `config.path`. Raises ValueError for a model that cannot score, or has no context for
    `longest` tokens, as the policy counts them."""
    hf_config = read_config(config.path, model_config, "--reward-model.path", SCORED)
    check_reader(read_tokenizer(config.path, model_config, "--reward-model.path"), hf_config, "--reward-model.path")
    check_context(hf_config, longest, f"--reward-model.path {config.path}")
    return hf_config


class RewardModel:
    """Scores conversations in the model's own chat template and tokens."""

    def __init__(self, config: RewardModelConfig, model_config: ModelConfig, world: World):
        self.weight = config.weight
        self.world = world
        self.tokenizer = read_tokenizer(config.path, model_config, "--reward-model.path")
        self.model = load_critic(config.path, model_config, world, Weights(frozen=True))
        self.longest = context_length(self.model.backbone.config)
        self.unread: dict[int, str] = {}  # the number of a conversation in the last call -> why it has no score

    @property
    def reads_images(self) -> bool:
        return self.model.backbone.config.model_type in FAMILIES

    def score(self, conversations: list[list[dict[str, Any]]], images: Any = None) -> list[float]:
        """One score per conversation, NaN for those in `unread`. All ranks call this together, each with its own
        conversations (or none). `images`: of a model that reads them, common/dataset/shown.py's JudgedImages."""
        encode = None
        if images is not None:
            conversations = [*map(images.marked, conversations)]
            encode = images.encode
        rows, self.unread = whole_rows(self.tokenizer, conversations, self.model.backbone.config, encode)
        for number, row in enumerate(rows):
            if len(row) > self.longest:
                self.unread[number] = f"it has {len(row)} tokens, and the reward model a context of {self.longest}"
                rows[number] = [0]
        unseen = {*self.unread, len(conversations)}                         # they have no image in their row
        rows.append([0])                                                    # a dummy: all ranks run as many groups
        # The critic gives a value to a token from the tokens before it. With one more token, its value is read at the
        # end of the conversation.
        batch = Batch.build(rows, [[0]] * len(rows))
        self.model.prompts = images
        if images is not None:
            batch.image_row = torch.tensor([-1 if number in unseen else number for number in range(len(rows))])
        lengths = batch.sequence_lengths.numpy()
        (minibatch,) = plan_step(Sequences(lengths, lengths), 1, 1, MAX_TOKENS, seed=0).minibatches
        groups = list(chain(*minibatch))                                    # rows that run together
        most_groups = int(all_max([len(groups)])[0])
        of_dummy = np.array([len(conversations)])
        groups += [of_dummy] * (most_groups - len(groups))
        scores = np.zeros(len(rows))
        for group in groups:
            part = batch.select(group).to(self.world.device)
            scores[group] = self.model.score(part)[part.mask].numpy(force=True)
        scores[[*self.unread]] = np.nan
        return scores[: len(conversations)].tolist()
