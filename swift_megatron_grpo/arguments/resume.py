"""Apply --resume: find the checkpoint, and set the flags that load it, before ms-swift and other checks read them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch.distributed as dist
from swift.utils import get_logger, init_process_group

from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.output.checkpoints.newest import AFTER_VARIABLE, FLAG, Checkpoint, find_newest, open_checkpoint
from swift_megatron_grpo.output.checkpoints.sources import BadCheckpoint, Source

logger = get_logger()


# A run may change these and still train what a dump holds; after a change of any other flag it is generated again.
# Values of the other flags are written to the dump, so secrets must be among these.
_NAMES = """
    resume finetune mcore_model mcore_adapter output_dir add_version tensorboard_dir local_rank verify_checkpoint
    rollout_dump save_steps save_strategy save_total_limit save_safetensors save_missing_weights no_save_optim
    no_save_rng async_save use_persistent_ckpt_worker create_checkpoint_symlink merge_lora
    logging_steps report_to log_completions wandb_log_unique_prompts wandb_project wandb_exp_name swanlab_project
    swanlab_exp_name callbacks check_model check check_gpu stall_warnings eval_iters eval_steps num_generations_eval
    phase_timeout node_timeout reward_timeout stop_grace ddp_timeout vllm_request_timeout vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_server_group_port vllm_server_api_key
    vllm_gpu_memory_utilization dataloader_num_workers dataset_num_proc load_from_cache_file hub_token spare_groups
"""
_WITHOUT_EFFECT = frozenset(_NAMES.split())


def typed_flags(args: DerivedArguments) -> tuple[tuple[str, str], ...]:
    """Return the flags that decide what a run generates and trains; call it before anything changes their values."""
    values = ((field.name, repr(getattr(args, field.name))) for field in fields(args))
    return tuple((name, value) for name, value in values if name not in _WITHOUT_EFFECT)


class RunFinished(Exception):
    """There is nothing to do: the checkpoint that the run would continue from is its last one."""


def apply_resume(args: DerivedArguments) -> None:
    """Set the flags that continue from the checkpoint of --resume; log what was found and what was skipped."""
    if args.resume == "never":
        return
    if not args.finetune:
        typed = "--finetune false" + (" --mcore_adapter" if args.mcore_adapter else "")
        typed += " --mcore_model" if args.mcore_model else ""
        raise ValueError(
            f"--resume {args.resume} sets {typed} itself; leave these out, or leave --resume out to give the "
            "checkpoint by hand"
        )
    if args.output_dir is None:
        raise ValueError(
            f"--resume {args.resume} needs --output_dir, the folder in which the run is continued; use --output_dir "
            "megatron_output/NAME"
        )
    output_dir = Path(args.output_dir).expanduser().absolute()
    checkpoint = _newest(args, output_dir) if args.resume == "auto" else open_checkpoint(Path(args.resume).expanduser())
    if checkpoint is None:
        return
    if checkpoint.has_adapter != args.has_adapter:
        saved, typed = ("lora", "full") if checkpoint.has_adapter else ("full", "lora")
        raise ValueError(
            f"--resume {args.resume}: {checkpoint.folder} was saved with --tuner_type {saved}, and this run has "
            f"--tuner_type {typed}; use --tuner_type {saved}, another --output_dir, or --resume never"
        )
    if checkpoint.has_draft_head != bool(args.mtp_num_layers):
        saved, add = ("with", "add") if checkpoint.has_draft_head else ("without", "leave out")
        raise ValueError(
            f"--resume {args.resume}: {checkpoint.folder} was saved {saved} --mtp_num_layers 1, and its optimizer's "
            f"states are those of such a run; {add} --mtp_num_layers 1, or train the saved model in a new run with "
            f"--model {checkpoint.folder} --resume never"
        )
    continue_from(args, checkpoint)
    if checkpoint.run_folder in (output_dir, *output_dir.glob("v*")):  # else it is a checkpoint of another run
        args.output_dir, args.add_version = str(checkpoint.run_folder), False
    logger.info(f"--resume {args.resume}: the run continues from step {checkpoint.step}, in {checkpoint.folder}")


def continue_from(args: DerivedArguments, checkpoint: Checkpoint) -> None:
    """Set the flags that load a checkpoint, as a user would type them."""
    for flag, value in checkpoint.settings().items():
        setattr(args, flag, value)
    args.resumed_step = checkpoint.step


def _newest(args: DerivedArguments, output_dir: Path) -> Checkpoint | None:
    after = float(os.environ.get(AFTER_VARIABLE, "0"))
    newest, skipped = find_newest(output_dir, loads_optimizer=not args.no_load_optim, after=after)
    for reason in skipped:
        logger.warning(f"--resume auto skips {reason}")
    if newest is None:
        logger.info(f"--resume auto: there is no checkpoint in {output_dir}, so the run starts with step 1")
    return newest


def check_ranks_agree(args: DerivedArguments) -> None:
    """Raise ValueError unless all ranks have found the same checkpoint. Creates the process group as ms-swift does."""
    if args.resume == "never":
        return
    init_process_group(backend=args.ddp_backend, timeout=args.ddp_timeout)
    found = "none" if args.finetune else str(args.mcore_adapter if args.has_adapter else args.mcore_model)
    by_rank = [found] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    check_same(args.resume, by_rank)


def check_same(resume: str, found: Sequence[str]) -> None:
    """Raise ValueError unless all ranks have found the same checkpoint."""
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"--resume {resume}: ranks see different checkpoints: rank 0 {found[0]}, rank {rank} {other}; put "
                "--output_dir on a file system that all machines share, and wait until no other run writes to it"
            )


def check_or_fall_back(args: DerivedArguments, check: Callable[[Sequence[Source]], list[str]]) -> list[str]:
    """Check the sources of this run; with --resume auto continue from an earlier checkpoint if one is damaged.

    Large files are verified here, on all ranks together; the search before has seen small ones and sizes.
    """
    while True:
        try:
            return check(args.checkpoint_sources)
        except BadCheckpoint as problem:
            whole = problem.whole
            if args.resume != "auto" or whole is None or whole.flag != FLAG:
                raise
            logger.warning(f"--resume auto: {problem}; the run continues from {whole.folder}")
            continue_from(args, open_checkpoint(whole.folder))


def raise_if_finished(args: DerivedArguments) -> None:
    """Raise RunFinished if the run has done all of its steps; the model is not loaded yet."""
    if args.resume != "never" and args.resumes and args.resumed_step >= args.train_iters:
        source = args.mcore_adapter if args.has_adapter else args.mcore_model
        raise RunFinished(
            f"--resume {args.resume}: {source} is the last step of this run, {args.train_iters} of "
            f"{args.train_iters}, so there is nothing to do; use a larger --train_iters to train on"
        )


@contextmanager
def end_if_finished() -> Iterator[None]:
    """Around a whole run: if it has nothing to do, log this and end as a run that has done its steps."""
    try:
        yield
    except RunFinished as finished:
        logger.info(str(finished))
        if dist.is_initialized():
            dist.destroy_process_group()
