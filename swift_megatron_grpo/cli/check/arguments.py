"""Parse the flags of a run as one of its ranks does, without process groups, folders and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from megatron.core import parallel_state
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from swift.template import Template
from swift.utils import get_dist_setting, parse_args

from swift_megatron_grpo.arguments.command_line import check_typed
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments


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
    if rest:
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

    def _save_val_dataset(self, val_dataset: Any) -> None:
        """Write nothing; a run writes the rows that it splits off for evaluation to its output folder."""
