"""Prove, when a model is loaded, that packed sequences do not see each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PretrainedConfig

from common.batch import Batch

# The largest mean difference between the numbers of a sequence in two packed rows, as a share of their spread. Measured
# on tiny random models: state-space layers 0.13 to 1.2, RecurrentGemma 0.034; attention, which rounds alike as shapes
# are the same, 0 in bfloat16 and at most 1e-7 in float32.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.02}
LENGTH = 8


def check_packing(score: Callable[[Batch], Tensor], path: str, hf_config: PretrainedConfig, compute_dtype: str,
                  device: torch.device) -> None:
    """Score a sequence after two others, and before two different ones. All ranks raise ValueError if numbers differ.

    `score` returns numbers [T] of a batch. One neighbour has the same prompt in each row, so this also proves a layout
    that shares prompts. All ranks call this together, each with the same tokens."""
    # anything but a pattern
    tokens = [(7919 * i + 13) % hf_config.get_text_config().vocab_size for i in range(5 * LENGTH)]
    sequence, *others = (tokens[i : i + LENGTH] for i in range(0, len(tokens), LENGTH))
    others[1][0] = others[2][0] = sequence[0]
    found = []
    for row in ([*others[:2], sequence], [sequence, *others[2:]]):
        batch = Batch.build([tokens[:1] for tokens in row], [tokens[1:] for tokens in row]).to(device)
        with explain_failure(path, hf_config):
            found.append(score(batch).view(len(row), LENGTH)[row.index(sequence), 1:].double())
    difference = float((found[0] - found[1]).abs().mean())
    allowed = MAX_DIFFERENCE[compute_dtype] * float(found[1].std())
    if not difference <= allowed:                                       # also if it is NaN
        raise ValueError(f"{path} holds a {hf_config.model_type} model in which packed sequences see each other: "
                         f"the numbers of a sequence in two packed rows differ by {difference:.2g}, at most "
                         f"{allowed:.2g} is rounding; choose another model")


@contextmanager
def explain_failure(path: str, hf_config: PretrainedConfig) -> Iterator[None]:
    """Turn an exception for a family that cannot run on packed sequences, by transformers or by what is counted here,
    into a clear ValueError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} holds a {hf_config.model_type} model, which cannot be trained on packed "
                         f"sequences ({type(error).__name__}: {reason}); choose another model") from error
