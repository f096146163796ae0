"""Videos in rows: their frames and rate, kept as one file in a form of its own, and what the models get of them.

Frames are read with Pillow and resized to what the model's own processor of videos takes. That processor itself needs
torchvision, and rounds resized pixels otherwise. No frames are left out, and none are read out of a container.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils import cached_file

from envs.pictures import decode, read

MARK = b"frames of a video\n"
"""A file of a video begins with it. A line of JSON follows, with the rate and the sizes of the frames, and the frames.
"""
FPS = 2.0  # frames per second where a row says nothing, as Qwen's own tools and verl take them
SIDE = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}  # of a patch, in pixels


def is_given(entry: Any) -> bool:
    """Whether an entry of a row's pictures is a video: `store.columns_of` wraps those of `videos`."""
    return isinstance(entry, dict) and "video" in entry


def is_video(file: bytes) -> bool:
    return file.startswith(MARK)


def video_of(entry: Any) -> bytes:
    """The file of a video that a row gives as {"video": frames, "fps": rate}, or as frames alone: a list of {bytes,
    path} or of paths. Raises ValueError for other forms, and for frames that cannot be read."""
    given = entry["video"]
    fps = entry.get("fps")
    if isinstance(given, dict):
        fps = given.get("fps")
        given = given.get("video")
    if fps is None:
        fps = FPS
    if not isinstance(given, list) or not given:
        raise ValueError(f"a video is {given!r:.80}; must be a list of its frames, each {{bytes, path}} or a path: "
                         f"files of videos are not read")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1000:
        raise ValueError(f"the fps of a video is {fps!r:.80}; must be a number of frames per second")
    frames = [*map(read, given)]
    about = {
        "fps": float(fps),
        "sizes": [*map(len, frames)],
    }
    told = json.dumps(about).encode()
    return MARK + told + b"\n" + b"".join(frames)


def frames_of(file: bytes) -> tuple[list[bytes], float]:
    """The files of the frames, and their number per second."""
    told, _, content = file.removeprefix(MARK).partition(b"\n")
    about = json.loads(told)
    ends = [*accumulate(about["sizes"], initial=0)]
    frames = [content[start:end] for start, end in pairwise(ends)]
    return frames, about["fps"]


def pictures_of(files: Sequence[bytes]) -> list[bytes]:
    """The files of images, and in place of each video those of its frames."""
    found = []
    for file in files:
        if is_video(file):
            frames, _ = frames_of(file)
            found += frames
        else:
            found.append(file)
    return found


@cache
def settings_of(model: str) -> dict[str, Any]:
    """What the model's folder says of its processor of videos, where transformers looks for it; {}: nothing. Qwen2.5-VL
    was published with one file for images and videos."""
    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        settings = json.loads(Path(found).read_bytes())
        if name == "processor_config.json":
            settings = settings.get("video_processor")
        if settings is not None:
            return settings
    return {}


def size_of(family: str, model: str, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """Height and width to which the frames are resized: multiples of a token's side. The limits are of a frame's pixels
    in Qwen2.5-VL, and in Qwen3-VL of those of all frames."""
    factor = 2 * SIDE[family]
    limits = {"shortest_edge": 128 * factor**2, "longest_edge": 768 * factor**2}
    settings = settings_of(model)
    limits |= settings.get("size") or {}
    least = limits["shortest_edge"]
    most = limits["longest_edge"]
    if family == "qwen2_5_vl":
        least = settings.get("min_pixels") or least                     # of older files
        most = settings.get("max_pixels") or most
        return smart_resize(height, width, factor, least, most)
    scale = max(1, factor / height, factor / width)
    height = int(height * scale)
    width = int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"frames of {height} x {width} pixels: a side may be 200 times the other at most")
    rounded = round(height / factor) * factor, round(width / factor) * factor
    num_counted = round(num_frames / 2) * 2                             # as transformers, which rounds a half to even
    num_pixels = num_counted * rounded[0] * rounded[1]
    if least <= num_pixels <= most:
        return rounded
    limit = least
    cut = math.ceil
    if num_pixels > most:
        limit = most
        cut = math.floor
    scale = math.sqrt(limit / (num_frames * height * width))
    return (
        max(factor, cut(height * scale / factor) * factor),
        max(factor, cut(width * scale / factor) * factor),
    )


def video_inputs(file: bytes, family: str, model: str, processor: Any) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens that the model sees in place of a video's own, and its other inputs, as its processor names them.
    Raises ValueError for frames of several sizes, and for a single one."""
    files, fps = frames_of(file)
    frames = decode(files)
    if len(frames) < 2 or len({frame.size for frame in frames}) > 1:
        raise ValueError("a video must have at least 2 frames, all of one size")
    height, width = size_of(family, model, len(frames), frames[0].height, frames[0].width)
    frames = [frame.resize((width, height), resample=3) for frame in frames]            # bicubic
    if len(frames) % 2:                             # two frames make a patch
        frames.append(frames[-1])
    settings = settings_of(model)
    same = {name: settings[name] for name in ("image_mean", "image_std") if name in settings}
    made = processor.image_processor(images=frames, do_resize=False, return_tensors="pt", **same)
    _, rows, columns = made["image_grid_thw"][0].tolist()
    side = SIDE[family]
    # each image is there twice, as two frames of its own: [frames / 2, 2, patches, colours, 2, pixels]
    patches = made["pixel_values"].view(len(frames) // 2, 2, rows * columns, 3, 2, side * side)
    pixels = patches[:, :, :, :, 0].permute(0, 2, 3, 1, 4).reshape(len(frames) // 2 * rows * columns, -1)
    grid = torch.tensor([[len(frames) // 2, rows, columns]])
    inputs = {
        "pixel_values_videos": pixels,
        "video_grid_thw": grid,
    }
    per_step = rows * columns // 4
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2 / fps])
        text = processor.video_token * (per_step * len(frames) // 2)
    else:
        numbers = [min(n, len(files) - 1) for n in range(len(frames))]      # the last is repeated, its time too
        text = ""
        for first, second in zip(numbers[::2], numbers[1::2]):
            time = (first / fps + second / fps) / 2
            text += f"<{time:.1f} seconds><|vision_start|>{processor.video_token * per_step}<|vision_end|>"
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"], inputs


def check_engine(engine: str, *sets: Any) -> None:
    """Raises ValueError if an engine samples that reads no videos, and rows have some."""
    if engine == "vllm" and any(rows is not None and rows.loaded.num_videos for rows in sets):
        raise ValueError("rows have videos, which vLLM's engine is not given here: its processors of videos need "
                         "torchvision and choose frames themselves; set --rollout.engine hf")
