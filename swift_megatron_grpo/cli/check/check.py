"""Check a run: flags, dataset, rewards and model, in the order in which a run would read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.cli.check.arguments import Inputs, parse_flags
from swift_megatron_grpo.cli.check.estimate import estimate
from swift_megatron_grpo.cli.check.model import Model, read_model
from swift_megatron_grpo.cli.check.report import report
from swift_megatron_grpo.cli.check.rows import read_rows, try_rewards
from swift_megatron_grpo.runtime.gpus import Gpu, find_gpu

_GPU_WITHOUT_ONE = "H100-80G"  # that is assumed on a machine without a GPU


def check(command_line: Sequence[str]) -> tuple[str, bool]:
    """Return the report, and True if nothing stands against the run. Raises ValueError if it would be refused."""
    args = parse_flags(command_line)
    gpu = gpu_of(args.check_gpu)
    inputs = Inputs(args)
    rows = read_rows(args, inputs.train_rows, inputs.template)
    rewards = try_rewards(args, rows, inputs.template)
    passed = all(reward.problem is None for reward in rewards)
    model: Model | str
    try:
        model = read_model(args.model_dir)
    except ValueError as reason:
        return report(start_up_lines(args), rows, rewards, str(reason), None, gpu), passed
    result = estimate(args, model, rows, gpu)
    text = report(start_up_lines(args), rows, rewards, model, result, gpu)
    return text, passed and result.fits and result.engine_fits


def gpu_of(name: str | None) -> Gpu:
    """Return the GPU of --check_gpu. Without the flag, return this machine's GPU, or an H100 if it has none."""
    if name is None and torch.cuda.is_available() and torch.version.cuda is not None:
        try:
            return find_gpu(torch.cuda.get_device_name(0))
        except ValueError:
            pass
    return find_gpu(name or _GPU_WITHOUT_ONE)
