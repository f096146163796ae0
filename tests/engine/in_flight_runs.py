"""Steps with --rollout.in-flight on an engine of engine_models.py, whose weights change before each one."""

import copy
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from common.curriculum.sampler import PromptSampler
from common.metrics import Meter
from common.prompts import Prompt
from common.rollout import Rollout
from common.rollouts.in_flight import continue_rollout
from common.rollouts.scoring import RolloutRequest, RolloutSource
from envs.runtime.response import Response
from envs.stored import join, split, unpack, write_parts
from rewards.runtime.pool import RewardConfig
from tests.engine import engine_models

# longer than a block of vLLM's cache, whose keys and values could be found again
DATA = [Prompt([5 + row, 17, 300, *range(40, 75 + row % 5)], "", "", {}, []) for row in range(40)]


class NoText:
    """A tokenizer that knows no text and no special token."""

    added_tokens_decoder: ClassVar[dict] = {}
    bos_token_id = eos_token_id = pad_token_id = None
    name_or_path = ""

    def __len__(self) -> int:
        return 0

    def decode(self, *_, **__) -> str:
        return ""


NO_SCORERS = types.SimpleNamespace(
    pool=None, model=None, episodes=None, advance=lambda: None, tokenizer=NoText(), config=RewardConfig()
)
ENDS = tuple(range(0, 512, 16))  # a response ends after 15 tokens or so


class Steps:
    """`self(engine, step)` samples one step on an engine that is awake. What is in flight goes through files."""

    def __init__(self, engine, in_flight: float = 2.0, num_groups: int = 4, num_samples: int = 2, scoring=NO_SCORERS,
                 data=DATA, **flags):
        flags = {"in_flight": in_flight, "max_response_length": 30, "stop_token_ids": ENDS} | flags
        self.sampling = replace(engine.config, **flags)
        self.scoring, self.data = scoring, data
        self.num_groups, self.num_samples = num_groups, num_samples
        self.state, self.sampler, self.metrics = {}, PromptSampler(len(data), "", 0), {}

    def __call__(self, engine, step: int) -> Rollout:
        self.state = stored(self.state)
        meter = Meter()
        source = RolloutSource(engine, self.scoring, self.data)
        request = RolloutRequest(self.sampler.take(self.num_groups), self.num_samples, self.sampling, (0, step))
        pending = continue_rollout(source, request, self.state, self.sampler, meter)
        rollout = pending.collect(meter)
        self.metrics = meter.reduce()
        return rollout

    def left(self) -> list[Response]:
        """The responses that are in flight."""
        return [r for _, group in unpack(self.state["in_flight_responses"]) for r in group["responses"]]


def stored(state: dict) -> dict:
    """As a checkpoint of one rank brings it back."""
    with tempfile.TemporaryDirectory() as folder:
        plain, parts = split(state)
        write_parts(Path(folder), 0, parts)
        return join(plain, Path(folder), [0])


def saved_copy(model: str, policy) -> torch.nn.Module:
    """transformers' own model with the policy's weights as they are."""
    lm = engine_models.oracle(model, 0.0)
    lm.load_state_dict({name: tensor.clone() for name, tensor in policy.full_tensors(torch.float32)}, strict=False)
    return copy.deepcopy(lm)


def carry(model: str, engine, policy, num_steps: int = 5, restart: bool = False, **flags) -> list[dict]:
    """Of each response of these steps: its lengths by version, and how far its log-probs are from those of the policy
    that is said to have sampled them, and from the policy of the step in which it ended."""
    steps, copies, found = Steps(engine, **flags), [], []
    for step in range(num_steps):
        engine_models.perturb(policy, -0.2 if step % 2 else 0.2)        # else the model becomes certain
        copies.append(saved_copy(model, policy))
        engine.wake(policy)
        if restart:
            steps.scoring.episodes.end_kept()
        rollout = steps(engine, step)
        engine.sleep()
        for sample in rollout.samples:
            for prompt, part in sample.sequences:
                mask = torch.tensor(part.mask or [True] * len(part.tokens))
                versions = torch.tensor(part.versions)
                assert len(versions) == mask.sum() and len(mask) == len(part.tokens) == len(part.logp)
                logp = torch.tensor(part.logp)[mask]
                by_copy = torch.stack([engine_models.logps(lm, prompt, part.tokens)[mask] for lm in copies])
                own = by_copy[versions, torch.arange(len(versions))]                            # of [step + 1, T]
                late = versions < step
                found.append({
                    "step": step, "index": sample.index, "row": sample.row, "tokens": part.tokens,
                    "versions": part.versions, "reason": part.finish_reason, "mask": mask.tolist(),
                    "messages": sample.response.messages, "dropped": steps.metrics["rollout/dropped_tokens"],
                    "restarted": steps.metrics.get("episode/restarted"), "conversation": part.conversation,
                    "off": float((logp - own).abs().max()),
                    "off_now": float((logp - by_copy[-1]).abs()[late].max()) if late.any() else None,
                })
    return found
