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
    damaged: dict[Path, str] = {}
    for folder in on_main(world, lambda: candidates(root, how)):
        what = "; ".join(all_names(set(check_files(folder, world.rank, world.size))))
        if not what:
            together(lambda: world.is_main and set_aside(damaged), OSError)
            return folder
        damaged[folder] = what
    if damaged:
        what = "; ".join(f"{folder} is damaged: {what}" for folder, what in damaged.items())
        other = "--run-dir, or move its checkpoints away to start anew" if folder.parent == root else "--save.resume"
        raise ValueError(f"{what}: choose another {other}")
    return None


def set_aside(damaged: dict[Path, str]) -> None:
    """Renames these checkpoints, and says what is wrong with each."""
    for folder, what in damaged.items():
        number = len(list(folder.parent.glob(f"damaged_{folder.name}*")))
        renamed = folder.rename(folder.with_name(f"damaged_{folder.name}{f'_{number + 1}' if number else ''}"))
        print(f"{folder} is damaged: {what}. Renamed to {renamed.name}", flush=True)


def first_day(root: Path, how: str) -> str:
    """The day on which the run began that a start goes on with, as YYYY-MM-DD; today for a new run. `root`, `how`: as
    of `choose`. Chat templates may write it, and prompts are the same after midnight."""
    manifests = map(read_manifest, candidates(root, how))
    days = (manifest["state"].get("day") for manifest in manifests if manifest)
    return next(filter(None, days), date.today().isoformat())


def candidates(root: Path, how: str) -> list[Path]:
    """The checkpoints to start from, in the order in which to try them."""
    try:
        own = checkpoints_in(root)[::-1]
    except OSError as error:
        raise ValueError(f"--run-dir {root.parent}: its checkpoints cannot be read: {error}") from None
    counts = {os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")}
    if how == "auto" or (own and counts != {"0"}):
        return own
    if own:
        raise ValueError(f"--run-dir {root.parent} has checkpoints ({own[0].name}), which a later start would "
                         f"continue: with --save.resume {how}, choose another --run-dir or remove them")
    return [] if how == "none" else [find(how)]
