"""Ten faults of servers during two runs of 40 steps, in turn (grpo.py) and asynchronous (async_grpo.py).

    OMP_NUM_THREADS=1 python -m tests.bench.server_kills tests/evidence/server_kills.json

Two servers of vLLM sample for a tiny model in float32; one is in a network namespace of its own, which needs root.
A fault waits until its server samples. After it the other one samples alone for some steps; then the scoring of
rewards waits until both are back, so that ten faults have room in few steps however long a server takes to start. The
same runs with the engine in process are the measure: every response must have the same tokens, so none is lost, counted
twice or of other weights.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq

from tests.conftest import ROOT, TRAIN
from tests.engine.servers import KEY, VLLMServer, make_model

STEPS = 40
ALONE = 2
"""Steps after a fault before the run waits."""
WAIT = "PLAINRL_KILLS_WAIT"
"""Environment variable with a file: while it is there, no reward is given."""
TIMEOUT_S = 6
OUTAGE_S = 14
NAMESPACE = "plainrl_kills"
OUTSIDE, INSIDE = "10.77.3.1", "10.77.3.2"
FLAGS = [
    "--train-data", str(TRAIN), "--policy.compute-dtype", "float32", "--data.max-prompt-length", "200",
    "--rollout.max-response-length", "256", "--prompts-per-step", "4", "--samples-per-prompt", "4",
    "--reward.num-workers", "0", "--reward.function", f"{__file__}:compute_score", "--optim.lr", "1e-4",
    "--save.every", "0", "--save.hf", "never", "--total-steps", str(STEPS), "--log.rollouts-every", "1",
]
SCRIPTS = {
    "grpo.py": [sys.executable, "grpo.py"],
    "async_grpo.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                      "async_grpo.py", "--samplers", "1", "--correction.weights", "token"],
}


@contextlib.contextmanager
def network() -> Iterator[None]:
    """A network namespace with a cable to this one."""
    def ip(text: str) -> None:
        subprocess.run(["ip", *text.split()], check=True)

    ip(f"netns add {NAMESPACE}")
    try:
        ip(f"link add plainrl_out type veth peer name plainrl_in netns {NAMESPACE}")
        ip(f"addr add {OUTSIDE}/30 dev plainrl_out")
        ip(f"-n {NAMESPACE} addr add {INSIDE}/30 dev plainrl_in")
        ip(f"-n {NAMESPACE} link set lo up")
        ip(f"-n {NAMESPACE} link set plainrl_in up")
        ip("link set plainrl_out up")
        yield
    finally:
        ip(f"netns del {NAMESPACE}")


class Faults:
    """What happens to the servers."""

    def __init__(self, servers: dict[str, VLLMServer], addresses: Path):
        self.servers = servers
        self.addresses = addresses
        self.write()

    def write(self) -> None:
        self.addresses.write_text("".join(f"{server.url}\n" for server in self.servers.values()))

    def kill(self, name: str) -> None:
        self.servers[name].kill()
        self.servers[name].start()

    def move(self, name: str) -> None:
        self.servers[name].kill()
        self.servers[name].new_port()
        self.servers[name].start()
        self.write()

    def kill_worker(self, name: str) -> None:
        self.servers[name].kill_worker()
        time.sleep(2)
        self.kill(name)

    def stop(self, name: str) -> None:
        self.servers[name].signal(signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        self.servers[name].signal(signal.SIGCONT)

    def cut(self, name: str) -> None:
        """Of the one in the namespace."""
        subprocess.run(["ip", "link", "set", "plainrl_out", "down"], check=True)
        time.sleep(OUTAGE_S)
        subprocess.run(["ip", "link", "set", "plainrl_out", "up"], check=True)


PLANS = {
    "grpo.py": [("kill", "here"), ("stop", "there"), ("move", "there"), ("cut", "there"), ("kill_worker", "here")],
    "async_grpo.py": [("kill", "there"), ("stop", "here"), ("cut", "there"), ("move", "here"), ("stop", "there")],
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Something that depends on the text."""
    while os.environ.get(WAIT) and Path(os.environ[WAIT]).exists():
        time.sleep(0.1)
    return float(sum(map(ord, solution_str)) % 3 == 0)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if '"servers/ready"' in line]


