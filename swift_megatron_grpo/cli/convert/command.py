"""Convert the settings of verl, siiRL, slime or ROLL to a script for `megatron rlhf --rlhf_type grpo`.

swift-megatron-grpo convert run_qwen3-8b.sh > run.sh
swift-megatron-grpo convert rlvr_config.yaml
swift-megatron-grpo convert ppo_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B

The script is printed. Its comments, and standard error, list every key that has no counterpart and every setting that
needs a decision; none is dropped.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from swift_megatron_grpo.cli.check_script.shell import Shell
from swift_megatron_grpo.cli.check_script.stand_ins import read_flags
from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.cli.convert.tables import COMPUTED, Conversion, Table, convert
from swift_megatron_grpo.cli.convert.trainers import ROLL, SLIME, VERL

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_OVERRIDE = re.compile(r"\+{0,2}([a-zA-Z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
_TRAINER = re.compile(r"(^|/)train\w*\.py$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
FIRST = ["rlhf_type", "model", "tuner_type", "dataset", "val_dataset", "reward_funcs"]
TABLES = {"verl": VERL, "siirl": VERL, "roll": ROLL, "slime": SLIME}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="shell script or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings in addition to the file's")
    parser.add_argument("--trainer", choices=TABLES, help="whose settings these are; default: found by their keys")


def run(options: argparse.Namespace) -> int:
    file: Path = options.file
    if not file.is_file():
        raise Refused(f"{file} is not a file")
    settings = read_settings(file, options.overrides, os.environ)
    table = TABLES[options.trainer] if options.trainer else table_of(settings)
    if table is None:
        raise Refused(
            f"{file} has none of the keys of verl, siiRL, ROLL or slime; name the trainer with --trainer, or give the "
            "file that has the settings"
        )
    conversion = convert(settings, table)
    sys.stdout.write(script_of(conversion, table.name, file.name))
    print(
        f"{len(conversion.flags)} flags; {len(conversion.by_hand)} settings to decide by hand, "
        f"{len(conversion.unknown)} without a counterpart, {len(conversion.needless)} not needed: see the comments at "
        "the top of the script",
        file=sys.stderr,
    )
    return FINE


def table_of(settings: Mapping[str, Any]) -> Table | None:
    """Return the table of the trainer that has such keys; None if there is none."""
    return next((table for table in TABLES.values() if any(key.startswith(table.marks) for key in settings)), None)


def script_of(conversion: Conversion, trainer: str, source: str) -> str:
    """Return a conversion as a script. What could not be converted is in its comments."""
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


# ---- the file


def read_settings(
    path: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return key: value. `overrides`: key=value words that come after the file's.

    A shell script has them as key=value words (verl, siiRL) or as flags (slime), in commands and in arrays; variables
    that the script or the environment sets are replaced. YAML has them nested, with references such as
    ${data.batch_size}.
    """
    text = path.read_text()
    if path.suffix in (".yaml", ".yml"):
        settings = dict(_flatten(yaml.safe_load(text) or {}))
    else:
        settings = dict(_of_script(text, environment))
    settings |= _overrides(overrides, {})
    return {key: _resolve(value, settings, frozenset({key})) for key, value in settings.items()}


def _of_script(script: str, environment: Mapping[str, str] | None) -> Iterator[tuple[str, Any]]:
    """Yield overrides from commands and arrays, and the flags of the command that runs a train*.py."""
    shell = Shell(environment)
    commands = [words for words, _ in shell.run(script)]
    for command in [*shell.arrays.values(), *commands]:
        yield from _overrides(command, shell.variables)
    for command in commands:
        start = next((i for i, word in enumerate(command) if _TRAINER.search(word)), None)
        for name, words in read_flags(command[start + 1 :] if start is not None else []).items():
            values = [_scalar(word) if word else COMPUTED for word in words]
            yield f"--{name.replace('_', '-')}", values if len(values) > 1 else values[0] if values else True


def _overrides(words: Iterable[str], variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        if override := _OVERRIDE.fullmatch(word):
            # Some commands are evaluated, with variables, only after they are assigned.
            text = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), override[2])
            yield override[1], yaml.safe_load(text) if text else COMPUTED


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text) if re.fullmatch(r"[\w.+-]+", text) else text
    return text if isinstance(value, str) or value is None else value


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix and tree != {}:
        yield prefix, tree


def _resolve(value: Any, settings: Mapping[str, Any], seen: frozenset[str]) -> Any:
    """Replace references to other keys. A key that does not exist stays as it is written."""
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and whole[1] in settings and whole[1] not in seen:
        return _resolve(settings[whole[1]], settings, seen | {whole[1]})

    def replace(match: re.Match[str]) -> str:
        known = match[1] in settings and match[1] not in seen
        return str(_resolve(settings[match[1]], settings, seen | {match[1]})) if known else match[0]

    return _REFERENCE.sub(replace, value)
