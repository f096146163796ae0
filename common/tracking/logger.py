"""What rank 0 records of a run: metrics (console, metrics.jsonl, wandb, TensorBoard, Trackio), flags, its starts."""

import dataclasses
import itertools
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.checkpoint.files import naming, sync
from common.checkpoint.run_folder import check_holder
from common.flags.record import LogConfig
from common.flags.secrets import redacted
from common.model.policy import PackedModel
from common.parallel.ranks import World
from common.tracking.gradient_terms import GradientTerms
from common.tracking.health import HealthCheck
from common.tracking.noise_scale import NoiseScale
from common.tracking.now import Now

ROOT = Path(__file__).resolve().parent.parent.parent
OF_STEP = re.compile(r"(?:step|val)_(\d{6,})\.parquet")
"""Files of responses that a run writes."""


class Tracker:
    """Only rank 0 writes. `run_dir/metrics.jsonl` has one line a step, `config.json` the flags."""

    def __init__(self, config: LogConfig, run_dir: str, args: Any, world: World, state: dict[str, Any]):
        """`state`: the result of `state_dict` if the run is resumed, else {}. Lines written after that state are
        dropped, so no step appears twice."""
        self.is_main = world.is_main
        self.run_dir = Path(run_dir)
        self.wandb = None
        self.wandb_id = state.get("wandb_id")
        self.tensorboard = None
        self.trackio = None
        self.trackio_id = state.get("trackio_id")
        self.jsonl = self.run_dir / "metrics.jsonl"
        self.health = HealthCheck()
        self.now = Now(self.run_dir, world.is_main)
        self.noise = NoiseScale(state.get("noise", {}))
        self.terms = GradientTerms(config)
        if not self.is_main:
            return
        flags = redacted(dataclasses.asdict(args))
        record_start(self.run_dir, flags, world.size)
        (self.run_dir / "config.json").write_text(json.dumps(flags, indent=2, default=str) + "\n")
        self._drop_lines(state.get("size", 0))
        for file in sorted((self.run_dir / "rollouts").glob("*_*.parquet")):
            name = OF_STEP.fullmatch(file.name)                             # others are the user's
            if name and int(name[1]) > state.get("step", -1):
                file.unlink()
        if "wandb" in config.to:
            import wandb

            self.wandb = wandb.init(project=config.wandb_project, name=self.run_dir.name, dir=str(self.run_dir),
                                    config=flags, id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id
        if "tensorboard" in config.to:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.run_dir / "tensorboard"
            purge_step = None
            if state:                                               # TensorBoard drops this step and later ones
                purge_step = state["step"] + 1
            else:
                for file in folder.glob("events.out.tfevents.*"):           # other files are the user's
                    file.unlink()
            self.tensorboard = SummaryWriter(str(folder), purge_step=purge_step)
        if "trackio" in config.to:
            self.trackio = self._start_trackio(config.wandb_project, flags)
            self.trackio_id = self.trackio.id

    def watch(self, policy: PackedModel, optimizer: Any) -> None:
        """Measure the gradient of each update of this model."""
        self.noise.watch(policy, optimizer)
        self.terms.watch(policy)

    def log(self, step: int, metrics: dict[str, float], line: str) -> None:
        """`line` is the step's line on the console. Raises ValueError if another run has taken the folder."""
        if not self.is_main:
            return
        check_holder(self.run_dir)
        print(line, *self.health.look(step, metrics), sep="\n", flush=True)
        with naming(self.jsonl):
            with self.jsonl.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
            sync(self.jsonl)                                                # before a checkpoint knows this step
        self.now.logged(metrics)
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()                                        # a kill loses no step
        if self.trackio is not None:
            self.trackio.log(metrics, step=step)

    def _start_trackio(self, project: str, flags: dict[str, Any]) -> Any:
        """A new run of Trackio with all kept lines of metrics.jsonl, in place of that of the resumed start. Trackio can
        neither drop steps later than a checkpoint nor be trusted to have those just before a kill. It finds runs by
        name, which another folder may have too."""
        import trackio

        earlier = self.trackio_id
        run = trackio.init(project=project, name=self.run_dir.name, config=flags, embed=False, auto_log_gpu=False,
                           auto_log_cpu=False)
        for row in map(json.loads, self.jsonl.read_bytes().splitlines()):
            run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])
        if earlier:
            for other in trackio.Api().runs(project):                       # those of a server stay there
                if other.id == earlier:
                    other.delete()
        return run

    def _drop_lines(self, known: int) -> None:
        """Keep the first `known` bytes of metrics.jsonl, those that the checkpoint knows, without damaged lines."""
        self.jsonl.touch()
        content = self.jsonl.read_bytes()
        lines = [line for line in content[:known].splitlines(True) if is_row(line)]
        size = sum(map(len, lines))
        if size < known:
            print(f"{self.jsonl} has lost {known - size} bytes to damage: the steps of these lines are gone from it")
        elif size < len(content):
            print(f"{self.jsonl}: its last {len(content) - size} bytes, later than the checkpoint, are dropped")
        with self.jsonl.open("r+b") as file:                                # whose kept lines are never gone
            file.writelines(lines)
            file.truncate()
        for row in map(json.loads, lines):                                  # entropy falls from that of the first step
            self.health.look(row["step"], row)

    @contextmanager
    def progress(self, phase: str, total: int) -> Iterator[Callable[[], None]]:
        """`with tracker.progress("rollout", 64) as advance:`, and `advance()` whenever one of them is done: a bar on a
        terminal, elsewhere a line every 30 s."""
        as_lines = {"delay": 30, "mininterval": 30, "bar_format": "  {desc} {n}/{total}, {elapsed}\n"}
        options = {} if sys.stdout.isatty() else as_lines
        with tqdm(desc=phase, total=total, leave=False, file=sys.stdout, disable=not self.is_main, **options) as bar:
            done = itertools.count(1)

            def advance() -> None:
                bar.update()
                self.now.progress(next(done), total)

            yield advance

    def state_dict(self, step: int) -> dict[str, Any]:
        """The state that a resumed run needs after `step`, which has been logged."""
        size = self.jsonl.stat().st_size if self.is_main else 0
        return {"step": step, "wandb_id": self.wandb_id, "trackio_id": self.trackio_id, "size": size,
                "noise": self.noise.state.copy()}

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.trackio is not None:
            self.trackio.finish()


