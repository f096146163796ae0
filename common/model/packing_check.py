"""Prove, when a model is loaded, that packed sequences do not see each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PretrainedConfig

from common.batch import Batch

# The largest mean difference between the numbers of a sequence packed and alone, as a share of their spread. Measured
# on tiny random models: state-space layers 0.15 to 0.63, RecurrentGemma 0.05, attention in float32 below 1e-6. All of
# bfloat16's rounding is 0.014 for SmolLM2-135M; the part of it that differs between packed and alone is smaller.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
# The same among two sets of neighbours of equal lengths, where attention rounds alike (0 measured; RecurrentGemma 0.05)
MAX_LEAK = {"float32": 1e-3, "bfloat16": 0.02}
LENGTH = 8


def check_packing(score: Callable[[Batch], Tensor], path: str, hf_config: PretrainedConfig, compute_dtype: str,
                  device: torch.device) -> None:
    """Score a sequence among others, among rearranged others, and alone. All ranks raise ValueError if numbers differ.

    `score` gives numbers [T] of a batch. Two of the packed sequences have the same prompt, so a layout that shares
    prompts is proven with the rest. All ranks call this together, each with the same tokens."""
    vocab_size = hf_config.get_text_config().vocab_size
    tokens = [(7919 * i + 13) % vocab_size for i in range(3 * LENGTH)]                  # anything but a pattern
    prompts = [tokens[:1], tokens[1:2], tokens[1:2]]
    responses = [tokens[2 : LENGTH + 1], tokens[LENGTH + 1 : 2 * LENGTH], tokens[2 * LENGTH : 3 * LENGTH - 1]]
    packed = Batch.build(prompts, responses).to(device)
    rearranged = Batch.build(prompts, [responses[0][::-1], responses[1][::-1], responses[2]]).to(device)
    alone = Batch.build(prompts[-1:], responses[-1:]).to(device)
    with explain_failure(path, hf_config):
        numbers = [score(batch)[-len(responses[-1]) :].double() for batch in (packed, rearranged, alone)]
    among_others, among_rearranged, by_itself = numbers
    for other, limit in ((by_itself, MAX_DIFFERENCE), (among_rearranged, MAX_LEAK)):
        difference = float((among_others - other).abs().mean())
        allowed = limit[compute_dtype] * float(by_itself.std())
        if not difference <= allowed:                                   # also if it is NaN
            raise ValueError(
                f"{path} holds a {hf_config.model_type} model in which packed sequences see each other: the numbers of "
                f"a sequence packed and alone differ by {difference:.2g}, at most {allowed:.2g} is rounding. "
                "State-space and other recurrent layers carry their state over the end of a sequence; choose a model "
                "with attention only"
            )


@contextmanager
def explain_failure(path: str, hf_config: PretrainedConfig) -> Iterator[None]:
    """Turn what transformers raises where it cannot run a family on packed sequences into a ValueError that says so."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds a {hf_config.model_type} model, which transformers cannot run on packed sequences "
            f"({type(error).__name__}: {reason}); choose another model"
        ) from error
