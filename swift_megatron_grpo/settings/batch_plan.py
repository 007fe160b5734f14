"""The arithmetic of a GRPO run, in completions: every batch size counts completions, never prompts.

    data parallel size    = world size / (TP * PP * CP)
    global_batch_size     = micro_batch_size * data parallel size * accumulation steps      one optimizer step
    generation_batch_size = global_batch_size * steps_per_generation                        one rollout
    rollout prompts       = generation_batch_size / num_generations

`resolve` fills in the sizes that the user left out and refuses sizes that cannot work. ms-swift also refuses sizes that
only its own distribution of prompts cannot handle: here they work, and `BatchPlan.notes` reports them.
"""

from __future__ import annotations

from swift_megatron_grpo.settings.batch_sizes import BatchError, Sizes, check_sizes, check_world_size
from swift_megatron_grpo.settings.config import BatchPlan
from swift_megatron_grpo.settings.layout import Layout

_MOST = 10**8


def resolve(
    layout: Layout,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    num_generations: int,
    generation_batch_size: int | None = None,
    steps_per_generation: int | None = None,
) -> BatchPlan:
    """Fill in the sizes that the user left out (None). Raises BatchError if they do not fit together."""
    for flag, size in (("global_batch_size", global_batch_size), ("generation_batch_size", generation_batch_size)):
        if size is not None and size > _MOST:
            raise BatchError(f"--{flag} {size} is more than {_MOST} completions", [{flag: 128 * num_generations}])
    sizes = Sizes(micro_batch_size, global_batch_size, num_generations, generation_batch_size, steps_per_generation)
    check_world_size(layout, sizes)
    check_sizes(sizes, layout.data_parallel)
    return BatchPlan(
        layout=layout,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        generation_batch_size=sizes.rollout,
        steps_per_generation=sizes.rollout // global_batch_size,
        num_generations=num_generations,
    )


def format_table(plan: BatchPlan, max_tokens: int | None = None) -> str:
    """Format the batch plan for the start-up log. `max_tokens`: the token budget of micro batches, if any."""
    layout = plan.layout
    model_parallel = (
        f"TP {layout.tensor_model_parallel_size} * PP {layout.pipeline_model_parallel_size} * "
        f"CP {layout.context_parallel_size}"
    )
    train_prompts = plan.global_batch_size / plan.num_generations
    rows = [
        ("data parallel size", plan.data_parallel, f"world size {layout.world_size} / ({model_parallel})"),
        *_micro_batch_rows(plan, max_tokens),
        ("global batch", plan.global_batch_size, "completions of one optimizer step"),
        ("steps per generation", plan.steps_per_generation, "optimizer steps that train on one rollout"),
        ("generation batch", plan.generation_batch_size, "completions of one rollout"),
        ("completions per prompt", plan.num_generations, "num_generations"),
        ("rollout prompts", plan.rollout_prompts, "generation batch / completions per prompt"),
        ("train prompts", train_prompts, "global batch / completions per prompt"),
        ("prompts per DP group", plan.prompts_per_dp_group, "train prompts / data parallel size"),
    ]
    return "\n".join(f"  {name:<24}{value:>8g}   {meaning}" for name, value, meaning in rows)


def _micro_batch_rows(plan: BatchPlan, max_tokens: int | None) -> list[tuple[str, int, str]]:
    if max_tokens is not None:
        return [("micro batch", max_tokens, "maximum tokens of one forward pass; micro_batch_size is ignored")]
    return [
        ("micro batch", plan.micro_batch_size, "completions of one forward pass on one data-parallel rank"),
        ("accumulation steps", plan.gradient_accumulation, "micro batches of one step on each data-parallel rank"),
    ]
