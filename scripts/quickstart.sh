#!/usr/bin/env bash
# Install everything and train a tiny random model until its reward has doubled, on two CPU cores. No model is
# downloaded.
#   scripts/quickstart.sh
#   RUN=folder   folder for the model, the dataset, the log and the output (default: runs/quickstart)
set -euo pipefail
run=runs/quickstart
if [ -n "${RUN:-}" ]; then
    mkdir -p "$RUN"
    run=$(cd "$RUN" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh
PATH="$PWD/.venv/bin:$PATH"

rm -rf "$run/output" # ms-swift would append to the log of the last quickstart
python scripts/make_tiny_model.py --out "$run/model"
python scripts/make_dataset.py --out "$run/data.jsonl" --rows 64 --seed 0
echo "quickstart: training, about two minutes; the complete log is $run/train.log"
status=0
MODEL="$run/model" DATASET="$run/data.jsonl" OUTPUT="$run/output" NPROC_PER_NODE=2 \
    templates/cpu_quickstart.sh > "$run/train.log" 2>&1 || status=$?
if [ "$status" != 0 ]; then
    tail -n 40 "$run/train.log" >&2
    echo "quickstart: training failed with exit code $status; the complete log is $run/train.log" >&2
    exit "$status"
fi
python scripts/summarize_run.py "$run/output" --min-gain 2
