"""A step's gradient on any number of ranks: `vision_worker.py OUT MODEL ROWS SHARE_PROMPT` under torchrun."""

import sys

import torch
from transformers import AutoTokenizer

from common.dataset.store import load_prompts
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.prompts import DataConfig
from common.rollout import Layout, Response, Sample, gather_rollout, to_minibatches

RESPONSES = {0: [[5, 7, 2], [900, 901, 902, 903]], 1: [[8, 2], [9, 10, 11]], 2: [[4098, 17, 4097, 30, 2], [6]],
             3: [[5, 7, 2], [5, 7, 8]]}
"""By row. 4097 and 4098 are placeholders, which a policy may sample like any token."""


def step_gradient(model: str, rows: str, world: ranks.World, share_prompt: bool, max_tokens: int) -> dict:
    """Each rank has sampled the groups whose number is its own; pixels are made where a response is trained."""
    config = ModelConfig(compute_dtype="float32", share_prompt=share_prompt)
    policy = load_policy(model, config, world)
    policy.prompts = prompts = load_prompts([rows], AutoTokenizer.from_pretrained(model), DataConfig())
    samples = [
        Sample(2 * row + n, row, row, prompts[row], Response(tokens, [0.0] * len(tokens), "stop"), score=1.0)
        for row, responses in RESPONSES.items() for n, tokens in enumerate(responses) if row % world.size == world.rank
    ]
    rollout = gather_rollout(samples)
    layout = Layout(read_config(model, config), world, 1, max_tokens, seed=0, share_prompt=share_prompt)
    (minibatch,) = to_minibatches(rollout, rollout.has_score, layout)
    for microbatch in minibatch:
        logp, _ = policy(microbatch, 1.0)
        weight = (0.5 - 0.3 * microbatch.index)[microbatch.sequence_ids] * microbatch.mask
        (world.size * (logp * weight).sum()).backward()
    return {name: p.grad.full_tensor() for name, p in policy.lm.named_parameters()}


if __name__ == "__main__":
    out, model, rows, share_prompt = sys.argv[1:]
    world = ranks.init()
    found = step_gradient(model, rows, world, share_prompt == "True", max_tokens=60)
    if world.is_main:
        torch.save(found, out)
    ranks.shutdown()
