#!/usr/bin/env bash
# Makes .venv and installs the tested CPU set and this package into it. Does nothing when that is done already.
#   scripts/setup_venv.sh [--test]      --test also installs what scripts/test.sh needs
#   PYTHON=python3.12                   the interpreter to make .venv with (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

locks=(requirements/cpu.lock)
case "${1:-}" in
    "") ;;
    --test) locks+=(requirements/test.lock) ;;
    *) echo "usage: scripts/setup_venv.sh [--test]" >&2; exit 2 ;;
esac

if [ ! -x .venv/bin/python ]; then
    python=${PYTHON:-}
    if [ -z "$python" ]; then
        for candidate in python3.11 python3.12 python3.13 python3; do
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
    echo "setup_venv: making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)

# changed NAME FILE...: whether the files differ from those that were last installed under this name
changed() {
    wanted=$(cat "${@:2}" | sha256sum)
    [ "$(cat ".venv/$1.stamp" 2>/dev/null)" != "$wanted" ]
}

# install NAME WHAT PIP_ARGUMENT...
install() {
    echo "setup_venv: installing $2 into .venv ..."
    SECONDS=0
    "${pip[@]}" install -qq --no-deps "${@:3}"
    echo "$wanted" > ".venv/$1.stamp"
    echo "setup_venv: installed $2 in ${SECONDS} s"
}

for lock in "${locks[@]}"; do
    name=$(basename "$lock")
    if changed "$name" "$lock"; then
        arguments=(-r "$lock")
        # A machine may offer torch's CPU build itself; otherwise it is on PyTorch's own index.
        torch=$(grep '^torch==' "$lock" || true)
        if [ -n "$torch" ] && ! "${pip[@]}" install --quiet --no-deps --dry-run "$torch" >/dev/null 2>&1; then
            arguments+=(--extra-index-url https://download.pytorch.org/whl/cpu)
        fi
        install "$name" "$(grep -c '^[^#].*==' "$lock") packages of $name" "${arguments[@]}"
    fi
done
# Editable: only a change of the metadata asks for a new installation.
if changed package pyproject.toml swift_megatron_grpo/__init__.py; then
    install package swift-megatron-grpo --no-build-isolation -e .
fi
