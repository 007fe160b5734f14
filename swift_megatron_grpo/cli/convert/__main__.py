"""Print a script for `megatron rlhf --rlhf_type grpo` that trains what another trainer's file trains.

    python -m swift_megatron_grpo.cli.convert run_qwen3-8b.sh > run.sh
    python -m swift_megatron_grpo.cli.convert rlvr_config.yaml
    python -m swift_megatron_grpo.cli.convert ppo_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B

FILE is a shell script or a YAML file of verl, siiRL, ROLL or slime. Keys without a counterpart, and what needs a
decision, are listed in the script's comments and on standard error; none is dropped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.convert.roll import ROLL
from swift_megatron_grpo.cli.convert.script import script_of
from swift_megatron_grpo.cli.convert.slime import SLIME
from swift_megatron_grpo.cli.convert.sources import read_settings
from swift_megatron_grpo.cli.convert.tables import Table, convert
from swift_megatron_grpo.cli.convert.verl import VERL

TABLES = {"verl": VERL, "siirl": VERL, "roll": ROLL, "slime": SLIME}


def table_of(settings: Mapping[str, Any]) -> Table | None:
    """Return the table of the trainer that has such keys; None if there is none."""
    if any(key.startswith("actor_rollout_ref.") for key in settings):
        return VERL
    if any(key.startswith(("actor_train.", "actor_infer.")) for key in settings):
        return ROLL
    return SLIME if "--hf-checkpoint" in settings else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m swift_megatron_grpo.cli.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="shell script or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings in addition to the file's")
    parser.add_argument("--trainer", choices=TABLES, help="whose settings these are; default: found by their keys")
    given = parser.parse_args(arguments)
    if not given.file.is_file():
        parser.error(f"{given.file} is not a file")
    settings = read_settings(given.file, given.overrides, os.environ)
    table = TABLES[given.trainer] if given.trainer else table_of(settings)
    if table is None:
        parser.error(
            f"{given.file} has none of the keys of verl, siiRL, ROLL or slime; name the trainer with --trainer, or "
            "give the file that has the settings"
        )
    conversion = convert(settings, table)
    sys.stdout.write(script_of(conversion, table.name, given.file.name))
    print(
        f"{len(conversion.flags)} flags; {len(conversion.by_hand)} settings to decide by hand, "
        f"{len(conversion.unknown)} without a counterpart, {len(conversion.needless)} not needed: see the comments at "
        "the top of the script",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
