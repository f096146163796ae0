"""Harbor's task folders for envs/swe.py: python data/harbor_rows.py --tasks FOLDER --out data/harbor

FOLDER has a folder for each task: task.toml, instruction.md, tests/test.sh, and perhaps environment/. A task whose
task.toml names a `docker_image` runs in it, by apptainer. One without a Dockerfile runs in the jail, where /app holds
the files of environment/. A Dockerfile alone is refused: build the image, and name it in task.toml. What a task needs
beyond that (variables, other services, a network) is refused too.

--num-test tasks, the last in the order of their names, are the test data. Rows of the jail hold their files.
"""

import base64
import gzip
import io
import json
import shlex
import tarfile
import tomllib
from pathlib import Path
from typing import Any

from verl_rows import make_row, parser, run, write

REWARD_FILE = "/logs/verifier/reward.txt"
COMMAND = "bash /tests/test.sh"


def packed(folder: Path) -> str:
    """An archive as envs/swe.py takes it; the same files give the same bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            member = tar.gettarinfo(path, str(path.relative_to(folder)))
            member.mtime = member.uid = member.gid = 0
            member.uname = member.gname = ""
            if member.isfile():
                with path.open("rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
    return "base64:" + base64.b64encode(gzip.compress(archive.getvalue(), mtime=0)).decode()


def task_of(folder: Path) -> dict[str, Any]:
    """`extra_info.swe`. Raises ValueError for a task that cannot run."""
    settings = tomllib.loads((folder / "task.toml").read_text())
    environment = settings.get("environment", {})
    verifier = settings.get("verifier", {})
    if not (folder / "tests/test.sh").is_file():
        raise ValueError(f"{folder} has no tests/test.sh")
    for name, section, values in (("environment", environment, ("env", "healthcheck", "mcp_servers")),
                                  ("verifier", verifier, ("env",))):
        if found := [value for value in values if section.get(value)]:
            raise ValueError(f"{folder / 'task.toml'}: [{name}] {', '.join(found)} cannot be given to a task here")
    if (folder / "environment/docker-compose.yaml").exists():
        raise ValueError(f"{folder} has a docker-compose.yaml: other services cannot run beside a task here")
    task = {"tests": packed(folder / "tests"), "tests_folder": "/tests", "command": COMMAND,
            "reward_file": REWARD_FILE, "folder": "/app",
            "tests_timeout_s": float(verifier.get("timeout_sec", 120.0))}
    if image := environment.get("docker_image"):
        workdir = environment.get("workdir") or "/app"
        return task | {"image": image, "folder": workdir, "command": f"cd {shlex.quote(workdir)} && {COMMAND}"}
    if (folder / "environment/Dockerfile").exists():
        raise ValueError(f"{folder} has a Dockerfile and task.toml no docker_image: build the image where docker is, "
                         f"and name it there, [environment] docker_image = \"NAME\"")
    return task | {"repo": packed(folder / "environment")}


def make_harbor_row(folder: Path, split: str, index: int) -> dict:
    instruction = (folder / "instruction.md").read_text().strip()
    return make_row("harbor", instruction, "", "swe", split, index, swe=json.dumps(task_of(folder)), name=folder.name)


def main() -> None:
    args = parser(__doc__, "harbor")
    args.add_argument("--tasks", type=Path, required=True, help="folder of task folders")
    args.add_argument("--num-test", type=int, default=1, help="tasks of test.parquet (1)")
    args = args.parse_args()
    folders = sorted(path.parent for path in args.tasks.glob("*/task.toml"))
    if not 0 < args.num_test < len(folders):
        raise ValueError(f"--num-test {args.num_test} must be at least 1 and below the {len(folders)} tasks of "
                         f"{args.tasks}")
    for split, some in (("train", folders[: -args.num_test]), ("test", folders[-args.num_test :])):
        write([make_harbor_row(folder, split, i) for i, folder in enumerate(some)], args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
