#!/usr/bin/env bash
# The quickstart's task, whose flags are in TASK, with all four scripts or with three seeds, and a task of several turns:
# curves and a table in docs/.
#
#   make learn    docs/learn.png and docs/learn.md
#   make seeds    docs/quickstart.png and docs/quickstart.md
#   make agent    docs/agent.png and docs/agent.md; SEEDS="1 2 3" trains with three seeds
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

# The model learns the form of a conversation with the calculator from conversations half of which are wrong; then it is
# rewarded for right answers.
agent() {
    local data=data/calculator runs=()
    .venv/bin/python data/calculator.py --out "$data"
    for seed in ${SEEDS:-1}; do
        .venv/bin/python sft.py --model models/SmolLM2-135M-Instruct --train-data "$data/conversations/train.parquet" \
            --run-dir "runs/agent/sft$seed" --seed "$seed" --total-steps 16 --rows-per-step 16 --max-tokens-per-gpu 2048 \
            --optim.lr 3e-5 --optim.warmup-steps 2
        # shellcheck disable=SC2086
        .venv/bin/python grpo.py --model "runs/agent/sft$seed/model" --train-data "$data/train.parquet" \
            --val-data "$data/test.parquet" --run-dir "runs/agent/grpo$seed" --seed "$seed" \
            --rollout.episode envs/calculator.py --rollout.max-turns 3 --rollout.max-response-length 48 \
            --rollout.episodes-at-once 96 --rollout.max-num-seqs 96 --data.max-prompt-length 120 --total-steps 16 \
            --prompts-per-step 12 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt --optim.lr 2e-5 \
            --optim.warmup-steps 2 --eval-every 8 --eval-n 2 --reward.num-workers 1 --save.every 8 --save.keep 1 ${ARGS:-}
        runs+=("runs/agent/grpo$seed")
    done
    .venv/bin/python -m tools.report "${runs[@]}"
    draw agent "${runs[@]}"
}

# draw NAME RUNS...
draw() {
    .venv/bin/python -m tools.report "${@:2}" --out "docs/$1.png"
    .venv/bin/python -m tests.bench.quickstart_table "${@:2}" | tee "docs/$1.md"
}

"$1"
