"""What vLLM makes of the options that `common/engine/vllm.py` passes, on GPUs that are not there.

`python -m tests.gpu.engine_configs`, in the environment of `make setup-gpu`, on a machine with or without a GPU. It
imports everything that `common/` imports, then starts `VLLMEngine` for each of `CASES` and each of `GPUS`, as far as
vLLM's own configuration, builds vLLM's model of rank 0 from it and loads the names and shapes of the trainer's weights.
CUDA and the driver are stood in for, nothing is allocated. It prints a table: accepted, refused or changed. It ends
with 1 if an import fails, or if vLLM refuses or changes something that `KNOWN` does not list.
`tests/gpu/test_engine_configs.py` checks the options without the packages of GPUs.
"""

import ast
import contextlib
import ctypes
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro
from torch import nn
from transformers import AutoConfig

from common.engine.base import EngineSetup, RolloutConfig
from common.engine.vllm import VLLMEngine
from common.forward.vision import auto_class
from common.model.policy import ModelConfig
from common.parallel.ranks import World
from tests.cuda.shapes import MODELS, dense

ROOT = Path(__file__).parents[2]
OPTIONAL = {"flash_attn": "flash_attn", "torch.utils.tensorboard": "tensorboard"}
"""Modules that common/ imports only where a package is installed."""


@dataclass
class GPU:
    """What vLLM asks CUDA and the driver."""

    name: str
    gib: float
    processors: int


GPUS = {
    (8, 0): GPU("NVIDIA A100-SXM4-80GB", 79.2, 108),
    (8, 9): GPU("NVIDIA L40S", 44.4, 142),
    (9, 0): GPU("NVIDIA H100 80GB HBM3", 79.2, 132),
    (10, 0): GPU("NVIDIA B200", 178.4, 148),
}
"""By their compute capability."""


@dataclass
class Case:
    """A model's shape, and the flags that change the engine's options."""

    shape: dict[str, Any]
    rollout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


def extra(**options: Any) -> dict[str, str]:
    return {"extra": json.dumps(options)}


TWO = {"num_hidden_layers": 2}  # the layers of a model are alike
DENSE, MIXTURE = MODELS["Qwen2.5-7B"] | TWO, MODELS["Qwen3-30B-A3B"] | TWO
IMAGES = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "tie_word_embeddings": False,
    "text_config": {**DENSE, "model_type": "qwen2_5_vl_text", "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    "vision_config": {"depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
                      "out_hidden_size": 3584, "fullatt_block_indexes": [1]},
}
CASES = {
    "no flags": Case(DENSE),
    "`--rollout.enforce-eager`": Case(DENSE, {"enforce_eager": True}),
    "`--rollout.gpu-memory-utilization 0.6`": Case(DENSE, {"gpu_memory_utilization": 0.6}),
    "`--rollout.max-num-seqs 1024`": Case(DENSE, {"max_num_seqs": 1024}),
    "`--rollout.tp 2`": Case(DENSE, {"tp": 2}),
    "`--rollout.tp 4`": Case(DENSE, {"tp": 4}),
    "`--rollout.tp 8`": Case(MODELS["Llama-3.1-70B"] | TWO, {"tp": 8}),
    "`--policy.compute-dtype float32`": Case(DENSE, model={"compute_dtype": "float32"}),
    "soft-capped logits (Gemma 2)": Case(dense("Gemma2", 3584, 14336, 2, 16, 8, 256000, True, head_dim=256)),
    "images": Case(IMAGES),
    "mixture": Case(MIXTURE),
    "mixture, `--rollout.tp 4`": Case(MIXTURE, {"tp": 4}),
    "mixture, `enable_expert_parallel`": Case(MIXTURE, {"tp": 4} | extra(enable_expert_parallel=True)),
    "mixture, `--policy.router-replay rollout`": Case(MIXTURE, model={"router_replay": "rollout"}),
    "`attention_backend` `FLASH_ATTN`": Case(DENSE, extra(attention_backend="FLASH_ATTN")),
    "`quantization` `fp8`": Case(DENSE, extra(quantization="fp8")),
    "`quantization` `fp8_per_tensor`": Case(DENSE, extra(quantization="fp8_per_tensor")),
    "`quantization` `fp8_per_channel`": Case(DENSE, extra(quantization="fp8_per_channel")),
    "`quantization` and `kv_cache_dtype` `fp8`": Case(DENSE, extra(quantization="fp8", kv_cache_dtype="fp8")),
    "mixture, `quantization` `fp8`": Case(MIXTURE, extra(quantization="fp8")),
}
"""By what the table calls them. Flags of adapters change no option: the engine gets merged weights."""

