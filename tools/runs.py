"""What runs left on disk, as tools/report.py shows it: metrics, flags, rollouts."""

import base64
import gzip
import hashlib
import io
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from common.checkpoint.secrets import redacted


def read_metrics(run: str) -> list[dict[str, float]]:
    """One dict per logged step, in order; a last line that is still being written is left out. Raises ValueError if
    `run` has no metrics."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder of a run (--run-dir) that logged to jsonl")
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty: the run has not finished a step")
    return rows


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[name]) for row in rows if name in row]
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
    return flat_flags(redacted(json.loads(file.read_text()))) if file.exists() else {}


def flat_flags(flags: dict[str, Any], prefix: str = "--") -> dict[str, str]:
    """Nested flags as they are typed: {"optim": {"max_lr": 1}} -> {"--optim.max-lr": "1"}."""
    found = {}
    for key, value in flags.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            found |= flat_flags(value, f"{name}.")
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def rollout_files(run: Path) -> list[Path]:
    """Of training steps, and of validations."""
    return [file for kind in ("step", "val") for file in sorted((run / "rollouts").glob(f"{kind}_*.parquet"))]


def read_rollouts(run: Path, max_mb: float) -> tuple[list[dict[str, Any]], str]:
    """Responses, and a note on the steps that were left out. common/rollouts/record.py wrote them."""
    files = rollout_files(run)
    kept = [rollouts_of(file, file.stat().st_mtime_ns) for file in files]
    sizes = [len(to_json(rows)) for rows in kept]
    while len(kept) > 1 and sum(sizes) > max_mb * 1e6:
        kept, sizes = kept[::-2][::-1], sizes[::-2][::-1]   # every second one, counted from the last, which stays
    left_out = len(files) - len(kept)
    note = f"{left_out} of {len(files)} recorded steps left out (--max-mb)" if left_out else ""
    return [row for rows in kept for row in rows], note


@cache                                                      # --serve reads no file twice
def rollouts_of(file: Path, changed: int) -> list[dict[str, Any]]:
    """A file's responses as the page wants them. What they have per token is packed: the page unpacks what it shows."""
    rows, images = [], {}                                   # of a group, the first response has the prompt's images
    for batch in pq.read_table(file).to_batches(max_chunksize=1):
        (row,) = batch.to_pylist()
        of_row = tuple(map(thumbnail, row.pop("images", None) or ()))
        per_token = {name: row.pop(name) for name in list(row) if isinstance(row[name], list)}
        parts = json.loads(row["reward_parts"])
        row = {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}
        row |= {"validation": file.name.startswith("val"), "per_token": packed(per_token) if per_token else None}
        row["reward_parts"] = {key: finite(part) if isinstance(part, float) else part for key, part in parts.items()}
        rows.append(row | {"images": images.setdefault(row["group"], of_row)})
    return rows


def thumbnail(file: bytes) -> str:
    """An image as a JPEG of at most 256 pixels a side, in a data URL."""
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    picture.thumbnail((256, 256))
    picture.save(small, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"


def packed(per_token: dict[str, list]) -> str:
    """Lists by name, numbers with four decimals -> JSON in gzip in base64, a sixth of the JSON's size."""
    for name, values in per_token.items():
        if values and isinstance(values[0], float):
            rounded = np.round(values, 4)
            per_token[name] = [x if math.isfinite(x) else None for x in rounded.tolist()]
    return base64.b64encode(gzip.compress(to_json(per_token).encode(), 6, mtime=0)).decode()
