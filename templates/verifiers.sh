#!/usr/bin/env bash
# Full-parameter GRPO on an environment of the package verifiers, by its name.
#   MODEL=Qwen/Qwen3-1.7B ENVIRONMENT=reverse-text ARGUMENTS='{}' OUTPUT=output templates/verifiers.sh [flags]
# The environment must be installed, as by `prime env install reverse-text`. Its tasks become OUTPUT/train.jsonl, and
# the rest is agent.sh, whose flags may be overridden.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export VERIFIERS_ENVIRONMENT=${ENVIRONMENT:?set the name of an environment}
export VERIFIERS_ARGUMENTS=${ARGUMENTS:-\{\}} # of its load_environment, as JSON
export OUTPUT=${OUTPUT:-output}
mkdir -p "$OUTPUT"
python "$here/plugins/verifiers_agent.py" "$OUTPUT"

export DATASET=$OUTPUT/train.jsonl
exec "$here/agent.sh" --agent "$here/plugins/verifiers_agent.py:verifiers_agent" "$@"
