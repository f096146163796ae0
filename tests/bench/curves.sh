#!/usr/bin/env bash
# The quickstart's task, whose flags are in TASK, with every script or with three seeds: curves and tables in
# tests/evidence/, which each line names without its folder.
#
#   make learn        all of `policies` and `lessons`: learn.png, learn.md, lessons.png, lessons.md
#   make seeds        quickstart.png and quickstart.md
#   make adapters     LoRA at three ranks and full training, three seeds each: adapters.png and adapters.md
#   make optimizers   AdamW and Muon, three seeds each: optimizers.png and optimizers.md
#   make reward-model a reward model of pairs of responses, then ppo.py with it alone: reward_model.png and .md
#   make agent        a task of several turns: agent.png and agent.md
#   tests/bench/curves.sh software                numbers of tests/evidence/software_tasks.md, in 30 minutes a seed
#   TASK=... tests/bench/curves.sh in_flight      numbers of tests/evidence/asynchronous.md; async: too
#   TASK=... tests/bench/curves.sh distill        numbers of tests/evidence/distillation.md, in 45 minutes of one core
#   tests/bench/curves.sh long_tail               both on the task of tests/bench/long_tail.py, and long_tail.png
#
# DTYPE, of tools/environment.mk, is --policy.compute-dtype float32 on CPUs without bfloat16 instructions.
# SHORT, flags such as "--total-steps 1 --eval-prompts 4", comes last in every command and shows that all of them run.
# SEEDS="1 2 3" are those of sft.py and of grpo.py after it, in `after_sft` and `agent`, and all of `reward-model`.
set -euo pipefail
cd "$(dirname "$0")/../.."

SOLVED=data/word_problems/solved
STEPS="--total-steps 16 --eval-every 8"
CARRIED="--total-steps 12 --eval-every 6 --eval-prompts 48 --eval-n 2 --save.every 0 --save.hf never"    # and split
OUT=runs

# train SCRIPT FLAGS...: a script that samples. CLOCK: the module of Python that runs it
train() {
    # shellcheck disable=SC2086
    .venv/bin/python ${CLOCK:-} "$1" $TASK $STEPS "${@:2}" ${SHORT:-}
}