KNOWN = {
    ("`quantization` `fp8_per_channel`", "8.0"): "refused: ValueError: FP8 PTPC online quant requires a kernel",
    ("mixture, `quantization` `fp8`", "8.0"): "refused: ValueError: FP8 MoE backend TRITON does not support",
}
"""(case, capability) -> how the cell of the table begins, where a GPU cannot do what is asked for."""

# what was asked for -> where the finished configuration has it
PLACES = {
    "dtype": "model_config.dtype",
    "trust_remote_code": "model_config.trust_remote_code",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "distributed_executor_backend": "parallel_config.distributed_executor_backend",
    "max_model_len": "model_config.max_model_len",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "logprobs_mode": "model_config.logprobs_mode",
    "seed": "model_config.seed",
    "load_format": "load_config.load_format",
    "enforce_eager": "model_config.enforce_eager",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "enable_sleep_mode": "model_config.enable_sleep_mode",
    "enable_return_routed_experts": "aux_output_config.enable_return_routed_experts",
    "moe_backend": "kernel_config.moe_backend",
    "quantization": "model_config.quantization",
    "enable_expert_parallel": "parallel_config.enable_expert_parallel",
    "kv_cache_dtype": "cache_config.cache_dtype",
}
IN_0_26 = {"aux_output_config.enable_return_routed_experts": "model_config.enable_return_routed_experts"}
"""Places that vLLM 0.26, which has no such part of a configuration, has elsewhere."""


class Stopped(Exception):
    """Ends the start of the engine, with what was collected until then."""


@dataclass
class Args:
    """What vLLM makes of the engine's options, on GPUs that are not there."""

    out: str = ""
    """File for the tables."""
    capability: str = ""
    """Only this GPU, as 9.0, in this process; prints one line of JSON a case: what each child process does."""
    only: str = ""
    """Only cases whose name contains this."""


# --------------------------------------------------------------------------- options


def start(case: Case, folder: Path) -> None:
    """Start an engine as a script does on rank 0 of as many ranks as `--rollout.tp`. Never returns normally: whoever
    calls it stands in for vLLM's LLM or for a part of it, and raises Stopped."""
    (folder / "config.json").write_text(json.dumps(case.shape))
    config = RolloutConfig(**case.rollout)
    world = World(0, config.tp, torch.device("cuda", 0), None)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.tp), "LOCAL_WORLD_SIZE": str(config.tp),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with mock.patch.dict(os.environ, ranks):
        VLLMEngine(EngineSetup(
            str(folder), AutoConfig.from_pretrained(folder), config, ModelConfig(**case.model), world, [[1]], [2],
            max_model_len=2048, seed=1, trainer_gb=10.0,
        ))


def options_of(case: Case, gib: float = 79.2) -> dict[str, Any]:
    """The arguments of LLM(...) for this case, made by `VLLMEngine` itself."""

    def record(**options: Any) -> None:
        raise Stopped(options)

    memory = mock.patch("torch.cuda.mem_get_info", return_value=(int(gib * 2**30), int(gib * 2**30)))
    with tempfile.TemporaryDirectory() as folder, memory, mock.patch("vllm.LLM", record):
        try:
            start(case, Path(folder))
        except Stopped as stopped:
            return stopped.args[0]
    raise AssertionError("the engine started without vLLM")


def config_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """vLLM's finished configuration for this case and the options it was made of. The real LLM(...) runs until it would
    make the engine."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    asked = {}

    def ask(**options: Any) -> LLM:
        asked.update(options)
        return LLM(**options)

    def stop(engine_args: Any, usage_context: Any) -> None:
        raise Stopped(engine_args.create_engine_config(usage_context))

    with tempfile.TemporaryDirectory() as folder, mock.patch("vllm.LLM", ask), \
            mock.patch.object(LLMEngine, "from_engine_args", stop):
        try:
            start(case, Path(folder))
        except Stopped as stopped:
            return stopped.args[0], asked
    raise AssertionError("vLLM made an engine without its class")


def changes(config: Any, options: dict[str, Any]) -> list[str]:
    """Options that the finished configuration has another value for."""
    found = []
    for option, place in PLACES.items():
        if option not in options:
            continue
        if not hasattr(config, place.partition(".")[0]):
            place = IN_0_26[place]
        value = attrgetter(place)(config)
        asked = getattr(torch, options[option]) if option == "dtype" else options[option]
        if value != asked:
            found.append(f"{option} {asked} -> {value}")
    return found


def choices(config: Any) -> dict[str, str]:
    """What vLLM chose itself."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    scheduler, graphs = config.scheduler_config, config.compilation_config
    with set_current_vllm_config(config):
        head_size = config.model_config.get_head_size()
        attention = get_attn_backend(head_size, config.model_config.dtype, config.cache_config.cache_dtype)
    sizes = graphs.cudagraph_capture_sizes or [0]
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "asynchronous scheduling": str(scheduler.async_scheduling),
        "prefix cache": str(config.cache_config.enable_prefix_caching),
        "tokens a step": f"{scheduler.max_num_batched_tokens:,}",
        "graphs": graphs.cudagraph_mode.name,
        "graph sizes": f"{len(sizes)} up to {max(sizes)}" if max(sizes) else "none",
        "attention": attention.get_name(),
    }


