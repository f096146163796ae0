"""The sbatch scripts as they are, on two "nodes" of this machine: stub srun and scontrol, real torchrun and USR1."""

import os
import signal
import subprocess
import sys
import time

import pytest

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
code=0
for pid in "${pids[@]}"; do
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


@pytest.fixture
def cluster(tmp_path):
    """Environment of a job, with stub commands first in the PATH."""
    bin = tmp_path / "bin"
    bin.mkdir()
    put(bin, "srun", SRUN)
    put(bin, "scontrol", SCONTROL)
    put(bin, "apptainer", '#!/usr/bin/env bash\nwhile [[ $1 != *.sif ]]; do shift; done\nexec "${@:2}"\n')
    put(bin, "torchrun", f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tmp_path / "image.sif").touch()
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_GPUS_ON_NODE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {
        "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "tiny", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "OMP_NUM_THREADS": "1",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"), "RUN_DIR": str(tmp_path / "run"), "IMAGE": "",
    }


def submit(script: str, environment: dict[str, str], log, *arguments) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(["bash", f"slurm/{script}", *map(str, arguments)], env=environment, cwd=ROOT,
                                stdout=file, stderr=file, stdin=subprocess.DEVNULL)


def test_two_nodes_are_stopped_requeued_and_continue(cluster, flags, tmp_path):  # noqa: F811
    """USR1 to the batch script, as `--signal=B:USR1@120` sends it, in the third of four steps; then Slurm starts the
    job again."""
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit("many_nodes.sbatch", cluster, log, *flags, "--save.every", "0")
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(100) != 0
    text = log.read_text()
    assert "node1: 0 GPUs" in text and "stopped by SIGUSR1 after step" in text, text[-6000:]
    assert (tmp_path / "scontrol.log").read_text().split() == ["requeue", cluster["SLURM_JOB_ID"]]
    saved = steps_on_disk(run)
    assert len(saved) == 1 and 2 <= saved[0] < 4

    job = submit("many_nodes.sbatch", cluster | {"SLURM_RESTART_COUNT": "1"}, log, *flags, "--save.every", "0")
    assert job.wait(200) == 0, log.read_text()[-6000:]
    assert f"resumed after step {saved[0]}" in log.read_text()
    assert len((tmp_path / "scontrol.log").read_text().splitlines()) == 1
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3, 4]
    assert files.read_manifest(run / "checkpoints/step_000004")["world_size"] == 2