# supervise SCRIPT FLAGS...: a script that trains on text, with the model of the task
supervise() {
    local model=${TASK#*--model }
    # shellcheck disable=SC2086
    .venv/bin/python "$1" --model "${model%% *}" --train-data $SOLVED/train.parquet --val-data $SOLVED/test.parquet \
        $STEPS --max-tokens-per-gpu 2048 --save.keep 1 ${DTYPE:-} "${@:2}" ${SHORT:-}
}

# the same task with the four scripts of policy gradients
policies() {
    train grpo.py --run-dir runs/learn/grpo
    train ppo.py --run-dir runs/learn/ppo --minibatches-per-step 1 --critic-optim.lr 1e-4
    train dapo.py --run-dir runs/learn/dapo --max-gen-batches 3 --overlong-buffer 8
    train rloo.py --run-dir runs/learn/rloo
    draw learn runs/learn/{grpo,ppo,dapo,rloo}
}

# sft.py on 4 steps of solved problems, and grpo.py from the model that it wrote
after_sft() {
    for seed in ${SEEDS:-1}; do
        supervise sft.py --run-dir "runs/learn/sft$seed" --seed "$seed" --total-steps 4 --eval-every 2 \
            --rows-per-step 16 --optim.lr 1e-5
        train grpo.py --run-dir "runs/learn/after_sft$seed" --seed "$seed" --model "runs/learn/sft$seed/model"
    done
}

# samplers on a rank of their own, one step behind, with and without the correction
async() {
    local launch=(.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 async_grpo.py) weights runs=()
    for seed in ${SEEDS:-1 2 3}; do
        for weights in token none; do
            # shellcheck disable=SC2086
            "${launch[@]}" $TASK $CARRIED --run-dir "$OUT/async/$weights.seed$seed" --seed "$seed" --samplers 1 \
                --correction.weights "$weights" ${SHORT:-}
            runs+=("$OUT/async/$weights.seed$seed")
        done
    done
    .venv/bin/python -m tests.bench.quickstart_table "${runs[@]}"
}

# pairs of a right and a wrong result, and pairs of the policy's own responses
preferences() {
    supervise dpo.py --run-dir runs/learn/dpo --rows-per-step 8 --optim.lr 1e-5
    train online_dpo.py --run-dir runs/learn/online_dpo
}

# the model that grpo.py trained (see `policies`) teaches the model of the task, without any reward
distil() {
    train distill.py --run-dir runs/learn/distilled --teacher runs/learn/grpo/model
}

# the same from a teacher whose accuracy is measured: the whole distribution, its 64 best words, and the sampled word.
# Seconds are CPU seconds.
distill() {
    [[ -e $OUT/teacher/finished ]] || train grpo.py --run-dir $OUT/teacher --total-steps 14 --optim.lr 6e-5 \
        --eval-every 0 --eval-prompts 8 --eval-n 0 --save.every 0
    # shellcheck disable=SC2086
    .venv/bin/python evaluate.py --model $OUT/teacher/model --val-data data/word_problems/test.parquet \
        --eval-prompts 48 --eval-n 8 --run-dir $OUT/teacher_accuracy --data.max-prompt-length 160 \
        --rollout.max-response-length 40 --rollout.max-num-seqs 64 --reward.num-workers 1 ${DTYPE:-}
    STEPS="--total-steps 6 --optim.schedule constant --prompts-per-step 3 --samples-per-prompt 4 --eval-every 3
        --eval-prompts 24 --eval-n 2 --save.every 0 --save.hf never"
    local seed way script runs=()
    for seed in ${SEEDS:-1 2 3}; do
        while read -r way script; do
            # shellcheck disable=SC2086
            CLOCK="-m tests.bench.cpu_seconds" train $script --run-dir "$OUT/distill/$way.$seed" --seed "$seed" \
                --teacher $OUT/teacher/model </dev/null
            runs+=("$OUT/distill/$way.$seed")
        done <<<"exact distill.py
k1 grpo_variants.py --kl-loss-coef 1 --kl-estimator k1+ --reward-coef 0
top64 distill.py --divergence forward-kl --top-k 64"
    done
    .venv/bin/python -m tests.bench.steps_to $OUT/teacher_accuracy "${runs[@]}"
}

lessons() {
    after_sft
    preferences
    distil
    local seeds=("${SEEDS:-1}")
    # shellcheck disable=SC2206
    seeds=(${seeds[0]})
    draw lessons runs/learn/grpo "${seeds[@]/#/runs/learn/after_sft}" runs/learn/{online_dpo,distilled}
    .venv/bin/python -m tests.bench.lessons_table "${seeds[@]/#/runs/learn/sft}" runs/learn/{dpo,online_dpo,distilled} |
        tee -a tests/evidence/lessons.md
}

learn() {
    policies
    lessons
}

seeds() {
    STEPS=
    for seed in 1 2 3; do
        train grpo.py --run-dir "runs/seed$seed" --seed "$seed"
    done
    draw quickstart runs/seed{1,2,3}
}

# The model's own responses, a right one and a wrong one of the same prompt, train a reward model. ppo.py learns from its
# score alone; the task's own score is only measured.
reward-model() {
    local data=data/word_problems out=$OUT/reward_model runs=()
    # shellcheck disable=SC2086
    .venv/bin/python evaluate.py --model models/SmolLM2-135M-Instruct --val-data $data/train.parquet --eval-prompts 640 \
        --eval-n 8 --run-dir "$out/responses" --data.max-prompt-length 160 --rollout.max-response-length 40 \
        --rollout.max-num-seqs 64 --reward.num-workers 1 ${DTYPE:-} ${RESPONSES:-}
    .venv/bin/python data/pairs_from_responses.py --responses "$out/responses" --data $data/train.parquet \
        --out "$out/pairs" --num-test "${TEST_PROMPTS:-64}"
    for seed in ${SEEDS:-1 2 3}; do
        # shellcheck disable=SC2086
        .venv/bin/python rm.py --model models/SmolLM2-135M-Instruct --train-data "$out/pairs/train.parquet" \
            --val-data "$out/pairs/test.parquet" --run-dir "$out/rm$seed" --seed "$seed" --total-steps 60 \
            --rows-per-step 16 --max-tokens-per-gpu 1024 --optim.lr 1e-4 --optim.warmup-steps 4 \
            --optim.schedule linear --optim.min-lr-frac 0.1 --eval-every 30 --save.keep 1 \
            ${DTYPE:-} ${SHORT:-}
        STEPS="--total-steps 14 --eval-every 7"
        train ppo.py --run-dir "$out/ppo$seed" --seed "$seed" --minibatches-per-step 1 --critic-optim.lr 1e-4 \
            --reward.function rewards/measured.py --reward-model.path "$out/rm$seed/model" \
            --critic-model "$out/rm$seed/model"
        runs+=("$out/ppo$seed")
    done
    draw reward_model "${runs[@]}"
    .venv/bin/python -m tests.bench.lessons_table "$out"/{rm,ppo}[0-9]*
}

# adapters of three ranks, and all weights
adapters() {
    STEPS="--total-steps 10 --eval-every 0 --eval-prompts 48 --eval-n 2 --save.every 0 --save.hf never"
    local runs=() flags
    for seed in 1 2 3; do
        for rank in 8 16 64 0; do
            flags="--optim.lr 3e-5"
            [[ $rank = 0 ]] || flags="--lora.rank $rank --lora.alpha $((2 * rank)) --optim.lr 4e-4"
            # shellcheck disable=SC2086
            train grpo.py --run-dir "runs/adapters/rank${rank}_$seed" --seed "$seed" $flags
            runs+=("runs/adapters/rank${rank}_$seed")
        done
    done
    draw adapters "${runs[@]}"
}

# Muon beside AdamW. In few steps it needs a higher learning rate (docs/gpus.md).
optimizers() {
    STEPS=
    local kind runs=()
    for seed in ${SEEDS:-1 2 3}; do
        for kind in ${KINDS:-adamw muon}; do
            local flags="--optim.kind $kind"
            [[ $kind = adamw ]] || flags="$flags --optim.lr ${MUON_LR:-3e-4}"
            # shellcheck disable=SC2086
            train grpo.py --run-dir "$OUT/optimizers/$kind.seed$seed" --seed "$seed" $flags
            runs+=("$OUT/optimizers/$kind.seed$seed")
        done
    done
    draw optimizers "${runs[@]}"
}

# unfinished groups that continue in the next step, with the correction and ("2.0 none") without it
in_flight() {
    STEPS=$CARRIED
    local number preset runs=()
    for seed in ${SEEDS:-1 2 3}; do
        while read -r number preset; do
            train grpo.py --run-dir "$OUT/in_flight/$number.$preset.seed$seed" --seed "$seed" \
                --rollout.max-num-seqs 128 --rollout.in-flight "$number" --correction.preset "$preset" </dev/null
            runs+=("$OUT/in_flight/$number.$preset.seed$seed")
        done <<<"${IN_FLIGHT:-1.0 disabled
1.5 decoupled-token-is
2.0 decoupled-token-is
2.0 disabled}"
    done
    .venv/bin/python -m tests.bench.quickstart_table "${runs[@]}"
}

