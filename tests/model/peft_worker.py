"""Run by test_lora.py, where peft is found: the logits of a model with adapters that peft loads."""

import sys

import torch
from transformers import AutoModelForCausalLM

from tests.conftest import VOCAB


def logits(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))).logits


if __name__ == "__main__":
    from peft import PeftModel

    folder, adapter, out = sys.argv[1:]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter)
    torch.save(logits(adapted), out)
