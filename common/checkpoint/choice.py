"""Which checkpoint a run starts from (--save.resume), and whether it fits the run."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Any

from common.checkpoint.files import check_files, checkpoints_in, find, read_manifest
from common.flags.secrets import differences
from common.parallel.ranks import World, all_names, on_main, together

NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Entries of a model's config that may differ between a checkpoint and the run that continues from it."""
MAY_CHANGE = re.compile(
    "--(save|log|offload|policy.(gradient|share|replicas|sequence)|run-dir|model |"
    "reward.(num-workers|concurrency|timeout)|data|train-data|val-data|eval|total-|max-tokens-per-gpu|samplers|"
    "rollout.(drafts|max-num-seqs|tp|gpu-memory|kv-cache|enforce|val-top|max-probe|extra|server))"
)
"""Flags that change where and how fast a run computes, how long it goes on and what it reports, but not its steps."""


def choose(root: Path, how: str, world: World) -> Path | None:
    """The checkpoint to start from, after every file of it was read and compared; None for a new run. `root`: of the
    run's own checkpoints; `how`: --save.resume. Damaged ones that are newer get another name. Raises ValueError if all
    are damaged, because a run that starts anew would drop the metrics of all steps before."""
    damaged: dict[Path, str] = {}                                       # the newest first

    def set_aside_on_main() -> None:
        if world.is_main:
            set_aside(damaged)

    for folder in on_main(world, lambda: candidates(root, how)):
        mine = check_files(folder, world.rank, world.size)
        what = "; ".join(all_names({*mine}))
        if not what:
            together(set_aside_on_main, OSError)
            return folder
        damaged[folder] = what
    if not damaged:
        return None
    damage = []
    for folder, what in damaged.items():
        damage.append(f"{folder} is damaged: {what}")
    other = "--save.resume"
    if folder.parent == root:
        other = "--run-dir, or move its checkpoints away to start anew"
    raise ValueError(f"{'; '.join(damage)}: choose another {other}")


def set_aside(damaged: dict[Path, str]) -> None:
    """Renames these checkpoints, and says what is wrong with each."""
    for folder, what in damaged.items():
        name = f"damaged_{folder.name}"
        num_earlier = len(list(folder.parent.glob(f"{name}*")))
        if num_earlier:
            name += f"_{num_earlier + 1}"
        renamed = folder.rename(folder.with_name(name))
        print(f"{folder} is damaged: {what}. Renamed to {renamed.name}", flush=True)


def first_day(root: Path, how: str) -> str:
    """The day on which the run began that a start goes on with, as YYYY-MM-DD; today for a new run. `root`, `how`: as
    of `choose`. Chat templates may write it, and prompts are the same after midnight."""
    for folder in candidates(root, how):
        manifest = read_manifest(folder)
        if manifest and manifest["state"].get("day"):
            return manifest["state"]["day"]
    return date.today().isoformat()


def candidates(root: Path, how: str) -> list[Path]:
    """The checkpoints to start from, in the order in which to try them."""
    try:
        own = checkpoints_in(root)[::-1]
    except OSError as error:
        raise ValueError(f"--run-dir {root.parent}: its checkpoints cannot be read: {error}") from None
    by_torchrun = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    by_slurm = os.environ.get("SLURM_RESTART_COUNT", "0")
    is_restart = by_torchrun != "0" or by_slurm != "0"
    if how == "auto" or (own and is_restart):
        return own
    if own:
        raise ValueError(f"--run-dir {root.parent} has checkpoints ({own[0].name}), which a later start would "
                         f"continue: with --save.resume {how}, choose another --run-dir or remove them")
    if how == "none":
        return []
    return [find(how)]


def check_fits(folder: Path, manifest: dict[str, Any], now: dict[str, Any], is_own: bool,
               allow_changes: bool) -> list[str]:
    """What differs between a checkpoint and the run, in words. `now`: the run's entries of a manifest;
    `is_own`: the checkpoint is of this run; `allow_changes`: --save.allow-changes. Raises ValueError for
    another model and, unless changes are allowed, for other weights that no checkpoint holds and for this run
    with other flags."""
    wrong = []
    for text in differences(manifest.get("model", {}), now["model"]):
        if text.split()[0] not in NOT_COMPARED:
            wrong.append(text)
    if wrong:
        shown = "; ".join(wrong[:4])
        if len(wrong) > 4:
            shown += " ..."
        raise ValueError(f"{folder} does not fit this run: {shown}: "
                         "choose another --run-dir or --save.resume")
    changed = differences(manifest["flags"], now["flags"])
    algorithm = []
    for text in changed:
        if not MAY_CHANGE.match(text):
            algorithm.append(text)
    if algorithm and is_own and not allow_changes:
        raise ValueError(f"{folder.parent.parent} was trained with other flags: {'; '.join(algorithm)}: give "
                         "the old ones, or another --run-dir, or set --save.allow-changes")
    before = manifest.get("outside", {})
    others = []
    for name, checksum in sorted(now["outside"].items()):
        # a run that starts from another one's checkpoint may have other frozen models; adapters have one base
        is_compared = is_own or name in now["model"]["trained parts"]
        if is_compared and before.get(name, checksum) != checksum:
            others.append(name)
    if others and not allow_changes:
        raise ValueError(f"{folder} does not hold the weights of {', '.join(others)}, and those that are loaded "
                         "now are not those that it was trained with: put them back, give another --run-dir, or "
                         "set --save.allow-changes")
    return changed + [f"the weights of {name}" for name in others]
