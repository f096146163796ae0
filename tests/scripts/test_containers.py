"""Dockerfile, .dockerignore and slurm/plainrl.def: what they copy exists and is enough, nobody is root, and the bases
have exact versions."""

import re
import subprocess

import pytest

from tests.conftest import ROOT

DOCKERFILE = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
DEFINITION = (ROOT / "slurm/plainrl.def").read_text()
IGNORE = (ROOT / ".dockerignore").read_text().splitlines()


def steps(text: str) -> list[tuple[str, str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def is_ignored(path: str) -> bool:
    """Docker's rule: the last pattern that matches the path or a folder above it decides; `*` matches no slash."""
    ignored = False
    for line in IGNORE:
        if line and not line.startswith("#"):
            pattern = re.escape(line.lstrip("!").rstrip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(?:/.*)?", path):
                ignored = not line.startswith("!")
    return ignored


def test_each_file_of_the_repository_is_in_the_image_and_nothing_that_git_ignores():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = listed.stdout.splitlines()
    assert "data/gsm8k.py" in tracked and [path for path in tracked if is_ignored(path)] == []
    for path in (".git/config", ".venv/bin/python", ".venv-gpu/lib/x", "models/tiny/config.json", ".venv.lock",
                 "runs/a/metrics.jsonl", "data/gsm8k/train.parquet", "common/__pycache__/run.pyc", "wandb/x"):
        assert is_ignored(path), path


def test_the_packages_are_installed_from_files_that_are_copied_before():
    """tools/setup.sh reads these files; without one of them the build would end in the middle."""
    copied: set[str] = set()
    for word, rest in steps(DOCKERFILE):
        if word == "COPY":
            *sources, _ = [name for name in rest.split() if not name.startswith("--")]
            copied |= {str(path.relative_to(ROOT)) for source in sources if source != "." for path in ROOT.glob(source)}
        elif word == "RUN" and "setup.sh" in rest:
            break
    else:
        pytest.fail("no step installs the packages")
    read = set(re.findall(r"requirements[\w-]*\.txt|tools/\w+\.py", (ROOT / "tools/setup.sh").read_text()))
    assert {"requirements-cpu.txt", "tools/doctor.py"} <= read <= copied and "tools/setup.sh" in copied


def test_an_ordinary_user_builds_and_runs():
    words = [word for word, _ in steps(DOCKERFILE)]
    user = words.index("USER")
    assert steps(DOCKERFILE)[user][1] not in ("0", "root") and words.count("USER") == 1
    assert all(user < i for i, (word, rest) in enumerate(steps(DOCKERFILE)) if word == "RUN" and "setup.sh" in rest)
    copies = [rest for word, rest in steps(DOCKERFILE) if word == "COPY"]
    assert all(rest.startswith("--chown=plainrl:plainrl ") for rest in copies) and len(copies) == 3


def test_the_images_have_one_base_of_an_exact_version():
    (base,) = [rest for word, rest in steps(DOCKERFILE) if word == "FROM"]
    assert re.fullmatch(r"python:3\.11\.\d+-bookworm", base)
    assert re.search(r"^From: (.*)$", DEFINITION, re.MULTILINE)[1] == base


@pytest.mark.parametrize(("chosen", "call", "code"), [("cpu", "", 0), ("gpu", "gpu", 0), ("tpu", None, 2)])
def test_set_chooses_the_packages(chosen, call, code, tmp_path):
    """The step itself, with a stand-in for the script."""
    (step,) = [rest for word, rest in steps(DOCKERFILE) if word == "RUN" and "setup.sh" in rest]
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/setup.sh").write_text('#!/bin/bash\necho "called $*"\n')
    (tmp_path / "tools/setup.sh").chmod(0o755)
    environment = {"SET": chosen, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", step], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, check=False)
    assert done.returncode == code
    assert done.stdout == ("" if call is None else f"called {call}\n")
    assert call is not None or "SET must be cpu or gpu, not tpu" in done.stderr