def build(config: Any) -> nn.Module:
    """vLLM's model of rank 0, without memory: its layers choose their kernels here, and refuse what none can do."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    def ranks(size: int) -> types.SimpleNamespace:
        group = types.SimpleNamespace(size=lambda: size, rank=lambda: 0)
        return types.SimpleNamespace(
            world_size=size, rank_in_group=0, rank=0, local_rank=0, ranks=list(range(size)), is_first_rank=True,
            is_last_rank=True, device_group=group, cpu_group=group, device_communicator=None, unique_name="",
        )

    tp = config.parallel_config.tensor_parallel_size
    sizes = {"_WORLD": tp, "_TP": tp, "_EP": tp, "_PP": 1, "_DP": 1, "_PCP": 1, "_DCP": 1}
    groups = mock.patch.multiple(parallel_state, **{name: ranks(size) for name, size in sizes.items()})
    with groups, torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
        return initialize_model(config)


def load(model: nn.Module, case: Case, config: Any) -> str:
    """Send the trainer's names and shapes, as a weight sync does, without values. vLLM's loaders refuse a wrong name or
    shape. Raises ValueError if nothing goes into a weight of the engine. Weights that vLLM quantises are not sent:
    the kernel for that has no form without a GPU. Raises it too if level 2 of sleep would lose a tensor."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    names = {name for name, _ in model.named_parameters()}
    methods = {type(method).__name__ for module in model.modules()
               if getattr(method := getattr(module, "quant_method", None), "uses_meta_device", False)}
    if methods:
        return f"built with {', '.join(sorted(methods))}"
    hf_config = AutoConfig.for_model(**case.shape)
    with torch.device("meta"):
        trained = auto_class(hf_config).from_config(hf_config, dtype=config.model_config.dtype)
    with set_current_vllm_config(config):
        loaded = model.load_weights((name, weight.data) for name, weight in trained.named_parameters())
        process_weights_after_loading(model, config.model_config, torch.device("meta"))
    if lost := lost_in_sleep(model):
        raise ValueError(f"sleep loses {', '.join(lost)}")
    if missing := sorted(names - loaded):
        raise ValueError(f"nothing goes into {len(missing)} weights, such as {missing[0]}")
    return f"{len(names)} weights loaded"


def lost_in_sleep(model: nn.Module) -> list[str]:
    """Tensors on the GPU, as Class.attribute, that neither a sync sends again, as parameters, nor vLLM keeps, as
    buffers, nor its scheduler writes, as the cache: plain attributes of a layer or of an object that it holds."""
    kept = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    found = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules", "kv_cache"):
                continue
            inside = {} if isinstance(value, (nn.Module, type)) else getattr(value, "__dict__", {})
            for tensor in (value, *inside.values(), *(value if isinstance(value, (list, tuple)) else ())):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in kept and tensor.device.type != "cpu":
                    found.add(f"{type(module).__name__}.{name}")
    return sorted(found)


# --------------------------------------------------------------------------- a GPU that is not there


