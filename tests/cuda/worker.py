"""Runs scripts on the stand-in for CUDA: `python -m tests.cuda.worker JOBS.json`. conftest's `launch` makes one process
for all jobs, each a [script, run folder, flags]; what was seen of each is written to seen.json in its run folder."""

import dataclasses
import gc
import importlib
import json
import random
import sys
import types
from pathlib import Path
from typing import ClassVar

from tests.cuda import fake_cuda

CAPABILITY = (9, 0)


class StandIn:
    """vLLM's LLM: transformers' model on the GPU in its place, responses of random lengths."""

    log: ClassVar[list] = []                                            # what it is asked for, in order

    def __init__(self, **options):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        StandIn.log.append(["LLM", {key: value for key, value in options.items() if key != "model"}])
        self.asleep, self.requests = set(), {}
        set_stream_as_vllm()
        with torch.device("cuda"):
            config = AutoConfig.from_pretrained(options["model"])
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options["dtype"]))
        self.model.packed_modules_mapping = {}
        self.model.load_weights = self.load_weights
        self.llm_engine = types.SimpleNamespace(
            vllm_config=types.SimpleNamespace(use_v2_model_runner=True), is_sleeping=lambda: bool(self.asleep),
            reset_encoder_cache=lambda: None,
            add_request=self.add_request, step=self.step, abort_request=lambda ids: None,
            output_processor=types.SimpleNamespace(request_states={}, external_req_ids={}),
            has_unfinished_requests=lambda: bool(self.requests),
            engine_core=types.SimpleNamespace(shutdown=lambda: StandIn.log.append(["shutdown"])),
        )

    def load_weights(self, tensors) -> set[str]:
        assert "weights" not in self.asleep
        StandIn.log.append(["load"])
        mine, loaded = dict(self.model.named_parameters()), set()
        for name, tensor in tensors:
            assert tensor.device.type == "cuda", name
            mine[name].data.copy_(tensor)
            loaded.add(name)
        return loaded

    def apply_model(self, function) -> list:
        return [function(self.model)]

    def sleep(self, level: int):
        assert not self.asleep
        StandIn.log.append(["sleep", level])
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]):
        StandIn.log.append(["wake", *tags])
        self.asleep -= set(tags)

    def reset_prefix_cache(self) -> bool:
        return True

    def add_request(self, number: str, prompt: dict, params):
        assert not self.asleep
        self.requests[number] = params

    def step(self) -> list:
        number = next(iter(self.requests))
        params = self.requests.pop(number)
        draw = random.Random(params.seed)
        tokens = [draw.randint(300, 2000) for _ in range(draw.randint(1, params.max_tokens))]
        logprobs = types.SimpleNamespace(logprobs=[-1.0] * len(tokens), start_indices=[*range(len(tokens))])
        out = types.SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="stop")
        return [types.SimpleNamespace(request_id=number, outputs=[out])]


def set_stream_as_vllm() -> None:
    """With --rollout.tp above 1, and for mixtures with shared experts, vLLM gives the main thread a stream of its own,
    for good (`current_stream` in vllm/utils/torch_utils.py, which pynccl.py calls). Other threads stay in the default
    stream, and neither waits for the other."""
    import torch

    if torch.cuda.current_stream() is torch.cuda.default_stream():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)


@dataclasses.dataclass
class EngineArgs:
    enforce_eager: bool = False


def stand_in_for_vllm() -> None:
    """The names that common/engine imports of it; importing the real one takes long and needs its CUDA build."""
    group = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None, broadcast_object=lambda x, src: x)
    contents = {
        "vllm": {"LLM": StandIn, "SamplingParams": types.SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": types.SimpleNamespace(FINAL_ONLY=1)},
        "vllm.compilation": {},
        "vllm.compilation.decorators": {"_support_torch_compile": lambda cls: cls},
        "vllm.engine": {},
        "vllm.v1": {},
        "vllm.v1.engine": {"FinishReason": types.SimpleNamespace(ABORT=2)},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.distributed": {"get_tp_group": lambda: group},
        "vllm.distributed.parallel_state": {"destroy_distributed_environment": lambda: None},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def once_for_a_model(check_packing):
    """Not again by each job: three forward passes of a layout are a second here."""
    seen = set()

    def check(model, forward, path, hf_config, compute_dtype, device):
        key = (path, compute_dtype, type(model), model.share_prompt)
        if key not in seen:
            seen.add(key)
            check_packing(model, forward, path, hf_config, compute_dtype, device)

    return check


def main(jobs: list[list]) -> None:
    device = fake_cuda.install(capability=CAPABILITY)
    stand_in_for_vllm()
    import torch.distributed
    import tyro

    from common.checkpoint.manager import Checkpoints
    from common.engine import make
    from common.model import loading
    from common.parallel import ranks

    vllm = types.SimpleNamespace(version="0.32.0")
    make.importlib = types.SimpleNamespace(metadata=types.SimpleNamespace(distributions=lambda name: [vllm]))
    write = Checkpoints._write
    Checkpoints._write = lambda self, *arguments: device.in_this_thread(write, self, *arguments)
    world = ranks.init()
    ranks.init = lambda *_: world                                # one process group for all runs
    ranks.shutdown = torch.distributed.barrier
    loading.check_packing = once_for_a_model(loading.check_packing)
    gc.freeze()                                                         # an engine collects garbage at every turn
    for script, run_dir, flags in jobs:
        StandIn.log.clear()
        device.reads.clear()
        before = device.num_operations
        module = importlib.import_module(script)
        with device:
            module.main(tyro.cli(module.Args, args=[*flags, "--run-dir", run_dir]))
        seen = {
            "engine": StandIn.log, "reads": device.reads, "operations": device.num_operations - before,
        }
        (Path(run_dir) / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
