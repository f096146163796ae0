"""The engine's code for GPUs where there is none: vLLM and CUDA are stood in for, what they are asked for is compared
with the order that sleep mode needs. Kernels and memory are for tests/gpu."""

import contextlib
import types

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from common.engine import vllm
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.remote import Bridge
from common.engine.vllm import VLLMEngine
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.parallel.ranks import World
from tests.engine.engine_models import PROMPTS, make_model
from tests.generate import generate

WEIGHTS, CACHE = 10, 20                                                 # GiB


class StandIn:
    """vLLM's LLM on a GPU: transformers' model in its place, requests that end after one token."""

    log = None                                                          # a list, of each test
    kept = 1.0                                                          # GiB while it sleeps

    def __init__(self, **options):
        self.options, self.asleep, self.requests = options, set(), {}
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
        self.model.packed_modules_mapping = {}
        self.model.load_weights = self.load_weights
        self.llm_engine = types.SimpleNamespace(
            vllm_config=types.SimpleNamespace(model_config=None),
            reset_encoder_cache=lambda: None,
            is_sleeping=lambda: bool(self.asleep), add_request=self.add_request, step=self.step,
            abort_request=self.abort_request,
            output_processor=types.SimpleNamespace(request_states={}, external_req_ids={}),
            has_unfinished_requests=lambda: bool(self.requests),
        )
        self.seeds = []
        np.random.seed(0)
        torch.manual_seed(0)

    def load_weights(self, tensors):
        assert "weights" not in self.asleep
        self.log.append("load")
        mine = dict(self.model.named_parameters())
        for name, tensor in tensors:
            mine[name].data.copy_(tensor)
            del mine[name]
        return set(dict(self.model.named_parameters())) - set(mine)

    def apply_model(self, function):
        return [function(self.model)]

    def sleep(self, level):
        assert not self.asleep
        self.log.append(("sleep", level))
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))

    def wake_up(self, tags):
        self.log.append(("wake", *tags))
        self.asleep -= set(tags)

    def reset_prefix_cache(self):
        self.log.append("reset")
        return True

    def add_request(self, number, prompt, params):
        assert not self.asleep
        self.requests[number] = prompt
        self.seeds.append(params.seed)

    def abort_request(self, numbers):
        self.log.extend(("abort", number) for number in numbers)
        for number in numbers:
            self.requests.pop(number, None)

    def step(self):
        number = next(iter(self.requests))
        del self.requests[number]
        logprobs = types.SimpleNamespace(logprobs=[-6.2], start_indices=[0])            # as FlatLogprobs
        out = types.SimpleNamespace(token_ids=[7], logprobs=logprobs, finish_reason="length")
        return [types.SimpleNamespace(request_id=number, outputs=[out])]

    @property
    def used(self):
        return self.kept + WEIGHTS * ("weights" not in self.asleep) + CACHE * ("kv_cache" not in self.asleep)


class OnGPU(VLLMEngine):
    on_cpu = property(lambda self: False, lambda self, value: None)


@pytest.fixture
def start(world, tmp_path, monkeypatch):
    """start(**flags) -> engine, policy."""
    monkeypatch.setattr(StandIn, "log", [])
    monkeypatch.setattr("vllm.LLM", StandIn)
    group = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None, broadcast_object=lambda x, src: x)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: group)
    model, engines = make_model("llama", False, tmp_path), []

    def memory(*_):
        used = engines[0].llm.used if engines and hasattr(engines[0], "llm") else 0
        return int((80 - used) * 2**30), 80 * 2**30

    monkeypatch.setattr("torch.cuda.mem_get_info", memory)

    def make(trainer_gb=0.0, **flags):
        config, model_config = RolloutConfig(max_response_length=24, **flags), ModelConfig(compute_dtype="float32")
        engines.append(OnGPU.__new__(OnGPU))
        hf_config = AutoConfig.from_pretrained(model)
        setup = EngineSetup(model, hf_config, config, model_config, world, PROMPTS[:2], [2], 128, 0, trainer_gb)
        engines[0].__init__(setup)
        return engines[0], load_policy(model, model_config, world)

    return make


