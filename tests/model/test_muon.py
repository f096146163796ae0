"""--optim.kind muon: torch.optim.Muon on whole matrices, the same weights on any number of ranks, checkpoints, bytes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.model.loading import load_policy
from tests.model.muon_oracle import DECAY, LR, MODELS, gradient, start, train, trained, whole
from tests.model.test_bf16_adamw import MIXTURE


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """The models: tiny_llama, whose embedding is its head, and a mixture of 6 experts, whose embedding is not."""
    folder = tmp_path_factory.mktemp("muon")
    (folder / "llama").symlink_to(tiny_llama)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE).save_pretrained(folder / "mixture")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch_on_whole_matrices(name, folder, world):
    model, optimizer = start(name, folder, world)
    before = {key: p.detach().full_tensor().clone() for key, p in trained(model).items()}
    train(model, optimizer, range(4))
    for key, p in trained(model).items():
        print(key, tuple(p.shape), list(optimizer.state[p]))
        is_matrix = "layers." in key and p.ndim > 1
        parts = before[key].flatten(0, -3) if p.ndim == 3 else before[key][None]
        parts = [torch.nn.Parameter(part.clone()) for part in (parts if is_matrix else before[key][None])]
        flags = {"lr": LR, "weight_decay": DECAY if p.ndim > 1 else 0.0}
        if is_matrix:
            other = torch.optim.Muon(parts, adjust_lr_fn="match_rms_adamw", **flags)
        else:
            other = torch.optim.AdamW(parts, fused=True, **flags)
        for step in range(4):
            full = gradient(key, p.shape, step)
            for part, grad in zip(parts, full if p.ndim == 3 else full[None]):
                part.grad = grad.clone()
            other.step()
        want = torch.stack([part.detach() for part in parts]).view(p.shape)
        assert torch.equal(p.detach().full_tensor(), want), key
