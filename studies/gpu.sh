#!/usr/bin/env bash
# Everything that needs a GPU, in one call of about eight minutes, without a network:
#
#   bash studies/gpu.sh                                  # tables, JSON and logs go to results/
#   OUT=/tmp/out TEXT=my.txt bash studies/gpu.sh         # to another folder; train on this text
#   NANOGPT=../nanoGPT TEXT=my.txt bash studies/gpu.sh   # also time training steps of nanoGPT
#
# It runs the tests of the kernels, compares training with Triton and with PyTorch, and runs bench.py
# kernels and bench.py train; then, while there is time, other seeds and nanoGPT. Each part has a
# time limit, and a part that fails does not stop the others; the exit code says whether all passed.
# PARTS="train nanogpt" runs only these parts (a single one gets all the time), of: tests alike
# kernels train seeds nanogpt. LIMIT=580: seconds for all.
set -u
if [ $# -gt 0 ]; then
    echo "gpu.sh takes no arguments, but: PARTS, LIMIT, OUT, TEXT, NANOGPT, PYTHON in the environment" >&2
    exit 2
fi
PARTS=${PARTS:-}
out=$(realpath -m -- "${OUT:-$(dirname "$0")/../results}")
text=${TEXT:+$(realpath -m -- "$TEXT")}
nanogpt=${NANOGPT:+$(realpath -m -- "$NANOGPT")}
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
if [ -n "$nanogpt" ] && [ -z "$text" ]; then
    echo "NANOGPT needs a text to train on: give TEXT=my.txt too" >&2
    exit 2
fi
pytest=("$python" -m pytest -q -o addopts= -m "not slow" -p no:cacheprovider)  # without xdist
failed=0
mkdir -p "$out" || exit 1
export PYTHONUNBUFFERED=1 MDLM_GPU_TEXT=$text

"$python" - <<'EOF' || exit 1
import importlib.util, os, shutil, sys
need = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tqdm", "pytest")
peers = ("matplotlib", "liger_kernel", "cut_cross_entropy")
missing = lambda names: [n for n in names if importlib.util.find_spec(n) is None]
if missing(peers):
    print("not installed, so not compared or drawn:", ", ".join(missing(peers)))
if missing(need):
    sys.exit("missing: " + ", ".join(missing(need)) + "; pip install -r requirements.txt")
if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
    sys.exit("missing: a C compiler, with which Triton builds its launchers; install gcc, or name one in CC")
import torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing to measure")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
EOF

left() {  # seconds, at least 1
    local left=$((${LIMIT:-480} - SECONDS))
    echo $((left < 1 ? 1 : left))
}

within() {  # seconds: these, or what is left if that is less; a single part gets all that is left
    local left
    left=$(left)
    [[ "$PARTS" =~ ^[a-z]+$ ]] && echo "$left" || echo $((left < $1 ? left : $1))
}

limited() {  # seconds, command: interrupted at its limit, so that it can still write a summary
    timeout -s INT -k 10 "$@" 2>&1
}

ended() {  # name, exit code, second at which it began
    echo "== $1: exit code $2 after $((SECONDS - $3)) s$([ "$2" = 124 ] && echo ', stopped at its limit')"
    [ "$2" = 0 ] || failed=1
}

part() {  # name, seconds, command: run it, keep its output, show the end of it
    local name=$1 limit=$2 code=0 start=$SECONDS
    shift 2
    echo "== $name: $*"
    limited "$limit" "$@" >"$out/gpu_$name.md" || code=$?
    tail -n 60 "$out/gpu_$name.md"
    ended "$name" $code "$start"
}

tests() {  # seconds: a process for each file of tests, all at once: they mostly compile
    local limit=$1 start=$SECONDS logs name code
    local -A running
    logs=$(mktemp -d) || exit 1
    for path in tests/kernels_cases/*_cases.py; do
        name=$(basename "$path" _cases.py)
        limited "$limit" "${pytest[@]}" "$path" >"$logs/$name" &
        running[$name]=$!
    done
    for name in "${!running[@]}"; do
        code=0
        wait "${running[$name]}" || code=$?
        ended "$name" $code "$start" >>"$logs/$name"
        tail -n 20 "$logs/$name"
    done
    cat "$logs"/* >"$out/gpu_tests.md"
    rm -r "$logs"
}

wanted() {  # part: whether PARTS includes it
    [[ -z "$PARTS" || " $PARTS " == *" $1 "* ]]
}

late() {  # seconds, part: whether it is too late to begin it, which is not a failure
    [ "$(left)" -ge "$1" ] || { echo "== $2: not begun: the time is up"; return 0; }
    return 1
}

alike=tests/test_gpu.py::test_final_nelbo_agrees
wanted tests && tests "$(within 200)"
if wanted alike; then
    part alike "$(within 80)" "${pytest[@]}" -s tests/test_gpu.py \
        --deselect="$alike[1]" --deselect="$alike[2]"
fi
if wanted kernels; then
    limit=$(within 110)
    begin=$((limit > 35 ? limit - 35 : 1))  # the last case takes that long to compile and time
    part kernels "$limit" "$python" bench.py kernels --time_limit="$begin" --seconds=0.1 \
        --json="$out/gpu_kernels.json"
fi
if wanted train; then
    limit=$(within 165)
    begin=$((limit > 45 ? limit - 45 : 1))
    part train "$limit" "$python" bench.py train --time_limit="$begin" --seconds=1.5 \
        --json="$out/gpu_train.json"
fi
if wanted seeds && ! late 30 seeds; then
    part seeds "$(within 80)" "${pytest[@]}" -s "$alike[1]" "$alike[2]"
fi
if wanted nanogpt && [ -n "$nanogpt" ] && ! late 90 nanogpt; then
    limit=$(within 200)
    part nanogpt "$limit" "$python" -m studies.nanogpt --nanogpt="$nanogpt" \
        --data="$text" --seconds=3 --time_limit="$((limit - 40))" \
        --json="$out/gpu_nanogpt.json"
fi
exit $failed
