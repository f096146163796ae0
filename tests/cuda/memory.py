"""The memory of a step on GPUs, simulated: the project's own code runs on the stand-in for CUDA with shapes alone.

    python -m tests.cuda.memory Qwen2.5-7B --gpus 8 --tokens 16384 --offload.optimizer

One rank of `gpus` is run: real FSDP2 with collectives that do nothing, the real policy, optimizer, engine calls and
offloading. Every tensor takes its block of a caching allocator like PyTorch's (allocator.py). Not counted, because it
is no tensor of the trainer's: the CUDA context, NCCL's buffers, cuBLAS's workspaces, and all that the engine holds.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

import ppo
from common import losses
from common.batch import Batch
from common.checkpoint.state import tensors_of
from common.engine import base
from common.engine.base import Engine, EngineSetup, RolloutConfig
from common.memory.offload import Offload, OffloadConfig
from common.memory.plan import MemoryPlan
from common.model import loading
from common.model.lora import LoRAConfig
from common.model.optimizers import WEIGHTS, make_optimizer
from common.model.policy import Critic, ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from common.rollout import Minibatch, Response
from common.run import RunArgs
from tests.common.weigh import weigh
from tests.conftest import launch
from tests.cuda.shapes import MODELS

DEPTHS = 4, 8
PHASES = "rollout", "log-probs", "forward", "backward", "optimizer", "save"


class Peak(NamedTuple):
    """Of one phase, in GiB."""

    allocated_gb: float
    """Most that tensors took at once."""
    reserved_gb: float
    """Most that the caching allocator held, which is what nvidia-smi would show."""
    after_gb: float
    """What tensors take when the phase has ended, without what the allocator does not split off of their blocks."""
    moved: dict[str, int] = {}                                                                              # noqa: RUF012
    """Bytes through collectives, by operation and ranks of its group ("gather over 8"), each time."""

    def later_than(self, before: "Peak") -> "Peak":
        """Of the same phase, which came twice."""
        return Peak(max(self.allocated_gb, before.allocated_gb), max(self.reserved_gb, before.reserved_gb),
                    self.after_gb, Counter(self.moved) + Counter(before.moved))


@dataclass(frozen=True)
class Case:
    """What is simulated: a later step of a run, on one rank. Its phases, in order:

    rollout    `engine.wake`: weights gathered and handed over, and offloaded if asked for, the probe scored; then
               `engine.sleep`, with the weights on their way back
    log-probs  old log-probs of each micro-batch, of the reference too, and values
    forward    } of each micro-batch of the update; gradients of the first are there when the second runs
    backward   }
    optimizer  clipping and AdamW's step, for which moments that are offloaded come back
    save       weights gathered for an export, shards copied for a checkpoint
    """

    model: dict[str, Any]
    """The fields of a Hugging Face config.json, `model_type` and `architectures` among them."""
    gpus: int = 1
    """Ranks over which FSDP2 shards."""
    tokens: int = 16384
    """Budget of a micro-batch: as many responses as fit, at least one. A prompt that is shared counts once."""
    prompt_length: int = 256
    response_length: int = 768
    samples_per_prompt: int = 8
    num_microbatches: int = 2
    policy: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    reference: bool = False
    """A frozen model beside the trained one."""
    critic: bool = False
    """A trained critic of the same size."""
    entropy: bool = False
    """The entropy has a gradient."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    kind: str = "adamw"
    """--optim.kind."""


def simulate(*cases: Case, warm: bool = False) -> list[dict[str, Peak]]:
    """The peaks of each case, by phase. All run in one process of their own, which the stand-in needs; `warm`: one that
    has done its imports, for tests.

    A model of more than 8 layers is run with 4 and with 8 of them; its peaks follow on a straight line."""
    found = iter(peaks_of([job for case in cases for job in _jobs(case)], "cuda", warm))
    peaks = []
    for case in cases:
        by_depth = {depth: next(found) for depth in _depths(case)}
        peaks.append(_extrapolate(by_depth, case.model["num_hidden_layers"]))
    return peaks


