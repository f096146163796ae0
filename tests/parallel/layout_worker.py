"""Run by test_layout.py under torchrun: gradients of one mini-batch through the scripts' own path, for many layouts;
unsharded weights and clipped steps on these ranks; the same where the ranks hold several copies of the model."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

import grpo
from common import losses
from common.batch import Batch
from common.checkpoint.state import load_parts, tensors_of
from common.layout.shared_prefixes import sort_by_prefix
from common.model.flops import sequence_cost
from common.model.loading import Weights, load_policy, read_config
from common.model.lora import LoRAConfig
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.packing import Sequences, plan_step
from common.parallel import ranks
from common.parallel.exchange import exchange, gather_numbers
from common.parallel.ranks import make_groups
from tests.checkpoint import shards
from tests.common.weigh import weigh as weigh_globally

LORA = LoRAConfig(rank=3, alpha=6.0)


@dataclass
class Step:
    """Responses as lists, one entry each; `old_logps` and `masks` per response token."""

    prompts: list[list[int]]
    responses: list[list[int]]
    masks: list[list[bool]]
    old_logps: list[list[float]]
    advantages: list[float]
    samples_per_prompt: int
    temperature: float = 0.7
    clip_low: float = 0.2
    clip_high: float = 0.3
    clip_dual: float = 2.5
    norm_length: float = 16.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


def gradient(policy: Policy, world: ranks.World, hf_config, step: Step, order: list[int], budget: int, aggregation: str,
             skip: bool = False, episodes: bool = False, weigh=weigh_globally,
             ) -> tuple[dict[str, Tensor], int, int]:
    """The full gradient, the number of micro-batches on each rank, and the dummies on all of them.

    Response i of `step` gets the number `order[i]` and starts on the rank that this number is dealt to. The lines from
    `gather_numbers` to `backward` are those of grpo.py. `skip`: responses with advantage 0 run nowhere, only count.
    `episodes`: sequences 2k and 2k + 1 are one response, an episode whose history was rewritten.
    Whether prompts are shared is a setting of `policy`.
    """
    numbers = torch.tensor(order)
    response_of = torch.arange(len(order)) // (1 + episodes)                                                # [N]
    mine = [i for i in range(len(order)) if order[i] % world.size == world.rank]
    batch = Batch.build([], [])
    if mine:
        batch = Batch.build(
            [step.prompts[i] for i in mine], [step.responses[i] for i in mine],
            index=[int(response_of[order[i]]) for i in mine], number=[order[i] for i in mine],
            masks=[step.masks[i] for i in mine], rollout_logps=[step.old_logps[i] for i in mine],
        )
        batch.old_logp = batch.rollout_logp
    own = [(step.advantages[i], len(step.prompts[i]), len(step.responses[i]), sum(step.masks[i])) for i in mine]
    gathered = gather_numbers(torch.tensor(own, dtype=torch.float64).view(-1, 4), batch.number)             # [N, 4]
    advantages, prompt_lengths, response_lengths, num_sampled = gathered.unbind(1)
    lengths = (prompt_lengths + response_lengths).numpy().astype(np.int64)
    assert advantages[numbers].tolist() == step.advantages
    trained = (advantages != 0).numpy() if skip else np.ones(len(order), dtype=bool)
    alike = {}
    if policy.share_prompt:
        by_number = numbers.argsort()
        whole = Batch.build([step.prompts[i] for i in by_number], [step.responses[i] for i in by_number])
        groups = by_number // step.samples_per_prompt
        by_prefix, common = sort_by_prefix(whole.tokens, whole.mask, whole.cu_seqlens, None, None, groups)
        alike = {"order": by_prefix, "common": common[by_prefix.argsort()]}
    sequences = Sequences(lengths, sequence_cost(lengths, hf_config), trained, response_of.numpy(), **alike)
    plan = plan_step(sequences, 1, world.size, budget, seed=1, group_size=world.group_size)
    batch = batch.select(torch.from_numpy(np.flatnonzero(trained[batch.number.numpy()])))
    batch = exchange(batch, plan.rank[batch.number.numpy()])
    microbatches = [batch.microbatch(shares[world.rank]) for shares in plan.minibatches[0]]
    for microbatch in microbatches:
        microbatch.advantage = advantages.float()[microbatch.number][microbatch.sequence_ids] * microbatch.mask # [T]

    clips = grpo.Args("", (), clip_low=step.clip_low, clip_high=step.clip_high, clip_dual=step.clip_dual)
    for parameter in policy.parameters():
        parameter.grad = None
    left_out = plan.left_out[0]
    skipped = torch.zeros(1 + int(response_of[-1]), dtype=torch.float64)                                    # [S]
    skipped.index_add_(0, response_of[left_out], num_sampled[left_out])
    weigh(microbatches, aggregation, step.norm_length, skipped)
    if policy.mixture.coef:
        policy.count_choices(microbatches)
    for microbatch in microbatches:
        logp, entropy = policy(microbatch, step.temperature)
        loss, _ = grpo.clipped_loss(logp, microbatch.old_logp, microbatch.advantage, clips)
        if step.kl_coef:
            loss = loss + step.kl_coef * losses.kl_estimate(logp, microbatch.old_logp, "k3")
        if step.entropy_coef:
            loss = loss - step.entropy_coef * entropy
        (world.size * (loss * microbatch.extra["weight"]).sum()).backward()
    trained = [(name, parameter) for name, parameter in policy.lm.named_parameters() if parameter.requires_grad]
    full = {name: parameter.grad.full_tensor().clone() for name, parameter in trained}
    num_dummies = sum(len(share) == 0 for shares in plan.minibatches[0] for share in shares)
    return full, len(microbatches), num_dummies


def weigh_locally(microbatches, *options):
    """The bug of this field: every rank divides by what it has itself."""
    all_sum, losses.all_sum = losses.all_sum, lambda values: torch.as_tensor(values, dtype=torch.float64)
    try:
        weigh_globally(microbatches, *options)
    finally:
        losses.all_sum = all_sum


def weigh_each(microbatches, *options):
    """Its sibling: every micro-batch is divided by what it has itself, then averaged."""
    for microbatch in microbatches:
        weigh_globally([microbatch], *options)
        microbatch.extra["weight"] /= len(microbatches)


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_tensors(torch.float32)}


def clipped_step(policy: Policy, world: ranks.World) -> dict:
    """One step of SGD with the last gradient, then one whose gradient is infinite on the last rank (of each copy)."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    parameters = list(policy.parameters())
    half = OptimConfig(max_grad_norm=0.5)
    found = {"norm": optimizer_step(policy, optimizer, 0.1, half), "stepped": weights(policy)}
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if world.mesh.get_local_rank(-1) == world.mesh.size(-1) - 1:
        parameters[0].grad.to_local()[0, 0] = torch.inf
    found |= {"bad_norm": optimizer_step(policy, optimizer, 0.1, half), "after_bad": weights(policy)}
    return found | {"version": policy.version, "grads_left": sum(p.grad is not None for p in parameters)}


