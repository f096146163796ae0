"""Run where peft is found: the logits of a model with adapters that peft loads. It ends if peft finds adapters for
other layers than it makes."""

import sys
import warnings

import torch
from transformers import AutoConfig

from common.forward.vision import auto_class
from tests.conftest import VOCAB


def logits(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))).logits


if __name__ == "__main__":
    from peft import PeftModel

    folder, adapter, out = sys.argv[1:]
    warnings.filterwarnings("error", message="Found missing adapter keys")
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    torch.save(logits(PeftModel.from_pretrained(model, adapter)), out)