def took(engine) -> list:
    found = StandIn.log.copy()
    StandIn.log.clear()
    return found


def cycle(engine, policy) -> dict:
    metrics = engine.wake(policy)
    generate(engine, PROMPTS, range(5), SamplingConfig(1.0, 4))
    return metrics | engine.sleep()


def test_the_order_of_a_cycle(start, monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 7 * len(StandIn.log))    # after the first sleep
    engine, policy = start()
    made, used = StandIn.log.copy(), engine.llm.options["gpu_memory_utilization"]
    assert made == [("sleep", 2)] and engine.pool_bytes == 7
    assert used == min((80 - 4 - 1.5) / 80, 0.92) and engine.llm.options["enable_sleep_mode"]
    StandIn.log.clear()
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: StandIn.log.append("empty"))
    metrics = cycle(engine, policy)
    assert StandIn.log == ["empty", ("wake", "weights"), "load", "empty", ("wake", "kv_cache"), "reset", ("sleep", 2)]
    assert metrics["sleep/used_gb"] == StandIn.kept


def test_vllm_empties_torchs_cache(monkeypatch):
    """Its own allocator does so, which cannot use torch's blocks: before it takes memory, and when it gives some back.
    The engine relies on it."""
    cumem, log = pytest.importorskip("vllm.device_allocator.cumem"), []
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: log.append("map"))
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: log.append("unmap"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: log.append("empty"))
    monkeypatch.setattr("torch.accelerator.empty_cache", lambda: log.append("empty"))
    monkeypatch.setattr("gc.collect", lambda: log.append("collect"))
    allocator = cumem.CuMemAllocator.__new__(cumem.CuMemAllocator)
    weights = types.SimpleNamespace(tag="weights", handle=(0, 1), is_asleep=False, cpu_backup_tensor=None)
    allocator.pointer_to_data = {0: weights}
    allocator.sleep(offload_tags=())
    assert log == ["unmap", "collect", "empty"]
    allocator.wake_up(tags=["kv_cache"])
    assert log[3:] == ["collect", "empty"]
    allocator.wake_up(tags=["weights"])
    assert log[5:] == ["collect", "empty", "map"]


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_gives_a_users_allocator_options_back(fails, monkeypatch):
    """Its pool takes no expandable segments. torch forgets what is not in the string that it is given."""
    cumem, log = pytest.importorskip("vllm.device_allocator.cumem"), []
    asked = "max_split_size_mb:512,expandable_segments:True,garbage_collection_threshold:0.8"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", asked)
    monkeypatch.setattr(cumem, "set_alloc_conf", log.append)
    pool = types.SimpleNamespace(snapshot=list)
    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", lambda *_: contextlib.nullcontext((pool, None)))
    allocator = cumem.CuMemAllocator.__new__(cumem.CuMemAllocator)
    allocator.current_tag, allocator.allocator_and_pools, allocator.pointer_to_data = "default", {}, {}
    allocator.python_malloc_callback = allocator.python_free_callback = None
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), allocator.use_memory_pool("weights"):
        assert log == [asked.replace("True", "False")]
        if fails:
            raise KeyError
    assert log[1:] == [asked] and allocator.current_tag == "default"


def test_weights_come_back(start):
    """Also if they did not change: vLLM discards them when it sleeps."""
    engine, policy = start()
    cycle(engine, policy)
    took(engine)
    metrics = cycle(engine, policy)
    assert took(engine) == [("wake", "weights"), "load", ("wake", "kv_cache"), "reset", ("sleep", 2)]
    policy.version += 1
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().mul_(1.5)
    engine.wake(policy)
    assert "load" in took(engine)
    mine = dict(policy.full_tensors(None))
    for name, parameter in engine.llm.model.named_parameters():
        assert torch.equal(parameter, mine[name])
    engine.sleep()
    assert metrics["sync/num_checksums"] == 21


