"""What runs left on disk, as tools/report.py shows it: metrics, flags, rollouts."""

import base64
import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import struct
import time
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from common.checkpoint.files import read_regular
from common.checkpoint.own import FINISHED, LOCK
from common.flags.secrets import redacted
from envs.pictures import open_file
from tools.terminal import visible

MAX_STEPS = 5000
"""Steps of a run in the page's curves."""
MOST_METRICS = 2**31
"""Bytes of the longest metrics.jsonl that is read; a million steps have about that."""
MOST_ROLLOUTS = 2**33
"""Bytes of the largest file of rollouts that is read, without its compression."""
MOST_PIXELS = 2**26
"""Of a picture in it: decoded it takes four bytes for each."""
MAX_NOTES = 5
AT_ONCE = 1_000_000
"""Bytes of a file that are read together, before their compression."""
CLOCK = "clock"
NOW = "now.json"
OF_NOW = {"step": int, "total_steps": int, "done": int, "total": int, "phase": str, "phase_start": float,
          "step_start": float, "step_s": float, "tokens_per_s": float}
"""What the page shows of it."""
NEEDED = {
    pa.types.is_integer: "step index group response_length",
    pa.types.is_floating: "reward advantage",
    pa.types.is_string: "data_source prompt response ground_truth reward_parts finish_reason",
}
"""Columns that the page cannot do without; older files lack others."""