def run(script: str, model: str, run_dir: Path, *flags: str) -> subprocess.Popen:
    command = [*SCRIPTS[script], "--model", model, "--run-dir", str(run_dir), *FLAGS, *flags]
    log = (run_dir.parent / f"{run_dir.name}.log").open("w")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def num_sampling(server: VLLMServer) -> int:
    """The requests that a server runs, as it tells its own monitors."""
    asked = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {os.environ[KEY]}"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running"))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> bool:
    """False: the run has ended before."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.1)
    return False


def disturb(script: str, process: subprocess.Popen, run_dir: Path, faults: Faults) -> list[dict]:
    """Do what is planned, each fault while its server samples."""
    done = []
    wait = Path(os.environ[WAIT])
    for fault, name in PLANS[script]:
        before = len(metrics_of(run_dir))
        server = faults.servers[name]
        begun = wait_for(lambda number=before: len(metrics_of(run_dir)) > number + 1, process)
        if not begun or not wait_for(lambda one=server: num_sampling(one) > 0, process):
            break
        last = metrics_of(run_dir)[-1]
        start = time.monotonic()
        getattr(faults, fault)(name)
        seconds = time.monotonic() - start
        wait_for(lambda number=last["step"]: metrics_of(run_dir)[-1]["step"] >= number + ALONE, process)
        wait.touch()
        for one in faults.servers.values():
            one.wait()
        wait.unlink()
        wait_for(lambda: metrics_of(run_dir)[-1]["servers/ready"] == 2, process)
        after = metrics_of(run_dir)[-1]
        done.append({"script": script, "fault": fault, "server": name, "after_step": int(last["step"]),
                     "seconds": round(seconds, 1), "begun_anew": int(after["servers/moved"] - last["servers/moved"]),
                     "both_again_in_step": int(after["step"])})
        print(done[-1], flush=True)
    return done


def rollouts(run_dir: Path) -> list[list[list[int]]]:
    steps = []
    for step in range(1, STEPS + 1):
        rows = pq.read_table(run_dir / f"rollouts/step_{step:06d}.parquet").to_pylist()
        steps.append([row["tokens"] for row in rows])
    return steps


def main() -> None:
    out = Path(sys.argv[1])
    os.environ.setdefault(KEY, "kills")
    found: dict = {"command": "python -m tests.bench.server_kills", "steps": STEPS, "responses_of_a_step": 16,
                   "faults": [], "runs": []}
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        closing.enter_context(network())
        model = make_model(folder / "model")
        os.environ[WAIT] = str(folder / "wait")
        hosts = {"here": ("127.0.0.1", ""), "there": (INSIDE, NAMESPACE)}
        servers = {}
        for name, (host, namespace) in hosts.items():
            servers[name] = VLLMServer(model, folder / f"{name}.log", host=host, namespace=namespace, max_num_seqs="2")
            closing.callback(servers[name].start().kill)
        for server in servers.values():
            server.wait()
        faults = Faults(servers, folder / "servers.txt")
        for script, plan in PLANS.items():
            own, disturbed = folder / f"own_{script}", folder / f"disturbed_{script}"
            assert run(script, model, own, "--rollout.engine", "vllm", "--rollout.kv-cache-gb", "0.1").wait() == 0
            process = run(script, model, disturbed, "--rollout.engine", "server", "--rollout.servers",
                          str(faults.addresses), "--rollout.server-weights", str(folder / "weights"),
                          "--rollout.server-auth-env", KEY, "--rollout.server-timeout-s", str(TIMEOUT_S))
            done = disturb(script, process, disturbed, faults)
            code = process.wait()
            if code:
                print((folder / f"{disturbed.name}.log").read_text()[-3000:])
            pairs = [*zip(rollouts(own), rollouts(disturbed), strict=True)]
            num_same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
            metrics = metrics_of(disturbed)
            found["faults"] += done
            found["runs"].append({
                "script": script, "exit_code": code, "steps": len(metrics), "faults": len(done), "planned": len(plan),
                "responses": sum(len(ours) for ours, _ in pairs), "same_tokens": num_same,
                "begun_anew": int(metrics[-1]["servers/moved"]),
                "steps_with_one_server": sum(line["servers/ready"] == 1 for line in metrics),
                "worst_prob_diff": max(line["training/rollout_probs_diff_mean"] for line in metrics),
                "median_step_s": sorted(line["timing_s/step"] for line in metrics)[STEPS // 2],
                "longest_step_s": max(line["timing_s/step"] for line in metrics),
            })
            print(found["runs"][-1], flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
