"""Responses as bytes, as a checkpoint and the bridge from samplers to trainers hold them: eight bytes a token.

The ids of tokens are int32 and their log-probs float32, which is what engines return. Masks and versions change a few
times in a response and are runs in JSON, as everything else is JSON. Nothing that is read can run code. Messages are a
text of JSON in it: a model may write anything, also an object that looks like a stored response.

A checkpoint's state is JSON in its manifest. Bytes in it are of one rank alone, which writes them to files of its own.
"""

import json
import struct
from collections.abc import Iterable
from functools import partial
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np

from envs.runtime.response import Response

NUMBERS = {"tokens": "<i4", "logp": "<f4", "prompt": "<i4"}
"""Fields of a response with a number for each token, in binary."""
RUNS = ("mask", "versions")
"""Fields whose numbers repeat: stored as [number, count] for each run."""
SIZES = struct.Struct("<2Q")
"""Bytes of the JSON and of the numbers after it."""
RESPONSE = "\0response"
"""The only key of a JSON object that stands for a response."""
PART = "\0part"
"""The only key of a JSON object that stands for bytes of each rank, in the file of this number."""


def pack(items: list[Any]) -> bytes:
    """`items` hold what JSON can hold, and responses anywhere. The bytes of several lists, one after another, are those
    of one list. Raises TypeError for what can be neither."""
    numbers = bytearray()

    def store(response: Response) -> dict[str, Any]:
        if not isinstance(response, Response) or response.routing is not None:
            raise TypeError(f"{type(response).__name__} cannot be stored: only JSON and responses without routing can")
        fields = dict(vars(response))
        for name, kind in NUMBERS.items():
            if fields[name] is not None:
                array = np.array(fields[name], kind)
                fields[name] = [len(numbers), len(array)]
                numbers.extend(array.data)
        fields["messages"] = json.dumps(response.messages, ensure_ascii=False)
        for name in RUNS:
            if fields[name] is not None:
                fields[name] = [[value, len([*same])] for value, same in groupby(fields[name])]
        return {RESPONSE: fields}

    text = json.dumps(items, default=store).encode()
    return b"".join([SIZES.pack(len(text), len(numbers)), text, numbers])


def unpack(data: bytes) -> list[Any]:
    """The items of all lists that `pack` made these bytes of."""
    items, rest = [], memoryview(data)
    while rest:
        size, num_bytes = SIZES.unpack_from(rest)
        text, rest = rest[SIZES.size :][:size], rest[SIZES.size + size :]
        numbers, rest = rest[:num_bytes], rest[num_bytes:]
        items += json.loads(bytes(text), object_hook=partial(load, numbers=numbers))
    return items


def load(found: dict[str, Any], numbers: memoryview) -> Any:
    """A JSON object, or the response that it stands for."""
    if found.keys() != {RESPONSE}:
        return found
    fields = found[RESPONSE]
    for name, kind in NUMBERS.items():
        if fields[name] is not None:
            start, count = fields[name]
            fields[name] = np.frombuffer(numbers, kind, count, start).tolist() if count else []
    for name in RUNS:
        if fields[name] is not None:
            fields[name] = [*chain.from_iterable(repeat(value, count) for value, count in fields[name])]
    if isinstance(fields["messages"], str):  # else an older version stored them
        fields["messages"] = json.loads(fields["messages"])
    return Response(**fields)


def split(state: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """A copy of a state without the bytes in it, as JSON; and these bytes. Raises TypeError for what is neither,
    and ValueError for keys that are no text."""
    parts: list[bytes] = []

    def place(part: bytes) -> dict[str, int]:
        if not isinstance(part, bytes):
            raise TypeError(f"{type(part).__name__} cannot be stored: a state holds only JSON and bytes")
        parts.append(part)
        return {PART: len(parts) - 1}

    check_names(state)
    return json.loads(json.dumps(state, default=place)), parts


def check_names(value: Any) -> None:
    """Raises ValueError for a key that is no text: JSON would make it one, and a resumed run would not find it."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"a checkpoint's state has the key {name!r}, which a resumed run would find as a "
                                 f"text: write str(...) where run.script_state is written and read")
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            check_names(inner)


def write_parts(folder: Path, rank: int, parts: list[bytes]) -> None:
    for number, part in enumerate(parts):
        (folder / f"__{rank}_part_{number}").write_bytes(part)


def join(state: dict[str, Any], folder: Path, ranks: Iterable[int]) -> dict[str, Any]:
    """The state that `split` took apart, with what `write_parts` wrote of these ranks, one after another. Raises
    ValueError for a checkpoint that holds responses in its JSON."""

    def read(found: dict[str, Any]) -> Any:
        if {"tokens", "logp"} <= found.keys():
            raise ValueError(f"{folder} holds responses as JSON, which cannot be continued: finish the run with the "
                             f"version that began it, or give another --run-dir and --save.resume none")
        if found.keys() != {PART}:
            return found
        return b"".join((folder / f"__{rank}_part_{found[PART]}").read_bytes() for rank in ranks)

    return json.loads(json.dumps(state), object_hook=read)
