#!/usr/bin/env bash
# Run everything that must hold before a change goes in, on two CPU cores and without an accelerator. Cheap stages come
# first; the first stage that fails ends the run.
#   scripts/test.sh                             the stages on the locked packages; of dist and e2e a choice, see --short
#   scripts/test.sh --ci [STAGE...]             all stages or these, also on other versions of megatron-core, without
#                                               tests marked `nightly`: .ci/run, 19 to 25 minutes. On a busy machine one
#                                               test of 7,000 may fail for time: up to three run once more, alone
#   scripts/test.sh --all [STAGE...]            all tests of all stages or of these, as every night
#   scripts/test.sh --quick                     checks, short unit and contract files, one layout, one training run
#   scripts/test.sh STAGE... [pytest arguments] stages: checks docs unit contract dist e2e core-0.19.2 core-0.16.1
#   scripts/test.sh -k packing                  pytest arguments go to every pytest stage
# The stages core-VERSION run a choice of tests on another version of megatron-core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(checks docs unit contract dist e2e core-0.19.2 core-0.16.1)
stages=() quick="" every_stage="" chosen=() # chosen: options of tests/conftest.py
most_again=0 again=()                       # tests that may run once more, and those that have passed so
quick_seconds=8 # of the files that --quick runs, in tests/durations.json
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --all) chosen=() every_stage=1 ;;
        --ci) chosen=(--without-nightly) every_stage=1 most_again=3 ;;
        checks | docs | unit | contract | dist | e2e | core-0.19.2 | core-0.16.1) stages+=("$1") ;;
        *) break ;;
    esac
    shift
