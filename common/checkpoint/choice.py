"""Which checkpoint a run starts from (--save.resume)."""

import os
from datetime import date
from pathlib import Path

from common.checkpoint.files import check_files, checkpoints_in, find, read_manifest
from common.parallel.ranks import World, all_names, on_main, together


def choose(root: Path, how: str, world: World) -> Path | None:
    """The checkpoint to start from, after every file of it was read and compared; None for a new run. `root`: of the
    run's own checkpoints; `how`: --save.resume. Damaged ones that are newer get another name. Raises ValueError if all
    are damaged, because a run that starts anew would drop the metrics of all steps before."""
    damaged: dict[Path, str] = {}                                       # the newest first
    for folder in on_main(world, lambda: candidates(root, how)):
        mine = check_files(folder, world.rank, world.size)
        what = "; ".join(all_names({*mine}))
        if not what:
            together(lambda: world.is_main and set_aside(damaged), OSError)
            return folder
        damaged[folder] = what
    if not damaged:
        return None
    all_damage = "; ".join(f"{folder} is damaged: {what}" for folder, what in damaged.items())
    other = "--save.resume"
    if folder.parent == root:
        other = "--run-dir, or move its checkpoints away to start anew"
    raise ValueError(f"{all_damage}: choose another {other}")


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
        day = manifest["state"].get("day") if manifest else None
        if day:
            return day
    return date.today().isoformat()


def candidates(root: Path, how: str) -> list[Path]:
    """The checkpoints to start from, in the order in which to try them."""
    try:
        own = checkpoints_in(root)[::-1]
    except OSError as error:
        raise ValueError(f"--run-dir {root.parent}: its checkpoints cannot be read: {error}") from None
    restarts = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    is_restart = restarts != ["0", "0"]
    if how == "auto" or (own and is_restart):
        return own
    if own:
        raise ValueError(f"--run-dir {root.parent} has checkpoints ({own[0].name}), which a later start would "
                         f"continue: with --save.resume {how}, choose another --run-dir or remove them")
    return [] if how == "none" else [find(how)]
