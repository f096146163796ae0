"""Breaks lines that only GPUs run, one at a time in a copy of the repository, and says which test notices:

    python -m tests.cuda.breaks                        # all
    python -m tests.cuda.breaks pinned "set_device"    # those with one of these texts in their names
    python -m tests.cuda.breaks --done runs/breaks.jsonl    # goes on where an earlier call with this file ended

Each break is what a careless change would make of a line. Its tests run in order until one fails: some seconds of one
core, and half a minute where whole scripts or steps of large shapes are run."""

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE = ".venv", "models", "data"                                      # git does not have (all of) them: linked

STEP, MEMORY, MEMORY_PLAN = (f"tests/cuda/test_{name}.py" for name in ("step_on_cuda", "memory", "memory_plan"))
ORDER = "tests/cuda/test_order_on_cuda.py"
ROLLOUTS, REPORTS, OPTIMIZERS, SAVES, RULES = (
    f"CUDA_PARTS={part} {ORDER} -k '{tests}'" for part, tests in (
        ("rollouts", "offloaded"), ("reports", "host_waits or seconds or most_memory or meter or sums"),
        ("optimizers", "a_step_takes"),
        ("saves", "checkpoint or export or save"), ("rules", "refused or taken"),
    )
)
OPTIM = "tests/common/test_optim.py"
ENGINE, OFFLOAD = "tests/engine/test_engine_cuda.py", "tests/model/test_offload.py"
RANKS, ATTENTION = "tests/parallel/test_ranks.py", "tests/model/test_attention.py"
CHECKPOINT, PLAN = "tests/checkpoint/test_checkpoint.py", "tests/model/test_memory_plan.py"
OPTIONS, KERNELS = "tests/gpu/test_engine_configs.py", "tests/common/test_kernels.py"


def scripts(tests: str, *jobs: str) -> str:
    """Some tests of whole scripts, with only the runs that they look at."""
    return f"CUDA_JOBS={','.join(jobs)} tests/cuda/test_scripts_on_cuda.py -k {shlex.quote(tests)}"


SAME, READS = scripts("change_nothing and offload", "grpo", "offload.params", "offload.optimizer"), scripts(
    "reads_nothing", "grpo", "shared", "mixture", "terms", "distill", "many micro-batches")
FP32 = scripts("two_steps and float32", "float32")


class Break(NamedTuple):
    name: str
    file: str
    line: str
    """Text that is in the file once, or as often as it is to be replaced."""
    broken: str
    hurts: str
    """What it would do on a GPU."""
    tests: tuple[str, ...]


def of(file: str, *breaks: tuple) -> list[Break]:
    return [Break(name, file, line, broken, hurts, tests) for name, line, broken, hurts, *tests in breaks]