def checkpoint(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """The weights after a step of AdamW with the last gradient, saved with the moments."""
    optimizer = make_optimizer(policy, OptimConfig())
    optimizer_step(policy, optimizer, 0.01, OptimConfig())
    shards.save(tensors_of({"policy": (policy, optimizer)}), folder)
    return weights(policy)


def replicated(folder: Path, todo: dict, config: ModelConfig, world: ranks.World, replicas: int) -> dict:
    """With so many copies of the model: the last layout's gradient, a clipped step, and what is saved after a step, and
    what a model of one copy and one of these copies then load."""
    grouped = replace(world, **make_groups("cpu", ranks.collective_timeout(60), replicas))
    policy, single = (load_policy(todo["model"], config, place) for place in (grouped, world))
    hf_config, found = read_config(todo["model"], config), {"loaded": weights(policy)}
    name, budget, order, aggregation, _ = todo["layouts"][-1]
    saved = folder / f"replicas_{replicas}_of_{world.size}"
    found["gradient"], *_ = gradient(policy, grouped, hf_config, todo["steps"][name], order, budget, aggregation)
    found["after_adam"] = checkpoint(policy, saved)
    for loader in (single, load_policy(todo["model"], config, grouped)):
        parts = {"policy": (loader, make_optimizer(loader, OptimConfig()))}
        load_parts(parts, saved)
        whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                 for name, tensor in tensors_of(parts).items()}
        found.setdefault("restored", []).append(whole)
    gradient(single, world, hf_config, todo["steps"][name], order, budget, aggregation)
    checkpoint(single, folder / f"single_{replicas}_of_{world.size}")
    policy = load_policy(todo["model"], config, grouped)
    gradient(policy, grouped, hf_config, todo["steps"][name], order, budget, aggregation)
    return found | {"weights": weights(policy)} | clipped_step(policy, grouped)


def with_adapters(todo: dict, config: ModelConfig, world: ranks.World) -> dict:
    """The last layout's gradient of adapters, in two copies of the model where there are two ranks; A and B; and the
    merged weights, as the engine gets them."""
    if world.size > 1:
        world = replace(world, **make_groups("cpu", ranks.collective_timeout(60), replicas=2))
    policy = load_policy(todo["model"], config, world, Weights(lora=LORA))
    adapters = {name: p for name, p in policy.lm.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapters.items():
        if name.endswith("lora_B"):
            full = 0.1 * torch.randn(parameter.shape, generator=generator)
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.detach().to_local().copy_(shard.to_local())
    name, budget, order, aggregation, _ = todo["layouts"][-1]
    hf_config = read_config(todo["model"], config)
    found, *_ = gradient(policy, world, hf_config, todo["steps"][name], order, budget, aggregation)
    whole = {name: parameter.detach().full_tensor() for name, parameter in adapters.items()}
    return {"gradient": found, "adapters": whole, "weights": weights(policy)}


def main(folder: Path) -> None:
    world = ranks.init()
    todo = torch.load(folder / "todo.pt", weights_only=False)
    configs = {"": {}, "share": {"share_prompt": True}}
    configs = {variant: ModelConfig(compute_dtype="float32", **flags) for variant, flags in configs.items()}
    policies = {variant: load_policy(todo["model"], config, world) for variant, config in configs.items()}
    hf_config, policy = read_config(todo["model"], configs[""]), policies[""]
    wrong = {"": weigh_globally, "local": weigh_locally, "each": weigh_each}
    results = {}
    for name, budget, order, aggregation, variant in todo["layouts"]:
        step = todo["steps"][name]
        results[name, budget, tuple(order), aggregation, variant] = gradient(
            policies.get(variant, policy), world, hf_config, step, order, budget, aggregation, variant == "skip",
            variant == "episodes", wrong.get(variant, weigh_globally),
        )
    found = {"gradients": results, "weights": weights(policy)}
    found |= clipped_step(policy, world)
    if world.size > 1:
        found["replicas"] = replicated(folder, todo, configs[""], world, replicas=2)
    found["lora"] = with_adapters(todo, configs[""], world)
    torch.save(found, folder / f"found_{world.size}_{world.rank}.pt")
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
