"""Write a conversion as a shell script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from swift_megatron_grpo.cli.convert.tables import Conversion

FIRST = ["rlhf_type", "model", "tuner_type", "dataset", "val_dataset", "reward_funcs"]


def script_of(conversion: Conversion, trainer: str, source: str) -> str:
    """Return the script. What could not be converted is in its comments."""
    flags = {"rlhf_type": "grpo", **conversion.flags}
    flags.setdefault("vllm_mode", "colocate")
    order = sorted(flags, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    command = " \\\n    ".join(["megatron rlhf", *(f"--{name} {_quoted(flags[name])}" for name in order)])
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(conversion.environment.items())]
    lines = [
        "#!/usr/bin/env bash",
        f"# Converted from the settings of {trainer} in {source}. Counts of completions, not of prompts.",
        *_comments("To decide by hand:", conversion.by_hand),
        *_comments("No counterpart; the run differs without them:", conversion.unknown),
        *_comments("Not needed:", conversion.needless),
        "set -euo pipefail",
        *exports,
        command + ' "$@"',  # so that `bash run.sh --check true` does not start the training
    ]
    return "\n".join(lines) + "\n"


def _comments(title: str, settings: Mapping[str, str]) -> list[str]:
    one_line = {key: " ".join(value.split()) for key, value in settings.items()}
    return [f"# {title}", *(f"#   {key}: {value}" for key, value in one_line.items())] if settings else []


def _quoted(value: str) -> str:
    """Quote each word of a value: a flag may have several."""
    return " ".join(map(shlex.quote, value.split(" "))) if value else "''"
