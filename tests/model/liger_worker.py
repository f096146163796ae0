"""Liger's kernels in Triton's interpreter, on the CPU: `python -m tests.model.liger_worker`, with TRITON_INTERPRET=1.
For each family and dtype the differences to transformers' own modules are printed as JSON."""

import json
from functools import partial

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from triton.runtime import interpreter

import common.forward.attention  # noqa: F401  makes packed_sdpa known to transformers
from common.batch import Batch
from common.memory.plan import Model
from common.model.loading import LIGER_FAMILIES, LIGER_KERNELS
from common.model.policy import ModelConfig, Policy
from tests.model.kept import kept_bytes

SIZES = {"vocab_size": 53, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16, "initializer_range": 0.2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BATCH = Batch.build([[5, 6, 7], [9], [11, 12]], [[3, 4, 8, 9, 30], [17], [40, 41, 42]])


def complete_the_interpreter() -> None:
    """Two things that a GPU's compiler does and the interpreter lacks: a float argument is a float32 tensor, and
    libdevice's rsqrt is the one of Triton's language."""
    convert = interpreter._implicit_cvt

    def with_floats(argument):
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)


def pass_over(lm) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and gradients of a policy, by name."""
    logp, entropy = Policy(lm)(BATCH, 0.7)
    ((logp * torch.linspace(-1, 1, len(logp))).sum() + 0.1 * entropy.sum()).backward()
    return {"logp": logp.detach(), "entropy": entropy.detach()} | {
        name: p.grad.float() for name, p in lm.named_parameters()}


def build(family: str, dtype: torch.dtype, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | sizes)
    return config, AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="packed_sdpa")


def differences(family: str) -> dict[str, float]:
    """The largest differences to transformers' own modules in float32: of log-probs and entropies, and of gradients as
    a share of the largest number of each. "own": of transformers' own in float16. The interpreter has no bfloat16."""
    exact, found = pass_over(build(family, torch.float32)[1]), {}

    def compare(name: str, passed: dict[str, torch.Tensor]) -> None:
        differences = {key: float((passed[key] - exact[key]).abs().max()) for key in exact}
        found[f"{name} values"] = max(differences.pop("logp"), differences.pop("entropy"))
        found[f"{name} gradients"] = max(x / float(exact[key].abs().max()) for key, x in differences.items())

    compare("own", pass_over(build(family, torch.float16)[1]))
    models = {name: build(family, dtype)[1] for name, dtype in (("float32", torch.float32), ("float16", torch.float16))}
    for name, lm in models.items():
        apply_liger_kernel(lm, LIGER_KERNELS)
        compare(name, pass_over(lm))
    found["modules"] = sum("Liger" in module._get_name() for module in lm.modules())
    return found


def kept(family: str) -> dict[str, float]:
    """Bytes a token that autograd keeps of a block with the kernels, and as they are calculated."""
    use = partial(apply_liger_kernel, kernel_config=LIGER_KERNELS)
    shallow, deep = (kept_bytes(build(family, torch.bfloat16, num_hidden_layers=n)[0], use) for n in (2, 4))
    model = Model(build(family, torch.bfloat16)[0], ModelConfig(), 1)
    model.is_fused = True
    return {"kept": (deep - shallow) / 2, "calculated": model.kept_by_block(keys=0)}


if __name__ == "__main__":
    complete_the_interpreter()
    print(json.dumps({family: differences(family) for family in LIGER_FAMILIES} | {"kept": kept("qwen3")}))
