#!/usr/bin/env bash
# Makes .venv and installs the tested CPU set and this package into it. Does nothing when that is done already.
#   scripts/setup_venv.sh [--test]      --test also installs what scripts/test.sh needs, and into .stacks the other
#                                       versions of megatron-core that it tests, 20 MB each
#   scripts/setup_venv.sh --recipes     also what templates/plugins/reasoning_task.py needs; --test includes it
#   PYTHON=/path/to/python              the interpreter to make .venv with, 3.11 or newer; without it: 3.12 if there is one
# Python 3.11 gets the same packages as 3.12, those of requirements/cpu.lock. torch is the CPU build where pip finds it,
# otherwise the CUDA build, which works without a GPU and takes 2.5 GB more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

test="" recipes="" installed=""
case "${1:-}" in
    "") ;;
    --test) test=1 recipes=1 ;;
    --recipes) recipes=1 ;;
    *) echo "usage: scripts/setup_venv.sh [--test | --recipes]" >&2; exit 2 ;;
esac

lock=requirements/cpu.lock
core=$(grep '^megatron-core==' "$lock")
if [ ! -x .venv/bin/python ]; then
    python=${PYTHON:-}
    if [ -z "$python" ]; then
        for candidate in python3.12 python3.11 python3.13 python3; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
    fi
    if ! "${python:-false}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "setup_venv: no Python 3.11 or newer found; name one with PYTHON=/path/to/python" >&2
        exit 1
    fi
    "$python" -m venv .venv
    echo "setup_venv: made .venv with $("$python" --version) of $(command -v "$python"); it gets $core of $lock"
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)

# install_core REQUIREMENT FOLDER: on Python 3.11, too. megatron-core 0.17 and newer ask for 3.12 in their metadata. Only
# the helpers of Megatron's own datasets are compiled for it, and nothing here uses them.
install_core() {
    "${pip[@]}" install -qq --no-deps --only-binary=:all: --ignore-requires-python --python-version 3.12 \
        --target "$2" "$1"
}

# changed NAME FILE...: whether the files differ from those that were last installed under this name
changed() {
    wanted=$(cat "${@:2}" | sha256sum)
    [ "$(cat ".venv/$1.stamp" 2>/dev/null)" != "$wanted" ]
}

# install_lock NAME WHAT FILE PIP_ARGUMENT...: pip unpacks and compiles on one core, so two install half of the file each
install_lock() {
    echo "setup_venv: installing $2 into .venv ..."
    SECONDS=0
    local half
    for half in 0 1; do
        grep '^[^#]' "$3" | awk "NR % 2 == $half" > ".venv/half-$half.lock"
    done
    "${pip[@]}" install -qq --no-deps --no-compile -r .venv/half-1.lock "${@:4}" &
    "${pip[@]}" install -qq --no-deps --no-compile -r .venv/half-0.lock "${@:4}" || { kill $!; exit 1; }
    wait $!
    installed=1
    echo "$wanted" > ".venv/$1.stamp"
    echo "setup_venv: installed $2 in ${SECONDS} s"
}

# found PIP_ARGUMENT...: whether pip finds the build of torch that the lock pins
found() {
    "${pip[@]}" install --quiet --no-deps --dry-run --retries 1 "$(grep '^torch==' "$lock")" "$@" >/dev/null 2>&1
}

name=$(basename "$lock")
if changed "$name" "$lock" requirements/cuda.lock; then
    pinned=$lock arguments=()
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    # A machine may offer torch's CPU build itself; otherwise it is on PyTorch's own index.
    if ! found; then
        if found "${index[@]}"; then
            arguments=("${index[@]}")
        else
            echo "setup_venv: pip does not find $(grep '^torch==' "$lock"); installing torch's CUDA build"
            replaced=$(sed -n 's/==.*//p' requirements/cuda.lock | paste -sd '|')
            { grep -vE "^($replaced)==" "$lock"; cat requirements/cuda.lock; } > .venv/with-cuda.lock
            pinned=.venv/with-cuda.lock
        fi
    fi
    if .venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        rm -rf "$packages"/megatron{,_core-*.dist-info} # with --target, pip would skip a folder that is there
        install_core "$core" "$packages"
        grep -v '^megatron-core==' "$pinned" > .venv/without-megatron.lock
        pinned=.venv/without-megatron.lock
    fi
    install_lock "$name" "$(grep -c '^[^#].*==' "$lock") packages of $name" "$pinned" "${arguments[@]}"
fi
if [ -n "$test" ] && changed test.lock requirements/test.lock; then
    install_lock test.lock "$(grep -c '^[^#].*==' requirements/test.lock) packages of test.lock" requirements/test.lock
fi
if [ -n "$test" ] && ! command -v cc >/dev/null; then
    echo "no C compiler, which requirements/recipes.lock needs: the tests of templates/plugins/reasoning_task.py skip"
    recipes=""
fi
if [ -n "$recipes" ] && changed recipes.lock requirements/recipes.lock; then
    install_lock recipes.lock "packages of recipes.lock" requirements/recipes.lock
fi
# Tests import a quarter of these files, and compile what they import.
if [ -n "$installed" ] && [ -z "$test" ]; then
    .venv/bin/python -W ignore -m compileall -qq -j 0 .venv/lib || true # packages have files for other versions of Python, too
fi
# Editable: only a change of the metadata asks for a new installation.
if changed package pyproject.toml swift_megatron_grpo/__init__.py; then
    echo "setup_venv: installing swift-megatron-grpo into .venv ..."
    "${pip[@]}" install -qq --no-deps --no-build-isolation -e .
    echo "$wanted" > .venv/package.stamp
fi

# On PYTHONPATH, such a folder replaces the megatron-core of .venv.
for other in $([ -z "$test" ] || grep -v '^#' requirements/stacks.txt); do
    folder=.stacks/${other/==/-}
    if [ ! -d "$folder" ]; then
        echo "setup_venv: installing $other into $folder"
        rm -rf "$folder.new" # of a run that was ended
        install_core "$other" "$folder.new"
        mv "$folder.new" "$folder"
    fi
done
