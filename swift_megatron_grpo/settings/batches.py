"""Batch sizes, in completions: of a rollout, of an optimizer step, of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from swift_megatron_grpo.settings.batch_sizes import BatchSizes, resolve
from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, as_typed, flag, rule
from swift_megatron_grpo.settings.layout import Layout

SharePrompts = Literal["auto", "true", "false"]
SHARE_PROMPTS_FROM: dict[SharePrompts, float | None] = {"auto": 0.05, "true": 0.0, "false": None}


@dataclass(frozen=True, kw_only=True)
class Batches(Flags):
    """Completions of a rollout and of an optimizer step; the loop reads them. batch_sizes.py has the arithmetic."""

    global_batch_size: int
    generation_batch_size: int | None
    steps_per_generation: int | None
    num_generations: int
    micro_batch_size: int
    num_iterations: Annotated[int, AtLeast(1, use=1)]
    max_tokens_per_micro_batch: int | None

    @rule
    def sizes_fit_together(self, layout: Layout) -> None:
        if layout.is_positive:
            self.sizes(layout)

    def sizes(self, layout: Layout) -> BatchSizes:
        """Fill in the sizes that are not typed. Raises BatchError if they do not fit together."""
        return resolve(
            layout,
            micro_batch_size=1 if self.max_tokens_per_micro_batch is not None else self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            num_generations=self.num_generations,
            generation_batch_size=self.generation_batch_size,
            steps_per_generation=self.steps_per_generation,
        )

    def notes(self, sizes: BatchSizes) -> list[str]:
        """Return one line if ms-swift's own trainer would refuse these sizes, for users who switch back."""
        objection = _objection_of_ms_swift(sizes)
        if objection is None:
            return []
        here = "ms-swift's own trainer refuses that; this one distributes single completions to ranks and accepts it"
        return [f"{objection}. {here}."]


def _objection_of_ms_swift(sizes: BatchSizes) -> str | None:
    dp, prompts, world = sizes.data_parallel, sizes.rollout_prompts, sizes.layout.world_size
    count = f"generation_batch_size ({sizes.generation_batch_size}) // num_generations ({sizes.num_generations})"
    if prompts % dp:
        return f"num_rollout_prompt ({prompts}) = {count} is not divisible by dp_size ({dp})"
    if prompts // dp % sizes.micro_batch_size:
        return (
            f"Per-device rollout prompt count ({prompts // dp}) = ({count}) // dp_size ({dp}) is not divisible by "
            f"micro_batch_size ({sizes.micro_batch_size})"
        )
    if sizes.generation_batch_size % world:
        return f"generation_batch_size ({sizes.generation_batch_size}) is not divisible by the world size ({world})"
    return None


@dataclass(frozen=True, kw_only=True)
class MicroBatches(Flags):
    """Micro batches of a forward pass; packing and the passes of training read them."""

    micro_batch_size: int
    max_tokens_per_micro_batch: Annotated[int | None, AtLeast(1, use=16384)] = flag(
        None,
        "Token budget of a packed micro batch, including prompts and padding. Completions are packed up to "
        "this budget, the work is balanced across data-parallel ranks, and --micro_batch_size is ignored. A "
        "completion longer than the budget gets its own micro batch. Default: none, a micro batch has "
        "--micro_batch_size completions.",
        example="16384",
    )
    infer_max_tokens_per_micro_batch: Annotated[int | None, AtLeast(1, use=32768)] = flag(
        None,
        "Token budget of a packed micro batch in forward-only passes, which compute log-probs and need "
        "less memory than training. Default: the micro batches of training.",
        example="65536",
    )
    infer_batch_size: Annotated[int | None, AtLeast(1, use=16)] = flag(
        None,
        "Number of completions in a micro batch of forward-only passes; an alternative to "
        "--infer_max_tokens_per_micro_batch. Default: the micro batches of training.",
        example="16",
    )
    share_prompts: SharePrompts = flag(
        "auto",
        "true: in a micro batch, the completions of a prompt share one copy of it, forward and backward, which is "
        "exact. Token budgets count the copy once, so more completions fit. auto: the same where layout and model "
        "allow it and a step saves a twentieth of its FLOPs. false: every completion has a copy. Default: auto.",
    )
    context_parallel_size: int
    attention_backend: Any

    @rule
    def one_size_of_forward_only_passes(self) -> Faults:
        budget, completions = self.infer_max_tokens_per_micro_batch, self.infer_batch_size
        if budget is not None and completions is not None:
            yield (
                f"--infer_max_tokens_per_micro_batch {budget} and --infer_batch_size {completions} both set the size "
                "of forward-only micro batches; set only one of them"
            )

    @rule
    def prompts_can_be_shared(self) -> Faults:
        if self.share_prompts != "true":
            return
        if self.context_parallel_size > 1:
            yield (
                f"--share_prompts true with --context_parallel_size {self.context_parallel_size}: ring attention cuts "
                "queries and keys alike; use --share_prompts auto, which repeats prompts here"
            )
        if as_typed(self.attention_backend) == "unfused":
            yield (
                "--share_prompts true with --attention_backend unfused is not tested; use --share_prompts auto, which "
                "repeats prompts here, or --attention_backend flash"
            )
        by_tokens = self.max_tokens_per_micro_batch or self.infer_max_tokens_per_micro_batch
        if not by_tokens and max(self.micro_batch_size, self.infer_batch_size or 1) == 1:
            yield (
                "--share_prompts true has no effect in micro batches of one completion; use "
                "--max_tokens_per_micro_batch 16384, or a --micro_batch_size that is a multiple of --num_generations"
            )

    @property
    def share_prompts_from(self) -> float | None:
        """The share of a step's FLOPs that sharing prompts must save to be done; None: prompts are repeated."""
        return SHARE_PROMPTS_FROM[self.share_prompts]
