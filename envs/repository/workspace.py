"""Where a repository's commands run: in the project's own jail, or in a container of the image that a row names.

Both run inside.py, and both keep no process between two operations. The jail (rewards/sandbox/jail.py) has no network,
no file of the machine beyond the system's and Python's folders, and bounded time, processes, memory and files. Its
packages are those of the system and of this Python. Apptainer gives a row the packages of an image.
"""

import base64
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rewards.sandbox import sandbox

INSIDE = Path(__file__).with_name("inside.py").read_text()
TEST_RUNNER = Path(__file__).with_name("test_runner.py").read_text()
LIMITS = sandbox.Limits(memory_mb=2048, total_mb=3072, threads=64, files=256, file_mb=256, folder_mb=512,
                        num_files=50_000)
MAX_PACKED = 64 << 20  # bytes of a packed snapshot: with each command it goes in, and where it was changed it comes out
SPARE_S = 20.0  # seconds for all but the command: to start, unpack and pack
EMBEDDED = "base64:"
JAIL_FOLDERS = {"/app": "repo", "/testbed": "repo", "/tests": "tests", "/logs": "logs"}
"""Absolute paths that tasks name, and what they are in the jail's folder."""
UNDONE = "[this used more than the sandbox gives, or ended its own shell: what it did is undone]"


@lru_cache(maxsize=64)
def pack_files(source: str) -> str:
    """The files of a folder or of a tar archive, or those that a row itself holds ("base64:..."), as a packed archive
    in base64. A `.git` is left out: its history may hold the solution. Raises ValueError."""
    if source.startswith(EMBEDDED):
        return source.removeprefix(EMBEDDED)
    path = Path(source)
    if path.is_dir():
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            tar.add(path, ".", filter=without_history)
        packed = archive.getvalue()
    elif path.is_file():
        if not tarfile.is_tarfile(path):
            raise ValueError(f"{path} is no tar archive")
        packed = path.read_bytes()
    else:
        raise ValueError(f"{path} is neither a folder nor a tar archive")
    if len(packed) > MAX_PACKED:
        raise ValueError(f"{path} has {len(packed) >> 20} MB when packed, and may have {MAX_PACKED >> 20}: larger "
                         f"repositories need an image")
    return base64.b64encode(packed).decode()


def without_history(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if ".git" in Path(member.name).parts else member


@dataclass
class Jail:
    """`files`: the repository as the last operation left it, packed."""

    files: str
    isolated: bool = True

    def fresh(self, files: str) -> "Jail":
        return Jail(files, self.isolated)

    def packed(self) -> str:
        return self.files

    def do(self, operation: dict[str, Any], keep: str = "changes") -> dict[str, Any]:
        """What inside.py says. An operation that used up what the jail gives, or that ended inside.py, has `lost`."""
        given = json.dumps({"folder": "repo", "files": self.files, "operation": operation, "keep": keep})
        limits = replace(LIMITS, timeout_s=operation.get("timeout_s", 0.0) + SPARE_S)
        links = {name: f"/box/{inside}" for name, inside in JAIL_FOLDERS.items()}
        result = said(sandbox.run(INSIDE, given, limits, self.isolated, True, links).stdout)
        self.files = result.pop("files", self.files)
        return result

    def close(self) -> None:
        """Nothing is left."""


class Container:
    """A container of an image, by apptainer. What the model changes lies in an overlay of bounded size, a file that is
    removed with the episode."""

    def __init__(self, image: str, folder: str, setup: str = ""):
        """`folder`: of the repository in the image. `setup`: shell commands before each operation, for example to
        activate an environment. Raises ValueError where apptainer is missing."""
        self.program = shutil.which("apptainer") or shutil.which("singularity") or ""
        if not self.program:
            raise ValueError(f"the row names the image {image}, and this machine has no apptainer: install it, or use "
                             f"rows without an image")
        self.image = image if "://" in image or os.path.exists(image) else f"docker://{image}"
        self.folder = folder
        self.setup = setup
        descriptor, self.overlay = tempfile.mkstemp(suffix=".img")
        os.close(descriptor)
        os.unlink(self.overlay)
        size = str(LIMITS.folder_mb)
        self.call(["overlay", "create", "--sparse", "--size", size, self.overlay], "", SPARE_S)

    def fresh(self, files: str) -> "Container":
        return Container(self.image, self.folder, self.setup)

    def packed(self) -> str:
        return self.do({"kind": "command", "command": "true", "timeout_s": SPARE_S}, "always").get("files", "")

    def do(self, operation: dict[str, Any], keep: str = "never") -> dict[str, Any]:
        given = json.dumps({"folder": self.folder, "files": "", "operation": operation, "keep": keep})
        timeout_s = operation.get("timeout_s", 0.0) + SPARE_S
        script = f'{self.setup}\ncd "$(mktemp -d)" && exec python3 -c "$INSIDE"'
        isolation = ["--containall", "--cleanenv", "--no-home", "--net", "--network", "none", "--no-privs",
                     "--memory", f"{LIMITS.total_mb}M", "--pids-limit", str(LIMITS.threads)]
        command = ["exec", *isolation, "--overlay", self.overlay, "--pwd", self.folder, self.image,
                   "timeout", "-k", "1", f"{timeout_s:g}", "bash", "-c", script]
        return said(self.call(command, given, timeout_s + SPARE_S))

    def call(self, arguments: list[str], text: str, timeout_s: float) -> str:
        """Raises RuntimeError for what apptainer itself refuses: it exits with 255 then."""
        environment = os.environ | {"APPTAINERENV_INSIDE": INSIDE, "SINGULARITYENV_INSIDE": INSIDE}
        done = subprocess.run([self.program, *arguments], input=text, capture_output=True, text=True, timeout=timeout_s,
                              errors="replace", env=environment)
        if done.returncode == 255 or (done.returncode and arguments[0] == "overlay"):
            raise RuntimeError(f"{Path(self.program).name} {arguments[0]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.overlay)


def said(output: str) -> dict[str, Any]:
    """The last line is inside.py's. A command that ended it has no answer: then `lost` is there."""
    try:
        result = json.loads(output.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"code": None, "output": UNDONE, "passed": [], "lost": True}
    return result


def is_passed(task: dict[str, Any], result: dict[str, Any]) -> list[bool]:
    """Of each test that must pass, or of each line that must be printed."""
    if task.get("passes"):
        return [name in result["passed"] for name in task["passes"]]
    lines = {line.strip() for line in result["output"].splitlines()}
    return [line.strip() in lines for line in task["expects"]]


def read_reward(text: str) -> float | None:
    """Of Harbor's reward.txt, a number, or reward.json, an object with `reward` or with one number. None for all else,
    which a program under test may have written."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        value = value.get("reward") if "reward" in value or len(value) != 1 else next(iter(value.values()))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