def stub_driver() -> None:
    """vLLM's extension is linked to the driver's library. Where there is none, a library of the same name with the
    functions that the extension asks for: each of them fails."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        return
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.submodule_search_locations[0])
    names = set()
    for extension in folder.rglob("*.so"):
        symbols = subprocess.run(["nm", "-D", "--undefined-only", extension], capture_output=True, text=True)
        found = (line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines())
        names |= {name for name in found if name.startswith("cu") and name[2:3].isupper()}
    with tempfile.TemporaryDirectory() as place:
        source, library = Path(place) / "cuda.c", Path(place) / "libcuda.so.1"
        source.write_text("".join(f"int {name}() {{ return 100; }}\n" for name in sorted(names)))  # 100: no device
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def pretend(capability: tuple[int, int]) -> None:
    """For the rest of this process: eight GPUs of this capability, as far as Python asks."""
    gpu = GPUS[capability]
    total = int(gpu.gib * 2**30)
    properties = types.SimpleNamespace(
        name=gpu.name, total_memory=total, major=capability[0], minor=capability[1],
        multi_processor_count=gpu.processors,
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_name = lambda *_: gpu.name
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.mem_get_info = lambda *_: (total, total)
    stub_driver()
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):
        """CUDA's platform, with answers in place of NVML's."""

    answers = {
        "get_device_capability": DeviceCapability(*capability), "get_device_name": gpu.name,
        "get_device_total_memory": total, "is_fully_connected": True, "num_compute_units": gpu.processors,
    }
    for name, answer in answers.items():
        setattr(Platform, name, classmethod(lambda cls, *_, answer=answer, **__: answer))
    vllm.platforms._current_platform = Platform()


# --------------------------------------------------------------------------- imports


def imported_names(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(file, module, name or "") of every import below a folder, those inside functions too."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((str(path), alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((str(path), node.module, alias.name) for alias in node.names)


def failed_imports(folder: Path) -> list[str]:
    """Imports below a folder that this environment does not have. Packages in `OPTIONAL` may be missing."""
    failed = []
    for file, module, name in imported_names(folder):
        needs = next((package for optional, package in OPTIONAL.items() if module.startswith(optional)), None)
        if needs and importlib.util.find_spec(needs) is None:
            continue
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            failed.append(f"{file}: {module} {name}: {error}")
    return failed


# --------------------------------------------------------------------------- the table


class Warnings(logging.Handler):
    """Keeps the messages of vLLM's warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def check(case: Case) -> dict[str, Any]:
    """One case on the GPU of this process."""
    heard = Warnings()
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(heard)
    try:
        config, options = config_of(case)
        changed, chosen = changes(config, options), choices(config)
        chosen["weights"] = load(build(config), case, config)
        result = "changed: " + ", ".join(changed) if changed else "accepted"
    except (ValueError, NotImplementedError, RuntimeError, AssertionError, TypeError, AttributeError) as error:
        result, chosen = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:300]}", {}
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    return {"result": result, "choices": chosen, "warnings": heard.messages}


def in_process(args: Args) -> None:
    major, minor = map(int, args.capability.split("."))
    pretend((major, minor))
    print(json.dumps({"failed imports": failed_imports(ROOT / "common")}), flush=True)
    for name, case in CASES.items():
        if args.only in name:
            print(json.dumps({"case": name} | check(case)), flush=True)


def main(args: Args) -> None:
    if args.capability:
        in_process(args)
        return
    rows, failed = {}, []
    capabilities = [f"{major}.{minor}" for major, minor in GPUS]
    for capability in capabilities:
        command = [sys.executable, "-m", "tests.gpu.engine_configs", "--capability", capability, "--only", args.only]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            sys.exit(f"capability {capability}: ended with {done.returncode}")
        failed += found[0]["failed imports"]
        for row in found[1:]:
            rows[row["case"], capability] = row
            print(json.dumps({"capability": capability} | row), file=sys.stderr, flush=True)
    text = table(rows, capabilities)
    print(text)
    if args.out:
        Path(args.out).write_text(text)
    unexpected = [key for key, row in rows.items() if not row["result"].startswith(KNOWN.get(key, "accepted"))]
    for line in dict.fromkeys(failed):
        print(line, file=sys.stderr)
    for case, capability in unexpected:
        print(f"{case}, {capability}: {rows[case, capability]['result']}", file=sys.stderr)
    sys.exit(bool(failed or unexpected))


def table(rows: dict[tuple[str, str], dict[str, Any]], capabilities: list[str]) -> str:
    """Markdown: what became of each case, what vLLM chose; what GPUs share is written once, after their names."""
    cases = list(dict.fromkeys(case for case, _ in rows))
    lines = ["| options | " + " | ".join(capabilities) + " | chosen |", "| --- |" + " --- |" * (len(capabilities) + 1)]
    for case in cases:
        cells = [rows[case, capability]["result"] for capability in capabilities]
        chosen: dict[str, list[str]] = {}
        for capability in capabilities:
            if choices := rows[case, capability]["choices"]:
                chosen.setdefault(", ".join(choices.values()), []).append(capability)
        last = "<br>".join(f"{', '.join(where)}: {text}" for text, where in chosen.items())
        lines.append("| " + " | ".join([case, *cells, last]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Args))
