"""Checkpoints of a run: show them, or write one's policy as a Hugging Face folder.

    python -m tools.checkpoints list RUN
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before
"""

from pathlib import Path

import tyro
from tyro.conf import Positional

from common.checkpoint.export import dtype_of, replace_hf, stored_weights
from common.checkpoint.files import check_files, find, incomplete, read_manifest
from common.tracking.console import exit_with_error


def export_checkpoint(source: Positional[str], out: Positional[Path]) -> None:
    """Write a policy as a Hugging Face folder. SOURCE: a checkpoint, or a run folder (its newest checkpoint)."""
    folder = find(source)
    if damage := check_files(folder):
        raise ValueError(f"{folder} is damaged: {'; '.join(damage)}")
    files = {}
    for path in [folder / "hf", *(folder / "hf").rglob("*")]:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, which no run writes: its target would be copied to {out}")
        if path.is_file() and not path.name.startswith("model"):
            files[str(path.relative_to(folder / "hf"))] = path.read_bytes()
    replace_hf(out, stored_weights(folder, dtype_of(files)), files)
    print(f"{folder} -> {out}")


def list_checkpoints(run: Positional[str]) -> None:
    """Show the checkpoints of a run folder, and read them all to find damage."""
    for folder in sorted((Path(run).resolve() / "checkpoints").glob("*step_*")):
        if lacks := incomplete(folder):
            print(f"{folder.name}  incomplete: {lacks}")
            continue
        manifest, damage = read_manifest(folder), check_files(folder)
        gb = sum(entry["size"] for entry in manifest["files"].values()) / 2**30
        print(f"{folder.name}  {gb:.2f} GiB  {manifest['world_size']} rank(s)  score {manifest['score']}  "
              f"{'damaged: ' + '; '.join(damage) if damage else 'complete'}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"export": export_checkpoint, "list": list_checkpoints})
    except ValueError as error:
        exit_with_error(error)
