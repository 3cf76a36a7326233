#!/usr/bin/env bash
# Measure a recipe: seeds 0, 1, 2 and the autoregressive twin, with exact likelihoods.
#
#   bash studies/record.sh --data=tinyshakespeare.txt --preset=gpu      # any flags of mdlm.py
#
# Each run has a folder in $OUT (out-record). Give the same command again to go on: a run that was cut
# off is resumed, a finished one is left alone. The table is $OUT/record.txt, the curves compare.png.
set -eu -o pipefail
out=$(realpath -m -- "${OUT:-out-record}")
python=${PYTHON:-python3}
mdlm=$(realpath -- "$(dirname "$0")/..")
windows=${WINDOWS:-64}  # of the exact likelihood

for run in seed0 seed1 seed2 ar; do
    if [ -e "$out/$run/latest" ]; then
        flags=(--resume)
    elif [ "$run" = ar ]; then
        flags=()  # without those of masks
        for flag in "$@"; do
            [[ $flag =~ ^--(rate|mask|loss_weight|min_rate|max_rate) ]] || flags+=("$flag")
        done
        flags+=(--objective=ar)
    else
        flags=("$@" "--seed=${run#seed}")
    fi
    mkdir -p "$out"
    echo "== $run: ${flags[*]}"
    "$python" "$mdlm/mdlm.py" "${flags[@]}" "--out_dir=$out/$run"
    [ -s "$out/$run/exact.txt" ] ||
        "$python" "$mdlm/eval.py" "--out_dir=$out/$run" --exact "--windows=$windows" --pictures=none \
            > "$out/$run/exact.txt"
    cat "$out/$run/exact.txt"
done
"$python" "$mdlm/eval.py" "--compare=$out/seed0,$out/seed1,$out/seed2,$out/ar" "--pictures=$out" | tee "$out/record.txt"