done
if [ ${#stages[@]} = 0 ] && [ -n "$every_stage" ]; then
    stages=("${all[@]}")
elif [ ${#stages[@]} = 0 ]; then
    stages=(checks docs unit contract dist e2e) chosen=(--short)
fi
code=(swift_megatron_grpo scripts benchmarks templates tests)

scripts/setup_venv.sh --test
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 MODELSCOPE_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # or every worker and every command would compile all files again
export NO_VCS_VERSION=1 # megatron-core 0.18 and newer would add the commit of this repository to their version
# Xdist's workers are not shown by name, and pytest's own header says nothing new.
pytest=(python -m pytest -q --durations=10)
# Three workers, because tests also wait; four for unit and contract, where a third of the time is waiting. Each is a
# fork that has imported ms-swift, Megatron and vLLM. They take files in the order of tests/durations.json, the longest
# first: scripts/test.sh unit contract dist e2e --store-durations
fork="popen//python=python -m tests.forking.worker"
workers=(--tx "3*$fork" --dist loadfile --no-loadscope-reorder)
workers_that_wait=(--tx "4*$fork" --dist loadfile --no-loadscope-reorder)
one_worker=(--tx "$fork" --dist load)

# Stages on the same packages share the preloaded processes of tests/forking: their imports take 60 CPU seconds.
servers=$(mktemp -d)
trap 'rm -rf "$servers"' EXIT # which ends them
export TESTS_FORK_OWNER=$$
share_servers() { # share_servers NAME_OF_PACKAGES: and end those of other packages
    export TESTS_FORK_SERVERS=$servers/$1
    find "$servers" -mindepth 1 -maxdepth 1 ! -name "$1" -exec rm -r {} +
    mkdir -p "$TESTS_FORK_SERVERS"
}
share_servers locked

# Mypy uses one core for most of `checks`. On the other one, the processes that workers and ranks are forked from import
# packages.
preload() { # preload KIND...
    python -c 'import sys; from tests.forking.client import fork_server; [*map(fork_server, sys.argv[1:])]' "$@" \
        >"$servers/preload.txt" 2>&1 &
}

step() { # step NAME COMMAND...
    echo "== $1"
    local began=$SECONDS status=0
    "${@:2}" || status=$?
    if [ "$status" != 0 ]; then
        echo "== $1 failed after $((SECONDS - began)) s" >&2
        [[ $1 != ruff* ]] || echo "== run scripts/fix, which mends most findings" >&2
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

docs() {
    step "site of docs" env NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
}

tests_of() { # tests_of WORKERS PYTEST_ARGUMENT...: without what is marked `alone` because it measures time
    local core='import importlib.util as u, runpy; [root] = u.find_spec("megatron").submodule_search_locations[:1]
print(runpy.run_path(f"{root}/core/package_info.py")["__version__"])'
    echo "megatron.core $(python -c "$core"), Python $(python -c 'import platform; print(platform.python_version())')"
    run "$1" --alone no "${@:2}"
}

run() { # run WORKERS PYTEST_ARGUMENT...: what fails runs once more on one worker, if it is little
    local -n on=$1
    local status=0 failed=()
    rm -f .pytest_cache/v/cache/lastfailed
    "${pytest[@]}" "${chosen[@]}" "${on[@]}" "${@:2}" || status=$?
    [ "$status" = 1 ] || return "$status"
    mapfile -t failed < <(python -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' \
        <.pytest_cache/v/cache/lastfailed)
    [ ${#failed[@]} -gt 0 ] && [ ${#failed[@]} -le $most_again ] || return 1
    echo "== once more, alone: ${failed[*]}"
    "${pytest[@]}" "${chosen[@]}" "${one_worker[@]}" "${@:2}" --last-failed --last-failed-no-failures none || return 1
    again+=("${failed[@]}")
}

tests() { # tests "FOLDER..." ARGUMENT...: several workers
    local status=0 folders on=workers
    read -ra folders <<<"$1"
    [ "$1" != "unit contract" ] || on=workers_that_wait
    tests_of $on "${folders[@]/#/tests/}" "${@:2}" || status=$?
    # 5: nothing was collected. With arguments that select, a folder may be left empty; without, something is wrong.
    [ "$status" = 5 ] && [ $# -gt 1 ] || return "$status"
}

alone() { # alone "FOLDER..." ARGUMENT...: what measures time, on one worker
    local status=0 folders files # only these files are collected: importing all others takes 10 to 20 s
    read -ra folders <<<"$1"
    mapfile -t files < <(grep -rl --include 'test_*.py' 'mark\.alone' "${folders[@]/#/tests/}")
    [ ${#files[@]} -gt 0 ] || return 0
    run one_worker "${files[@]}" --alone yes "${@:2}" || status=$?
    [ "$status" = 5 ] || return "$status"
}

# What depends on the version of megatron-core: its seams, a choice of layouts, the golden steps, runs of the real
# command, and parity with ms-swift's own trainer. --ci leaves out what `further` has.
seams=(tests/contract/test_{megatron_seam,swift_seam,images_seam,linear_attention,shared_prompts,stock_losses}.py)
units=(tests/unit/platforms tests/unit/training/memory tests/unit/training/upstream_fixes
    tests/unit/training/head/test_logprob.py tests/unit/training/test_trained_weights.py
    tests/unit/training/moe/test_{expert_chunks,router_replay}.py)
layout=tests/dist/test_layouts.py::test_a_layout_matches_one_rank
golden=tests/dist/test_engine_runs.py::test_ten_steps_match_the_golden_file
shapes=tests/dist/test_stage_shapes.py::test_shapes_are_exchanged_in_the_first_pass_alone
replay=tests/dist/test_router_replay.py
replayed="$replay::test_a_given_routing_has_the_same_effect_on_every_layout[lora-tp2+sp]"
numbers=tests/e2e/test_parity.py::test_numbers_match_the_stock_trainer
command=tests/e2e/test_cli.py::test
ranks=("$layout["dense-{lora-tp2+sp,full-tp2+cp2,full-pp2+vpp2+dp2+tokens64}"]"
    "$layout["moe-full-{dp2+ep2+cpu_adam,tp2+sp+etp2}"]" "$golden" "$shapes[2-pp2+vpp2]" "$replayed"
    tests/dist/test_{flat_optimizer,row_dispatch,newer_transformer_engine}.py)
runs=("$numbers" "$command"_{a_pipeline_trains_with_tensor_parallel_vllm,experts_train_in_parallel})
further=("$layout["{dense,moe}-full-tp2+sp"]" "$layout["moe-{lora-tp2+sp,full-dp2+ep2}"]"
    "$layout["dense-full-{pp2+vpp2,cp2,dp2+overlap}"]" tests/dist/test_engine_runs.py
    "$shapes[2-pp2]" "$replay::test_a_recorded_pass_is_replayed_bit_by_bit[lora-recompute]"
    "$command"_lora_trains_with_data_parallelism tests/e2e/test_parity.py)

other_core() { # other_core VERSION PYTEST_ARGUMENT...
    local -x PYTHONPATH="$PWD/.stacks/megatron-core-$1${PYTHONPATH:+:$PYTHONPATH}"
    local more=()
    [ ${#chosen[@]} -gt 0 ] || more=("${further[@]}")
    share_servers "$1"
    preload upstream trainer # tests/dist would wait for the second, with one core idle
    tests_of workers "${seams[@]}" "${units[@]}" "${ranks[@]}" "${runs[@]}" "${more[@]}" "${@:2}"
}

if [ -n "$quick" ]; then
    preload upstream trainer # for tests/dist
    checks
    step "pytest" "${pytest[@]}" tests/unit tests/contract \
        "tests/dist/test_layouts.py::test_a_layout_matches_one_rank[dense-full-tp2+sp+recompute]" \
        tests/e2e/test_cli.py::test_lora_trains_with_data_parallelism --longest-file $quick_seconds --alone no \
        --without-nightly "${workers[@]}" "$@"
    exit
fi
if [ "${stages[0]}" = checks ] && [ ${#stages[@]} -gt 1 ]; then
    case " ${stages[*]} " in
        *" e2e "*) preload upstream trainer rollout ;;
        *" dist "*) preload upstream trainer ;;
        *) preload upstream ;;
    esac
fi
# Two neighbours run as one: a start of three workers takes 10 s, and the last files of a stage leave workers idle.
joined=" ${stages[*]} "
joined=${joined/ unit contract / unit+contract }
joined=${joined/ dist e2e / dist+e2e }
read -ra stages <<<"$joined"
folders=()
for stage in "${stages[@]}"; do
    case $stage in
        checks | docs | core-*) ;;
        *) folders+=("${stage/+/ }") ;;
    esac
done
for stage in "${stages[@]}"; do
    case $stage in
        checks) checks ;;
        docs) docs ;;
        core-*) step "pytest on megatron-core ${stage#core-}" other_core "${stage#core-}" "$@" ;;
        *)
            step "pytest tests/${stage/+/ tests/}" tests "${stage/+/ }" "$@"
            if [ "${stage/+/ }" = "${folders[-1]}" ]; then
                step "pytest, one test at a time" alone "${folders[*]}" "$@"
            fi
            ;;
    esac
done
for test in "${again[@]}"; do
    echo "== failed, and passed alone: $test"
done
