#!/usr/bin/env bash
# Ten minutes of one GPU: SmolLM2-135M becomes a diffusion model of Python, and fills lines of code.
#
#   MODEL=SmolLM2-135M-Instruct.Q4_1.gguf DATA=python.jsonl bash studies/gpu_adapt.sh
#
# DATA: from `studies/corpora.py python`. The result, adapters, is the run in $OUT (out-smollm2). Its
# last line has the gate, necessary but not sufficient: the cross-entropy with up to 10 % masked must
# be well below the decoder's from left to right. Then both models fill the same lines of HumanEval. In
# the environment: SECONDS_OF_TRAINING (360), TASKS (100), FLAGS (more flags of mdlm.py), PYTHON.
set -eu -o pipefail
out=$(realpath -m -- "${OUT:-out-smollm2}")
python=${PYTHON:-python3}
mdlm=$(realpath -- "$(dirname "$0")/..")
read -ra more <<< "${FLAGS:-}"

# Plain text, as a missing line has a whole file around it. "<|" could begin a special token.
text=$out.txt
"$python" - "$DATA" "$text" << 'EOF'
import json, sys
with open(sys.argv[1], encoding="utf-8") as f, open(sys.argv[2], "w", encoding="utf-8") as g:
    for line in f:
        g.write(json.loads(line)["text"].strip("\n").replace("<|", "< |") + "\n\n\n")
EOF
"$python" "$mdlm/mdlm.py" "--init_from=$MODEL" "--data=$text" --block_size=512 --batch_size=32 \
    --lora=32 "--time_limit=${SECONDS_OF_TRAINING:-360}" "--out_dir=$out" "${more[@]}"
lines() {
    "$python" "$mdlm/studies/infill_code.py" --dtype=bfloat16 "--tasks=${TASKS:-100}" "$@"
}
lines "--out_dir=$MODEL" --contestants=greedy,ranked,search "--json=$out/decoder.json"
lines "--out_dir=$out" "--ranker=$MODEL" --contestants=length,search,both "--json=$out/adapted.json"