BREAKS = [
    *of(
        "common/memory/offload.py",
        ("pinned host memory", "pin = torch.cuda.is_available()", "pin = False",
         "copies are several times slower, and the host waits for each", OFFLOAD, ROLLOUTS),
        ("freed before it is copied", "            buffer.copy_(_bytes(storage))\n            storage.resize_(0)\n",
         "            old = _bytes(storage)\n            storage.resize_(0)\n            buffer.copy_(old)\n",
         "weights are lost", OFFLOAD, SAME),
        ("copy to the host not waited for", "buffer.copy_(_bytes(storage))",
         "buffer.copy_(_bytes(storage), non_blocking=True)",
         "nothing: the storage is freed, and filled again, in the stream of the copy, and the host reads no buffer",
         OFFLOAD, ROLLOUTS),
        ("nothing copied back", "            _bytes(storage).copy_(buffer, non_blocking=True)\n", "",
         "weights are whatever was in the memory", OFFLOAD),
        ("copy back in a stream of its own", "            _bytes(storage).copy_(buffer, non_blocking=True)\n",
         "            with torch.cuda.stream(torch.cuda.Stream()):\n"
         "                _bytes(storage).copy_(buffer, non_blocking=True)\n",
         "the next forward pass reads half of the weights", ROLLOUTS),
        ("moments stay after a step",
         "    optimizer.register_step_post_hook(to_host)\n", "",
         "moments and activations together: out of memory", OFFLOAD),
        ("moments not brought back for a save",
         "    optimizer.register_state_dict_pre_hook(to_device)\n", "",
         "a save with empty moments", OFFLOAD),
    ),
    *of(
        "common/engine/base.py",
        ("weights leave before they are sent", "        self._wake_weights()\n        if policy",
         "        self._wake_weights()\n        self.offload.params.to_host()\n        if policy",
         "the engine gets nothing", OFFLOAD),
        ("moments leave after the engine's weights came",
         "        for moments in self.offload.moments:\n            moments.to_host()\n        self._wake_weights()\n",
         "        self._wake_weights()\n        for moments in self.offload.moments:\n            moments.to_host()\n",
         "out of memory after a save", OFFLOAD, ROLLOUTS),
        ("weights leave after the cache came",
         "        self.offload.params.to_host()\n        self._wake_cache()\n",
         "        self._wake_cache()\n        self.offload.params.to_host()\n", "out of memory", OFFLOAD, ROLLOUTS),
        ("weights return before the engine sleeps",
         "        metrics = self._sleep()\n        self.awake = False\n        self.offload.params.to_device()\n",
         "        self.offload.params.to_device()\n        metrics = self._sleep()\n        self.awake = False\n",
         "out of memory", OFFLOAD, ROLLOUTS),
    ),
    *of(
        "common/engine/vllm.py",
        ("weights and cache wake together", 'wake_up(tags=["weights"])', 'wake_up(tags=["weights", "kv_cache"])',
         "the cache takes the memory that the sync needs", ENGINE),
        ("sleep level", "sleep(level=2)", "sleep(level=1)", "weights are kept twice in host memory", ENGINE),
        ("sleep mode off", '                "enable_sleep_mode": True,\n', "", "the engine never gives memory back",
         ENGINE),
        ("prefixes of the old weights", "if not self.llm.reset_prefix_cache() or self.", "if self.",
         "responses mix old keys and new weights", ENGINE),
        ("a failed wake goes on", " or self.llm.llm_engine.is_sleeping():", ":", "kernels on memory that is unmapped",
         ENGINE),
        ("no room for graphs", "RESERVED_GB + GRAPHS_GB", "RESERVED_GB", "out of memory in the capture", ENGINE),
        ("memory of others counted as free", "(free - trainer_gb - reserved_gb)", "(total - trainer_gb - reserved_gb)",
         "vLLM refuses to start, or the trainer is out of memory", ENGINE),
        ("memory as torch counts it", "free, total = torch.cuda.mem_get_info()  # of the whole GPU: torch does not see "
         "the engine's pools\n", "total = 80 * 2**30; free = total - torch.cuda.memory_reserved()\n",
         "sleep/used_gb says that the engine gave all back", ENGINE),
        ("kernels of a mixture", '{"moe_backend": "triton"}', "{}", "experts in an order that a sync does not write",
         OPTIONS),
        ("a seed for each rank", 'seed_of(setup.seed, self.engine_rank)', 'seed_of(setup.seed, self.world.rank)',
         "ranks of an engine draw differently", ENGINE),
    ),
    *of(
        "common/parallel/ranks.py",
        ("set_device", "        torch.cuda.set_device(device)\n", "", "all ranks of a machine take GPU 0", RANKS, STEP),
        ("a rank's GPU", 'torch.device("cuda", local_rank)', 'torch.device("cuda", job_rank)',
         "the second machine has no such GPU", RANKS),
        ("NCCL alone", '"cpu:gloo,cuda:nccl"', '"nccl"', "sums of the host are refused", RANKS, STEP),
        ("more ranks than GPUs", "if local_rank >= num_gpus:", "if local_rank > num_gpus:",
         "an error of CUDA in place of a rule", RANKS),
        ("time limit of the default group", ", world_size=size, timeout=timeout)", ", world_size=size)",
         "NCCL ends a job whose first rank validates for 10 minutes", RANKS),
        ("time limit of the other groups", "new_subgroups_by_enumeration(part.tolist(), timeout)",
         "new_subgroups_by_enumeration(part.tolist())", "the same with copies of the model", RANKS),
        ("no limit in 32 bits", "timedelta(days=24)", "timedelta(days=30)", "a negative number of milliseconds", RANKS),
        ("sums on the GPU", "dtype=torch.float64).detach().cpu().clone()", "dtype=torch.float64).detach().clone()",
         "the host waits, and ranks with and without GPU tensors call different backends", REPORTS),
    ),
    *of(
        "common/engine/remote.py",
        ("weights by gloo", 'if self.world.device.type == "cpu":', "if True:", "weights go through the host", ENGINE),
    ),
    *of(
        "common/kernels/logp.py",
        ("logits in 16 bits", "torch.mm(a, b, out_dtype=torch.float32)", "(a @ b).float()",
         "log-probs are off by up to 0.06", STEP),
        ("products of two dtypes", "torch.mm(a, b, out_dtype=torch.float32)", "torch.mm(a, b.float())",
         "cuBLAS refuses", STEP),
        ("the head's gradient in 16 bits", "torch.addmm(out, a, b, out_dtype=torch.float32, out=out)",
         "out.add_(torch.mm(a, b))", "gradients lose digits", STEP),
        ("tiles of large models", "max(tokens, weight.shape[1]) // 128", "tokens // 128",
         "the head's gradient takes gigabytes", KERNELS + " -k tile", PLAN, MEMORY_PLAN),
        ("autocast of a caller", "with torch.autocast(hidden.device.type, enabled=False):", "if True:",
         "in a fork with autocast logits are rounded", KERNELS, STEP),
    ),
    *of(
        "common/forward/attention.py",
        ("window of tokens after", "window_size=(keys_before, 0)", "window_size=(keys_before, -1)",
         "tokens see later ones", ATTENTION + " -k hands_the_kernel", STEP),
        ("keys of a shared prompt", "if key_rows is not None:", "if False:", "the kernel reads beyond its keys", STEP),
        ("float32 to a 16-bit kernel", 'or config.compute_dtype == "float32":', "or False:", "the kernel refuses",
         ATTENTION + " -k choose", FP32),
        ("wide heads", "width > 256 or width % 8", "width > 512", "the kernel refuses", ATTENTION),
        ("soft-cap", "if has_softcap or width", "if width", "the kernel has none", ATTENTION),
        ("shared prompts to FlashAttention", " and width <= 256 and not config.share_prompt", " and width <= 256",
         "the package takes no keys of others", ATTENTION),
        ("wide heads to FlashAttention", "_available() and width <= 256 and", "_available() and",
         "the package refuses", ATTENTION),
        ("lengths read from the GPU", 'int(layout["max_length_q"])', 'int(layout["cu_seq_lens_q"].diff().max())',
         "the host waits in every layer", STEP, READS),
    ),
    *of(
        "common/batch.py",
        ("offsets of 64 bits", "(1, 0)).int()", "(1, 0))", "the kernel refuses", STEP),
        ("copy of a batch to the host not waited for", "non_blocking=not to_host", "non_blocking=True",
         "the host reads what was in its memory", REPORTS),
        ("lengths asked of the GPU",
         '            moved.keep("host_lengths", self.host_lengths, moved.cu_seqlens)\n', "",
         "the host waits at every micro-batch", STEP, READS),
    ),
    *of(
        "common/metrics.py",
        ("seconds without kernels", "            torch.cuda.synchronize()", "            pass",
         "times of phases are those of launches", REPORTS),
        ("means with a mask", "torch.where(mask, values, other)", "values[mask]", "the host waits", REPORTS, READS),
    ),
    *of(
        "common/tracking/step.py",
        ("memory of now", "torch.cuda.max_memory_allocated()", "torch.cuda.memory_allocated()",
         "perf/max_memory_allocated_gb says too little", REPORTS),
    ),
    *of(
        "common/memory/plan.py",
        ("budget from what is free", "torch.cuda.mem_get_info()[1]", "torch.cuda.mem_get_info()[0]",
         "the budget depends on the moment, and on the rank", PLAN),
        ("the largest GPU decides", "-all_max([-torch", "all_max([torch", "ranks with less memory fail", PLAN),
    ),
    *of(
        "common/checkpoint/manager.py",
        ("device of the thread that writes", ', get_device_module(world.device).set_device, (world.device,))', ")",
         "shards that have not arrived are written", CHECKPOINT + " -k thread"),
        ("a save does not wait for the trainer's stream",
         "            get_device_module(self.world.device).synchronize()\n", "",
         "a checkpoint of moments that are still on their way back from the host", SAVES),
        ("the save before", "            self.wait()\n            tensors = tensors_of(self.parts)\n",
         "            tensors = tensors_of(self.parts)\n", "two saves in one memory", CHECKPOINT + " -k one_before"),
    ),
    *of(
        "common/model/optimizers.py",
        ("AdamW without its kernel", "fused=True", "foreach=True", "copies of all weights in each step",
         OPTIMIZERS),
        ("generator of the host", "torch.Generator(weight.device)", "torch.Generator()", "the kernel refuses",
         OPTIMIZERS),
        ("table of codes on the host", "torch.cat([sizes, torch.ones(1)]).float().to(device)",
         "torch.cat([sizes, torch.ones(1)]).float()", "the kernel refuses", OPTIMIZERS),
        ("a step of whole weights", '"cuda": 2**22', '"cuda": 2**40', "float32 copies of the largest weight",
         OPTIMIZERS),
    ),
    *of(
        "common/optim.py",
        ("gradients stay", "set_to_none=True", "set_to_none=False", "4 bytes a weight while the engine samples",
         OPTIM, MEMORY),
    ),
    *of(
        "common/model/sharding.py",
        ("memory of experts' gradients", "            grad.record_stream(torch.cuda.current_stream())\n",
         "            pass\n", "a layer's gradients are overwritten by those of the next one",
         "tests/cuda/test_many_ranks.py -k experts"),
        ("shards on the host", "to_empty(device=world.device)", 'to_empty(device="cpu")', "it trains on the CPU", STEP),
        ("blocks stay whole", '"reshard_after_forward": num_shards > 1', '"reshard_after_forward": False',
         "out of memory", STEP, MEMORY),
    ),
    *of(
        "tests/cuda/fake_cuda.py",
        ("the stand-in: attention", "(_check_varlen_attention, ", "(", "accepts what kernels refuse", STEP),
        ("the stand-in: products", "_check_matrix_products, _check_fp8", "_check_fp8", "the same", STEP),
        ("the stand-in: order", "        self.follow(func, args, kwargs, out)\n", "", "accepts races", RULES),
        ("the stand-in: waits", "        ORDER.wait((stream or _current_stream()).stream_id, self.clock)\n",
         "        pass\n", "refuses what is right", STEP),
    ),
]


