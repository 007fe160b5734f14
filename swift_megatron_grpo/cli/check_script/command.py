"""Try a script for a cluster on this machine, before paying for GPUs.

swift-megatron-grpo check-script run.sh

The script is read, not run. First, all flags of its command are checked at the script's own sizes, as its ranks would
check them. Then the command runs on a few ranks, with a tiny random model of the same architecture and with made-up
rows in place of a hub's data. Without a folder of the model on this machine, sizes are checked against those of a
made-up large model, which every common layout divides.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.launch.roles import words_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("script", type=Path, metavar="SCRIPT", help="shell script with a `megatron rlhf --rlhf_type grpo`")
    add("--nproc_per_node", type=int, default=2, help="ranks of the run; 0: as many as the script has; default: 2")
    add("--train_iters", type=int, default=1, help="optimizer steps of the run; 0: check only the flags; default: 1")
    add("--output_dir", type=Path, help="keep model, rows and output of the run in this folder")


def run(options: argparse.Namespace) -> int:
    from swift_megatron_grpo.plugin.rank import hook_platform

    if not options.script.is_file():
        raise Refused(f"{options.script} is not a file")
    hook_platform()
    keep = options.output_dir
    with tempfile.TemporaryDirectory(prefix="check-script-") if keep is None else nullcontext(str(keep)) as path:
        folder = Path(path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        check_script(options.script, folder, options.nproc_per_node, options.train_iters)
    return FINE


def check_script(script: Path, folder: Path, ranks: int, steps: int) -> None:
    """Check the script's flags, and train the rehearsal unless `steps` is 0. Raises Refused if either fails."""
    from swift_megatron_grpo.cli.check.check import parse_flags
    from swift_megatron_grpo.cli.check_script.rehearsal import make_rehearsal, train
    from swift_megatron_grpo.cli.check_script.stand_ins import differences

    environment = dict(os.environ)
    try:
        text = script.read_text(encoding="utf-8")
        rehearsal = make_rehearsal(text, folder, ranks or 2, max(steps, 1), environment)
        if ranks == 0:
            rehearsal = make_rehearsal(text, folder, rehearsal.world_size, max(steps, 1), environment)
        _print("in place of what is not on this machine", rehearsal.replaced)
        world = str(rehearsal.world_size)
        os.environ |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0"}
        parse_flags(words_of(rehearsal.published))
    except UnicodeDecodeError as error:
        raise Refused(f"{script} is not a text file") from error
    except RecursionError as error:
        raise Refused(f"{script} is nested too deeply to be read") from error
    except ValueError as error:
        raise Refused(f"{script} would be refused:\n{error}") from error
    print(f"check-script: all flags are accepted on {rehearsal.world_size} ranks")
    if steps:
        smaller = differences(rehearsal.published, rehearsal.reduced)
        _print(f"smaller, for {rehearsal.ranks} ranks of this machine", smaller)
        train(rehearsal, folder)
        print(f"check-script: the script runs, on {rehearsal.ranks} ranks and a tiny model")


def _print(heading: str, lines: Sequence[str]) -> None:
    print("\n    ".join([f"check-script: {heading}:", *lines]) if lines else f"check-script: {heading}: nothing")
