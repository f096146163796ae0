#!/usr/bin/env bash
# What the changes for GPUs gain, before and after in one sitting: three calls of at most nine minutes each.
#
#   tests/gpu/before_after.sh 1     the engine: speed, a sync, checksums with a wait for each and with one, host work a step
#   tests/gpu/before_after.sh 2     the update: all, half and none of the layers recomputed; optimizers compiled and not
#   tests/gpu/before_after.sh 3     the rollout: waiting for the longest, in flight, and with drafts; several ranks on a GPU
#
# Variables: PYTHON, OUT (the folder of the results, beside runs), SIZE=tiny for a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/before_after}
SIZE=${SIZE:-}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$OUT"
graphs='{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
small=0.6B large=1.7B shapes=(0.5B 1.5B) tiny=() vllm=(--rollout.extra "$graphs") length=512
if [[ $SIZE == tiny ]]; then
    small=tiny large=tiny shapes=(tiny) tiny=(--tiny) vllm=() length=16
fi

say() {  # say NAME COMMAND...: its output is shown, and kept in OUT/NAME.txt; one that fails stops no other
    local name=$1
    shift
    echo "== $name"
    timeout 400 "$@" 2>&1 | tee "$OUT/$name.txt" || echo "== $name FAILED"
}

part=("$PYTHON" -m tests.gpu.first_parts)
in_work=(--work "$OUT/work" "${tiny[@]}")

case ${1:-} in
1)
    say engine "$PYTHON" -m tests.gpu.check_engine --shapes "${shapes[@]}" --cycles 3 --prompts $([[ $SIZE ]] && echo 4 || echo 64) \
        --max-tokens $([[ $SIZE ]] && echo 32 || echo 512) --extra "$([[ $SIZE ]] && echo '{}' || echo "$graphs")"
    requests=(--requests 128 512) && [[ $SIZE ]] && requests=(--requests 16 --tokens 8)
    say decode_before "$PYTHON" -m tests.bench.bench_decode "${requests[@]}" --vllm-outputs
    say decode "$PYTHON" -m tests.bench.bench_decode "${requests[@]}"
    ;;
2)
    say models "${part[@]}" models "${in_work[@]}"
    for share in 1 0.5 0; do
        say "recomputed_$share" "${part[@]}" speed "${in_work[@]}" --model "$large" --recomputed "$share"
    done
    say kernels "${part[@]}" kernels "${in_work[@]}"
    ;;
3)
    "$PYTHON" data/word_problems.py --out "$OUT/data" --solved
    say models "${part[@]}" models "${in_work[@]}"
    for flags in "--rollout.in-flight 1" "--rollout.in-flight 1.5 --correction.preset decoupled-token-is" "--rollout.drafts 4"; do
        read -ra more <<< "$flags"
        name=$(tr -dc 'a-z0-9.' <<< "$flags")
        say "$name" "$PYTHON" grpo.py --model "$OUT/work/$small" --train-data "$OUT/data/train.parquet" --total-steps 6 \
            --prompts-per-step 8 --samples-per-prompt 8 --data.max-prompt-length 600 --rollout.max-response-length "$length" \
            --reward.function tools/try_script.py:compute_score --reward.num-workers 1 --save.hf never --save.every 0 \
            --run-dir "$OUT/$name" "${vllm[@]}" "${more[@]}"
    done
    if [[ ! $SIZE ]]; then
        say several_ranks "$PYTHON" -m tests.gpu.several_ranks
    fi
    ;;
*)
    echo "usage: tests/gpu/before_after.sh 1|2|3" >&2
    exit 2
    ;;
esac
