"""A step's gradient on any number of ranks: `vision_worker.py OUT MODEL ROWS SHARE_PROMPT OWN` under torchrun."""

import base64
import sys

import torch
from transformers import AutoTokenizer

from common.dataset.images import show
from common.dataset.store import PromptSet, load_prompts
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.prompts import DataConfig
from common.rollout import Layout, Response, Sample, to_minibatches
from common.rollouts.gather import gather_rollout
from tests.vision.tiny_models import picture

RESPONSES = {0: [[5, 7, 2], [900, 901, 902, 903]], 1: [[8, 2], [9, 10, 11]], 2: [[4098, 17, 4097, 30, 2], [6]],
             3: [[5, 7, 2], [5, 7, 8]]}
"""By row. 4097 and 4098 are placeholders, which a policy may sample like any token."""
OWN = {0: [(61, 62), ()], 1: [(63,), (64, 65, 66)], 2: [(), (67,)], 3: [(61,), (68,)]}
"""By row: seeds of the pictures that a tool shows after a response, before another one."""
HEIGHTS = {61: 60, 62: 30, 63: 90, 64: 60, 65: 60, 66: 60, 67: 120, 68: 60}


def responses_of(prompts: PromptSet, with_own: bool) -> dict[int, list[Response]]:
    """By row; `with_own`: episodes with pictures of their own, each after the token 40, and after all of them the
    response once more."""
    model, found = prompts.tokenizer.name_or_path, {}
    for row, responses in RESPONSES.items():
        found[row] = []
        for tokens, seeds in zip(responses, OWN[row] if with_own else ((), ())):
            if not seeds:
                found[row].append(Response(tokens, [0.0] * len(tokens), "stop"))
                continue
            tokens = [token for token in tokens if token not in (4097, 4098)]
            files = [picture(HEIGHTS[seed], 60, seed)["bytes"] for seed in seeds]
            told = [token for file in files for token in [40, *show(file, model)]]
            mask = [True] * len(tokens) + [False] * len(told) + [True] * len(tokens)
            images = [base64.b64encode(file).decode() for file in files]
            found[row].append(Response([*tokens, *told, *tokens], [0.0] * len(mask), "stop", mask, images=images))
    return found


def weight_of(index: int | torch.Tensor) -> float | torch.Tensor:
    return 0.5 - 0.3 * index


def step_gradient(model: str, rows: str, world: ranks.World, share_prompt: bool, max_tokens: int,
                  with_own: bool = False) -> dict:
    """Each rank has sampled the groups whose number is its own; pixels are made where a response is trained."""
    config = ModelConfig(compute_dtype="float32", share_prompt=share_prompt)
    policy = load_policy(model, config, world)
    policy.prompts = prompts = load_prompts([rows], AutoTokenizer.from_pretrained(model), DataConfig())
    samples = [
        Sample(2 * row + n, row, row, prompts[row], response, score=1.0)
        for row, responses in responses_of(prompts, with_own).items() for n, response in enumerate(responses)
        if row % world.size == world.rank
    ]
    rollout = gather_rollout(samples)
    layout = Layout(read_config(model, config), world, 1, max_tokens, seed=0, share_prompt=share_prompt)
    (minibatch,) = minibatches = to_minibatches(rollout, rollout.has_score, layout)
    prompts.take_images(rollout, minibatches)
    for microbatch in minibatch:
        logp, _ = policy(microbatch, 1.0)
        weight = weight_of(microbatch.index)[microbatch.sequence_ids] * microbatch.mask
        (world.size * (logp * weight).sum()).backward()
    return {name: p.grad.full_tensor() for name, p in policy.lm.named_parameters()}


if __name__ == "__main__":
    out, model, rows, share_prompt, with_own = sys.argv[1:]
    world = ranks.init()
    found = step_gradient(model, rows, world, share_prompt == "True", max_tokens=60, with_own=with_own == "True")
    if world.is_main:
        torch.save(found, out)
    ranks.shutdown()
