# Sourced by the sbatch scripts: checks before anything heavy, and a step that is stopped in time, saved and queued again.
# SCRIPT is the script that trains, VENV the environment, or IMAGE an Apptainer image with the packages of
# requirements.txt. The repository and RUN_DIR are bound in the image at their own paths; BIND names more (models, data).
set -euo pipefail

die() { echo "error: $*" >&2; exit 2; }

SCRIPT=${SCRIPT:-grpo.py}
VENV=${VENV:-.venv-gpu}
[[ -n ${SLURM_JOB_ID:-} ]] || die "no SLURM_JOB_ID: submit this with sbatch"
[[ -f $SCRIPT ]] || die "no $SCRIPT in $PWD: submit from the root of the repository; SCRIPT names the script that trains"
[[ -n ${IMAGE:-} || -x $VENV/bin/torchrun ]] || die "no $VENV/bin/torchrun in $PWD: run \`make setup-gpu\` first, or name \
another environment: VENV=FOLDER"
[[ -z ${IMAGE:-} || -f $IMAGE ]] || die "IMAGE $IMAGE does not exist"
# Until the step runs, a signal would end this script, and nothing would queue the job again.
stopped="" step=""
trap 'stopped=1; [[ -z $step ]] || kill -USR1 "$step"' USR1
# In an array job, %a in the flags and in RUN_DIR is the task's number, as in sbatch's own --output.
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME${SLURM_ARRAY_TASK_ID:+_%a}}
set -- "${@//%a/${SLURM_ARRAY_TASK_ID:-%a}}"
export SCRIPT RUN_DIR=${RUN_DIR//%a/${SLURM_ARRAY_TASK_ID:-%a}}
# srun does not take --cpus-per-task from sbatch (Slurm 22.05 and newer): all ranks of a node would share one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
(($(ulimit -n) >= 4096)) || ulimit -n 4096 || die "open files are limited to $(ulimit -n): raise ulimit -n to 4096"

# SERVERS is the file that slurm/servers.sbatch keeps.
if [[ -n ${SERVERS:-} ]]; then
    [[ -n ${SERVER_KEY:-} ]] || die "SERVERS needs SERVER_KEY, the key of the servers"
    echo "waiting for a server in $SERVERS"
    until [[ -s $SERVERS || -n $stopped ]]; do
        sleep 2 &
        wait $! || true
    done
    [[ " $*" == *" --rollout.server-transfer"* ]] || set -- --rollout.server-weights "$RUN_DIR/weights" "$@"
    set -- --rollout.engine server --rollout.servers "$SERVERS" --rollout.server-auth-env SERVER_KEY "$@"
fi

# Every node by itself: the repository is there, the run folder can be written, the GPUs that Slurm promised answer.
node_check='[[ -f $SCRIPT ]] || { echo "$HOSTNAME: no $PWD/$SCRIPT"; exit 1; }
mkdir -p "$RUN_DIR" && file=$(mktemp "$RUN_DIR/.XXXXXX") && rm "$file" || { echo "$HOSTNAME: no $RUN_DIR"; exit 1; }
found=$( (nvidia-smi -L 2> /dev/null || true) | wc -l)
(( found >= ${SLURM_GPUS_ON_NODE:-0} )) || { echo "$HOSTNAME: $found GPUs, not ${SLURM_GPUS_ON_NODE}"; exit 1; }
echo "$HOSTNAME: $found GPUs, $(df -h --output=avail "$RUN_DIR" | tail -n 1 | tr -d " ") free in $RUN_DIR"'
srun bash -c "$node_check" || die "a node is not ready"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds that torchrun leaves the ranks to save, of the 120 before the end
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${nodes[0]}
# The kernel takes the ports of connections from 32768 on.
PORT=$((20000 + SLURM_JOB_ID % 12000))

python=("$VENV/bin/python")
if [[ -n ${IMAGE:-} ]]; then
    container=(apptainer exec --nv --pwd "$PWD" --bind "$PWD,$(realpath "$RUN_DIR")${BIND:+,$BIND}" "$IMAGE")
    python=("${container[@]}" python)
fi
torchrun=("${python[@]}" slurm/launch.py)
if ((${SLURM_GPUS_ON_NODE:-0} > 0)); then
    srun "${python[@]}" tools/doctor.py --only packages --gpus "$SLURM_GPUS_ON_NODE" || die "these packages cannot use the \
$SLURM_GPUS_ON_NODE GPUs of a node"
fi
"${python[@]}" tools/doctor.py --only model --model "$MODEL" "$@" || die "the model cannot be read"  # $@: the flags at the end

# The last task of an array has the array's number, by which scontrol means all tasks: it would stop the others in the
# middle of their training. A job submitted by a task inherits the array's variables, but has a number of its own.
JOB=$SLURM_JOB_ID
[[ $JOB != "${SLURM_ARRAY_JOB_ID:-}" ]] || JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# train COMMAND: on SIGUSR1, passed on by srun and torchrun, the ranks save and exit; then the job is queued again, and
# continues from that checkpoint. So it is after preemption. A run that ends by itself, or fails, is not.
train() {
    local code=1
    if [[ -z $stopped ]]; then
        "$@" &
        step=$!
        [[ -z $stopped ]] || kill -USR1 "$step"  # it came between the two lines before
        code=0
        wait "$step" || code=$?
        while kill -0 "$step" 2> /dev/null; do  # a trapped signal has ended `wait` early
            code=0
            wait "$step" || code=$?
        done
    fi
    # a preempted step gets SIGTERM; if it ends before its grace time, Slurm takes the job for one that failed
    if [[ $code != 0 && (-n $stopped || $(scontrol show job "$JOB") == *" PreemptTime="[0-9]*) ]]; then
        echo "Slurm needs the nodes, or the time limit is near: job $JOB is queued again"
        scontrol requeue "$JOB"
    fi
    return "$code"
}