# the same with responses of log-normal lengths
long_tail() {
    OUT=runs/long_tail
    .venv/bin/python -m tests.bench.long_tail $OUT
    TASK="--model models/SmolLM2-135M-Instruct --train-data $OUT/train.parquet --val-data $OUT/test.parquet \
        --reward.function tests/bench/long_tail.py --data.max-prompt-length 256 --rollout.max-response-length 112 \
        --prompts-per-step 8 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt --optim.lr 3e-5 \
        --optim.warmup-steps 2 --optim.schedule linear --optim.min-lr-frac 0.1 --reward.num-workers 1 \
        --rollout.max-num-seqs 128"
    SHORT="--total-steps 8 --eval-every 4 ${SHORT:-}"
    in_flight
    async
    .venv/bin/python -m tests.bench.over_seconds tests/evidence/long_tail.png $OUT/in_flight/*.seed* $OUT/async/*.seed*
}

# The model learns the form of a conversation with the calculator from conversations half of which are wrong; then it is
# rewarded for right answers.
agent() {
    local data=data/calculator runs=()
    .venv/bin/python data/calculator.py --out "$data"
    for seed in ${SEEDS:-1}; do
        .venv/bin/python sft.py --model models/SmolLM2-135M-Instruct --train-data "$data/conversations/train.parquet" \
            --run-dir "runs/agent/sft$seed" --seed "$seed" --total-steps 14 --rows-per-step 16 --max-tokens-per-gpu 2048 \
            --optim.lr 3e-5 --optim.warmup-steps 2 ${DTYPE:-}
        # shellcheck disable=SC2086
        .venv/bin/python grpo.py --model "runs/agent/sft$seed/model" --train-data "$data/train.parquet" \
            --val-data "$data/test.parquet" --run-dir "runs/agent/grpo$seed" --seed "$seed" \
            --rollout.episode envs/calculator.py --rollout.max-turns 3 --rollout.max-response-length 48 \
            --rollout.episodes-at-once 96 --rollout.max-num-seqs 96 --data.max-prompt-length 120 --total-steps 16 \
            --prompts-per-step 12 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt --optim.lr 2e-5 \
            --optim.warmup-steps 2 --eval-every 8 --eval-n 2 --reward.num-workers 1 --save.every 8 --save.keep 1 \
            ${DTYPE:-} ${ARGS:-} ${SHORT:-}
        runs+=("runs/agent/grpo$seed")
    done
    .venv/bin/python -m tools.report "${runs[@]}"
    draw agent "${runs[@]}"
}

# repositories with a bug each: conversations with tools, then episodes with a shell
software() {
    local data=data/toy_repositories runs=()
    .venv/bin/python data/toy_repositories.py --out "$data"
    # shellcheck disable=SC2086
    .venv/bin/python sft.py --model models/SmolLM2-135M-Instruct --train-data "$data/conversations/train.parquet" \
        --data.chat-template-file "$data/tools.jinja" --run-dir runs/software/sft --total-steps 16 --rows-per-step 16 \
        --max-tokens-per-gpu 4096 --optim.lr 5e-5 --optim.warmup-steps 2 ${DTYPE:-} ${SHORT:-}
    for seed in ${SEEDS:-1}; do
        # shellcheck disable=SC2086
        .venv/bin/python grpo.py --model runs/software/sft/model --train-data "$data/train.parquet" --seed "$seed" \
            --val-data "$data/test.parquet" --data.chat-template-file "$data/tools.jinja" \
            --run-dir "runs/software/grpo$seed" --rollout.episode envs/swe.py --rollout.tool-parser hermes \
            --rollout.tool-timeout-s 200 --rollout.max-turns 4 --rollout.max-response-length 320 \
            --rollout.episodes-at-once 48 --rollout.max-num-seqs 48 --data.max-prompt-length 160 --total-steps 20 \
            --prompts-per-step 6 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt \
            --optim.lr 2e-5 --optim.warmup-steps 2 --eval-every 10 --eval-n 1 --eval-prompts 32 \
            --reward.num-workers 1 --save.every 0 ${DTYPE:-} ${SHORT:-}
        runs+=("runs/software/grpo$seed")
    done
    .venv/bin/python -m tests.bench.quickstart_table "${runs[@]}"
}

# draw NAME RUNS...: curves and tables. A page that a person wrote stays, and the tables are only printed.
draw() {
    local page=tests/evidence/$1.md folder
    folder=$(mktemp -d)
    [[ ! -e $page ]] || grep -q 'curves.sh writes this page' "$page" || page=/dev/null
    .venv/bin/python -m tools.report "${@:2}" --out "$folder/$1.png"
    mv "$folder/$1.png" tests/evidence
    rmdir "$folder"
    {
        printf '# Runs: %s\n\ntests/bench/curves.sh writes this page: validation before and after training, ' "$1"
        printf 'the training reward, and the time of each phase.\n\n![curves](%s.png)\n\n' "$1"
        .venv/bin/python -m tests.bench.quickstart_table "${@:2}"
    } | tee "$page"
}

"$1"
