"""What this project wrote, and so may replace or remove. All else in a folder is the user's, and stays.

A run folder has `.lock`, which is written first. A Hugging Face folder has plainrl.json, which names every file in it
with its size and CRC-32. A checkpoint has its manifest (files.py).
"""

import os
import re
from pathlib import Path
from typing import Any

from common.checkpoint.files import FILES as FILES_FORM
from common.checkpoint.files import (
    MANIFEST,
    crc32,
    has_form,
    is_folder,
    read_checkpoint,
    read_manifest,
    read_regular,
    remove,
)
from common.flags.secrets import flags_of

MARK = "plainrl.json"
LOCK = ".lock"
FINISHED = "finished"
HOLDER = re.compile(rb"(process \d+ on .*\n)?")
"""What `.lock` says: which process has the run folder."""
FILES = ("config.json", "metrics.jsonl", "best.json", "now.json", "skipped_train.jsonl", "skipped_val.jsonl")
"""Files of a run folder that a start replaces, shortens or removes."""
OF_A_RUN = re.compile("|".join(map(re.escape, FILES)) + rf"|{FINISHED}|rollouts|tensorboard|start_\d+")
OF_A_CHECKPOINT = re.compile(rf"{re.escape(MANIFEST)}|__\d+_(\d+\.safetensors|part_\d+)")


def check_replaceable(out: Path, reads_all: bool = True) -> None:
    """Raises ValueError if something is at `out`, or at the hidden names beside it, that is not as this project wrote
    it. `reads_all`: compare contents too, not only names and sizes."""
    for beside in hidden(out):
        if not os.path.lexists(beside):
            continue
        if not is_marked(beside):
            raise ValueError(f"{beside} is in the way, and has no {MARK}: move it away, or delete it if an earlier "
                             f"version of this project left it there")
    kind = ""
    if out.is_symlink():
        kind = "symbolic link"
    elif out.exists() and not out.is_dir():
        kind = "file"
    if kind:
        raise ValueError(f"{out} is a {kind}, which would be replaced: move it away, or name another folder")
    wrong = not_as_written(out, reads_all)
    if wrong:
        raise ValueError(f"{out} would be replaced, and {wrong}: move it away, or name another folder")


def hidden(out: Path) -> list[Path]:
    """Where a folder is written before it gets its name, and where the one that it replaces goes."""
    partial = out.with_name(f".{out.name}.partial")
    old = out.with_name(f".{out.name}.old")
    return [partial, old]


def is_marked(folder: Path) -> bool:
    """Whether a hidden folder is one that an export left, perhaps while it made it."""
    if not is_folder(folder):
        return False
    if (folder / MARK).is_file():
        return True
    return not any(folder.iterdir())


def not_as_written(folder: Path, reads_all: bool = True) -> str:
    """What in a Hugging Face folder is not as this project wrote it, in words; "" also for one that is empty or not
    there."""
    present = all_but_folders(folder)
    if not present:
        return ""
    files = read_manifest(folder, MARK).get("files")
    if not has_form(files, FILES_FORM):
        first = present[0].relative_to(folder)
        return f"has no {MARK}, in which this version names the files that it wrote ({first} is there)"
    for path in present:
        name = str(path.relative_to(folder))
        if name == MARK:
            continue
        if name not in files or not path.is_file() or path.is_symlink():
            return f"has {name}, which was not written with it"
        if path.stat().st_size != files[name]["size"]:
            return f"its {name} was changed since it was written"
        if not reads_all:
            continue
        if crc32(path) != files[name]["crc32"]:
            return f"its {name} was changed since it was written"
    return ""


def check_run_folder(args: Any) -> None:
    """Raises ValueError if this run would replace what it did not write, or a model that it reads. `args`: the flags of
    a script. Call it before anything is written."""
    run_dir = Path(args.run_dir)
    model = run_dir / "model"
    for name in (LOCK, *FILES):
        if (run_dir / name).is_symlink():
            raise ValueError(f"--run-dir {run_dir}: {name} is a symbolic link, whose target would be overwritten; no "
                             f"run makes one: choose another --run-dir")
    if (run_dir / LOCK).exists():
        if not HOLDER.fullmatch(read_regular(run_dir / LOCK, 10_000)):
            raise ValueError(f"--run-dir {run_dir}: {LOCK} is not of a run: choose another --run-dir")
    elif not has_checkpoints(run_dir):          # one that was copied without its hidden files has
        for path in sorted(run_dir.glob("*")):
            if OF_A_RUN.fullmatch(path.name):
                raise ValueError(f"--run-dir {run_dir} has {path.name}, which a run would overwrite, and no {LOCK}, "
                                 f"which every run writes first: choose another --run-dir; if a run made it, `touch "
                                 f"{run_dir / LOCK}`")
    if args.save.hf == "never":
        return
    for flag, value in flags_of(args).items():
        for path in paths_in(value):
            if os.path.realpath(model) in (str(path), *map(str, path.parents)):
                raise ValueError(f"{flag} {value} is in {model}, which this run replaces with its own model: choose "
                                 f"another --run-dir, or set --save.hf never")
    check_replaceable(model, reads_all=False)


def has_checkpoints(run_dir: Path) -> bool:
    manifests = run_dir.glob(f"checkpoints/step_*/{MANIFEST}")
    return any(read_checkpoint(path.parent) for path in manifests)


def paths_in(value: Any) -> list[Path]:
    """What the texts of a flag may name, without links: PATH, or NAME=PATH."""
    entries = [value]
    if isinstance(value, list):
        entries = value
    found = []
    for text in entries:
        if not isinstance(text, str):
            continue
        for name in {text, text.rpartition("=")[2]}:
            if name and "\0" not in name:
                found.append(Path(os.path.realpath(name)))
    return found


def all_but_folders(folder: Path) -> list[Path]:
    """Files, and links of any kind, in a folder and below it, sorted."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not is_folder(path):
            found.append(path)
    return found


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, except files in it that no run writes: they get a folder beside it."""
    if not is_folder(folder):                                   # of one that was moved elsewhere, the link
        remove(folder)
        return
    own = read_checkpoint(folder).get("files", {})
    others: dict[Path, str] = {}
    for path in all_but_folders(folder):
        name = str(path.relative_to(folder))
        if name in own:
            continue
        if OF_A_CHECKPOINT.fullmatch(name):
            continue
        if not own and name.startswith("hf/"):                  # a kill may have removed the manifest already
            continue
        others[path] = name
    step = "".join(filter(str.isdigit, folder.name))
    kept = folder.with_name(f"other_files_{step}")
    for path, name in others.items():
        if (kept / name).exists():
            print(f"{folder} is not removed: {name} in it is of no run, and {kept} has one already", flush=True)
            return
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        path.rename(kept / name)
        print(f"{name}, which no run wrote, was in a checkpoint that is removed: it is in {kept} now", flush=True)
    remove(folder)
