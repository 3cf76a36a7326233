#!/usr/bin/env bash
# What needs a GPU, in calls of less than ten minutes each, without a network:
#
#   TEXT=my.txt bash studies/gpu.sh                        # 1. what decides most, in that order
#   PARTS="train whole nanogpt tiles ops alike" TEXT=my.txt NANOGPT=../nanoGPT bash studies/gpu.sh
#   PARTS=tests bash studies/gpu.sh                        # every test of the kernels
#   PARTS=record TEXT=my.txt bash studies/gpu.sh           # the gpu preset, seeds 0, 1, 2
#   PARTS=large, PARTS=shards                              # all of gpt2; --shard on all GPUs, or on one
#   REHEARSAL=1 bash studies/gpu.sh                        # without a GPU: tiny sizes, no times
#
# The first call asks (seconds on an H100, estimated, behind each part below): do the kernels compute
# what float64 computes (smoke; if not, nothing else is run), what takes the time of a step (profile),
# do the kernels that wait for it help (residual, relu2, backward, muon; those that do become the default), is
# torch.compile needed (step), where do a run's other seconds go (start), what does sampling cost
# (generate), how fast is PyTorch at its best (baselines), what do networks of others cost
# (pretrained), what does our attention gain there (grouped), 124 M parameters (gpt2), are steps the
# same when repeated (repeat), is what triton 3.7.1 makes right (cubins; first `studies/cubins.py
# make`), and peers for as long as there is time (liger-kernel and cut-cross-entropy). While smoke runs, what is timed later is compiled.
# whole: all of a training on TEXT; its log is gpu_whole.jsonl. NANOGPT: a clone of
# github.com/karpathy/nanoGPT in which data/shakespeare_char/prepare.py has run.
# OUT: folder of the results (results/). LIMIT: seconds for all (580). PYTHON: the interpreter.
# CACHES: folder of the compilers' caches (build/gpu_caches).
# Each part prints what it has as it ends, and depends on no other. It has a time limit, a single part
# gets all the time, and one that fails does not stop the others; the exit code says whether all passed.
# At the end stands which parts were left out. What was printed is $OUT/gpu.md.
set -u -o pipefail
if [ $# -gt 0 ]; then
    echo "gpu.sh takes no arguments, but: PARTS, LIMIT, OUT, TEXT, NANOGPT, PYTHON, CACHES, REHEARSAL in the environment" >&2
    exit 2
fi
first="smoke profile residual relu2 backward muon step start generate baselines pretrained grouped gpt2 repeat cubins peers"
others="train whole nanogpt tiles ops alike large tests record shards"
PARTS=${PARTS:-$first}
if [ -z "${PARTS// /}" ]; then
    echo "PARTS names no part; give some of: $first $others" >&2
    exit 2
fi
for name in $PARTS; do
    [[ " $first $others " == *" $name "* ]] && continue
    echo "there is no part $name; give some of: $first $others" >&2
    exit 2
done
out=$(realpath -m -- "${OUT:-$(dirname "$0")/../results}")
text=${TEXT:+$(realpath -m -- "$TEXT")}
nanogpt=${NANOGPT:+$(realpath -m -- "$NANOGPT")}
rehearsal=${REHEARSAL:-}
cd "$(dirname "$0")/.." || exit 1
python=$(realpath -s -- "$(command -v "${PYTHON:-python3}")") || exit 1
caches=$(realpath -m -- "${CACHES:-build/gpu_caches}")
failed=0
left_out=""
mkdir -p "$out" || exit 1
export PYTHONUNBUFFERED=1 MDLM_GPU_TEXT=$text
[ -z "$rehearsal" ] || export MDLM_TRITON=1  # the emulator executes the prototypes
export TRITON_CACHE_DIR=$caches/triton TORCHINDUCTOR_CACHE_DIR=$caches/inductor

REHEARSAL=$rehearsal "$python" - <<'EOF' | tee -a "$out/gpu.md" || exit 1
import importlib.util, os, shutil, sys
need = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tqdm", "pytest", "xdist")
peers = ("matplotlib", "transformers", "liger_kernel", "cut_cross_entropy")
missing = lambda names: [n for n in names if importlib.util.find_spec(n) is None]
if missing(peers):
    print("not installed, so not compared or drawn:", ", ".join(missing(peers)))
if missing(need):
    sys.exit("missing: " + ", ".join(missing(need)) + "; pip install -r requirements-dev.txt")
if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
    sys.exit("missing: a C compiler, with which Triton builds its launchers; install gcc, or name one in CC")
import torch
if os.environ["REHEARSAL"]:
    print("a rehearsal, without a GPU: sizes are tiny, and no time means anything")
elif not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing to measure (REHEARSAL=1 tries each part on the CPU)")
else:
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
        left_out+=" $name"
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
    if [ "$code" = 2 ] && [ -n "$rehearsal" ]; then  # it has said that it needs a CUDA device
        left_out+=" $name"
    elif [ "$code" != 0 ]; then
        failed=1
    fi
}

bench() {  # name, seconds, arguments of bench.py
    part "$1" "$2" "$python" bench.py "${@:3}" --time_limit=LATEST --json="$out/gpu_$1.json"
}

ask() {  # name, seconds: a part of studies/gpu.py
    part "$1" "$2" "$python" studies/gpu.py "$1" --time_limit=LATEST --json="$out/gpu_$1.json" "${@:3}"
}

pytest=("$python" -m pytest -q -m "not slow and not long" -p no:cacheprovider -o addopts=)
alike=tests/test_gpu.py::test_final_nelbo_agrees

if [[ " $PARTS " == *" smoke "* ]]; then
    # Compiled in the meantime, to be found in the cache by the parts that time it.
    for name in step gpt2; do
        [[ " $PARTS " == *" $name "* && -z "$rehearsal" ]] || continue
        timeout -s INT 100 "$python" studies/gpu.py $name --seconds=0 >"$out/warm_$name" 2>&1 &
    done
    [[ " $PARTS " == *" tiles "* ]] && "$python" studies/tiles.py --compile >"$out/warm_tiles" 2>&1 &
    part smoke 150 env ${rehearsal:+TRITON_INTERPRET=1} "$python" studies/smoke.py  # 60
    wait
    rm -f "$out"/warm_*
    if [ "$failed" != 0 ]; then
        echo "smoke has failed, or had no time to end: nothing else is run" | tee -a "$out/gpu.md"
        exit 1
    fi
fi
bench profile 50 profile --preset=gpu                    # 15
part residual 40 "$python" studies/residual.py           # 20
part relu2 60 "$python" studies/relu2.py                 # 40
part backward 60 "$python" studies/fused_backward.py     # 35
part muon 60 "$python" studies/newton_schulz.py          # 40
ask step 60 --seconds=1                                  # 30
ask start 120                                            # 80
ask generate 100 --seconds=0.1                           # 70
ask baselines 120 --seconds=0.2                          # 90
ask pretrained 75                                        # 50
ask grouped 90                                           # 60
ask gpt2 90 --seconds=1                                  # 45
ask repeat 75                                            # 40
part cubins 60 "$python" studies/cubins.py run           # 20
bench peers 200 kernels --seconds=0.1 --only=head        # what is left
bench train 100 train --preset=gpu --seconds=1
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
[ -z "$left_out" ] || echo "== left out:$left_out" | tee -a "$out/gpu.md"
exit $failed
