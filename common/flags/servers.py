"""The flags of engines that are servers, --rollout.servers and --rollout.server-*."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit


@dataclass
class ServerConfig:
    """Servers that sample."""

    servers: tuple[str, ...] = ()
    """Addresses of the servers that sample, http://host:port, of vLLM or SGLang; or a file with one on each line, which
    is read again all the time: servers join a run by a new line. Needs --rollout.engine server."""
    server_weights: str = ""
    """Folder for the weights of each sync, on a disk or in memory that the servers see too. Default: a temporary
    one, if all servers are on this machine. Needs --rollout.engine server."""
    server_transfer: Literal["folder", "gloo", "nccl"] = "folder"
    """How the weights of each sync reach the servers: by files in --rollout.server-weights, or, to vLLM, tensor by
    tensor and not encrypted, from a copy in the host's memory: gloo by TCP, nccl from GPU to GPU. Needs
    --rollout.engine server."""
    server_auth_env: str = ""
    """Name of the environment variable that holds the servers' key, sent as a bearer token. Servers on other machines
    must have one. Needs --rollout.engine server."""
    server_timeout_s: float = 60.0
    """Seconds without an answer after which a server counts as gone; its requests then go to the others. Needs
    --rollout.engine server."""


def check_address(url: str, auth_env: str) -> str:
    """The address of a server without a slash at its end. Raises ValueError, in one line that never has a password."""
    parts = urlsplit(url)
    shown = f"--rollout.servers {parts.scheme}://{parts.hostname}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{shown}: an address has no password, no ? and no # in it: name the variable that holds the "
                         f"key with --rollout.server-auth-env")
    try:
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise ValueError(f"--rollout.servers {url} must be http://host:port, or a file with such lines")
    if not auth_env and not is_loopback(url):
        raise ValueError(f"{shown} is another machine: its server must ask for a key (tools.serve does), which "
                         f"--rollout.server-auth-env NAME sends; without one, anybody there could send it weights")
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_addresses(given: Sequence[str], auth_env: str) -> list[str]:
    """The addresses that --rollout.servers names, and those in the files that it names. Raises ValueError."""
    urls = []
    for text in given:
        if "://" in text:
            urls.append(text)
        else:
            try:
                lines = Path(text).read_text().splitlines()
            except OSError as error:
                raise ValueError(f"--rollout.servers {text}: {error.strerror}; it must be http://host:port, or a file "
                                 f"with such lines") from None
            urls += [line.strip() for line in lines if line.strip()]
    addresses = [check_address(url, auth_env) for url in urls]
    return list(dict.fromkeys(addresses))


def check_servers(config: ServerConfig, engine: str) -> None:
    """Raises ValueError for flags of servers that cannot work."""
    if engine != "server":
        return
    if not config.servers:
        raise ValueError("--rollout.engine server needs --rollout.servers http://host:port ...")
    name = config.server_auth_env
    if name and not os.environ.get(name):
        raise ValueError(f"--rollout.server-auth-env {name}: this environment variable is not set; set it where the "
                         f"trainer starts")
    urls = read_addresses(config.servers, name)
    if not urls:
        raise ValueError(f"--rollout.servers {' '.join(config.servers)} names no server")
    if config.server_timeout_s <= 0:
        raise ValueError(f"--rollout.server-timeout-s {config.server_timeout_s:g} must be above 0")
    by_folder = config.server_transfer == "folder"
    if config.server_weights and not by_folder:
        raise ValueError(f"--rollout.server-weights {config.server_weights} is not read with --rollout.server-transfer "
                         f"{config.server_transfer}: leave it out")
    if by_folder and not config.server_weights and not all(map(is_loopback, urls)):
        raise ValueError("--rollout.server-weights must name a folder that this machine and the servers see, or "
                         "--rollout.server-transfer be gloo or nccl: some servers are on other machines")