def copy_to(folder: Path) -> None:
    """What git has here or would take, and links to what else the tests need."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for beside in BESIDE:
        for path in [ROOT / beside] if not (folder / beside).exists() else (ROOT / beside).iterdir():
            target = folder / path.relative_to(ROOT)
            if path.exists() and not target.exists():
                target.symlink_to(path.resolve())


def import_what_does_not_change(needs_vllm: bool) -> None:
    """The imports of most tests, once for all: what runs them is a fork of this process."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("pytest", "torch", "transformers.models.llama.modeling_llama", "torch.distributed.checkpoint",
                 "pyarrow", *["vllm.entrypoints.llm"] * needs_vllm):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


def run_worker(launch: Callable, *command: str | Path, **options: Any) -> Any:
    """In place of conftest's `launch`: a worker of tests/cuda runs in a fork, which has done its imports."""
    path = Path(*command[1].split(".")).with_suffix(".py") if command[0] == "-m" else Path(command[0])
    if path.parent != Path("tests/cuda"):
        return launch(*command, **options)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w")                                  # pytest's holds what is written
        sys.argv = [str(path), *map(str, command[2 if command[0] == "-m" else 1:])]
        status = 1
        try:
            runpy.run_path(str(path), run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"{path} ended with {code}"
    return SimpleNamespace(stdout=said)


def run_pytest(folder: Path, arguments: list[str], out: Path, limit_s: int) -> int:
    """The exit status, of a fork in the folder."""
    child = os.fork()
    if not child:
        signal.alarm(limit_s)
        with out.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "common")]:
            del sys.modules[name]
        status = 3
        with contextlib.suppress(BaseException):
            conftest = importlib.import_module("tests.conftest")
            conftest.launch = partial(run_worker, conftest.launch)
            status = int(importlib.import_module("pytest").main(arguments))
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def caught_by(folder: Path, tests: tuple[str, ...], limit_s: int) -> str:
    """The first test that fails; "nobody"."""
    for arguments in tests:
        words = shlex.split(arguments)
        for name in ("CUDA_JOBS", "CUDA_PARTS"):
            os.environ.pop(name, None)
            if words[0].startswith(f"{name}="):
                os.environ[name] = words.pop(0).partition("=")[2]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-o", "addopts=", "-m", "not slow"]
        code = run_pytest(folder, [*words, *options], folder.parent / "said", limit_s)
        said = (folder.parent / "said").read_text()
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, flags=re.MULTILINE)
        if found:
            return found[1]
        if code < 0:                                                    # of reading memory that was freed, for example
            return f"{words[0]}: {'hangs' if code == -signal.SIGALRM else signal.Signals(-code).name}"
        if code:
            raise RuntimeError(f"{arguments}: pytest ended with {code}: {said[-3000:]}")
    return "nobody"


