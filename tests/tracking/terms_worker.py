"""The shares of a loss's terms and of a reward's parts, by micro-batches of several sizes:
`terms_worker.py MODEL FOLDER`. FOLDER/found.json gets the metrics of each budget, and whether the gradient is the one
that the same loss has without the flag, to the bit."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from common.batch import Batch
from common.flags.model import ModelConfig
from common.flags.record import LogConfig
from common.losses import token_weights
from common.metrics import Meter
from common.model.loading import load_policy
from common.optim import OptimConfig
from common.parallel import ranks
from common.rollout import Minibatch
from common.tracking import phase as phases
from common.tracking.gradient_terms import GradientTerms

KL, ENTROPY, LENGTH = 0.3, 20.0, 0.05
PROMPT = [3, 4, 5]


def numbers() -> dict[str, torch.Tensor]:
    """8 responses of 2 to 9 tokens, and an advantage, the shares of two parts in it and a reference of each. The same
    on all ranks."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 10, (8,), generator=generator)
    advantage = torch.randn(8, generator=generator, dtype=torch.float64)
    advantage[3] = 0.0
    style = torch.rand(8, generator=generator, dtype=torch.float64) * 2 - 0.5
    return {"lengths": lengths, "advantage": advantage, "style": style, "right": 1 - style,
            "tokens": torch.randint(3, 53, (8, 9), generator=generator),
            "ref": -4 * torch.rand(8, 12, generator=generator)}


def minibatch_of(world: ranks.World, known: dict[str, torch.Tensor], size: int) -> Minibatch:
    """Every world.size-th response, `size` in a micro-batch."""
    mine = range(world.rank, 8, world.size)
    microbatches = []
    for start in range(0, len(mine), size):
        chosen = [*mine][start : start + size]
        responses = [known["tokens"][i, : known["lengths"][i]].tolist() for i in chosen]
        batch = Batch.build([PROMPT] * len(chosen), responses, index=chosen)
        batch.advantage = batch.to_tokens(known["advantage"])
        ref = torch.cat([known["ref"][i, : 3 + known["lengths"][i]] for i in chosen])
        batch.ref_logp = ref.where(batch.mask, 0)
        microbatches.append(batch)
    return Minibatch(microbatches, torch.zeros(8, dtype=torch.float64))


def update(policy, world: ranks.World, minibatch: Minibatch, terms: GradientTerms | None) -> tuple[dict, list]:
    policy.gradient_terms = terms
    run = SimpleNamespace(
        args=SimpleNamespace(policy=ModelConfig()), meter=Meter(), metrics={}, total_steps=1, world=world, step=0,
        before_update=lambda model: None, policy=policy, optimizers={"policy": None},
        checkpoints=SimpleNamespace(check=lambda: None))
    gradients = []

    def keep(model, *_):
        gradients.extend(p.grad.full_tensor().clone() for p in model.parameters())
        for p in model.parameters():
            p.grad = None
        return 1.0

    phases.optimizer_step = keep
    phase = phases.Phase(run, "update_actor", [minibatch])
    phase.advance = lambda: None
    for microbatch, weight in zip(minibatch, token_weights(minibatch, "token-mean")):
        logp, entropy = policy(microbatch, 1.0)
        ratio = (logp - logp.detach()).exp()
        loss = phase.term("policy", -microbatch.advantage * ratio)
        loss = loss + phase.term("kl", KL * (logp - microbatch.ref_logp).square() / 2)
        loss = loss - phase.term("entropy", ENTROPY * entropy)
        loss = loss + LENGTH * logp.square()                             # has no name
        (world.size * (loss * weight).sum()).backward()
        phase.done(microbatch, logp, entropy)
    phase.optimizer_step(policy, None, OptimConfig(), 0)
    return run.meter.reduce() | run.metrics, gradients


def main(model: str, folder: str) -> None:
    world = ranks.init()
    known = numbers()
    found = {}
    for size in (1, 3, 8):
        policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
        minibatch = minibatch_of(world, known, size)
        _, plain = update(policy, world, minibatch, None)
        terms = GradientTerms(LogConfig(signal=1))
        terms.watch(policy)
        terms.factors = {"style": known["style"], "right": known["right"]}
        metrics, gradients = update(policy, world, minibatch, terms)
        same = all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
        found[size] = metrics | {"same": same, "num": len(gradients)}
    if world.is_main:
        Path(folder, f"found_{world.size}.json").write_text(json.dumps(found))
    ranks.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