def is_row(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is whole and readable."""
    try:
        return line.endswith(b"\n") and "step" in json.loads(line)
    except (ValueError, TypeError):
        return False


def record_start(run_dir: Path, flags: dict[str, Any], num_ranks: int) -> None:
    """Write RUN_DIR/start_N, N counts from 1: the script, the command, the commit and what differs from it. `flags`:
    without secrets. One rank calls it."""
    last = 0
    for earlier in run_dir.glob("start_*"):
        number = earlier.name.removeprefix("start_")
        if number.isdecimal():
            last = max(last, int(number))
    folder = run_dir / f"start_{last + 1}"
    folder.mkdir(parents=True)
    script = Path(sys.argv[0])
    if script.is_file():
        (folder / script.name).write_text(redacted(script.read_text()))
    (folder / "changes.diff").write_text(redacted(_git("diff HEAD")))
    start = {
        "command": redacted(sys.argv),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "ranks": num_ranks,
        "commit": _git("rev-parse HEAD").strip(),
        "versions": installed_versions(),
        "flags": flags,
    }
    (folder / "start.json").write_text(json.dumps(start, indent=2, default=str) + "\n")


def installed_versions() -> dict[str, str]:
    """Package -> version, by the names of folders: to read what lies in them takes a hundred times as long."""
    versions: dict[str, str] = {}
    for folder in reversed(sys.path):                                       # the first that has a package wins
        for path in Path(folder).glob("*.dist-info"):
            package, version = path.stem.split("-", 1)
            versions[package] = version
    return versions


def _git(arguments: str) -> str:
    """Git's commit and changes of this repository; empty without git or a repository."""
    return subprocess.run(f"git {arguments}", shell=True, cwd=ROOT, capture_output=True, text=True).stdout
