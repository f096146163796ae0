#!/usr/bin/env bash
# What a new GPU machine shall tell first, in at most 25 minutes: tests/gpu/first_hour.py, which has the flags.
#
#   tests/gpu/first_hour.sh pack FOLDER     on a machine with an index: wheels that a bare machine with torch lacks (2 MB)
#   tests/gpu/first_hour.sh [FLAGS]         on the GPU machine: all parts; with a folder of wheels in WHEELS, with these
#
# Variables: PYTHON names the Python to use, OUT the folder of the results (first_hour.json, .md, .log, profile.txt).
# TARGET is the Python version that wheels are for.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/first_hour}
PACKAGES="tyro docstring_parser typeguard math-verify latex2sympy2_extended antlr4-python3-runtime"

if [[ ${1:-} == pack ]]; then
    folder=${2:?name a folder for the wheels}
    pins=$(for name in $PACKAGES; do grep -oiE "^$name==[^ ]+" requirements-cpu.txt; done)
    # shellcheck disable=SC2086
    exec "$PYTHON" -m pip download --no-deps --only-binary=:all: --python-version "${TARGET:-3.12}" \
        --dest "$folder" $pins "$(grep -o '^liger-kernel==[^ ]*' requirements.txt)"
fi

if [[ ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
"$PYTHON" -m tests.gpu.first_hour --out "$OUT" "$@"