def peaks_of(cases: list[Case], device: str, warm: bool = False) -> list[dict[str, Peak]]:
    """Of cases as they are, in a process on "cuda", the stand-in, or with real memory on "cpu"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
        said = launch("tests/cuda/memory_worker.py", device, path, warm=warm).stdout
    found = json.loads(said.splitlines()[-1])
    return [{name: Peak(*peak) for name, peak in phases.items()} for phases in found]


def plan_of(case: Case) -> MemoryPlan:
    """What is calculated for the same step."""
    rollout = RolloutConfig(max_response_length=case.response_length)
    args = RunArgs(model="model", train_data=(), policy=case.policy, lora=case.lora, rollout=rollout,
                   offload=case.offload, optim=OptimConfig(kind=case.kind))
    config = AutoConfig.for_model(**case.model)
    return MemoryPlan(args, config, case.gpus, case.prompt_length + case.response_length,
                      frozen=args.model if case.reference else "")


def _jobs(case: Case) -> list[Case]:
    """The case at each depth. Whether layers are recomputed follows from the size of the whole model."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**case.model)
        is_large = AutoModelForCausalLM.from_config(config).num_parameters() > 1e9
    recompute = case.policy.gradient_checkpointing
    policy = dataclasses.replace(case.policy, gradient_checkpointing=is_large if recompute is None else recompute)
    return [dataclasses.replace(case, policy=policy, model=case.model | {"num_hidden_layers": depth})
            for depth in _depths(case)]


def _depths(case: Case) -> tuple[int, ...]:
    num_layers = case.model["num_hidden_layers"]
    return DEPTHS if num_layers > max(DEPTHS) else (num_layers,)


def _extrapolate(by_depth: dict[int, dict[str, Peak]], num_layers: int) -> dict[str, Peak]:
    if num_layers in by_depth:
        return by_depth[num_layers]
    low, high = sorted(by_depth)
    share = (num_layers - low) / (high - low)
    return {
        name: Peak(*(a + share * (b - a) for a, b in zip(peak[:3], by_depth[high][name])))
        for name, peak in by_depth[low].items()
    }


# --------------------------------------------------------------------------- what is run

class Handover(Engine):
    """An engine that takes the weights and forgets them, and says the same to every prompt."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        self.waiting: list[int] = []

    def _load(self, tensors, sent) -> tuple[int, set[str]]:
        for _ in tensors:
            pass
        return len(sent), set()

    def add(self, request, prompt, seed, sampling, images, schema=None) -> None:
        self.waiting.append(request)
        self.length = sampling.max_response_length

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def step(self) -> Iterator[tuple[int, Response]]:
        while self.waiting:
            yield self.waiting.pop(0), Response([7] * self.length, [-1.0] * self.length, "stop")

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        return []


def microbatch(case: Case) -> Batch:
    """As many responses as fit into the budget, group after group."""
    prompts: list[list[int]] = []
    room = case.tokens
    while True:
        is_first = len(prompts) % case.samples_per_prompt == 0
        needed = case.response_length
        if is_first or not case.policy.share_prompt:
            needed += case.prompt_length
        if prompts and needed > room:
            break
        room -= needed
        prompts.append([3 + len(prompts) // case.samples_per_prompt] * case.prompt_length)
    responses = [[3 + n] * case.response_length for n in range(len(prompts))]          # no two begin alike
    return Batch.build(prompts, responses, rollout_logps=[[-1.0] * case.response_length] * len(prompts))


def run(case: Case, world: ranks.World, watch: Callable[[str], AbstractContextManager]) -> None:
    """A step as the scripts make it, each phase in `watch(name)`. An update of one micro-batch comes before it, after
    which the optimizers have moments."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.model))
        dtype = WEIGHTS[case.kind]
        trained, frozen = loading.Weights(lora=case.lora, dtype=dtype), loading.Weights(frozen=True)
        policy = loading.load_policy(folder, case.policy, world, trained)
        reference = loading.load_policy(folder, case.policy, world, frozen) if case.reference else None
        critic = loading.load_critic(folder, case.policy, world, trained) if case.critic else None
    trained = [policy] if critic is None else [critic, policy]
    optimizers = [make_optimizer(model, OptimConfig(kind=case.kind)) for model in trained]
    probe = [[3 + i] * case.prompt_length for i in range(4)]
    longest = case.prompt_length + case.response_length
    engine = Handover(EngineSetup("", None, RolloutConfig(max_probe_diff=0), case.policy, world, probe, [], longest, 0))
    frozen = [] if reference is None else [reference]
    engine.offload = Offload(case.offload, trained + frozen, optimizers)
    batch = microbatch(case)
    microbatches = [batch.to(world.device) for _ in range(case.num_microbatches)]

    score(microbatches[:1], policy, reference, critic, lambda name: contextlib.nullcontext())
    update(case, world, microbatches[:1], trained, optimizers, lambda name: contextlib.nullcontext())
    if world.device.type == "cuda":
        torch.cuda.empty_cache()                                        # as the engine does before it wakes
    Minibatch(microbatches, torch.zeros(1))                             # which micro-batch is its last
    with watch("rollout"):
        engine.wake(policy)
        engine.sleep()
    score(microbatches, policy, reference, critic, watch)
    update(case, world, microbatches, trained, optimizers, watch)
    with watch("save"):
        for _, tensor in policy.full_tensors(getattr(torch, case.policy.compute_dtype)):
            tensor.to("cpu", copy=True)
        for tensor in tensors_of({str(n): part for n, part in enumerate(zip(trained, optimizers))}).values():
            tensor.to("cpu", copy=True)


