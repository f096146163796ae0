"""Breaks lines that only GPUs run, one at a time in a copy of the repository, and says which test notices:
`python -m tests.cuda.breaks [FIRST [LAST]]`. It takes a minute a line."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STEP, SCRIPTS, MEMORY = (f"tests/cuda/test_{name}.py" for name in ("step_on_cuda", "scripts_on_cuda", "memory"))
BREAKS = [                                                              # file, line, what becomes of it, tests
    ("common/kernels.py", "torch.mm(a, b, out_dtype=torch.float32)", "(a @ b).float()", STEP),
    ("common/kernels.py", "torch.mm(a, b, out_dtype=torch.float32)", "torch.mm(a, b.float())", STEP),
    ("common/model/attention.py", "else sliding_window - 1, 0)", "else sliding_window - 1, -1)", STEP),
    ("common/model/attention.py", "if key_rows is None else", "if True else", STEP),
    ("common/batch.py", "(1, 0)).int()", "(1, 0))", STEP),
    ("common/model/sharding.py", "to_empty(device=world.device)", 'to_empty(device="cpu")', STEP),
    ("common/model/attention.py", 'or config.compute_dtype == "float32":', "or False:", SCRIPTS),
    ("common/model/offload.py", "_bytes(storage).copy_(buffer, non_blocking=True)", "pass", SCRIPTS),
    ("common/engine/vllm.py", 'wake_up(tags=["weights"])', 'wake_up(tags=["weights", "kv_cache"])', SCRIPTS),
    ("common/rollout.py", ".to(world.device, share_prompt)", ".to(world.device)", SCRIPTS),
    ("common/batch.py", "vars(self).update(self.known)", "pass", SCRIPTS),
    ("common/metrics.py", "torch.where(mask, values, other)", "values[mask]", SCRIPTS),
    ("common/optim.py", "optimizer.zero_grad(set_to_none=True)", "optimizer.zero_grad(set_to_none=False)", MEMORY),
    ("common/model/sharding.py", "is_divided = num_shards > 1", "is_divided = False", MEMORY),
    ("tests/cuda/fake_cuda.py", "self.next_block, old.block = old.block, None", "pass", STEP),
    ("tests/cuda/fake_cuda.py", '("silu_backward", "mish_backward")', "()", MEMORY),
    *(("tests/cuda/fake_cuda.py", check, replacement, STEP) for check, replacement in (
        ("(_check_varlen_attention, ", "("), ("_check_matrix_products, _check_fp8", "_check_fp8"),
        ("_check_fp8, _check_nccl)", "_check_nccl)"),
    )),
]


def caught_by(folder: Path, tests: str) -> str:
    command = [sys.executable, "-m", "pytest", tests, "-x", "-q", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, flags=re.MULTILINE)
    return found[1] if found else "NOBODY"


def main(first: str = "0", last: str = str(len(BREAKS))) -> None:
    for file, line, broken, tests in BREAKS[int(first) : int(last)]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "copy"
            shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))
            source = (folder / file).read_text()
            number = source[: source.index(line)].count("\n") + 1       # ValueError: the line is another one now
            (folder / file).write_text(source.replace(line, broken))
            print(f"{file}:{number}  {line}  ->  {broken}  caught by {caught_by(folder, tests)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
