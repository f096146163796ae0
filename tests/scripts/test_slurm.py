"""The sbatch scripts as they are, on two "nodes" of this machine: stub srun and scontrol, real torchrun and USR1."""

import importlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import pytest
import torch
from torch.distributed.run import get_args_parser
from torch.numa import binding

from common.checkpoint import files
from tests.checkpoint.test_resume import flags, metrics, steps_on_disk  # noqa: F401 (flags is a fixture)
from tests.conftest import ROOT

SRUN = r"""#!/usr/bin/env bash
# One process a node, as Slurm makes them; a signal to srun goes to its tasks. Its own flags end at the first word.
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    HOSTNAME=node$node SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
    pids+=($!)
done
trap 'kill -USR1 "${pids[@]}"' USR1
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do
    wait "$pid"; last=$?
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; last=$?; done
    ((last == 0)) || code=$last
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


def put(folder, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def put_python(folder, launch: str) -> None:
    """This Python, which runs the line `launch` where slurm/launch.py would start the ranks."""
    put(folder, "python", f'''#!/usr/bin/env bash
[[ $1 == slurm/launch.py ]] || exec {sys.executable} "$@"
shift
{launch}
''')


@pytest.fixture
def cluster(tmp_path):
    """Environment of a job, with stub commands first in the PATH."""
    bin = tmp_path / "bin"
    bin.mkdir()
    put(bin, "srun", SRUN)
    put(bin, "scontrol", SCONTROL)
    put(bin, "apptainer", '#!/usr/bin/env bash\nwhile [[ $1 != *.sif ]]; do shift; done\nexec "${@:2}"\n')
    (tmp_path / "image.sif").touch()
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_GPUS_ON_NODE",
            "SCRIPT", "MODEL", "TRAIN_DATA", "VAL_DATA", "BIND", "HF_HUB_OFFLINE", "SLURM_ARRAY_JOB_ID",
            "SLURM_ARRAY_TASK_ID", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {
        "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "tiny", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "OMP_NUM_THREADS": "1",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"), "RUN_DIR": str(tmp_path / "run"), "IMAGE": "", "VENV": ".venv",
    }


def submit(script: str, environment: dict[str, str], log, *arguments) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(["bash", f"slurm/{script}", *map(str, arguments)], env=environment, cwd=ROOT,
                                stdout=file, stderr=file, stdin=subprocess.DEVNULL)


@pytest.mark.sweep
def test_two_nodes_are_stopped_requeued_and_continue(cluster, flags, tmp_path):  # noqa: F811
    """USR1 to the batch script, as `--signal=B:USR1@120` sends it, in the third of many steps; then Slurm starts the
    job again, which makes one step more."""
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit("many_nodes.sbatch", cluster, log, *flags, "--save.every", "0", "--total-steps", "100")
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(100) != 0
    text = log.read_text()
    assert "node1: 0 GPUs" in text and "stopped by SIGUSR1 after step" in text, text[-6000:]
    assert text.count("torchrun: stopped by SIGUSR1\n") == 2 and "Traceback" not in text, text[-6000:]
    assert (tmp_path / "scontrol.log").read_text().split() == ["requeue", cluster["SLURM_JOB_ID"]]
    (saved,) = steps_on_disk(run)
    assert 2 <= saved < 100

    again = cluster | {"SLURM_RESTART_COUNT": "1"}
    job = submit("many_nodes.sbatch", again, log, *flags, "--save.every", "0", "--total-steps", saved + 1)
    assert job.wait(200) == 0, log.read_text()[-6000:]
    assert f"resumed after step {saved}" in log.read_text()
    assert len((tmp_path / "scontrol.log").read_text().splitlines()) == 1
    assert [row["step"] for row in metrics(run)] == [*range(saved + 2)]
    assert files.read_manifest(run / f"checkpoints/step_{saved + 1:06d}")["world_size"] == 2


WORKER = """import signal, sys, time
if "fails" in sys.argv:
    raise ValueError("a real failure")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
