"""Check a run before it starts: its flags, dataset, rewards, memory and time, without a GPU and without weights.

    megatron rlhf --rlhf_type grpo ... --check true [--check_gpu H100-80G]

Exits with 0 if nothing stands against the run, with 1 otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from swift_megatron_grpo.planning.gpus import Gpu, find_gpu
from swift_megatron_grpo.plugin.activation import hook_platform

OWN_FLAGS = ("check", "check_gpu")


def ranks_of(environment: Mapping[str, str]) -> int:
    """Return the world size: torchrun's, or that of a script for the `megatron` command."""
    if "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    return int(environment.get("NPROC_PER_NODE", "1")) * int(environment.get("NNODES", "1"))


def main(command_line: Sequence[str]) -> int:
    hook_platform()
    ranks = ranks_of(os.environ)
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("NPROC_PER_NODE", "1")))
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_machine), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # of ms-swift, which prints all arguments
    from swift_megatron_grpo.arguments.resume import RunFinished
    from swift_megatron_grpo.arguments.start_up_log import start_up_lines
    from swift_megatron_grpo.dry_run.arguments import Inputs, parse_flags
    from swift_megatron_grpo.dry_run.estimate import estimate
    from swift_megatron_grpo.dry_run.model import read_model
    from swift_megatron_grpo.dry_run.report import report
    from swift_megatron_grpo.dry_run.rows import read_rows, try_rewards

    try:
        args = parse_flags(command_line)
        gpu = gpu_of(args.check_gpu)
        inputs = Inputs(args)
        rows = read_rows(args, inputs.train_rows, inputs.template)
        rewards = try_rewards(args, rows, inputs.template)
        model = read_model(args.model_dir)
        result = estimate(args, model, rows, gpu)
    except RunFinished as finished:
        print(finished)
        return 0
    except ValueError as problem:
        print(f"--check: this run would be refused:\n{problem}", file=sys.stderr)
        return 1
    print(report(gpu, ranks, start_up_lines(args), model, rows, rewards, result))
    return 0 if result.fits and all(reward.problem is None for reward in rewards) else 1


def gpu_of(name: str | None) -> Gpu:
    """Return the GPU of --check_gpu; without the flag, that of this machine or an H100."""
    import torch

    if name is None and torch.cuda.is_available() and torch.version.cuda is not None:
        try:
            return find_gpu(torch.cuda.get_device_name(0))
        except ValueError:
            pass
    return find_gpu(name or "H100-80G")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
