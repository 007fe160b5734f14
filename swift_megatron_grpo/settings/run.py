"""The length of a run, its checkpoints and its data, and a check without training."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, Range, flag, rule

UnreadTensors = Literal["stop", "warn"]


class Duration(Flags):
    """Length of a run, and intervals of logs and checkpoints."""

    train_iters: Annotated[int | None, AtLeast(1, use=100)]
    num_train_epochs: Annotated[int | None, AtLeast(1, use=1)]
    logging_steps: Annotated[int, AtLeast(1, use=1)]
    save_steps: Annotated[int, AtLeast(1, use=100)]
    save_total_limit: Annotated[int | None, AtLeast(1, use=2)]
    ddp_timeout: Annotated[int, AtLeast(1, use=18000000)]

    @rule
    def the_length_is_set(self) -> Faults:
        if self.train_iters is None and self.num_train_epochs is None:
            yield "the length of training is not set; use --num_train_epochs 1 or --train_iters 100"


class Checkpoints(Flags):
    """Checkpoints that a run loads and saves."""

    resume: str = flag(
        "never",
        "auto: continue from the newest whole checkpoint in --output_dir or in one of its version folders, in the "
        "folder of that run; incomplete and damaged checkpoints are skipped, with a line in the log. Without a "
        "checkpoint the run starts with step 1, and a run that has done all its steps ends at once. Rollouts that "
        "--rollout_dump has stored beyond the checkpoint are trained without being generated again. A folder "
        "checkpoint-N: continue from it. never: start with step 1, unless --finetune false and --mcore_model or "
        "--mcore_adapter name a checkpoint. docs/checkpoints.md describes it. Default: never.",
        example="auto",
    )
    verify_checkpoint: bool = flag(
        True,
        "Verify checkpoints before they are loaded: every file against the size and the checksum in manifest.json, the "
        "model, and when a run resumes the tokenizer. A damaged or incomplete checkpoint is refused, and the error "
        "names a whole one. false: files are not verified, and differences are only logged. Default: true.",
    )
    unread_tensors: UnreadTensors = flag(
        "stop",
        "What to do if a checkpoint has tensors that nothing loads, so that they would be neither trained nor sent to "
        "vLLM. stop: the run ends with an error that names them. warn: they are logged and left out. Layers of "
        "multi-token prediction and buffers that are computed are always left out. Default: stop.",
    )
    finetune: bool
    mcore_model: str | None
    mcore_adapter: str | None
    async_save: bool
    save_total_limit: int | None
    save_missing_weights: bool | None = flag(
        None,
        "Copy the tensors of the checkpoint that the model does not have into saved models, as they were. Default: "
        "copy layers of multi-token prediction and, with --language_model_only true, the image, video, audio "
        "and speech parts; other tensors are left out.",
    )

    @rule
    def a_run_that_continues_has_a_checkpoint(self) -> Faults:
        if not self.finetune and self.mcore_model is None and self.mcore_adapter is None:
            yield (
                "--finetune false continues from a checkpoint, and there is none: --mcore_model and --mcore_adapter "
                "are not set; leave it out, or use --resume auto alone, which finds one in --output_dir"
            )

    @rule
    def checkpoints_are_removed_once_they_are_written(self) -> Faults:
        if self.async_save and self.save_total_limit is not None:
            yield (
                f"--save_total_limit {self.save_total_limit} with --async_save true: ms-swift does not remove "
                "checkpoints that it writes in the background; use --async_save false, or leave one of them out"
            )


class Data(Flags):
    """Rows of the datasets, and the order of the training prompts."""

    data_seed: Annotated[int | None, Range(0, 42, high=2**31 - 1, why="numpy and vLLM accept no other seeds")]
    train_dataloader_shuffle: bool
    streaming: bool
    shuffle_buffer_size: Annotated[int, AtLeast(1, use=1000)]
    dataset: list[str]
    split_dataset_ratio: float
    save_strategy: str
    train_iters: int | None
    num_train_epochs: int | None
    dataset_num_proc: Annotated[int, AtLeast(1, use=1)]
    max_pixels: Annotated[int | None, AtLeast(784, use=1003520, why="an image has at least one patch")]
    truncation_strategy: Literal["left", "delete", "raise", "right", "split"] | None = flag(
        None,
        "What to do with prompts longer than --max_length. left: leave out the oldest turns of a conversation, and "
        "refuse a prompt whose last turn alone is longer. delete: leave such rows out of the dataset before training. "
        "raise: refuse the dataset, with the rows. Default: none, the same as left.",
        example="delete",
    )

    @property
    def seed(self) -> int:
        """--data_seed, which ms-swift sets to --seed if it is left out."""
        assert self.data_seed is not None
        return self.data_seed

    @property
    def shuffles(self) -> bool:
        """True if the order of training is random; that of a stream is the order in which it was read."""
        return self.train_dataloader_shuffle and not self.streaming

    @rule
    def a_stream_has_no_length(self) -> Faults:
        if not self.streaming:
            return
        if self.train_iters is None or self.num_train_epochs is not None:
            yield (
                "--streaming true reads as many rows as --train_iters trains, and knows no epochs; use --train_iters "
                "100, and leave --num_train_epochs out"
            )
        if self.save_strategy == "epoch":
            yield "--streaming true knows no epochs; use --save_strategy steps, not epoch"
        if self.split_dataset_ratio > 0:
            yield "--streaming true does not split a dataset; use --val_dataset, not --split_dataset_ratio"
        for name in self.dataset:
            if re.search("#[0-9]+$", name):
                yield (
                    f"--streaming true with --dataset {name}: --train_iters says how many rows are read; use "
                    f"{name.rpartition('#')[0]}"
                )


class Warnings(Flags):
    """Warnings of a run that stops learning; the console prints them."""

    stall_warnings: bool = flag(
        True,
        "Print a line when the metrics of the logged steps show that a run stops learning: nearly all groups have "
        "equal rewards, the reward falls, completions grow until they are cut off, the entropy collapses, or vLLM "
        "drifts away from the trainer. The line names the flags that help; docs/metrics.md has the conditions. A run "
        "with --rollout_only or --rollout_replay prints none. Default: true.",
    )
    rollout_only: bool
    rollout_replay: str | None

    @property
    def watches_stalls(self) -> bool:
        return self.stall_warnings and not self.rollout_only and self.rollout_replay is None


class Check(Flags):
    """A check of the settings without training; cli/check reads it."""

    check: bool = flag(
        False,
        "Do not train. In one process, without a GPU and without weights: check all flags, read the dataset, call the "
        "reward functions with made-up completions, and print the layout, the batches, the memory of each GPU by "
        "phase, a guess of the time, and settings that fit if these do not. docs/check.md has an example. Default: "
        "false.",
    )
    check_gpu: str | None = flag(
        None,
        "With --check true: the GPU of the run, such as A100-80G, H100-80G or H200-141G. Default: the GPU of this "
        "machine, or H100-80G without one.",
        example="H200-141G",
    )