print("ready", flush=True)
time.sleep(100)
"""


def launched(folder, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen:
    (folder / "worker.py").write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, "slurm/launch.py", "--standalone", "--nproc-per-node", "1", "--log-dir", folder / "logs",
         "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1", *options,
         folder / "worker.py", *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_stop_by_a_signal_ends_in_one_line(name, tmp_path):
    launcher = launched(tmp_path)
    while launcher.stdout.readline().strip() != "ready":
        assert launcher.poll() is None
    launcher.send_signal(signal.Signals[name])
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and said.endswith(f"torchrun: stopped by {name}\n") and "Traceback" not in said


def test_a_rank_that_fails_has_torchruns_own_report(tmp_path):
    launcher = launched(tmp_path, "fails")
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "ChildFailedError" in said and "ValueError: a real failure" in said
    assert "stopped by" not in said


def test_a_signal_before_the_step_queues_the_job_again(echo, tmp_path):
    """As preemption may send it while the nodes are checked: the step is not started for its last seconds."""
    put(tmp_path / "bin", "srun", f"#!/usr/bin/env bash\nkill -USR1 $PPID\n{SRUN}")
    text = submitted("one_node.sbatch", echo, tmp_path / "log", code=1)
    assert "is queued again" in text and "torchrun" not in text
    assert (tmp_path / "scontrol.log").read_text().split() == ["requeue", echo["SLURM_JOB_ID"]]


@pytest.mark.parametrize(("when", "code", "again"), [
    ("2026-11-25T15:00:30", 1, True), ("None", 1, False), ("2026-11-25T15:00:30", 0, False),
])
def test_a_preempted_job_is_queued_again(echo, tmp_path, when, code, again):
    """Real Slurm, with a grace time and without send_user_signal: the step gets SIGTERM, saves and fails; this field
    has the time, and the job would end as FAILED. A job that fails by itself, or ends, is not queued again."""
    shown = f"   PreemptEligibleTime=2026-11-25T14:52:36 PreemptTime={when}"
    answers = f"if [[ $2 == job ]]; then echo '{shown}'; elif [[ $1"
    put(tmp_path / "bin", "scontrol", SCONTROL.replace("if [[ $1", answers))
    put_python(tmp_path / "venv/bin", f"exit {code}")
    text = submitted("one_node.sbatch", echo, tmp_path / "log", code=code)
    assert ("is queued again" in text) == again
    assert (tmp_path / "scontrol.log").exists() == again


@pytest.mark.parametrize(("array", "name"), [
    ("7", "7_3"),                                               # the last task, whose number is the array's
    ("5", "7"),                                                 # another task, or a job that a task submitted
    (None, "7"),
])
@pytest.mark.parametrize("cause", ["signal", "preemption", "a sibling's preemption"])
def test_a_task_of_an_array_is_queued_again_alone(echo, tmp_path, array, name, cause):
    """As real Slurm does it: by the array's number scontrol shows, and queues again, all tasks. The one that is stopped
    must not stop its siblings, and one that fails by itself must not be queued for what happened to a sibling."""
    sibling, own = (f"   PreemptEligibleTime=2026-11-25T14:52:36 PreemptTime={when}" for when in (
        "2026-11-25T15:00:30" if cause == "a sibling's preemption" else "None",
        "2026-11-25T15:00:30" if cause == "preemption" else "None"))
    put(tmp_path / "bin", "scontrol", SCONTROL.replace("if [[ $1", f"""case "$*" in
    "show job {array}") echo '{own}'; echo; echo '{sibling}'; exit;;
    "show job "*) echo '{own}'; exit;;
