#!/usr/bin/env bash
# Run everything that must hold before a change goes in, on two CPU cores and without an accelerator. Cheap stages come
# first; the first stage that fails ends the run.
#   scripts/test.sh                             all stages
#   scripts/test.sh --quick                     checks, unit, contract, one layout, one run of the real command
#   scripts/test.sh STAGE... [pytest arguments] stages: checks unit contract dist e2e
#   scripts/test.sh -k packing                  pytest arguments go to every pytest stage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(checks unit contract dist e2e)
stages=() quick=""
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        checks | unit | contract | dist | e2e) stages+=("$1") ;;
        *) break ;;
    esac
    shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
code=(swift_megatron_grpo scripts benchmarks templates tests)

scripts/setup_venv.sh --test
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 MODELSCOPE_OFFLINE=1
# Xdist's workers are not shown by name, and pytest's own header says nothing new.
pytest=(python -m pytest -q --durations=10)

step() { # step NAME COMMAND...
    echo "== $1"
    local began=$SECONDS status=0
    "${@:2}" || status=$?
    if [ "$status" != 0 ]; then
        echo "== $1 failed after $((SECONDS - began)) s" >&2
        exit "$status"
    fi
    echo "== $1 passed in $((SECONDS - began)) s"
}

checks() {
    step "ruff check" ruff check "${code[@]}"
    step "ruff format" ruff format --check "${code[@]}"
    step "mypy" mypy
    step "import contracts" lint-imports
}

tests() { # tests FOLDER ARGUMENT...: two workers, then without workers what is marked `alone` because it measures time
    local status=0
    "${pytest[@]}" "tests/$1" --alone no -n 2 --dist loadfile "${@:2}" || status=$?
    # 5: nothing was collected. With arguments that select, a folder may be left empty; without, something is wrong.
    if [ "$status" = 5 ] && [ $# -gt 1 ]; then status=0; fi
    [ "$status" = 0 ] || return "$status"
    "${pytest[@]}" "tests/$1" --alone yes "${@:2}" || status=$?
    [ "$status" = 5 ] || return "$status" # not every folder has tests that measure time
}

if [ -n "$quick" ]; then
    checks
    step "pytest" "${pytest[@]}" tests/unit tests/contract \
        "tests/dist/test_layouts.py::test_a_layout_matches_one_rank[dense-full-tp2+sp]" \
        tests/e2e/test_cli.py::test_full_tuning_trains_with_tensor_and_sequence_parallelism --alone no -n 2 --dist loadfile "$@"
    exit
fi
for stage in "${stages[@]}"; do
    if [ "$stage" = checks ]; then
        checks
    else
        step "pytest tests/$stage" tests "$stage" "$@"
    fi
done
