"""The checkpoints of a run, from its flags: those that it loads are checked, and a writer is made for new ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from swift.template import Template
from swift.utils import get_dist_setting, get_logger

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.resume import check_or_fall_back
from swift_megatron_grpo.generation.protocol.model_identity import model_identity
from swift_megatron_grpo.output.checkpoints.identity import dataset_identity, tokenizer_identity
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter, Identity
from swift_megatron_grpo.output.checkpoints.verifying import check_order_of_experts, check_sources, compare_datasets
from swift_megatron_grpo.output.disk.files import threads_of_a_rank
from swift_megatron_grpo.runtime.parallel import Coordinator

logger = get_logger()


def check_loaded(args: GRPOArguments, template: Template, coordinator: Coordinator) -> None:
    """Refuse checkpoints that are damaged or do not fit the run, before the model loads."""
    check = partial(
        check_sources,
        model=model_identity(args.model_config),
        tokenizer=tokenizer_identity(template.tokenizer) if args.resumes else None,
        verify=args.verify_checkpoint,
        ranks=coordinator,
        threads=threads_of_a_rank(_ranks_of_this_machine()),
    )
    for warning in check_or_fall_back(args, check):
        logger.warning(warning)
    check_order_of_experts(args.optimizer_source, args.experts_in_order)


def checkpoint_writer(
    args: GRPOArguments, template: Template, train_rows: Any, coordinator: Coordinator, steps_done: int
) -> CheckpointWriter:
    """Return the writer of new checkpoints, after a comparison of the data with the loaded one's."""
    identity = Identity(
        model=model_identity(args.model_config),
        tokenizer=tokenizer_identity(template.tokenizer),
        dataset=dataset_identity(train_rows),
        experts_in_order=args.experts_in_order,
    )
    if args.resumes and steps_done > 0:
        warning = compare_datasets(args.checkpoint_sources, identity.dataset)
        if warning is not None:
            logger.warning(warning)
    return CheckpointWriter(Path(args.output_dir), coordinator, _ranks_of_this_machine(), identity, logger.info)


def next_save(args: GRPOArguments, steps_done: int) -> int:
    """Return the step of the next checkpoint."""
    period = args.save_steps or args.train_iters
    return int(min((steps_done // period + 1) * period, args.train_iters))


def resumed_from(args: GRPOArguments) -> list[str]:
    """Return the checkpoints that a run which resumes has loaded."""
    sources = (args.mcore_model, args.mcore_adapter, *args.adapters) if args.resumes else ()
    return [path for path in sources if path is not None]


def _ranks_of_this_machine() -> int:
    return max(int(get_dist_setting()[3]), 1)
