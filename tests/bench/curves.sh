#!/usr/bin/env bash
# The quickstart's task, whose flags are in TASK, with all four scripts or with three seeds: curves and a table in docs/.
#
#   make learn    docs/learn.png and docs/learn.md
#   make seeds    docs/quickstart.png and docs/quickstart.md
set -euo pipefail
cd "$(dirname "$0")/../.."

# train SCRIPT FLAGS...
train() {
    # shellcheck disable=SC2086
    .venv/bin/python "$1" $TASK "${@:2}"
}

learn() {
    local short=(--total-steps 16 --eval-every 8)
    train grpo.py --run-dir runs/learn/grpo "${short[@]}"
    train ppo.py --run-dir runs/learn/ppo "${short[@]}" --minibatches-per-step 1 --critic-optim.lr 1e-4
    train dapo.py --run-dir runs/learn/dapo "${short[@]}" --max-gen-batches 3 --overlong-buffer 8
    train rloo.py --run-dir runs/learn/rloo "${short[@]}"
    draw learn runs/learn/{grpo,ppo,dapo,rloo}
}

seeds() {
    for seed in 1 2 3; do
        train grpo.py --run-dir "runs/seed$seed" --seed "$seed"
    done
    draw quickstart runs/seed{1,2,3}
}

# draw NAME RUNS...
draw() {
    .venv/bin/python -m tools.report "${@:2}" --out "docs/$1.png"
    .venv/bin/python -m tests.bench.quickstart_table "${@:2}" | tee "docs/$1.md"
}

"$1"
