"""Models on the stand-in for CUDA where flash-attn-4 or flash-attn-3 is installed: `python -m
tests.cuda.newer_flash_worker FOLDER CAPABILITY NAME ...`. What came out of each is printed as JSON."""

import importlib
import json
import sys

from tests.cuda import fake_cuda
from tests.cuda.step_worker import RESPONSES

MODULES = {"FA4": "flash_attn.cute.interface", "FA3": "flash_attn_interface"}
OPERATION = "aten::_flash_attention_forward"


def main(folder: str, capability: str, *names: str) -> None:
    device = fake_cuda.install(capability=(int(capability), 0))
    import torch

    from common.batch import Batch
    from common.model.loading import load_policy
    from common.model.policy import ModelConfig
    from common.parallel import ranks
    from common.tracking.console import kernels_line

    world, found = ranks.init(), {}
    with device:
        for name in names:
            config = ModelConfig(gradient_checkpointing=False, share_prompt=name == "shared")
            path = f"{folder}/{'llama' if name == 'shared' else name}"
            policy = load_policy(path, config, world)
            kernel = torch.nn.attention.current_flash_attention_impl()
            calls = importlib.import_module(MODULES[kernel]).CALLS if kernel else []
            checked = len(calls)                                        # by the check at the start
            calls.clear()
            logp, entropy = policy(Batch.build(*RESPONSES).to(world.device), 1.0)
            (logp.sum() + entropy.sum()).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
            found[name] = {
                "line": kernels_line(config, policy.lm.config, world.device), "checked": checked, "calls": list(calls),
                "attention": policy.lm.config._attn_implementation, "logp": logp.detach().cpu().tolist(),
                "norm": float(norm.full_tensor().cpu()),
                "is_registered": torch._C._dispatch_has_kernel_for_dispatch_key(OPERATION, "CUDA"),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
