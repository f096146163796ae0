"""Real servers of vLLM on the CPU, which tests kill, stop, cut off and start again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch

from tests.conftest import ROOT, VOCAB, save_tokenizer

START_S = 240.0
KEY = "PLAINRL_TEST_KEY"
"""Environment variable with the key of servers that are not on loopback."""


def make_model(folder: Path) -> str:
    """A random model whose heads have 32 dimensions, as vLLM's attention for CPUs needs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as free:
        return free.getsockname()[1]


class Process:
    """`tests/engine/vllm_server.py` with its children. `command` and `environment` come on top of what all servers
    have here."""

    def __init__(self, model: str, log: Path):
        self.model, self.log = model, log
        self.process: subprocess.Popen

    def launch(self, url: str, command: list[str], environment: dict[str, str], before: list[str]) -> None:
        """`url`: of a path that answers when the server is there. `before`: a command that runs the other one."""
        self.answers = url
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                    "VLLM_NO_USAGE_STATS": "1"}
        whole = [*before, sys.executable, str(ROOT / "tests/engine/vllm_server.py"), "--model", self.model,
                 "--enforce-eager", *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(whole, stdout=log, stderr=log, env=os.environ | settings | environment,
                                            start_new_session=True)

    def wait(self) -> "Process":
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.answers, timeout=5):
                return self
            time.sleep(0.5)
        raise AssertionError(f"the server did not start\n{self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()


class VLLMServer(Process):
    """`vllm serve` with the flags that training needs, as this repository's engine in one process has them."""

    def __init__(self, model: str, log: Path, dtype: str = "float32", host: str = "127.0.0.1", namespace: str = "",
                 **flags: str):
        """`namespace`: of the network, in which the server runs. `flags`: further ones, or others."""
        super().__init__(model, log)
        self.host, self.namespace = host, namespace
        self.flags = {
            "dtype": dtype, "max-model-len": "1024", "max-num-seqs": "64", "max-num-batched-tokens": "2048",
            "block-size": "32", "logprobs-mode": "processed_logprobs", "load-format": "dummy",
            "worker-extension-cls": "tools.vllm_worker.Extension",
            "weight-transfer-config": '{"backend": "trainer"}',
        } | {name.replace("_", "-"): value for name, value in flags.items()}
        self.new_port()

    def new_port(self) -> None:
        self.port = free_port()
        self.url = f"http://{self.host}:{self.port}"

    def start(self) -> "VLLMServer":
        command = ["--host", self.host, "--port", str(self.port), "--no-enable-chunked-prefill", "--enable-scale-out"]
        for name, value in self.flags.items():
            command += [f"--{name}", value]
        if KEY in os.environ:
            command += ["--api-key", os.environ[KEY]]
        before = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
        self.launch(f"{self.url}/health", command, environment, before)
        return self

    def kill_worker(self) -> None:
        """Only the process that computes: the others find out."""
        listed = subprocess.run(["ps", "-o", "pid=,args=", "-g", str(self.process.pid)], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            pid, _, name = line.strip().partition(" ")
            if "Worker" in name:
                os.kill(int(pid), signal.SIGKILL)
