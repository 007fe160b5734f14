"""The arithmetic of a GRPO run, in completions: every batch size counts completions, never prompts.

    data parallel size    = world size / (TP * PP * CP)
    global_batch_size     = micro_batch_size * data parallel size * accumulation steps      one optimizer step
    generation_batch_size = global_batch_size * steps_per_generation                        one rollout
    rollout prompts       = generation_batch_size / num_generations

`resolve` fills in the sizes that the user left out. If sizes do not fit together, its error ends with the nearest ones
that do. The messages use ms-swift's terms, because its users know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd, lcm

from swift_megatron_grpo.settings.layout import Layout

WORLD_SIZE = "world_size"  # not a flag: NPROC_PER_NODE * NNODES
_LAYOUT_FLAGS = ("context_parallel_size", "pipeline_model_parallel_size", "tensor_model_parallel_size")
_MOST = 10**8


class BatchError(ValueError):
    """Sizes that do not fit together. Each suggestion is a complete fix: flags and their new values."""

    def __init__(self, fault: str, suggestions: Iterable[dict[str, int]]) -> None:
        self.suggestions = tuple(suggestions)
        super().__init__(fault + (f"; use {_format_suggestions(self.suggestions)}" if self.suggestions else ""))


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes that fit together, created by `resolve`."""

    layout: Layout
    micro_batch_size: int
    global_batch_size: int
    generation_batch_size: int
    steps_per_generation: int
    num_generations: int

    @property
    def data_parallel(self) -> int:
        return self.layout.data_parallel

    @property
    def gradient_accumulation(self) -> int:
        """Number of micro batches of one optimizer step on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def rollout_prompts(self) -> int:
        return self.generation_batch_size // self.num_generations

    @property
    def train_prompts(self) -> int:
        """Number of whole prompts of one optimizer step, at least 1: a step may end within a prompt's completions."""
        return max(1, self.global_batch_size // self.num_generations)

    @property
    def prompts_per_dp_group(self) -> float:
        """global_batch_size / num_generations / data parallel size; ms-swift's documentation requires an integer."""
        return self.global_batch_size / self.num_generations / self.data_parallel


def resolve(
    layout: Layout,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    num_generations: int,
    generation_batch_size: int | None = None,
    steps_per_generation: int | None = None,
) -> BatchSizes:
    """Fill in the sizes that the user left out (None). Raises BatchError if they do not fit together."""
    _check_world_size(layout)
    typed = {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "num_generations": num_generations,
        "generation_batch_size": generation_batch_size,
        "steps_per_generation": steps_per_generation,
    }
    for flag, size in typed.items():
        if size is not None and size > _MOST and flag.endswith("batch_size"):
            raise BatchError(f"--{flag} {size} is more than {_MOST} completions", [{flag: 128 * num_generations}])
    steps = 1 if steps_per_generation is None else steps_per_generation
    rollout = global_batch_size * steps if generation_batch_size is None else generation_batch_size
    fault = _fault(typed, rollout, layout.data_parallel)
    if fault is not None:
        raise BatchError(fault, _nearest_sizes(typed, rollout, layout.data_parallel))
    return BatchSizes(
        layout=layout,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        generation_batch_size=rollout,
        steps_per_generation=rollout // global_batch_size,
        num_generations=num_generations,
    )


def _fault(typed: Mapping[str, int | None], rollout: int, dp: int) -> str | None:
    for flag, size in typed.items():
        if size is not None and size <= 0:
            return f"{flag} must be > 0, got {size}"
    micro, step, group = (typed[flag] or 1 for flag in ("micro_batch_size", "global_batch_size", "num_generations"))
    steps = typed["steps_per_generation"]
    if steps is not None and rollout != step * steps:
        return (
            f"generation_batch_size ({rollout}) must equal global_batch_size ({step}) * steps_per_generation "
            f"({steps}) = {step * steps}"
        )
    if rollout % step:
        return f"generation_batch_size ({rollout}) must be divisible by global_batch_size ({step})"
    if rollout % group:
        return f"generation_batch_size ({rollout}) must be divisible by num_generations ({group})"
    if step % (micro * dp):
        return (
            f"global batch size ({step}) is not divisible by micro batch size ({micro}) times data parallel size ({dp})"
        )
    return None


def _nearest_sizes(typed: Mapping[str, int | None], rollout: int, dp: int) -> list[dict[str, int]]:
    """Return the flags to change, for the nearest sizes below and above that fit together."""
    micro, step = max(typed["micro_batch_size"] or 1, 1), max(typed["global_batch_size"] or 1, 1)
    group = typed["num_generations"] or 0
    group = group if group > 0 else 2
    if lcm(micro * dp, group) > _MOST:
        micro, group = 1, min(group, 8)
    given = typed["generation_batch_size"] is not None
    steps = max(1, round(rollout / step)) if given else max(typed["steps_per_generation"] or 1, 1)
    if given and step == typed["global_batch_size"] and step % (micro * dp) == 0:  # only the rollout is at fault
        both = (step * (typed["steps_per_generation"] or 0), *_multiples(rollout, lcm(step, group)))
        fits = [(step, size) for size in both if size > 0 and size % group == 0]
    else:
        fits = [(size, size * steps) for size in _multiples(step, lcm(micro * dp, group // gcd(group, steps)))]
    fixes = []
    for size, completions in fits:
        fixed = {
            "global_batch_size": size,
            "generation_batch_size": completions,
            "steps_per_generation": completions // size,
            "micro_batch_size": micro,
            "num_generations": group,
        }
        fixes.append({flag: value for flag, value in fixed.items() if typed[flag] not in (None, value)})
    return [fix for place, fix in enumerate(fixes) if fix not in fixes[:place]]


def _multiples(size: int, unit: int) -> list[int]:
    """Return the nearest multiples of `unit` below and above a size, or the size if it is one."""
    below = size // unit * unit
    return [multiple for multiple in dict.fromkeys((below, -(-size // unit) * unit)) if multiple > 0] or [unit]


def _check_world_size(layout: Layout) -> None:
    """Raise BatchError unless the world size is a multiple of the ranks that one copy of the model needs."""
    world, ranks = layout.world_size, layout.model_parallel
    if world % ranks == 0:
        return
    fixes = [{WORLD_SIZE: size} for size in _multiples(world, ranks)]
    for flag in _LAYOUT_FLAGS:
        size = getattr(layout, flag)
        smaller = (n for n in range(min(size - 1, world), 0, -1) if size % n == 0 and world % (ranks // size * n) == 0)
        fixes += [{flag: n} for n in list(smaller)[:1]]
    tp, pp, cp = (getattr(layout, flag) for flag in reversed(_LAYOUT_FLAGS))
    raise BatchError(
        f"world size ({world}) must be divisible by tensor_model_parallel_size ({tp}) * pipeline_model_parallel_size "
        f"({pp}) * context_parallel_size ({cp}) = {ranks}",
        fixes,
    )


def _format_suggestions(suggestions: Iterable[dict[str, int]]) -> str:
    """Format suggestions like this: --global_batch_size 48 or 64, or --micro_batch_size 2."""
    by_flags: dict[tuple[str, ...], list[dict[str, int]]] = {}
    for suggestion in suggestions:
        by_flags.setdefault(tuple(suggestion), []).append(suggestion)
    phrases = []
    for flags, choices in by_flags.items():
        if len(flags) > 1:
            phrases += [" ".join(f"--{flag} {value}" for flag, value in choice.items()) for choice in choices]
        else:
            flag = "a world size of" if flags == (WORLD_SIZE,) else f"--{flags[0]}"
            phrases.append(f"{flag} " + " or ".join(str(choice[flags[0]]) for choice in choices))
    return ", or ".join(phrases)


def format_table(sizes: BatchSizes, max_tokens: int | None = None) -> str:
    """Format the batch sizes for the start-up log. `max_tokens`: the token budget of micro batches, if any."""
    layout = sizes.layout
    tp, pp, cp = (getattr(layout, flag) for flag in reversed(_LAYOUT_FLAGS))
    micro = [
        ("micro batch", sizes.micro_batch_size, "completions of one forward pass on one data-parallel rank"),
        ("accumulation steps", sizes.gradient_accumulation, "micro batches of one step on each data-parallel rank"),
    ]
    if max_tokens is not None:
        micro = [("micro batch", max_tokens, "maximum tokens of one forward pass; micro_batch_size is ignored")]
    train_prompts = sizes.global_batch_size / sizes.num_generations
    rows = [
        ("data parallel size", sizes.data_parallel, f"world size {layout.world_size} / (TP {tp} * PP {pp} * CP {cp})"),
        *micro,
        ("global batch", sizes.global_batch_size, "completions of one optimizer step"),
        ("steps per generation", sizes.steps_per_generation, "optimizer steps that train on one rollout"),
        ("generation batch", sizes.generation_batch_size, "completions of one rollout"),
        ("completions per prompt", sizes.num_generations, "num_generations"),
        ("rollout prompts", sizes.rollout_prompts, "generation batch / completions per prompt"),
        ("train prompts", train_prompts, "global batch / completions per prompt"),
        ("prompts per DP group", sizes.prompts_per_dp_group, "train prompts / data parallel size"),
    ]
    return "\n".join(f"  {name:<24}{value:>8g}   {meaning}" for name, value, meaning in rows)
