"""Check a run: flags, as one of its ranks parses them, dataset, rewards and model, in the order of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from swift.template import Template
from swift.utils import get_dist_setting, parse_args

from swift_megatron_grpo.arguments.command_line import check_typed
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.cli.check.estimate import bytes_of_reward_models, estimate
from swift_megatron_grpo.cli.check.model import read_model
from swift_megatron_grpo.cli.check.report import report
from swift_megatron_grpo.cli.check.rows import read_rows, try_rewards
from swift_megatron_grpo.runtime.gpus import Gpu, find_gpu

_GPU_WITHOUT_ONE = "H100-80G"  # that is assumed on a machine without a GPU


@dataclass
class DryArguments(GRPOArguments):
    """Arguments that create nothing."""

    def _init_output_dir(self) -> None:
        self.check_before_process_groups()

    def _init_distributed(self) -> None:
        """Set what ms-swift sets after it has created the process groups."""
        self.rank, self.local_rank, self.world_size, self.local_world_size = get_dist_setting()
        self.data_parallel_size = self.layout.data_parallel
        self.num_microbatches = self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def init_iters(self, train_dataset: Any, val_dataset: Any) -> None:
        """Set the number of iterations. ms-swift would divide by the ranks of a process group."""
        with patch.object(parallel_state, "get_data_parallel_world_size", return_value=self.data_parallel_size):
            super().init_iters(train_dataset, val_dataset)


def parse_flags(command_line: Sequence[str]) -> DryArguments:
    """Parse and check all flags. Raises ValueError with all problems that a rank would find."""
    check_typed(list(command_line))
    args, rest = parse_args(DryArguments, list(command_line))
    if rest and not args.ignore_args_error:
        raise ValueError(f"unknown arguments: {' '.join(rest)}")
    checked: DryArguments = args
    return checked


class Inputs(MegatronRLHF):
    """Template and datasets of a run. The parent class would also write args.json and load what it needs to train."""

    def __init__(self, args: DryArguments) -> None:
        self.args = args
        self.train_msg: dict[str, object] = {}
        self.model, self.processor = args.get_model_processor(load_model=False, download_model=False)
        self._prepare_template()
        self.template: Template
        self.template.use_megatron = True
        train_rows, val_rows = self._prepare_dataset()
        self.train_rows, self.val_rows = args.checked_datasets(train_rows, val_rows, self.template)
        args.init_iters(self.train_rows, self.val_rows)
        answers = args.load_answers(self.template)
        self.answers = [(len(answer.tokens), int(answer.trained.sum())) for answer in answers]

    def _save_val_dataset(self, val_dataset: Any) -> None:
        """Write nothing; a run writes the rows that it splits off for evaluation to its output folder."""


def check(command_line: Sequence[str]) -> tuple[str, bool]:
    """Return the report, and True if nothing stands against the run. Raises ValueError if it would be refused."""
    args = parse_flags(command_line)
    gpu = gpu_of(args.check_gpu)
    inputs = Inputs(args)
    rows = read_rows(args, inputs.train_rows, inputs.template)
    rewards = try_rewards(args, rows, inputs.template)
    graded = all(reward.problem is None for reward in rewards)
    try:
        model, graders = read_model(args.model_dir), bytes_of_reward_models(args)
    except ValueError as reason:
        return report(start_up_lines(args), rows, rewards, str(reason), None, gpu), graded
    result = estimate(args, model, rows, gpu, graders, inputs.answers)
    text = report(start_up_lines(args), rows, rewards, model, result, gpu)
    return text, graded and result.fits and result.engine_fits


def gpu_of(name: str | None) -> Gpu:
    """Return the GPU of --check_gpu. Without the flag, return this machine's GPU, or an H100 if it has none."""
    if name is None and torch.cuda.is_available() and torch.version.cuda is not None:
        try:
            return find_gpu(torch.cuda.get_device_name(0))
        except ValueError:
            pass
    return find_gpu(name or _GPU_WITHOUT_ONE)
