#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than eight minutes, without a network:
#
#   bash results/gpu.sh                  # tables, JSON and logs go to results/
#   OUT=/tmp/out TEXT=my.txt bash results/gpu.sh      # to another folder; training on a text of one's own
#
# Tests of the kernels, bench.py kernels, bench.py train, and whether Triton and PyTorch train alike. Each part
# has its own time limit, and one that fails does not stop the others; the exit code says whether all passed.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-results}
python=${PYTHON:-python3}
failed=0
mkdir -p "$out" || exit 1
export PYTHONUNBUFFERED=1 MDLM_GPU_TEXT=${TEXT:-}

"$python" - <<'EOF' || exit 1
import importlib.util, sys
need = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tqdm", "pytest")
peers = ("matplotlib", "liger_kernel", "cut_cross_entropy")
missing = lambda names: [n for n in names if importlib.util.find_spec(n) is None]
if missing(peers):
    print("not installed, so not compared or drawn:", ", ".join(missing(peers)))
if missing(need):
    sys.exit("missing: " + ", ".join(missing(need)) + "; pip install -r requirements.txt")
import torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing to measure here")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
EOF

part() {  # name, seconds, command: run it, keep its output, show its end
    local name=$1 limit=$2 code=0 start=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout -k 5 "$limit" "$@" >"$out/gpu_$name.md" 2>&1 || code=$?
    tail -n 60 "$out/gpu_$name.md"
    echo "== $name: exit code $code after $((SECONDS - start)) s$([ $code = 124 ] && echo ', stopped at its limit')"
    [ $code = 0 ] || failed=1
}

part tests 100 "$python" -m pytest -p no:cacheprovider tests/kernels_cases/*_cases.py
part alike 80 "$python" -m pytest -p no:cacheprovider -s tests/test_gpu.py
part kernels 120 "$python" bench.py kernels --time_limit=100 --seconds=0.1 --json="$out/gpu_kernels.json"
part train 165 "$python" bench.py train --time_limit=110 --seconds=1.5 --json="$out/gpu_train.json"
exit $failed
