#!/usr/bin/env bash
# Ten minutes of one GPU: SmolLM2-135M becomes a diffusion model of Python, and fills lines of code.
#
#   MODEL=SmolLM2-135M-Instruct.Q4_1.gguf DATA=python.jsonl bash studies/gpu_adapt.sh
#
# DATA: from `studies/corpora.py python`. The result, adapters of 20 MB, is the run in $OUT
# (out-smollm2). The last line of the run says what decides: its cross-entropy with up to 10 % masked
# must be well below the decoder's from left to right. Then both fill lines of HumanEval. In the
# environment: SECONDS_OF_TRAINING (420), TASKS (100), FLAGS (more flags of mdlm.py), PYTHON.
set -eu -o pipefail
out=$(realpath -m -- "${OUT:-out-smollm2}")
python=${PYTHON:-python3}
mdlm=$(realpath -- "$(dirname "$0")/..")
read -ra more <<< "${FLAGS:-}"

# Plain text: documents of known lengths take the default's rates, and here half of a text at most is
# hidden, since a missing line is 3 % of it.
text=$out.txt
"$python" - "$DATA" "$text" << 'EOF'
import json, sys
with open(sys.argv[1], encoding="utf-8") as f, open(sys.argv[2], "w", encoding="utf-8") as g:
    for line in f:
        g.write(json.loads(line)["text"].strip("\n").replace("<|", "< |") + "\n\n\n")
EOF
"$python" "$mdlm/mdlm.py" "--init_from=$MODEL" "--data=$text" --block_size=512 --batch_size=32 \
    --lora=32 --rates=0-0.5 "--time_limit=${SECONDS_OF_TRAINING:-420}" "--out_dir=$out" "${more[@]}"
"$python" "$mdlm/studies/infill_code.py" "--out_dir=$out" "--ranker=$MODEL" --dtype=bfloat16 \
    "--tasks=${TASKS:-100}" --contestants=length,search,both "--json=$out/code.json"
