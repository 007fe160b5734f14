#!/usr/bin/env bash
# Everything that must hold before a change goes in, on two CPU cores and without an accelerator. The cheap stages come
# first and the first that fails ends it.
#   scripts/test.sh [pytest arguments]     for example -k packing; they go to every pytest stage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh --test
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 MODELSCOPE_OFFLINE=1

stage() { # stage NAME COMMAND...
    echo "== $1"
    local began=$SECONDS status=0
    "${@:2}" || status=$?
    if [ "$status" != 0 ]; then
        echo "== $1 failed after $((SECONDS - began)) s" >&2
        exit "$status"
    fi
    echo "== $1 passed in $((SECONDS - began)) s"
}
tests() { # tests FOLDER ARGUMENT...
    # The ranks of tests/dist are started by the first test that asks for them, and take both cores.
    local status=0 workers=(-n 2 --dist loadfile)
    [ "$1" != dist ] || workers=()
    python -m pytest "tests/$1" --durations=10 --alone no "${workers[@]}" "${@:2}" || status=$?
    # 5: nothing was collected. With arguments that select, a folder may be left empty; without, something is wrong.
    if [ "$status" = 5 ] && [ $# -gt 1 ]; then status=0; fi
    [ "$status" = 0 ] || return "$status"
    python -m pytest "tests/$1" --durations=10 --alone yes "${@:2}" || status=$?
    [ "$status" = 5 ] || return "$status" # not every folder has tests that measure time
}
code=(swift_megatron_grpo scripts benchmarks templates tests)

stage "ruff check" ruff check "${code[@]}"
stage "ruff format" ruff format --check "${code[@]}"
stage "mypy" mypy
stage "import walls" lint-imports
for tests in unit contract dist e2e; do
    stage "pytest tests/$tests" tests "$tests" "$@"
done
