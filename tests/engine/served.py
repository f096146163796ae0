"""Real servers that tests start as users do, by tools.serve: `with Served("sglang", model, folder) as served`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

START_S = 300.0
KEY_NAME = "PLAINRL_TEST_SERVER_KEY"
KEY = "open sesame"
SGLANG = ROOT / ".venv-sglang/bin/python"
SGLANG_FLAGS = (
    "--python", str(SGLANG), "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--mem-fraction-static", "0.8", "--max-total-tokens", "8192", "--disable-overlap-schedule", "--disable-radix-cache",
)
"""Of SGLang on a CPU."""
needs_sglang = pytest.mark.skipif(not SGLANG.is_file(), reason="SGLang is not installed: tools/setup.sh sglang")


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.ExitStack() as stack:
            port = first.getsockname()[1]
            try:
                for other in range(port + 1, port + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", other)))
            except OSError:
                continue
            return port


class Served:
    """`flags`: of tools.serve, and further ones of the server."""

    def __init__(self, engine: str, model: str, folder: Path, flags: tuple[str, ...] = (), count: int = 1):
        self.folder = folder
        port = free_ports(count)
        self.urls = [f"http://127.0.0.1:{port + index}" for index in range(count)]
        self.command = [sys.executable, "-m", "tools.serve", "--engine", engine, "--model", model, "--port", str(port),
                        "--servers", str(count), "--logs", str(folder / "logs"), "--max-num-seqs", "64", *flags]
        self.said = folder / "said.txt"

    def __enter__(self) -> "Served":
        self.start()
        self.wait_for("--rollout.engine server")
        return self

    def __exit__(self, *_) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def start(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests/engine/stand_ins/vllm"), "PYTHONSAFEPATH": "",
            "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", KEY_NAME: KEY,
        }
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=out, stderr=out, env=environment)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + START_S
        while text not in self.said.read_text():
            logs = "\n".join(log.read_text()[-3000:] for log in self.folder.glob("logs/*.log"))
            assert self.process.poll() is None and time.monotonic() < end, f"{self.said.read_text()}\n{logs}"
            time.sleep(0.2)

    def pids(self) -> dict[str, list[int]]:
        """The processes of each server, by its address; the server's own process first."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid="], capture_output=True, text=True).stdout
        table = [[*map(int, line.split())] for line in listed.splitlines()]
        groups = sorted(pid for pid, parent, _ in table if parent == self.process.pid)
        return dict(zip(self.urls, [[pid for pid, _, group in table if group == first] for first in groups]))
