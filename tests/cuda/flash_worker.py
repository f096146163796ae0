"""Models on the stand-in for CUDA where the package flash-attn is installed: `python -m tests.cuda.flash_worker FOLDER
NAME ...`. What came out of each is printed as JSON."""

import json
import sys

from tests.cuda import fake_cuda
from tests.cuda.step_worker import RESPONSES


def main(folder: str, *names: str) -> None:
    device = fake_cuda.install()
    import flash_attn
    import torch

    from common.batch import Batch
    from common.model.loading import load_policy
    from common.model.policy import ModelConfig
    from common.parallel import ranks

    world, found = ranks.init(), {}
    with device:
        for name in names:
            policy = load_policy(f"{folder}/{name}", ModelConfig(gradient_checkpointing=False), world)
            flash_attn.CALLS.clear()                                    # of the check at the start
            logp, entropy = policy(Batch.build(*RESPONSES).to(world.device), 1.0)
            (logp.sum() + entropy.sum()).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
            found[name] = {
                "attention": policy.lm.config._attn_implementation, "calls": list(flash_attn.CALLS),
                "logp": logp.detach().cpu().tolist(), "norm": float(norm.full_tensor().cpu()),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
