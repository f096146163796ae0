"""Shared by the tests: the real model, tiny random ones, and a way to run the scripts as users do."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from common.parallel import ranks
from tests.checkpoint.faulty import Server, python_path, server

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
# --policy.compute-dtype float32 on CPUs without bfloat16 instructions, for the tests that train the real model
FAST_DTYPE = os.environ.get("DTYPE", "").split()
TRAIN, VAL = ROOT / "data/word_problems/train.parquet", ROOT / "data/word_problems/test.parquet"

# Measured, longest first; with `--dist loadfile --no-loadscope-reorder` the workers then end together.
LONGEST_FILES = (
    "checkpoint/test_resume.py", "scripts/test_async.py", "scripts/test_scripts.py", "scripts/test_grpo.py",
    "checkpoint/test_watch.py", "engine/test_engine.py", "cuda/test_scripts_on_cuda.py", "scripts/test_evaluate.py",
    "engine/test_sync.py", "checkpoint/test_faults.py", "forks/test_forks.py", "engine/test_episodes.py",
    "vision/test_episodes.py", "cuda/test_memory.py", "gpu/test_first_hour.py", "cuda/test_memory_plan.py",
    "engine/test_in_flight.py", "tools/test_play.py", "tools/test_audit.py", "scripts/test_agents.py",
    "scripts/test_slurm.py", "model/test_bf16_adamw.py", "parallel/test_layout.py", "scripts/test_rm.py",
    "scripts/test_distill.py",
)

NO_BROWSER = "no Chromium: apt-get install chromium"
VLLM = "vllm.entrypoints.llm"
ON_THIS_MACHINE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # a role, for verifiers
VOCAB = 4096                                                            # of tiny models

# Every 64th token ends a response, so that those of a random model differ in length.
STOPS = ["--rollout.stop-token-ids", *map(str, range(0, VOCAB, 64))]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; the order within a file, and of all others, stays."""
    rank = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What did not run, and why, in one table. Without a browser the report's page is not tested, and that is loud."""
    stats = terminalreporter.stats
    skipped = defaultdict(list)
    for report in stats.get("skipped", []):
        file, _, reason = report.longrepr
        skipped[reason.removeprefix("Skipped: ")].append(Path(file).name)
    if skipped:
        terminalreporter.section(f"skipped: {sum(map(len, skipped.values()))}")
    for reason, files in sorted(skipped.items(), key=lambda item: -len(item[1])):
        terminalreporter.write_line(f"{len(files):4}  {reason}  ({', '.join(sorted(set(files)))})")
    if slow := len(stats.get("deselected", [])):
        terminalreporter.write_line(f"{slow:4}  not selected by -m or -k (make test-all runs the sweeps, "
                                      f"make test ARGS=\"-m slow\" the slow tests)")
    if NO_BROWSER in skipped:
        terminalreporter.write_line(f"THE REPORT'S PAGE WAS NOT TESTED: {NO_BROWSER}", red=True, bold=True)


@pytest.fixture(scope="session")
def smollm() -> str:
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"{MODEL} is missing: run the tests with `make test`, which makes it")
    return str(MODEL)


@pytest.fixture(scope="session")
def small_train(tmp_path_factory) -> str:
    """The first 32 problems: all 2,048 take half a second a run to tokenise."""
    path = tmp_path_factory.mktemp("train") / "train.parquet"
    pq.write_table(pq.read_table(TRAIN).slice(0, 32), path)
    return str(path)


@pytest.fixture(scope="session")
def verifiers_path(tmp_path_factory) -> str:
    """PYTHONPATH with the packages of requirements-verifiers.txt and the tasksets of the tests, where uv can install
    the programs of harnesses."""
    from tests.scripts.test_requirements import installed

    packages = installed("verifiers", tmp_path_factory.mktemp("packages"))
    path = os.pathsep.join([str(packages), str(ROOT / "tests/envs/tasksets")])
    table = {"taskset": {"id": "toy_pair"}} | dict.fromkeys(("writer", "checker"), ON_THIS_MACHINE)
    env = os.environ | {"PYTHONPATH": path, "VERIFIERS_ENV": json.dumps(table)}
    command = [sys.executable, "-c", "import envs.verifiers_env"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if "cannot be installed" in result.stderr:
        pytest.skip(f"no package index has these: {result.stderr.strip()[-200:]}")
    return path


@pytest.fixture(autouse=True)
def no_samplers_left():
    """A test that calls async_grpo.main sets this for its whole process: in later ones, ranks would only sample."""
    before = os.environ.get(ranks.SAMPLERS)
    yield
    assert os.environ.get(ranks.SAMPLERS) == before, f"the test leaves {ranks.SAMPLERS}: monkeypatch.setenv it first"


@pytest.fixture(scope="session")
def world():
    """A group of one for the whole session: vLLM and DeviceMesh keep what they made of it."""
    world = ranks.init()
    yield world
    ranks.shutdown()


def save_tokenizer(folder: Path) -> None:
    """The real tokenizer with its first VOCAB tokens, the merges that make them, and its chat template: of the CPU
    seconds of a tiny run, 49,152 tokens would take a third."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    bpe = content["model"]
    bpe["vocab"] = {token: number for token, number in bpe["vocab"].items() if number < VOCAB}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def make_tiny_llama(folder: Path, hidden_size: int = 32) -> str:
    """A random 2-layer Llama with a small part of the real tokenizer, in float32: a folder like any other model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, smollm) -> str:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def launch(
    *command: str, ranks: int = 0, warm: bool | str = False, env: dict[str, str] | None = None, timeout: float = 600.0,
    check: bool = True,
):
    """`python COMMAND` in the repository, or `torchrun --nproc-per-node ranks COMMAND`; one OpenMP thread a rank.

    `warm`: a script, in a fork a rank of a process that has done its imports, with VLLM those of vLLM too."""
    if warm:
        done = _warm_start(server() if warm is True else server(warm), *map(str, command), ranks=ranks or 1, env=env)
    else:
        python = [sys.executable]
        logs = tempfile.TemporaryDirectory()                            # torchrun leaves the folder that it makes
        if ranks:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            python += ["--log-dir", logs.name]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        environment["PYTHONPATH"] = python_path(ROOT, (env or {}).get("PYTHONPATH", ""))
        environment["PYTHONSAFEPATH"] = "1"                             # or tests/common would hide common/
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "LD_PRELOAD"):
            environment.pop(name, None)
        with logs:
            done = subprocess.run(
                [*python, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=timeout, stdin=subprocess.DEVNULL,
            )
    if check:
        # of several ranks the first one that failed is the cause, and writes first
        errors = done.stderr if len(done.stderr) < 40000 else f"{done.stderr[:20000]}\n...\n{done.stderr[-20000:]}"
        said = f"{done.stdout[-3000:]}\n{errors}"
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{said}"
    return done


def launch_all(folder: Path, jobs: dict[str, list[str]], ranks: int = 1) -> None:
    """Run folder in `folder` -> its command, as ["grpo", *flags]: all in one process a rank, one after the other."""
    folder.mkdir(exist_ok=True)
    listed = [[script, str(folder / name), flags] for name, (script, *flags) in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(listed))
    launch("tests/scripts/variant_worker.py", folder / "jobs.json", ranks=ranks, warm=True)


def _warm_start(
    start: Server, *command: str, ranks: int, env: dict[str, str] | None
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        code = start(out, "none", *command, ranks=ranks, errors=errors, env=env)
        return subprocess.CompletedProcess(command, code, out.read_text(), errors.read_text())