def try_all(breaks: list[Break], folder: Path, done: Path, limit_s: int) -> None:
    """One after the other, in a copy in `folder`. Each adds a line to `done`."""
    copy = folder / "copy"
    copy.mkdir(parents=True)
    copy_to(copy)
    for one in breaks:
        path, start = copy / one.file, time.perf_counter()
        source = path.read_text()
        path.write_text(source.replace(one.line, one.broken))
        caught = caught_by(copy, one.tests, limit_s)
        path.write_text(source)
        with done.open("a") as file:
            file.write(json.dumps({"name": one.name, "caught": caught, "seconds": time.perf_counter() - start}) + "\n")
        print(f"{one.name}: {caught}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--done", type=Path, help="a file that gets a line for each, and whose lines are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="breaks that are tried at the same time")
    parser.add_argument("--limit-s", type=int, default=900, help="seconds of tests, after which they hang")
    options = parser.parse_args()
    chosen = [x for x in BREAKS if not options.names or any(name in x.name for name in options.names)]
    known = {}
    if options.done and options.done.is_file():
        known = {line["name"]: line for line in map(json.loads, options.done.read_text().splitlines())}
    for one in chosen:                                                  # before anything runs
        if (ROOT / one.file).read_text().count(one.line) == 0:
            raise ValueError(f"{one.name}: {one.file} has no {one.line!r}: the line is another one")
    import_what_does_not_change(any("tests/engine" in test for one in chosen for test in one.tests))
    left = [one for one in chosen if one.name not in known]
    with tempfile.TemporaryDirectory() as name:
        done = options.done or Path(name) / "done.jsonl"
        children = []
        for job in range(options.jobs):
            children.append(os.fork())
            if not children[-1]:
                status = 1
                try:
                    try_all(left[job :: options.jobs], Path(name) / str(job), done, options.limit_s)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
        codes = [os.waitpid(child, 0)[1] for child in children]
        known = {line["name"]: line for line in map(json.loads, done.read_text().splitlines())}
    print("| break | file | what it would do | caught by |\n| --- | --- | --- | --- |")
    for one in chosen:
        caught = known.get(one.name, {"caught": "not run"})["caught"]
        print(f"| {one.name} | `{one.file}` | {one.hurts} | {caught} |")
    if any(codes):
        sys.exit("a job ended with an error")
    missed = [one.name for one in chosen if known[one.name]["caught"] == "nobody"]
    print(f"\n{len(chosen)} breaks, {len(chosen) - len(missed)} caught; not: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
