"""Convert settings of verl, siiRL, slime, ROLL, TRL or ms-swift's Ray to a script of `megatron rlhf --rlhf_type grpo`.

swift-megatron-grpo convert run_qwen3-8b.sh > run.sh
swift-megatron-grpo convert rlvr_config.yaml
swift-megatron-grpo convert train_grpo.py num_processes=8
swift-megatron-grpo convert ray_grpo_colocate.yaml
swift-megatron-grpo convert ppo_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B

FILE is read and never run. The script is printed. Its comments, and standard error, list every key that has no
counterpart and every setting that needs a decision; none is dropped.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.cli.convert.ray import RAY
from swift_megatron_grpo.cli.convert.reading import read_settings
from swift_megatron_grpo.cli.convert.tables import Conversion, Table, convert
from swift_megatron_grpo.cli.convert.trainers import ROLL, SLIME
from swift_megatron_grpo.cli.convert.trl import TRL
from swift_megatron_grpo.cli.convert.verl import VERL

FIRST = ["rlhf_type", "model", "tuner_type", "dataset", "val_dataset", "reward_funcs"]
TABLES = {"verl": VERL, "siirl": VERL, "roll": ROLL, "slime": SLIME, "trl": TRL, "ray": RAY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="shell script, YAML file, or Python program of TRL")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings in addition to the file's")
    parser.add_argument("--trainer", choices=TABLES, help="whose settings these are; default: found by their keys")


def run(options: argparse.Namespace) -> int:
    file: Path = options.file
    if not file.is_file():
        raise Refused(f"{file} is not a file")
    try:
        settings = read_settings(file, options.overrides, os.environ)
    except ValueError as error:
        raise Refused(f"{file}: {error}") from error
    table = TABLES[options.trainer] if options.trainer else table_of(settings)
    if table is None:
        raise Refused(
            f"{file} has none of the keys of verl, siiRL, ROLL, slime, TRL or ms-swift's Ray; name the trainer with "
            "--trainer, or give the file that has the settings"
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
    flags = {"rlhf_type": ("grpo",), "vllm_mode": ("colocate",), **conversion.flags}
    order = sorted(flags, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    command = " \\\n    ".join(["megatron rlhf", *(f"--{name} {shlex.join(flags[name])}" for name in order)])
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(conversion.environment.items())]
    lines = [
        "#!/usr/bin/env bash",
        f"# Converted from the settings of {trainer} in {_one_line(source)}. Counts of completions, not of prompts.",
        *_comments("To decide by hand:", conversion.by_hand),
        *_comments("No counterpart; the run differs without them:", conversion.unknown),
        *_comments("Not needed:", conversion.needless),
        "set -euo pipefail",
        *exports,
        command + ' "$@"',  # so that `bash run.sh --check true` does not start the training
    ]
    return "\n".join(lines) + "\n"


def _comments(title: str, settings: Mapping[str, str]) -> list[str]:
    lines = [f"#   {_one_line(key)}: {_one_line(value)}" for key, value in settings.items()]
    return [f"# {title}", *lines] if settings else []


def _one_line(text: str) -> str:
    """Return text that cannot leave a comment of the script."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
