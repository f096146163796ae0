"""Run by test_routing.py in a process of its own, because --policy.router-float32 changes vLLM's routers for good: what
the engine and trainers with and without float32 routers say of the same tokens, in bfloat16."""

import json
import sys
from pathlib import Path

import torch

from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.parallel import ranks
from tests.engine.engine_models import PROMPTS
from tests.generate import generate

CONFIG = ModelConfig(router_float32=True)


def main(model: str, kind: str, out: Path) -> None:
    world = ranks.init()
    rollout = RolloutConfig(engine=kind, max_response_length=24, max_num_seqs=16, kv_cache_gb=0.1)
    if kind == "vllm":
        rollout.extra = '{"skip_tokenizer_init": true}'
    setup = EngineSetup(model, read_config(model, CONFIG), rollout, CONFIG, world, PROMPTS[:2], [2], 256, 0)
    engine = make_engine(setup)
    dtypes = set()
    errors = [0.0]

    def compare(module, args, out) -> None:
        """The logits with the product in float64, of the same numbers in bfloat16."""
        hidden = args[0].flatten(0, -2)
        dtypes.add(f"{hidden.dtype} {module.weight.dtype} {out[0].dtype}")
        want = hidden.double() @ module.weight.double().T
        errors.append(float((out[0] - want).abs().max() / want.abs().max()))

    for module in engine.model.modules():
        if type(module).__name__ in ("GateLinear", "Qwen3MoeTopKRouter"):
            module.register_forward_hook(compare)
    policy = load_policy(model, CONFIG, world)
    engine.wake(policy)
    prompts = PROMPTS * 8
    found = generate(engine, prompts, range(len(prompts)), SamplingConfig(1.0, 24))
    engine.sleep()
    engine.close()
    batch = Batch.build(prompts, [response.tokens for response in found])
    theirs = torch.tensor([logp for response in found for logp in response.logp])
    differences = {}
    for name, trainer in {"both": policy, "engine alone": load_policy(model, ModelConfig(), world)}.items():
        ours = trainer.score(batch, 1.0)[batch.mask]
        differences[name] = float((ours.exp() - theirs.exp()).abs().mean())
    out.write_text(json.dumps({"dtypes": sorted(dtypes), "error": max(errors), "differences": differences}))
    ranks.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
