#!/usr/bin/env bash
# What needs a GPU, in calls of less than ten minutes each, without a network:
#
#   TEXT=my.txt NANOGPT=../nanoGPT bash studies/gpu.sh     # 1. figures, the most telling first
#   PARTS=tests bash studies/gpu.sh                        # 2. every test of the kernels
#   PARTS=large bash studies/gpu.sh                        # 3. 124 M parameters
#   PARTS=record TEXT=my.txt bash studies/gpu.sh           # 4. the gpu preset, seeds 0, 1, 2
#   PARTS=shards bash studies/gpu.sh                       # 5. --shard on all GPUs, or on one
#
# PARTS: of the first call smoke train profile whole nanogpt tiles ops alike; the others alone.
# smoke: whether the kernels compute what float64 computes; if not, nothing else is run. While it
# runs, what is timed later is compiled. whole: all of a training on TEXT; its log is gpu_whole.jsonl.
# NANOGPT: a clone of github.com/karpathy/nanoGPT in which data/shakespeare_char/prepare.py has run;
# its own train.py then says how long a step of the same size takes (16,384 tokens).
# OUT: folder of the results (results/). LIMIT: seconds for all (580). PYTHON: the interpreter.
# A part has a time limit of its own, a single part gets all the time, and one that fails does not
# stop the others; the exit code says whether all passed. What was printed is $OUT/gpu.md.
set -u -o pipefail
if [ $# -gt 0 ]; then
    echo "gpu.sh takes no arguments, but: PARTS, LIMIT, OUT, TEXT, NANOGPT, PYTHON in the environment" >&2
    exit 2
fi
first="smoke train profile whole nanogpt tiles ops alike"
PARTS=${PARTS:-$first}
if [ -z "${PARTS// /}" ]; then
    echo "PARTS names no part; give some of: $first tests large record shards" >&2
    exit 2
fi
for name in $PARTS; do
    [[ " $first tests large record shards " == *" $name "* ]] && continue
    echo "there is no part $name; give some of: $first tests large record shards" >&2
    exit 2
done
out=$(realpath -m -- "${OUT:-$(dirname "$0")/../results}")
text=${TEXT:+$(realpath -m -- "$TEXT")}
nanogpt=${NANOGPT:+$(realpath -m -- "$NANOGPT")}
cd "$(dirname "$0")/.." || exit 1
python=$(realpath -s -- "$(command -v "${PYTHON:-python3}")") || exit 1
failed=0
mkdir -p "$out" || exit 1
export PYTHONUNBUFFERED=1 MDLM_GPU_TEXT=$text

"$python" - <<'EOF' | tee -a "$out/gpu.md" || exit 1
import importlib.util, os, shutil, sys
need = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tqdm", "pytest", "xdist")
peers = ("matplotlib", "liger_kernel", "cut_cross_entropy")
missing = lambda names: [n for n in names if importlib.util.find_spec(n) is None]
if missing(peers):
    print("not installed, so not compared or drawn:", ", ".join(missing(peers)))
if missing(need):
    sys.exit("missing: " + ", ".join(missing(need)) + "; pip install -r requirements-dev.txt")
if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
    sys.exit("missing: a C compiler, with which Triton builds its launchers; install gcc, or name one in CC")
import torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing to measure")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
EOF

part() {  # name, seconds, command: run it within them and what is left of LIMIT; keep its output
    local name=$1 limit=$2 left=$((${LIMIT:-580} - SECONDS)) code start=$SECONDS
    shift 2
    [[ " $PARTS " == *" $name "* ]] || return 0
    [ "$PARTS" = "$name" ] && limit=$left
    limit=$((left < limit ? left : limit))
    if [ "$limit" -lt 10 ]; then
        echo "== $name: not begun: the time is up" | tee -a "$out/gpu.md"
        failed=1
        return
    fi
    # Interrupted at its limit, a program can still say what it has. No case begins near the end:
    # it takes half a minute to compile, and those that are compiled are then timed in turn.
    set -- "${@//=LATEST/=$((limit > 90 ? limit - 45 : limit / 2))}"
    echo "== $name: $*" | tee -a "$out/gpu.md"
    timeout -s INT -k 10 "$limit" "$@" 2>&1 | tee -a "$out/gpu.md"
    code=${PIPESTATUS[0]}
    echo "== $name: exit code $code after $((SECONDS - start)) s" | tee -a "$out/gpu.md"
    [ "$code" = 0 ] || failed=1
}

bench() {  # name, seconds, arguments of bench.py
    part "$1" "$2" "$python" bench.py "${@:3}" --time_limit=LATEST --json="$out/gpu_$1.json"
}

pytest=("$python" -m pytest -q -m "not slow" -p no:cacheprovider -o addopts=)
alike=tests/test_gpu.py::test_final_nelbo_agrees

if [[ " $PARTS " == *" smoke "* ]]; then
    # Compiled in the meantime, to be found in the cache by the parts that time it.
    quiet=(--seconds=0 --time_limit=90)
    [[ " $PARTS " == *" train "* ]] && "$python" bench.py train --preset=gpu "${quiet[@]}" >"$out/warm_train" 2>&1 &
    [[ " $PARTS " == *" tiles "* ]] && "$python" studies/tiles.py --compile >"$out/warm_tiles" 2>&1 &
    part smoke 150 "$python" studies/smoke.py
    wait
    rm -f "$out"/warm_*
    if [ "$failed" != 0 ]; then
        echo "smoke has failed, or had no time to end: nothing else is run" | tee -a "$out/gpu.md"
        exit 1
    fi
fi
bench train 80 train --preset=gpu --seconds=1
bench profile 50 profile --preset=gpu
if [[ " $PARTS " == *" whole "* ]]; then
    rm -rf out-whole
    part whole 110 "$python" mdlm.py --preset=gpu --data="${text:-pydoc}" --eval_interval=250 --out_dir=out-whole
    [ ! -e out-whole/log.jsonl ] || cp out-whole/log.jsonl "$out/gpu_whole.jsonl"
fi
# With a line of the log a step, its times are of whole steps. The last ones count: the first compile.
[ -z "$nanogpt" ] || part nanogpt 60 env -C "$nanogpt" "$python" train.py config/train_shakespeare_char.py \
    --max_iters=200 --log_interval=1 --eval_interval=1000 --eval_iters=1 --out_dir=/tmp/nanogpt
part tiles 60 "$python" studies/tiles.py --time
bench ops 70 kernels --seconds=0.1  # those of the preset come first
part alike 70 "${pytest[@]}" -s tests/test_gpu.py -k "not shards" --deselect="$alike[1]" --deselect="$alike[2]"
bench large 570 train --preset=gpt2
part shards 570 "${pytest[@]}" -s tests/test_gpu.py -k shards
part tests 570 "${pytest[@]}" -n 8 tests/kernels_cases/*_cases.py
part record 570 env OUT=out-record bash studies/record.sh --data="${text:-shakespeare}" --preset=gpu
if [[ " $PARTS " == *" record "* && "$failed" = 0 ]]; then
    cp out-record/record.txt out-record/compare.png "$out" || failed=1
    for seed in 0 1 2; do
        cp "out-record/seed$seed/log.jsonl" "$out/gpu_seed$seed.jsonl" || failed=1
    done
fi
exit $failed
