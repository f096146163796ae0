"""Starts servers that sample for a training run, one on each group of GPUs, with the flags that training needs.

    python -m tools.serve --model Qwen/Qwen2.5-7B-Instruct --gpus 8 --tp 2 --max-length 4096

When all of them answer, it prints the flags that the training run takes. It watches them until it is stopped by SIGINT
or SIGTERM, and then stops them. For another machine: --host 0.0.0.0 --auth-env NAME, with the key in this environment
variable on both sides. Flags that are not known go to the server, after all others.
"""

import argparse
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from common.flags.servers import is_loopback
from common.servers.group import BACKEND
from common.servers.guard import KEY
from common.servers.vllm import EXTENSION

ROOT = Path(__file__).resolve().parent.parent
ASK_AGAIN_S = 0.5
STOP_S = 20.0
"""Seconds that a server may take to end before it is killed."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
DEVICES = Path("/dev")
MOST_FAILED = 3
"""Starts without an answer after which a server is left as it is."""


def main() -> None:
    args, others = parser().parse_known_args()
    try:
        check(args)
        check_machine(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    folder = Path(args.logs)
    folder.mkdir(parents=True, exist_ok=True)
    servers = [Server(args, index, others) for index in range(num_servers(args))]
    try:
        for server in servers:
            server.start()
        watch(servers, args)
    finally:
        for server in servers:
            server.end()
        if args.addresses:
            write_addresses(Path(args.addresses), [])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tools.serve", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    found.add_argument("--model", required=True, help="--model of the training run: its config and tokenizer")
    found.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    found.add_argument("--python", default=sys.executable, help="Python of the environment that has the engine")
    found.add_argument("--gpus", type=int, default=0, help="GPUs to use, of those in CUDA_VISIBLE_DEVICES; 0: the CPU")
    found.add_argument("--tp", type=int, default=1, help="GPUs of one server")
    found.add_argument("--servers", type=int, default=0, help="number of servers on a CPU; on GPUs it is --gpus / --tp")
    found.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --auth-env")
    found.add_argument("--port", type=int, default=8000, help="of the first server; the others have the next ones")
    found.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                       help="--policy.compute-dtype of the training run")
    found.add_argument("--max-length", type=int, default=2048,
                       help="tokens of prompt and response: --data.max-prompt-length and --rollout.max-response-length")
    found.add_argument("--max-num-seqs", type=int, default=256, help="responses that a server decodes at the same time")
    found.add_argument("--seeds", action="store_true",
                       help="SGLang: responses follow from their seeds, as vLLM's always do; slower")
    found.add_argument("--auth-env", default="", help="environment variable that holds the key that requests must have")
    found.add_argument("--addresses", default="",
                       help="file for the addresses of the servers that answer, for --rollout.servers FILE")
    found.add_argument("--logs", default="runs/servers", help="folder for what the servers print")
    found.add_argument("--restart", action="store_true", help="start a server again that has ended")
    return found


def check(args: argparse.Namespace) -> None:
    """Raises ValueError."""
    if args.gpus and args.servers:
        raise ValueError(f"--servers {args.servers}: on GPUs there are --gpus / --tp servers; leave it out")
    if args.gpus < 0 or args.tp < 1 or args.gpus % args.tp:
        raise ValueError(f"--gpus {args.gpus} must be a multiple of --tp {args.tp}")
    if not args.gpus and args.tp > 1:
        raise ValueError(f"--tp {args.tp} needs --gpus")
    found = visible_gpus(args.gpus)
    if len(found) < args.gpus:
        raise ValueError(f"--gpus {args.gpus}: CUDA_VISIBLE_DEVICES names {len(found)}")
    if args.servers < 0 or args.max_length < 2 or args.max_num_seqs < 1:
        raise ValueError(f"--servers {args.servers}, --max-length {args.max_length} and --max-num-seqs "
                         f"{args.max_num_seqs} must be positive")
    last = args.port + num_servers(args) - 1
    if args.port < 1 or last > 65535:
        raise ValueError(f"--port {args.port}: the ports {args.port} to {last} must be between 1 and 65535")
    if args.auth_env and not os.environ.get(args.auth_env):
        raise ValueError(f"--auth-env {args.auth_env}: this environment variable is not set")
    if not args.auth_env and not is_loopback(f"http://{args.host}"):
        raise ValueError(f"--host {args.host} is reached from other machines, whose users could load weights: name "
                         f"the environment variable that holds a key with --auth-env")
    if args.seeds and args.engine != "sglang":
        raise ValueError("--seeds is for --engine sglang: vLLM's responses follow from their seeds anyway")


def check_machine(args: argparse.Namespace) -> None:
    """Raises ValueError for what this machine does not have."""
    if shutil.which(args.python) is None:
        raise ValueError(f"--python {args.python} is no program: name the Python of the environment that has the "
                         f"engine, such as .venv/bin/python")
    is_path = args.model.startswith((".", "/", "~")) or args.model.count("/") > 1
    if is_path and not Path(args.model).is_dir():
        raise ValueError(f"--model {args.model} is no folder here: name a Hugging Face folder, or a hub name")
    if not args.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        num_gpus = len(list(DEVICES.glob("nvidia[0-9]*")))
        if num_gpus:
            raise ValueError(f"--gpus 0 serves on the CPU, and this machine has {num_gpus} GPUs: set --gpus, or "
                             f"CUDA_VISIBLE_DEVICES= to serve on the CPU")
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    for index in range(num_servers(args)):
        port = args.port + index
        try:
            socket.create_server((args.host, port), family=family).close()
        except OSError as error:
            reason, _, _ = str(error.strerror).partition(" (")
            raise ValueError(f"--host {args.host} --port {port}: {reason}; the servers here would have the "
                             f"ports {args.port} to {args.port + num_servers(args) - 1}: choose others with --port"
                             ) from None


def num_servers(args: argparse.Namespace) -> int:
    return args.gpus // args.tp or args.servers or 1


def visible_gpus(count: int) -> list[str]:
    """Names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(gpu) for gpu in range(count)]
    return [gpu for gpu in given.split(",") if gpu]


