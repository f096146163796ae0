"""How the teachers of distill.py are named, and the flags of those behind a server, --served.*"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit


@dataclass
class ServedConfig:
    """How teachers behind a server are asked."""

    cache: str = ""
    """Folder with the answers of the server, on a disk that all ranks see. A sequence that is in it is not asked again.
    Default: teacher/ in --run-dir."""
    auth_env: str = ""
    """Name of the environment variable that holds the key of the server, sent as a bearer token. Default: no key."""
    concurrency: int = 16
    """Most requests that a rank has in flight, of one sequence each; the server batches them."""
    timeout_s: float = 120.0
    """Seconds that one request may take."""
    wait_s: float = 600.0
    """Seconds for which a request is repeated while the server is gone, busy, or has no whole answer."""


class Address(NamedTuple):
    """Where a teacher is served."""

    url: str  # of the interface, http://host:port/v1
    model: str  # its name at the server; "": the only one
    revision: str  # of the user's own counting, "": none


def teacher_paths(texts: Sequence[str]) -> dict[str, str]:
    """Of distill.py's --teacher: data_source ("": all) -> path. Raises ValueError."""
    paths = {}
    for text in texts:
        source, _, path = text.rpartition("=")
        paths[source] = path
    if not paths or len(paths) < len(texts) or ("" in paths and len(paths) > 1):
        raise ValueError(f"--teacher {' '.join(texts)} must be one model, or several DATA_SOURCE=PATH, one for each "
                         f"data_source")
    return paths


def is_served(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def read_address(path: str) -> Address:
    """`http://host:port/v1`, or `http://host:port/v1#MODEL`, or `...#MODEL@REVISION`. Raises ValueError."""
    parts = urlsplit(path)
    if "@" in parts.netloc or parts.query:
        raise ValueError(f"--teacher {parts.scheme}://{parts.hostname}: an address has no password and no ? in it: "
                         f"name the variable that holds the key with --served.auth-env")
    try:
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        has_host = False
    if not has_host:
        raise ValueError(f"--teacher {path} must be http://host:port/v1, or http://host:port/v1#MODEL@REVISION")
    model, _, revision = parts.fragment.partition("@")
    return Address(parts._replace(fragment="").geturl().rstrip("/"), model, revision)


def check_served(paths: Iterable[str], args: Any) -> None:
    """Raises ValueError for flags of distill.py that cannot work with served teachers, or without."""
    config = args.served
    temperature = args.rollout.temperature
    served = [path for path in paths if is_served(path)]
    if not served:
        if config != ServedConfig():
            raise ValueError("--served.* does nothing without a --teacher http://host:port/v1: leave it out")
        return
    if len(served) < len([*paths]):
        raise ValueError(f"--teacher {' '.join(paths)} must be all behind servers or none: the loss of a teacher "
                         f"behind a server has its k best words and one class for the rest")
    for path in served:
        read_address(path)
    if args.top_k < 1 or args.top_k_of != "teacher":
        raise ValueError(f"--top-k {args.top_k} --top-k-of {args.top_k_of}: a teacher behind a server tells "
                         f"its k best words, so --top-k must be at least 1 (at most the server's --max-logprobs), of "
                         f"the teacher")
    if temperature != 1:
        raise ValueError(f"--rollout.temperature {temperature:g} must be 1 with a teacher behind a server, whose "
                         f"log-probs of the k best words are those of temperature 1")
    if args.context:
        raise ValueError(f"--context {args.context} does not go with a teacher behind a server: name a teacher of this "
                         f"process")
    if args.policy.sequence_parallel > 1:
        raise ValueError(f"--policy.sequence-parallel {args.policy.sequence_parallel} must be 1 with a teacher behind "
                         f"a server")
    if config.concurrency < 1 or config.timeout_s <= 0 or config.wait_s < 0:
        raise ValueError(f"--served.concurrency {config.concurrency} must be at least 1, --served.timeout-s "
                         f"{config.timeout_s:g} above 0 and --served.wait-s {config.wait_s:g} at least 0")
    if config.auth_env and not os.environ.get(config.auth_env):
        raise ValueError(f"--served.auth-env {config.auth_env}: this environment variable is not set; set it "
                         f"where the trainer starts")
