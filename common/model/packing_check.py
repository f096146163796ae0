"""Prove, when a model is loaded, that packed sequences do not see each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from common.batch import Batch
from common.forward.sequence_parallel import make_row
from common.model.policy import PackedModel
from common.parallel.ranks import all_max

# The largest mean difference between the numbers of a sequence in two packed rows, as a share of their spread. Measured
# on tiny random models: state-space layers 0.13 to 1.2, RecurrentGemma 0.034; attention, which rounds alike as shapes
# are the same, 0 in bfloat16 and at most 1e-7 in float32.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.02}
LENGTH = 8


def check_packing(model: PackedModel, forward: Callable[[Batch], Tensor], path: str, hf_config: PretrainedConfig,
                  compute_dtype: str, device: torch.device) -> None:
    """All ranks raise ValueError if packed sequences see each other, and call this together, with the same tokens.

    `forward` returns numbers [T] of a batch, with a gradient. The numbers of a sequence must not change with the
    others in its row, and their gradient with regard to the others' embeddings must be 0. A state that decays leaks
    little into numbers, which are rounded: a Mamba-2 layer behind a right convolution passes the first check (measured:
    Granite, Nemotron-H and Falcon-H1 in bfloat16). The gradient has no rounding: it is exactly 0, or it is not.

    One neighbour has the same prompt in each row, so this also proves a layout that shares prompts."""
    # anything but a pattern
    tokens = [(7919 * i + 13) % hf_config.get_text_config().vocab_size for i in range(5 * LENGTH)]
    sequence, *others = (tokens[i : i + LENGTH] for i in range(0, len(tokens), LENGTH))
    others[1][0] = others[2][0] = sequence[0]
    found = []
    for row in ([*others[:2], sequence], [sequence, *others[2:]]):
        with explain_failure(path, hf_config), torch.no_grad():
            numbers = forward(batch_of(row, device)).view(len(row), LENGTH)
        found.append(numbers[row.index(sequence), 1:].double())
    model.free_unsharded()

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"{path} holds a {hf_config.model_type} model in which packed sequences see each other: "
                         f"{reason}; choose another model")

    difference = float((found[0] - found[1]).abs().mean())
    allowed = MAX_DIFFERENCE[compute_dtype] * float(found[1].std())
    if not difference <= allowed:                                       # also if it is NaN
        refuse(f"the numbers of a sequence in two packed rows differ by {difference:.2g}, at most {allowed:.2g} is "
               f"rounding")
    leak = gradient_on_others(model, forward, batch_of([others[0], sequence, others[1]], device))
    largest = float(all_max([leak]))
    if largest != 0:
        refuse(f"the gradient of a sequence with regard to another one's embeddings is {largest:.2g}, must be 0")


def batch_of(row: list[list[int]], device: torch.device) -> Batch:
    """Sequences with prompts of one token."""
    return Batch.build([tokens[:1] for tokens in row], [tokens[1:] for tokens in row]).to(device)


def gradient_on_others(model: PackedModel, forward: Callable[[Batch], Tensor], batch: Batch) -> float:
    """The largest gradient of the numbers of the second of three sequences with regard to the embeddings of the tokens
    that the policy sampled in the others, if they run on this rank. No weight gets a gradient."""
    (transformer,) = (part for part in model.children() if isinstance(part, PreTrainedModel))
    embedded: list[Tensor] = []
    hook = transformer.get_input_embeddings().register_forward_hook(
        lambda layer, inputs, output: embedded.append(output.requires_grad_())
    )
    with torch.enable_grad():
        total = forward(batch)[batch.sequence_ids == 1].sum()
    hook.remove()
    (gradient,) = torch.autograd.grad(total, embedded)                                          # [1, t, H]
    model.free_unsharded()
    # perhaps with three sequences of each rank
    row = make_row(batch, model.share_prompt, model.sequence_group, model.has_states)
    is_other = row.batch.mask & (row.batch.sequence_ids % 3 != 1)                               # [T]
    return float(gradient[0].abs().amax(-1).where(is_other[row.run], 0).max())


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