def read_metrics(run: str) -> list[dict[str, float]]:
    """One dict per logged step, in order; a last line that is still being written is left out. Raises ValueError if
    `run` has no metrics."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder of a run (--run-dir) that logged to jsonl")
    if rows := read_rows(path):
        return rows
    raise ValueError(f"{path} is empty: the run has not finished a step")


def has_steps(run: str) -> bool:
    path = Path(run) / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def read_now(run: str) -> dict[str, Any]:
    """What common/tracking/now.py wrote last, with `state`: "running", or "finished", or "stopped" (its process is
    gone); `phase_s`, the seconds of the phase so far; `left_s`, those until the end of the run at the present pace.
    Without what is not known, such as while a line is being written."""
    folder = Path(run)
    try:
        found = json.loads(read_regular(folder / NOW).decode())
        now = {name: found[name] for name, kind in OF_NOW.items() if type(found.get(name)) is kind}
    except (OSError, ValueError, AttributeError, RecursionError):
        now = {}
    now["state"] = "running" if is_held(folder / LOCK) else "finished" if (folder / FINISHED).exists() else "stopped"
    if now["state"] == "running" and "phase_start" in now:
        now["phase_s"] = time.time() - now["phase_start"]
    if now["state"] == "running" and {"step", "total_steps", "step_s", "step_start"} <= now.keys():
        steps = now["total_steps"] - now["step"] + 1
        now["left_s"] = max(steps * now["step_s"] - (time.time() - now["step_start"]), 0.0)
    return all_finite(now)


def is_held(lock: Path) -> bool:
    """Whether a process, of any machine, has locked this file of a run folder."""
    if lock.is_symlink() or not lock.is_file():
        return False
    with lock.open("rb") as file:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)     # struct flock of 64-bit Linux
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    return struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK


def read_rows(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, each an object of numbers with a whole step; a last one without its end is left
    out."""
    rows = []
    for number, line in enumerate(read_regular(path, MOST_METRICS).split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged in line {number}: {error}") from None
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError(f"{path} is damaged in line {number}: it must be an object with a step")
        wrong = [name for name, value in row.items() if not (isinstance(value, float) and name != "step")
                 and not (isinstance(value, int) and abs(value) < 2**63)]
        if wrong:
            raise ValueError(f"{path} is damaged in line {number}: {visible(wrong[0][:100])} is no number")
        rows.append(row)
    return rows


def thinned(rows: list[dict[str, float]]) -> tuple[list[dict[str, float]], str]:
    """At most MAX_STEPS rows and those with a validation, and a note on what is left out. CLOCK has the seconds of all
    steps so far."""
    every = -(-len(rows) // MAX_STEPS)
    kept, seconds = [], 0.0
    for number, row in enumerate(rows, start=1):
        seconds += row.get("timing_s/step", 0.0)
        if (len(rows) - number) % every == 0 or any(name.startswith("val-") for name in row):
            kept.append(row | {CLOCK: seconds})
    note = f"curves show {len(kept):,} of {len(rows):,} steps" if len(kept) < len(rows) else ""
    return kept, note


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged; what is too large to draw is a gap."""
    found = [(row["step"], row[name] if abs(row[name]) < 1e100 else math.nan) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def version(runs: list[str]) -> str:
    """Changes when the page of these runs would."""
    files = [file for run in runs for file in [Path(run) / "metrics.jsonl", *rollout_files(Path(run))]]
    state = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def to_json(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def finite(x: float | None) -> float | None:
    """`x` with six digits, or None, which JSON has, for what it has not: nan and the infinities."""
    return float(f"{x:.6g}") if x is not None and math.isfinite(x) else None


def read_flags(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    try:
        return flat_flags(redacted(json.loads(read_regular(file).decode())))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def flat_flags(flags: dict[str, Any], prefix: str = "--") -> dict[str, str]:
    """Nested flags as they are typed: {"optim": {"max_lr": 1}} -> {"--optim.max-lr": "1"}."""
    found = {}
    for key, value in flags.items():
        name = prefix + key.replace("_", "-").rstrip("-")       # async_, a word of Python's, is --save.async
        if isinstance(value, dict):
            found |= flat_flags(value, f"{name}.")
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def rollout_files(run: Path) -> list[Path]:
    """Of training steps, and of validations."""
    return [file for kind in ("step", "val") for file in sorted((run / "rollouts").glob(f"{kind}_*.parquet"))]


def read_rollouts(run: Path, max_mb: float) -> tuple[list[dict[str, Any]], str]:
    """Responses, and a note on what was left out. common/rollouts/record.py wrote them."""
    files, most = rollout_files(run), max_mb * 1e6
    stats = {file: file.stat() for file in files if file.is_file()}     # others are links to nothing, or folders
    kept = every_second(files, [stats[file].st_size if file in stats else 0 for file in files], 2 * most)
    found = [(file, rollouts_of(file, stats[file].st_mtime_ns if file in stats else 0, most)) for file in kept]
    found = every_second(found, [size for _, (_, _, size, _) in found], most)
    notes = [f"{len(files) - len(found)} of {len(files)} recorded steps left out (--max-mb)"]
    notes = notes if len(files) > len(found) else []
    notes += [f"{file.name}: {total - len(rows):,} of {total:,} responses left out (--max-mb)"
              for file, (rows, total, _, problem) in found if total > len(rows) and not problem]
    notes += [f"{file.name} cannot be read: {problem}" for file, (_, _, _, problem) in found if problem]
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"and {len(notes) - MAX_NOTES:,} further files left out in part or as a whole"]
    return [row for _, (rows, *_) in found for row in rows], "; ".join(notes)


def every_second(items: list, sizes: list[float], most: float) -> list:
    """Every second item, counted from the last, which stays, until the sum of their sizes fits."""
    while len(items) > 1 and sum(sizes) > most:
        items, sizes = items[::-2][::-1], sizes[::-2][::-1]
    return items


@cache                                                      # --watch reads no file twice
def rollouts_of(file: Path, changed: int, most: float) -> tuple[list[dict[str, Any]], int, float, str]:
    """A file's first responses as the page wants them, as many as fit `most` bytes but at least one; how many the file
    has; their bytes; what is wrong with the file. What they have per token is packed: the page unpacks what it
    shows."""
    rows, images, size, total = [], {}, 0, 0                # of a group, the first response has the prompt's images
    try:
        if not file.is_file():
            raise ValueError("it is a folder, a pipe or a device, or a link to nothing")
        with pq.ParquetFile(file) as parquet:
            total, fields = parquet.metadata.num_rows, parquet.schema_arrow
            if len(set(fields.names)) < len(fields.names):
                raise ValueError("two of its columns have the same name")
            for is_kind, names in NEEDED.items():
                for name in names.split():
                    if name not in fields.names or not is_kind(fields.field(name).type):
                        raise ValueError(f"its column {name} is missing, or of another type")
            columns = [field.name for field in fields if is_shown(field)]
            groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
            if (num_bytes := sum(group.total_byte_size for group in groups)) > MOST_ROLLOUTS:
                raise ValueError(f"it has {num_bytes:,} bytes without its compression, more than {MOST_ROLLOUTS:,}")
            at_once = AT_ONCE * total // (1 + num_bytes)
            batches = parquet.iter_batches(batch_size=min(max(at_once, 1), 1000), columns=columns)
            for row in chain.from_iterable(batch.to_pylist() for batch in batches):
                rows.append(row_of(file, row, images))
                size += len(to_json(rows[-1]))
                if size > most:
                    break
    except (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError,
            pa.ArrowException) as error:
        return [], total, 0, visible(str(error))[:200]
    return rows[:-1] if size > most and len(rows) > 1 else rows, total, size, ""


def is_shown(field: pa.Field) -> bool:
    """Whether JSON has the column's type; a fork may record others."""
    kind = field.type.value_type if pa.types.is_list(field.type) else field.type
    kinds = (*NEEDED, pa.types.is_boolean)
    return field.name == "images" or any(is_kind(kind) for is_kind in kinds)


def row_of(file: Path, row: dict[str, Any], images: dict[int, tuple[str, ...]]) -> dict[str, Any]:
    for name in NEEDED[pa.types.is_string].split():
        if row[name] is None:
            raise ValueError(f"its column {name} has a null")
    of_row = tuple(map(thumbnail, row.pop("images", None) or ()))
    per_token = {name: row.pop(name) for name in list(row) if isinstance(row[name], list)}
    row["reward_parts"] = dict(json.loads(row["reward_parts"]))
    row |= {"validation": file.name.startswith("val"), "per_token": packed(per_token) if per_token else None}
    return all_finite(row) | {"images": images.setdefault(row["group"], of_row)}


def all_finite(value: Any) -> Any:
    """With `finite` applied to all floats inside."""
    if isinstance(value, dict):
        return {key: all_finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [all_finite(part) for part in value]
    return finite(value) if isinstance(value, float) else value


def thumbnail(file: bytes) -> str:
    """An image as a JPEG of at most 256 pixels a side, in a data URL. Raises ValueError for a file that is none of the
    formats that training reads, or is damaged or too large."""
    small = io.BytesIO()
    try:
        picture = open_file(file)
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"its picture of {picture.width} x {picture.height} pixels is larger than {MOST_PIXELS:,}")
        picture = picture.convert("RGB")
        picture.thumbnail((256, 256))
        picture.save(small, "JPEG")
    except (OSError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture in it is damaged: {error}") from None
    return f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"


def packed(per_token: dict[str, list]) -> str:
    """Lists by name, numbers with four decimals -> JSON in gzip in base64, a sixth of the JSON's size."""
    for name, values in per_token.items():
        if values and isinstance(values[0], float):
            rounded = np.round(values, 4)
            per_token[name] = [x if math.isfinite(x) else None for x in rounded.tolist()]
    return base64.b64encode(gzip.compress(to_json(per_token).encode(), 6, mtime=0)).decode()