class Server:
    def __init__(self, args: argparse.Namespace, index: int, others: list[str]):
        self.args = args
        self.port = args.port + index
        self.gpus = visible_gpus(args.gpus)[index * args.tp : (index + 1) * args.tp] if args.gpus else []
        self.others = others
        self.log = Path(args.logs) / f"{self.port}.log"
        self.log_start = 0  # bytes of earlier starts
        self.process: subprocess.Popen | None = None
        self.key_file = ""  # which SGLang reads as it starts
        self.answers = False
        self.num_failed = 0  # ends since it answered last
        host = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
        self.url = f"http://{host}:{self.port}"
        self.own_url = f"http://{'127.0.0.1' if args.host == '0.0.0.0' else args.host}:{self.port}"

    def start(self) -> None:
        key = os.environ.get(self.args.auth_env, "")
        environment = os.environ | environment_of(self.args, key)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.args.engine == "sglang":
            if key:
                self.key_file = write_key(key)
            command = sglang_command(self.args, self.key_file)
        else:
            command = vllm_command(self.args, bool(key))
        command += ["--host", self.args.host, "--port", str(self.port), *self.others]
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.log_start = os.fstat(file).st_size
        with os.fdopen(file, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment,
                                            start_new_session=True)
        self.answers = False

    def ask(self) -> bool:
        """Whether it answers now, for the first time."""
        if self.answers:
            return False
        try:
            with DIRECT.open(f"{self.own_url}/health", timeout=5):
                pass
        except (OSError, http.client.HTTPException):
            return False
        self.answers = True
        self.num_failed = 0
        self.remove_key()
        return True

    def remove_key(self) -> None:
        if self.key_file:
            Path(self.key_file).unlink(missing_ok=True)
            self.key_file = ""

    def end(self) -> None:
        self.remove_key()
        if self.process is None:
            return
        for number, most_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(most_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def vllm_command(args: argparse.Namespace, has_key: bool) -> list[str]:
    command = [
        args.python, "-m", "vllm.entrypoints.launchers.api_server.entry",  # what `vllm serve` starts
        "--model", args.model,
        "--dtype", args.dtype,
        "--max-model-len", str(args.max_length),
        "--max-num-seqs", str(args.max_num_seqs),
        "--tensor-parallel-size", str(args.tp),
        "--logprobs-mode", "processed_logprobs",  # of what it samples from
        "--load-format", "dummy",  # weights come from the trainer, before the first use
        "--enable-scale-out",  # the route for token ids
        "--worker-extension-cls", EXTENSION,
        "--weight-transfer-config", json.dumps({"backend": BACKEND}),
    ]
    if not args.gpus:  # as common/engine/vllm.py, for the same reasons
        command += ["--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill",
                    "--max-num-batched-tokens", str(max(args.max_length, 2048))]
    if has_key:
        command += ["--middleware", "common.servers.guard.Guard"]
    return command


def sglang_command(args: argparse.Namespace, key_file: str) -> list[str]:
    command = [
        args.python, "-m", "sglang.launch_server",
        "--model-path", args.model,
        "--dtype", args.dtype,
        "--context-length", str(args.max_length + 6),  # its own margin
        "--max-running-requests", str(args.max_num_seqs),
        "--tp-size", str(args.tp),
        "--load-format", "dummy",  # weights come from the trainer, before the first use
        "--skip-server-warmup",
        "--log-level", "warning",  # its first line would have the key
    ]
    if not args.gpus:
        command += ["--device", "cpu"]
    if args.seeds:
        command += ["--enable-deterministic-inference"]
    if key_file:
        command += ["--config", key_file]
    return command


def write_key(key: str) -> str:
    """A file for SGLang, readable by this user alone: all users of the machine see flags."""
    descriptor, path = tempfile.mkstemp(suffix=".yaml", prefix="sglang_")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"api-key: {json.dumps(key)}\n")
    return path


