#!/usr/bin/env bash
# Whether requirements.txt, the packages for GPUs, can be installed with each Python: finds a version of every package
# that is needed, for Linux on x86-64 with glibc 2.31 or newer, and installs nothing. Only wheels count: a package that
# must be built would need a compiler on the user's machine. Needs a package index, and no GPU.
#
#   tests/gpu/resolve.sh             Python 3.11 and 3.12
#   tests/gpu/resolve.sh 3.13        another one
#
# Variables: OUT names a folder that gets a file of all versions for each Python. UV names uv, which resolves for any
# Python; without it pip does, and needs each Python itself (python3.12).
set -euo pipefail
cd "$(dirname "$0")/../.."

UV=${UV:-$(command -v uv || true)}
(($#)) || set -- 3.11 3.12
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
OUT=${OUT:-$work}
mkdir -p "$OUT"

# === takes no local version: an index that has torch's CPU wheel would resolve without CUDA
grep -o '^torch==[^ ]*' requirements.txt | sed 's/==/===/' > "$work/cuda.txt"

# resolve PYTHON FILE: one line a package, NAME==VERSION
resolve() {
    if [[ $UV ]]; then
        "$UV" pip compile requirements.txt --constraints "$work/cuda.txt" --python-version "$1" --no-annotate \
            --python-platform x86_64-manylinux_2_31 --only-binary :all: --no-header --quiet --output-file "$2"
        return
    fi
    "python$1" -m pip install --dry-run --ignore-installed --quiet --no-input --only-binary=:all: \
        --use-feature=fast-deps -r requirements.txt -c "$work/cuda.txt" --report "$work/report.json" || return
    "python$1" - "$work/report.json" > "$2" << 'CODE'
import json
import re
import sys

with open(sys.argv[1]) as report:
    found = [item["metadata"] for item in json.load(report)["install"]]
print("\n".join(sorted(re.sub(r"[-_.]+", "-", x["name"]).lower() + "==" + x["version"] for x in found)))
CODE
}

# missing FILE: what of requirements.txt is not there with its version, and whether CUDA's libraries are
missing() {
    local pin
    while read -r pin; do
        grep -qixF "${pin//\[*\]/}" "$1" || echo "$pin"
    done < <(grep -oE '^[A-Za-z0-9_.-]+(\[[^]]*\])?==[^ ]+' requirements.txt)
    grep -q '^nvidia-nccl-' "$1" || echo "NVIDIA's libraries: torch is a build for CPUs"
}

failed=0
for python; do
    file=$OUT/python-$python.txt
    if ! resolve "$python" "$file" 2> "$work/errors"; then
        failed=1
        echo "Python $python: requirements.txt cannot be resolved"
        tail -n 25 "$work/errors"
        continue
    fi
    lacks=$(missing "$file")
    if [[ $lacks ]]; then
        failed=1
        printf 'Python %s: lacks %s\n' "$python" "${lacks//$'\n'/, }"
        continue
    fi
    echo "Python $python: $(grep -c == "$file") packages, all wheels"
    grep -E '^(torch|vllm|transformers|triton|flashinfer-python|numpy|pyarrow|nvidia-(cublas|cudnn-cu|nccl-cu))[^=]*==' "$file" \
        | sed 's/^/    /'
done
exit "$failed"
