"""Run under torchrun by test_expert_parallel.py: `expert_worker.py FOLDER MODEL`, one engine of two ranks, each with
half of a mixture's experts. Writes what each rank holds after two syncs. It samples nothing: on CPUs vLLM cannot."""

import json
import sys
from pathlib import Path

import torch

from common.parallel import ranks
from common.sync.checksums import EXPERTS, names_of_parts
from tests.engine.engine_models import perturb, start

if __name__ == "__main__":
    world = ranks.init()
    out, model = sys.argv[1:]
    engine, policy = start(model, world, tp=2, more={"enable_expert_parallel": True})
    found = []
    for scale in (0.0, 0.3):
        perturb(policy, scale)
        metrics = engine.wake(policy)
        sent = dict(policy.full_tensors(engine.dtype))
        are_equal = []
        for path, module in engine.model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if name in EXPERTS:
                    (trained,) = names_of_parts(engine.model, path, name)
                    own = sent[trained].chunk(2)[world.rank]
                    # the elements of each expert, which the kernel for CPUs has in an order of its own
                    of_trainer, of_engine = (x.flatten(1).sort(dim=1).values for x in (own, weight))
                    are_equal.append(torch.equal(of_trainer, of_engine))
        found.append({"num_checksums": metrics["sync/num_checksums"], "experts": are_equal})
        engine.awake = False
    name = next(name for name in sent if name.endswith("gate_up_proj"))
    load = engine._load

    def other_expert(tensors, sums):
        """What is loaded has a changed expert, of the second rank's."""
        def changed():
            for key, tensor in tensors:
                if key == name:
                    tensor = tensor.clone()
                    tensor[-1] += 1
                yield key, tensor
        return load(changed(), sums)

    engine._load = other_expert
    try:
        engine.wake(policy)
        found.append("no error")
    except RuntimeError as error:
        found.append(str(error))
    engine.close()
    Path(out, f"{world.rank}.json").write_text(json.dumps(found))
    ranks.shutdown()
