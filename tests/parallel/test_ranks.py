"""What joining the ranks refuses, and how they leave."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.parallel import ranks

ROOT = Path(__file__).resolve().parent.parent.parent
# gloo's thread copies for some 50 ms, then waits for Python's lock to free the tensors. The main thread holds the lock
# from then on until Python ends, as it may on a busy machine.
LEAVES_EARLY = """
import atexit, sys, time

def hold():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass

atexit.register(hold)  # before torch is imported, so that it runs last
import torch
import torch.distributed as dist
from common.parallel import ranks

world = ranks.init()
group = dist.new_group()
tensor = torch.zeros(50 * 2**20, dtype=torch.uint8)
sys.setswitchinterval(60)
dist.all_gather([torch.empty_like(tensor)], tensor, group=group, async_op=True)
{end}
"""

TWO_MACHINES = """
import torch
import torch.distributed as dist
from common.parallel import ranks

world = ranks.init(60)
total = torch.tensor(world.rank + 1)
dist.all_reduce(total)
print("sum", int(total))
ranks.shutdown()
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A CUDA build of torch that finds no GPU, on a machine without NVIDIA devices."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(ranks, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **options: None)
    monkeypatch.setattr(ranks, "make_groups", lambda *_: {"mesh": None})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_gpus_that_torch_cannot_use_are_an_error(machine, monkeypatch):
    """With a driver too old for its CUDA, torch finds no GPU: the run would go on, on the CPU."""
    (machine / "nvidiactl").touch()
    assert ranks.init().device.type == "cpu"                            # a driver without a GPU
    (machine / "nvidia3").touch()
    rule = "cannot use this machine's NVIDIA GPUs: .* may be too old for CUDA 13.0: .* set CUDA_VISIBLE_DEVICES=-1"
    with pytest.raises(ValueError, match=rule):
        ranks.init()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ValueError, match=re.escape("docs/gpus.md")):
        ranks.init()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_hides_are_not_missed(hidden, machine, monkeypatch):
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert ranks.init().device.type == "cpu"


def test_the_cpu_build_trains_on_the_cpu(machine, monkeypatch):
    (machine / "nvidia0").touch()
    monkeypatch.setattr("torch.version.cuda", None)
    assert ranks.init().device.type == "cpu"


@pytest.mark.parametrize("replicas", [3, 0])
def test_copies_that_the_ranks_cannot_hold_are_refused_before_ranks_meet(replicas, machine, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **options: pytest.fail("they met"))
    rule = f"--policy.replicas {replicas} must be at least 1 and divide the 4 ranks evenly"
    with pytest.raises(ValueError, match=re.escape(rule)):
        ranks.init(60, replicas)


@pytest.fixture
def gpus(machine, monkeypatch):
    """A machine with 8 GPUs; what torch is asked for."""
    asked = {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: asked.update(device=str(device)))
    monkeypatch.setattr("torch.distributed.init_process_group",
                        lambda backend, **options: asked.update(options, backend=backend))
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: iter([(ranks.dist.HashStore(), 0, 1)]))
    return asked


def test_a_rank_has_the_gpu_of_its_place_on_the_machine(gpus, monkeypatch):
    """Rank 11 of 16 is the fourth of the second machine."""
    for name, value in {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
                        "GLOO_SOCKET_IFNAME": "eth0"}.items():
        monkeypatch.setenv(name, value)
    world = ranks.init(60.0)
    assert (str(world.device), world.rank, gpus["device"], gpus["rank"]) == ("cuda:3", 11, "cuda:3", 11)
    assert gpus["backend"] == "cpu:gloo,cuda:nccl" and gpus["timeout"].total_seconds() == 360
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(ValueError, match=r"local rank 8 needs a GPU of its own, this machine has 8: set torchrun"):
        ranks.init(60.0)


