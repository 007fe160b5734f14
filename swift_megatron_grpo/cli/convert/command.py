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
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.cli.convert.roll import ROLL
from swift_megatron_grpo.cli.convert.script import script_of
from swift_megatron_grpo.cli.convert.slime import SLIME
from swift_megatron_grpo.cli.convert.sources import read_settings
from swift_megatron_grpo.cli.convert.tables import Table, convert
from swift_megatron_grpo.cli.convert.verl import VERL

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
    return next((table for table in TABLES.values() if table.is_of(settings)), None)
