"""What autograd keeps of a model's forward pass."""

from collections.abc import Callable

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from common.batch import Batch
from common.forward.sequence_parallel import make_row

NUM_TOKENS = 16


class Attention(torch.autograd.Function):
    """Keeps what the variable-length kernels keep: queries, keys, values, the output, a float32 number a head."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = query[0].transpose(0, 1).clone()                          # [T, heads, D]
        ctx.save_for_backward(query, key, value, out, torch.zeros(out.shape[:2]))
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(0, 1)[None], None, None


AttentionInterface.register("kept", lambda module, query, key, value, mask=None, **_: (
    Attention.apply(query, key, value)[None], None))


def kept_bytes(config, change: Callable = lambda model: None, lengths: tuple[int, ...] = (NUM_TOKENS,)) -> float:
    """Bytes a token of all storages that autograd keeps of a bfloat16 model, weights aside. `change`: what is done to
    the model before. `lengths`: of the sequences in its packed row."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="kept").eval()
    change(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor             # alive, so that no address is used twice
        return tensor

    batch = Batch.build([[1]] * len(lengths), [[2] * (n - 1) for n in lengths])
    row = make_row(batch, False, None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(
            input_ids=batch.tokens[None], position_ids=batch.sequence_positions[None], use_cache=False, **row.layout
        )
    found.pop(out.last_hidden_state.untyped_storage().data_ptr(), None)
    return sum(x.untyped_storage().nbytes() for address, x in found.items() if address not in weights) / sum(lengths)
