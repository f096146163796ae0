"""Layers with a state on packed rows against one sequence at a time: CPU seconds and operations.

`python -m tests.bench.bench_states [FAMILY...]` prints a markdown table: forward and backward of two blocks, one with a
state and one with attention, on one core. An operation is one of torch's that is no view: on a GPU each is at least one
launch.
"""

import sys
import time

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import common.forward.attention  # noqa: F401 - transformers knows packed_sdpa then
from common.batch import Batch
from common.forward.sequence_parallel import make_row
from common.forward.states import for_each_sequence, layers_with_state, separate_states
from tests.model import families

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
         "max_position_embeddings": 2048, "initializer_range": 0.02}
FAMILIES = {
    "qwen3_5_text": {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                     "linear_value_head_dim": 64, "head_dim": 64},
    "kimi_linear": {"linear_num_heads": 8, "linear_head_dim": 64},
    "granitemoehybrid": {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
                         "mamba_chunk_size": 256, "shared_intermediate_size": 1408},
    "lfm2": {},
}
SHAPES = {"64 x 100": [100] * 64, "8 x 1,000": [1000] * 8}


class Counter(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and "detach" not in str(function)
        return function(*args, **kwargs or {})


def one_at_a_time(decoder: nn.Module) -> None:
    for layer in layers_with_state(decoder):
        layer.forward = for_each_sequence(layer.forward)


def measure(family: str, lengths: list[int], prepare) -> tuple[float, int]:
    """The fewest CPU seconds of two passes, and operations of a third one."""
    torch.manual_seed(0)
    config = type(families.config_of(family)).from_dict(families.config_of(family).to_dict() | SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa").eval()
    prepare(model.get_decoder())
    batch = Batch.build([[1]] * len(lengths), [torch.randint(3, 512, (n - 1,)).tolist() for n in lengths])
    row = make_row(batch, False, None)
    inputs = {"input_ids": batch.tokens[None], "position_ids": batch.sequence_positions[None], "use_cache": False}

    def run() -> float:
        start = time.process_time()
        model.base_model(**inputs, **row.layout).last_hidden_state.square().sum().backward()
        return time.process_time() - start

    seconds = min(run() for _ in range(2))
    with Counter() as counter:
        run()
    return seconds, counter.count


def main() -> None:
    torch.set_num_threads(1)
    print("| family | row | one at a time: s, operations | packed: s, operations |\n| --- | --- | --- | --- |")
    for family in sys.argv[1:] or FAMILIES:
        for name, lengths in SHAPES.items():
            # in this order: what `separate_states` replaces stays replaced
            cells = [measure(family, lengths, prepare) for prepare in (one_at_a_time, separate_states)]
            text = " | ".join(f"{seconds:.1f}, {count:,}" for seconds, count in cells)
            print(f"| {family} | {name} | {text} |", flush=True)


if __name__ == "__main__":
    main()
