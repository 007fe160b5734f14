"""Check a run before it starts: its flags, dataset, rewards, memory and time, without a GPU and without weights.

    megatron rlhf --rlhf_type grpo ... --check true [--check_gpu H100-80G]

Exits with 0 if nothing stands against the run, with 1 otherwise.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence

from swift_megatron_grpo.plugin.activation import hook_platform


def ranks_of(environment: Mapping[str, str]) -> int:
    """Return the world size: torchrun's, or that of a script for the `megatron` command."""
    if "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    return int(environment.get("NPROC_PER_NODE", "1")) * int(environment.get("NNODES", "1"))


def run(command_line: Sequence[str]) -> int:
    """Print the report and return the exit code."""
    ranks = ranks_of(os.environ)
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("NPROC_PER_NODE", "1")))
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_machine), "RANK": "0", "LOCAL_RANK": "0"}
    from swift_megatron_grpo.arguments.resume import RunFinished
    from swift_megatron_grpo.cli.check.check import check

    try:
        report, passed = check(command_line)
    except RunFinished as finished:
        print(finished)
        return 0
    except ValueError as problem:
        print(f"--check: this run would be refused:\n{problem}", file=sys.stderr)
        return 1
    except Exception as problem:
        traceback.print_exc()
        print(f"--check: this run would fail: {type(problem).__name__}: {problem}", file=sys.stderr)
        return 1
    print(report)
    return 0 if passed else 1


def main() -> None:
    hook_platform()
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # of ms-swift, which prints all arguments
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")  # of packages at import; what stands against the run is in the report
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