esac
if [[ $1"""))
    kill = "kill -USR1 $PPID\n" if cause == "signal" else ""
    put(tmp_path / "bin", "srun", f"#!/usr/bin/env bash\n{kill}{SRUN}")
    put_python(tmp_path / "venv/bin", "exit 1")
    variables = {} if array is None else {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "3"}
    text = submitted("one_node.sbatch", echo | {"SLURM_JOB_ID": "7"} | variables, tmp_path / "log", code=1)
    if cause == "a sibling's preemption":
        assert "is queued again" not in text and not (tmp_path / "scontrol.log").exists()
    else:
        assert f"job {name} is queued again\n" in text
        assert (tmp_path / "scontrol.log").read_text() == f"requeue {name}\n"


def test_tasks_of_an_array_have_their_numbers_in_flags_and_folders(echo, tmp_path):
    task = echo | {"SLURM_ARRAY_TASK_ID": "3", "RUN_DIR": f"{tmp_path}/a run/%a"}
    text = submitted("one_node.sbatch", task, tmp_path / "log", "--seed", "%a", "--lora.rank", "1")
    assert f"--run-dir {tmp_path}/a run/3 " in text and text.endswith(" --seed 3 --lora.rank 1\n")
    alone = submitted("one_node.sbatch", echo, tmp_path / "log2", "--data.chat-template-kwargs", "%a")
    assert alone.endswith(" --data.chat-template-kwargs %a\n")
    # without RUN_DIR, the last part of the default; the nodes' check made the folder
    put(tmp_path / "bin", "mkdir", '#!/usr/bin/env bash\necho "mkdir $*"; exit 1\n')
    text = submitted("one_node.sbatch", task | {"RUN_DIR": ""}, tmp_path / "log3", code=2)
    assert "mkdir -p runs/tiny_3\n" in text


def test_the_check_of_a_node_leaves_files_of_its_name(echo, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.node0").write_text("mine")
    submitted("one_node.sbatch", echo, tmp_path / "log")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".node0"]
    assert (tmp_path / "run/.node0").read_text() == "mine"


def test_a_step_gets_all_cores_of_its_task(echo, tmp_path):
    """srun takes them from this variable, not from sbatch's --cpus-per-task."""
    put_python(tmp_path / "venv/bin", 'echo "cores ${SRUN_CPUS_PER_TASK:-none}"')
    assert "cores 64" in submitted("one_node.sbatch", echo | {"SLURM_CPUS_PER_TASK": "64"}, tmp_path / "log")
    assert "cores none" in submitted("one_node.sbatch", echo, tmp_path / "log2")


@pytest.fixture
def echo(cluster, tmp_path):
    """The environment of a job whose torchrun prints its arguments; beside the venv, an image that has the same."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    put(tmp_path / "venv/bin", "torchrun", "#!/usr/bin/env bash\nexit 1\n")
    for folder in ("venv/bin", "bin"):
        put_python(tmp_path / folder, 'echo "torchrun $*"')
    put(tmp_path / "bin", "nvidia-smi", "#!/usr/bin/env bash\necho GPU 0\n")
    return cluster | {"VENV": str(tmp_path / "venv"), "MODEL": str(tmp_path), "SLURM_JOB_NUM_NODES": "1"}


def submitted(script: str, environment: dict[str, str], log, *arguments: str, code: int = 0) -> str:
    """What the job printed."""
    job = submit(script, environment, log, *arguments)
    assert job.wait(60) == code, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("script", ["one_node.sbatch", "many_nodes.sbatch"])
def test_the_environment_names_script_model_and_data(echo, script, tmp_path):
    job = echo | {"SCRIPT": "dapo.py", "TRAIN_DATA": "a.parquet"}
    printed = submitted(script, job, tmp_path / "log", "--seed", "1")
    assert f" dapo.py --model {tmp_path} --run-dir {tmp_path}/run --train-data a.parquet --val-data " \
           "data/gsm8k/test.parquet --save.every 20 --save.async --seed 1\n" in printed
    assert " grpo.py --model" in submitted(script, echo, tmp_path / "log2")
    text = submitted(script, echo | {"SCRIPT": "none.py"}, tmp_path / "log3", code=2)
    assert text.startswith(f"error: no none.py in {ROOT}")


@pytest.mark.parametrize("script", ["one_node.sbatch", "many_nodes.sbatch"])
def test_torchrun_takes_the_flags(script, echo, tmp_path):
    """Those of the torch that is installed."""
    text = submitted(script, echo | {"SLURM_GPUS_ON_NODE": "0"}, tmp_path / "log", "--seed", "1")
    (line,) = [line for line in text.splitlines() if line.startswith("torchrun ")]
    args = get_args_parser().parse_args(shlex.split(line)[1:])
    assert args.numa_binding == "node" and args.nproc_per_node == "0" and "SIGUSR1" in args.signals_to_handle
    assert args.training_script == "grpo.py" and args.training_script_args[-2:] == ["--seed", "1"]
    assert args.standalone or (args.nnodes, args.rdzv_backend) == ("1", "c10d")


def test_binding_is_left_out_where_it_cannot_be(tmp_path):
    """There is no GPU here: torchrun itself would fail."""
    launcher = launched(tmp_path, "fails", options=("--numa-binding", "node"))
    said, _ = launcher.communicate(timeout=60)
    assert "torchrun: ranks are not bound to cores: torch sees no GPU\n" in said
    assert "ValueError: a real failure" in said


@pytest.mark.parametrize(("gpus", "numactl", "cores", "reason"), [
    (2, "/bin/numactl", [{0, 1}, {2}], ""),
    (2, "/bin/numactl", [{0, 1}, set()], "none of this job's cores is beside GPU 1"),
    (1, None, [{0}], "numactl is not installed"),
])
def test_why_ranks_are_not_bound(gpus, numactl, cores, reason, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "slurm")
    launch = importlib.import_module("launch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda name: numactl)
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda gpu_index, numa_options: cores[gpu_index])
    assert launch.why_unbound("node") == reason


def test_a_gpu_that_is_in_no_folder_is_named(monkeypatch):
    """Torch's own search of /sys, for a GPU that is not there."""
    monkeypatch.syspath_prepend(ROOT / "slurm")
    launch = importlib.import_module("launch")
    place = types.SimpleNamespace(pci_domain_id=0xFFFF, pci_bus_id=0xFF, pci_device_id=0x1F)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/numactl")
    assert launch.why_unbound("node").startswith("the cores of GPU 0 are not found: [Errno 2]")


ENGINE = """import http.server, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_servers_of_one_job_sample_for_another(echo, tmp_path):
    """The job that trains is there first. It has the key in its environment only."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "health").touch()
    put(tmp_path, "engine", f"#!/usr/bin/env bash\ncd {tmp_path}\nexec {sys.executable} {tmp_path}/engine.py \"$@\"\n")
    addresses = tmp_path / "shared/addresses"
    both = echo | {"SERVERS": str(addresses), "SERVER_KEY": "open sesame", "VENV": str(tmp_path / "venv")}
    trainers = submit("one_node.sbatch", both, tmp_path / "log", "--seed", "1")
    time.sleep(1)
    assert trainers.poll() is None and "torchrun" not in (tmp_path / "log").read_text()
    job = both | {"SLURM_JOB_ID": "77"}
    servers = submit("servers.sbatch", job, tmp_path / "log2", "--servers", "2", "--python", tmp_path / "engine")
    try:
        assert trainers.wait(60) == 0, (tmp_path / "log2").read_text()
        text = (tmp_path / "log").read_text()
        assert f"--rollout.engine server --rollout.servers {addresses} --rollout.server-auth-env SERVER_KEY " \
               f"--rollout.server-weights {tmp_path}/run/weights --seed 1\n" in text
        deadline = time.monotonic() + 30
        host = socket.gethostname()
        while addresses.read_text().splitlines() != [f"http://{host}:20077", f"http://{host}:20078"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        servers.send_signal(signal.SIGTERM)
        assert servers.wait(60) != 0
    assert addresses.read_text() == "" and "sesame" not in text + (tmp_path / "log2").read_text()


@pytest.mark.parametrize(("script", "without"), [
    ("servers.sbatch", "SERVERS"), ("servers.sbatch", "SERVER_KEY"), ("one_node.sbatch", "SERVER_KEY"),
])
def test_servers_need_a_file_and_a_key(script, without, echo, tmp_path):
    job = echo | {"SERVERS": str(tmp_path / "a"), "SERVER_KEY": "k"} | {without: ""}
    assert f"error: SERVER{'S' if script != 'servers.sbatch' else without[6:]}" in submitted(
        script, job, tmp_path / "log", code=2)


def test_weights_that_are_sent_need_no_folder(echo, tmp_path):
    addresses = tmp_path / "addresses"
    addresses.write_text("http://127.0.0.1:1\n")
    job = echo | {"SERVERS": str(addresses), "SERVER_KEY": "k"}
    text = submitted("one_node.sbatch", job, tmp_path / "log", "--rollout.server-transfer", "gloo")
    assert text.endswith(" --rollout.server-auth-env SERVER_KEY --rollout.server-transfer gloo\n")


def test_an_image_takes_the_place_of_the_environment(echo, tmp_path):
    text = submitted("one_node.sbatch", echo | {"VENV": "none", "IMAGE": str(tmp_path / "image.sif")}, tmp_path / "log")
    assert "torchrun --standalone" in text
    missing = submitted("one_node.sbatch", echo | {"IMAGE": "none.sif"}, tmp_path / "log2", code=2)
    assert missing == "error: IMAGE none.sif does not exist\n"


def test_an_environment_that_cannot_use_the_gpus_is_refused(echo, tmp_path):
    """This test's own packages, made by `make setup`, where Slurm promised a GPU."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch can use GPUs")
    text = submitted("one_node.sbatch", echo | {"SLURM_GPUS_ON_NODE": "1"}, tmp_path / "log", code=2)
    assert "is built without CUDA: it would train on the CPU. Make an environment with `make setup-gpu`" in text
    assert "cannot use the 1 GPUs" in text and "torchrun" not in text
    text = submitted("one_node.sbatch", echo | {"VENV": "no-venv"}, tmp_path / "log2", code=2)
    assert "error: no no-venv/bin/torchrun" in text and "make setup-gpu" in text


def test_a_model_that_is_not_at_hand_is_refused_before_the_run(echo, tmp_path):
    """Offline, which is the default of a job: a hub model must be in the cache, with weights."""
    cache = tmp_path / "hub"
    job = echo | {"HF_HUB_CACHE": str(cache), "MODEL": "Qwen/Absent"}
    text = submitted("one_node.sbatch", job, tmp_path / "log", code=2)
    assert "run `hf download Qwen/Absent`" in text and str(cache) in text and "torchrun" not in text
    assert "torchrun" in submitted("one_node.sbatch", job | {"HF_HUB_OFFLINE": "0"}, tmp_path / "log1")
    assert "torchrun" in submitted("one_node.sbatch", job, tmp_path / "log2", "--model", str(tmp_path))    # the last
    assert "Other/Absent" in submitted("one_node.sbatch", job, tmp_path / "log3", "--model=Other/Absent", code=2)
    assert "neither a folder here nor" in submitted("one_node.sbatch", job | {"MODEL": "a/b/c"}, tmp_path / "log4",
                                                    code=2)
    snapshot = cache / "models--Qwen--Absent/snapshots/0a1b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--Qwen--Absent/refs").mkdir()
    (cache / "models--Qwen--Absent/refs/main").write_text("0a1b")
    assert "hf download" in submitted("one_node.sbatch", job, tmp_path / "log5", code=2)
    (snapshot / "model.safetensors").touch()
    assert "torchrun" in submitted("one_node.sbatch", job, tmp_path / "log6")