def on_two_machines(folder: Path, **env: str) -> list[subprocess.CompletedProcess]:
    """A sum over two ranks, each on a machine of its own name, which has no address. They share a network."""
    script = folder / "sum.py"
    script.write_text(TWO_MACHINES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                         "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)} | env
    command = f"hostname node$RANK && exec {sys.executable} {script}"
    started = [subprocess.Popen(["unshare", "--uts", "sh", "-c", command], env=here | {"RANK": str(rank)}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    return [subprocess.CompletedProcess(p.args, p.wait(), *p.communicate()) for p in started]


@pytest.mark.skipif(subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode != 0,
                    reason="names of machines need root")
def test_a_machine_that_others_cannot_reach_is_named(tmp_path):
    """Debian's images give a machine's name the address 127.0.1.1; a container's may have none."""
    first, second = on_two_machines(tmp_path)
    assert first.returncode == second.returncode == 1
    assert "this machine's name node0 is 127.0.0.1 to itself, where node1 cannot reach it: set GLOO_" in first.stderr
    assert "node1 is 127.0.0.1 to itself, where node0 cannot reach it" in second.stderr
    for done in on_two_machines(tmp_path, GLOO_SOCKET_IFNAME="lo"):
        assert (done.returncode, done.stdout) == (0, "sum 3\n"), done.stderr


@pytest.mark.parametrize(("addresses", "is_refused"), [
    (["10.0.0.3"], False), (["fd00::3"], False), (["fe80::3%eth0"], False), (["10.0.0.3", "127.0.0.1"], False),
    (["127.0.0.1"], True), (["127.0.1.1"], True), (["::1"], True), (["127.0.1.1", "10.0.0.3"], True), ([], True),
])
@pytest.mark.parametrize("others", [["here", "there"], ["here", "here"]])
def test_the_first_address_of_a_name_decides(addresses, is_refused, others, monkeypatch):
    """gloo listens on it. Two torchruns on one machine reach each other there."""
    def look_up(name, port, type):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, type, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = ranks.dist.HashStore()
    store.set("machine_of_1", others[1])
    refused = contextlib.nullcontext()
    if is_refused and others[1] == "there":
        refused = pytest.raises(ValueError, match="to itself, where there cannot reach it: set GLOO_SOCKET_IFNAME")
    with refused:
        ranks.check_address(store, 0, 2)


@pytest.mark.parametrize("timeout_s", [1.0, 3600.0, 0])
def test_time_limits_are_numbers_that_nccl_takes(timeout_s):
    """Milliseconds of 32 bits, and more than the phase may take."""
    limit = ranks.collective_timeout(timeout_s)
    assert timeout_s < limit.total_seconds() < 2**31 / 1000
    assert timeout_s or limit.days > 20


def test_every_group_has_the_time_limit(monkeypatch):
    """torch's own default of 10 minutes with NCCL would end a rollout."""
    limits = []
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(ranks.dist, "new_subgroups_by_enumeration",
                        lambda parts, timeout=None: limits.append(timeout) or (None, []))
    monkeypatch.setattr(ranks.dist, "new_subgroups", lambda size, timeout=None: limits.append(timeout) or (None, []))
    monkeypatch.setattr(ranks.DeviceMesh, "from_group", lambda *_, **__: None)
    limit = ranks.collective_timeout(7.0)
    ranks.make_groups("cuda", limit, replicas=2, sequence_parallel=2, expert_parallel=4)
    assert limits == [limit] * 5


@pytest.mark.sweep
@pytest.mark.parametrize(("end", "code"), [
    ("ranks.shutdown()", 0), ("sys.exit(2)", 2), ("sys.exit(143)", 143), ("1 / 0", 1), ("", 0),
])
def test_python_ends_after_the_threads_of_gloo_have_freed_their_tensors(end, code):
    """However it ends. Else the process may abort: "terminate called without an active exception"."""
    program = LEAVES_EARLY.format(end=end)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-2000:]
