"""Check a run before it starts: its flags, dataset, rewards, memory and time, without a GPU and without weights.

swift-megatron-grpo check --model ... [--check_gpu H100-80G]
megatron rlhf --rlhf_type grpo --model ... --check true [--check_gpu H100-80G]

Both check the same. The exit code is 0 if nothing stands against the run.
"""

import argparse
import os
import traceback
import warnings
from collections.abc import Sequence

from swift_megatron_grpo.cli.command_line import FINE, FOUND, Refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flags", nargs="+", metavar="FLAG", help="flags of `megatron rlhf`")


def run(options: argparse.Namespace) -> int:
    from swift_megatron_grpo.plugin.rank import hook_platform

    hook_platform()
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # of ms-swift, which prints all arguments
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")  # of packages at import; what stands against the run is in the report
    return check_flags(["--rlhf_type", "grpo", *options.flags])


def check_flags(command_line: Sequence[str]) -> int:
    """Print the report and return the exit code."""
    # torchrun's world size, or that of a script for the `megatron` command
    per_machine, machines = os.environ.get("NPROC_PER_NODE", "1"), os.environ.get("NNODES", "1")
    os.environ.setdefault("WORLD_SIZE", str(int(per_machine) * int(machines)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", per_machine)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    from swift_megatron_grpo.arguments.resume import RunFinished
    from swift_megatron_grpo.cli.check.check import check

    try:
        report, passed = check(command_line)
    except RunFinished as finished:
        print(finished)
        return FINE
    except ValueError as problem:
        raise Refused(f"this run would be refused:\n{problem}") from problem
    except Exception as problem:
        traceback.print_exc()
        raise Refused(f"this run would fail: {type(problem).__name__}: {problem}") from problem
    print(report)
    return FINE if passed else FOUND