def score(microbatches: list[Batch], policy: Policy, reference: Policy | None, critic: Critic | None, watch) -> None:
    with watch("log-probs"):
        for one in microbatches:
            one.old_logp = policy.score(one, 1.0)
            if reference is not None:
                one.ref_logp = reference.score(one, 1.0)
            if critic is not None:
                one.value = one.returns = critic.score(one)
    for one in microbatches:
        one.advantage = one.mask.float()


def update(case: Case, world: ranks.World, microbatches: list[Batch], trained: list, optimizers: list, watch) -> None:
    weigh(microbatches, "token-mean")
    for model, optimizer in zip(trained, optimizers):
        for one in microbatches:
            with watch("forward"):
                loss, stats = loss_of(case, model, one)                # noqa: RUF059  a script keeps them, too
            with watch("backward"):
                (world.size * (loss * one.extra["weight"]).sum()).backward()
        with watch("optimizer"):
            optimizer_step(model, optimizer, 1e-6, OptimConfig())


def loss_of(case: Case, model: Policy | Critic, one: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if isinstance(model, Critic):
        return ppo.value_loss(model(one), one.value, one.returns, one.mask)
    logp, entropy = model(one, 1.0)
    loss, stats = ppo.clipped_loss(logp, one.old_logp, one.advantage, ppo.Args("", ()))
    if case.reference:
        loss = loss + 0.01 * losses.kl_estimate(logp, one.ref_logp, "k3")
    return loss - 0.01 * entropy if case.entropy else loss, stats


def fill(module: torch.nn.Module, *_) -> None:
    """In place of reading weights: small numbers."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().fill_(0.01)
        for buffer in module.buffers():
            buffer.fill_(1)


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    """Models are loaded from a config alone. Left out is what takes much time and little memory: the check that packed
    sequences do not see each other, and checksums of weights, which are made a few megabytes at a time."""
    stand_ins = {
        "open_folder": lambda *_: {"score.weight": torch.zeros(1, 1)},
        "weights_of": lambda *_: {},
        "_read_in_turns": lambda _, module, *others: fill(module),
        "check_packing": lambda *_: None,
    }
    dispatch = EpDispatchExpertsParallel._dispatch_tokens

    def spread(self, hidden, chosen, experts_here, group, size):
        """What the router chooses has no numbers: here as many tokens choose each expert."""
        chosen = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % (experts_here * size)
        return dispatch(self, hidden, chosen, experts_here, group, size)

    with mock.patch.multiple(loading, **stand_ins), mock.patch.multiple(base, checksum=lambda *_: 0), \
            mock.patch.object(PreTrainedModel, "initialize_weights", return_value=None), \
            mock.patch.object(EpDispatchExpertsParallel, "_dispatch_tokens", spread):
        yield


@dataclass
class Args:
    model: tyro.conf.Positional[str]
    """One of tests/cuda/shapes.py, or a folder with a config.json."""
    gpus: int = 8
    tokens: int = 16384
    prompt_length: int = 256
    response_length: int = 768
    samples_per_prompt: int = 8
    policy: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    reference: bool = False
    critic: bool = False
    entropy: bool = False
    lora: LoRAConfig = field(default_factory=LoRAConfig)


def main(args: Args) -> None:
    model = MODELS.get(args.model) or json.loads((Path(args.model) / "config.json").read_text())
    case = Case(model, **{name: x for name, x in vars(args).items() if name != "model"})
    (peaks,) = simulate(case)
    print(f"{args.model} on {args.gpus} GPUs, {args.tokens} tokens a micro-batch: simulated GiB on each")
    print(f"{'phase':10}{'allocated':>10}{'reserved':>10}{'after':>10}")
    for name, peak in peaks.items():
        print(f"{name:10}{peak.allocated_gb:10.2f}{peak.reserved_gb:10.2f}{peak.after_gb:10.2f}")
    if not args.critic:
        simulated = max(peaks[phase].allocated_gb for phase in ("forward", "backward", "optimizer"))
        planned = sum(plan_of(case).update(case.tokens).values())
        print(f"calculated for the update: {planned:.2f} GiB, {planned / simulated:.2f} times what is simulated")


if __name__ == "__main__":
    main(tyro.cli(Args))