def environment_of(args: argparse.Namespace, key: str) -> dict[str, str]:
    if args.engine == "sglang":
        found = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # log-probs of what it samples from
        if not args.gpus:
            found["SGLANG_USE_CPU_ENGINE"] = "1"
        return found
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        "PYTHONPATH": os.pathsep.join(paths),  # for EXTENSION
        "VLLM_SERVER_DEV_MODE": "1",  # its routes for weights are there only then
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if not args.gpus:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else all servers take the same cores
    if key:
        found[KEY] = key
    return found


def watch(servers: list[Server], args: argparse.Namespace) -> None:
    """Until a signal, or until no server is left. Raises SystemExit."""
    was_said = False
    while True:
        num_changed = sum([server.ask() for server in servers])
        for server in servers:
            code = server.process.poll() if server.process is not None else None
            if code is not None:
                print(f"server {server.url} has ended with code {code}: the last lines of {server.log}:\n"
                      f"{last_lines(server.log, server.log_start)}", flush=True)
                num_changed += 1
                server.end()
                server.process = None
                server.answers = False
                server.num_failed += 1
                if args.restart and server.num_failed < MOST_FAILED:
                    server.start()
        if num_changed and args.addresses:
            write_addresses(Path(args.addresses), [server.url for server in servers if server.answers])
        if not was_said and all(server.answers for server in servers):
            was_said = True
            print(flags_of_run(servers, args), flush=True)
        if all(server.process is None for server in servers):
            sys.exit("no server is left")
        time.sleep(ASK_AGAIN_S)


def flags_of_run(servers: list[Server], args: argparse.Namespace) -> str:
    names = [args.addresses] if args.addresses else [server.url for server in servers]
    flags = ["--rollout.engine server --rollout.servers", *names]
    if args.auth_env:
        flags += ["--rollout.server-auth-env", args.auth_env]
    return " ".join(flags)


def write_addresses(file: Path, urls: list[str]) -> None:
    """At once, so that a run never reads half of it."""
    own = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    own.write_text("".join(f"{url}\n" for url in urls))
    own.replace(file)


def last_lines(file: Path, start: int) -> str:
    """Of what follows the first `start` bytes."""
    return "\n".join(file.read_bytes()[start:].decode(errors="replace").splitlines()[-10:])


def stop(number: int, _: Any) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