def test_what_the_trainer_leaves(start):
    engine, _ = start(trainer_gb=40.0, enforce_eager=True, extra='{"moe_backend": "cutlass"}')
    assert engine.llm.options["gpu_memory_utilization"] == (80 - 40 - 4) / 80
    assert engine.llm.options["moe_backend"] == "cutlass"
    with pytest.raises(ValueError, match=r"the trainer keeps 70.0 of \d+.\d free GiB on each GPU, 5.5 are reserved"):
        start(trainer_gb=70.0)


def test_a_wake_that_failed_is_an_error(start, monkeypatch):
    engine, policy = start()
    monkeypatch.setattr(StandIn, "wake_up", lambda self, tags: self.asleep.discard("weights"))
    with pytest.raises(RuntimeError, match="vLLM did not wake up"):
        engine.wake(policy)


def test_every_response_has_its_seed(start):
    engine, policy = start()
    engine.wake(policy)
    generate(engine, PROMPTS[:3], [1, 2, 3], SamplingConfig(1.0, 4))
    engine.sleep()
    assert engine.llm.seeds[:3] == [1, 2, 3]


def test_what_stop_left_is_aborted_in_order(start):
    engine, policy = start()
    engine.wake(policy)
    took(engine)
    seen = []
    generate(engine, PROMPTS, range(5), SamplingConfig(1.0, 4), lambda i, _: seen.append(i), stop=lambda: len(seen) > 1)
    engine.sleep()
    assert seen == [0, 1] and took(engine) == [("abort", "2"), ("abort", "3"), ("abort", "4"), ("sleep", 2)]


def test_a_weight_that_nobody_sends_is_an_error(start):
    engine, policy = start()
    engine.llm.model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match=r"nothing that the trainer sends goes into 2 weights of the engine "
                       r"\(extra.bias, extra.weight\)"):
        engine.wake(policy)


@pytest.mark.parametrize("told", ["experts.w13_weight", "experts.routed_experts.w13_weight"])
def test_experts_are_told_as_vllm_026_and_032_do(start, told):
    engine, policy = start()
    engine.llm.model.experts = torch.nn.Module()
    engine.llm.model.experts.routed_experts = torch.nn.Module()
    engine.llm.model.experts.routed_experts.register_parameter("w13_weight", torch.nn.Parameter(torch.zeros(2)))
    load = engine.llm.load_weights
    engine.llm.model.load_weights = lambda tensors: load(tensors) | {told}
    engine.wake(policy)


def test_what_others_hold_is_not_the_engines(start, monkeypatch):
    """A share is one of the whole GPU, of which 9 GiB are taken."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (71 * 2**30, 80 * 2**30))
    assert vllm.gpu_share(40.0, 4.0) == (71 - 40 - 4) / 80


def test_ranks_of_one_engine_have_one_seed(start, monkeypatch):
    """They sample the same, and other engines something else."""
    seeds = []
    monkeypatch.setattr(StandIn, "__init__", lambda self, **options: seeds.append(options["seed"]) or exit_start())

    def exit_start():
        raise KeyboardInterrupt

    for rank in range(4):
        config, model_config = RolloutConfig(tp=2), ModelConfig(compute_dtype="float32")
        world = World(rank, 4, torch.device("cuda", rank), mesh=None)
        with pytest.raises(KeyboardInterrupt):
            VLLMEngine(EngineSetup("", LlamaConfig(), config, model_config, world, PROMPTS[:2], [2], 128, 0))
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_gpus_get_weights_by_nccl(monkeypatch):
    """Of a job with 4 trainers and 2 samplers: who is in the group between them, and as what."""
    made = []
    options = types.SimpleNamespace(Options=lambda: "options")
    nccl = type("NCCL", (), {"Options": options.Options, "__init__": lambda self, *asked: made.append(asked[1:])})
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr("torch.distributed.ProcessGroupGloo", lambda *_: pytest.fail("weights would go by the host"))
    sides = [(rank, 4, True, False) for rank in range(4)] + [(rank, 2, False, True) for rank in range(2)]
    for rank, size, trains, samples in sides:
        Bridge(World(rank, size, torch.device("cuda", rank), mesh=None, trains=trains, samples=samples, num_samplers=2,
                     job_store=torch.distributed.HashStore()))
    assert made == [(0, 3, "options"), (1, 3, "options"), (2, 3, "options")]
