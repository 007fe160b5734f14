"""Refuse batch sizes and layouts that do not fit together, and suggest the nearest ones that do.

An error ends with settings that satisfy all constraints at once. They are found by search and not by formula, so that a
new constraint is added in one place only. The messages use ms-swift's terms, because its users know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from swift_megatron_grpo.settings.layout import Layout

WORLD_SIZE = "world_size"  # not a flag: NPROC_PER_NODE * NNODES


class BatchError(ValueError):
    """Sizes that do not fit together. Each suggestion is a complete fix: flags and their new values."""

    def __init__(self, fault: str, suggestions: Iterable[dict[str, int]]) -> None:
        self.suggestions = tuple(suggestions)
        super().__init__(fault + (f"; use {_format_suggestions(self.suggestions)}" if self.suggestions else ""))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Values as typed; None for a flag that was not."""

    micro_batch_size: int
    global_batch_size: int
    num_generations: int
    generation_batch_size: int | None
    steps_per_generation: int | None

    @property
    def rollout(self) -> int:
        """generation_batch_size, given or implied."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.global_batch_size * (1 if self.steps_per_generation is None else self.steps_per_generation)


_REACH = 2**13  # values that a search tries in each direction, in 50 ms
_SIZE_FLAGS = tuple(field.name for field in fields(Sizes))
_LAYOUT_FLAGS = ("context_parallel_size", "pipeline_model_parallel_size", "tensor_model_parallel_size")


def check_world_size(layout: Layout, sizes: Sizes) -> None:
    """Raise BatchError unless the world size is a multiple of the ranks that one copy of the model needs."""
    if layout.world_size % layout.model_parallel == 0:
        return
    others = list(_other_layouts(layout))
    fits = [other for other in others if _first_fault(sizes, other.data_parallel) is None] or others
    fewer = [other.world_size for other in fits if other.world_size < layout.world_size]
    more = [other.world_size for other in fits if other.world_size > layout.world_size]
    suggestions = [{WORLD_SIZE: size} for size in fewer[-1:] + more[:1]]
    for flag in _LAYOUT_FLAGS:
        smaller = [getattr(other, flag) for other in fits if getattr(other, flag) < getattr(layout, flag)]
        suggestions += [{flag: max(smaller)}] if smaller else []
    tp, pp, cp = (getattr(layout, flag) for flag in reversed(_LAYOUT_FLAGS))
    raise BatchError(
        f"world size ({layout.world_size}) must be divisible by tensor_model_parallel_size ({tp}) * "
        f"pipeline_model_parallel_size ({pp}) * context_parallel_size ({cp}) = {layout.model_parallel}",
        suggestions,
    )


def _other_layouts(layout: Layout) -> Iterator[Layout]:
    """Yield layouts that fit their world size and differ from this one in a single number.

    The number is the world size, in ascending order, or a flag, replaced by one of its divisors: a divisor of a size
    that is valid for the model is valid as well.
    """
    for multiple in range(1, layout.world_size // layout.model_parallel + 9):
        yield replace(layout, world_size=multiple * layout.model_parallel)
    for flag in _LAYOUT_FLAGS:
        current = getattr(layout, flag)
        for value in range(1, min(current, layout.world_size + 1)):
            other = replace(layout, **{flag: value})  # type: ignore[arg-type]
            if current % value == 0 and layout.world_size % other.model_parallel == 0:
                yield other


def check_sizes(sizes: Sizes, dp: int) -> None:
    """Raise BatchError unless the batch sizes fit together and divide over `dp` data-parallel ranks."""
    fault = _first_fault(sizes, dp)
    if fault is not None:
        raise BatchError(fault.message, _suggestions(sizes, dp, fault.flags))


@dataclass(frozen=True, slots=True)
class _Fault:
    message: str
    flags: tuple[str, ...]  # the flags that the message concerns


def _first_fault(sizes: Sizes, dp: int) -> _Fault | None:
    micro, step, rollout, group = sizes.micro_batch_size, sizes.global_batch_size, sizes.rollout, sizes.num_generations
    steps = sizes.steps_per_generation
    for flag in ("micro_batch_size", "global_batch_size", "num_generations", "generation_batch_size"):
        value = getattr(sizes, flag)
        if value is not None and value <= 0:
            return _Fault(f"{flag} must be > 0, got {value}", (flag,))
    if steps is not None and steps <= 0:
        return _Fault(f"steps_per_generation must be > 0, got {steps}", ("steps_per_generation",))
    if steps is not None and rollout != step * steps:
        return _Fault(
            f"generation_batch_size ({rollout}) must equal global_batch_size ({step}) * steps_per_generation "
            f"({steps}) = {step * steps}",
            ("generation_batch_size", "steps_per_generation"),
        )
    if rollout % step:
        return _Fault(
            f"generation_batch_size ({rollout}) must be divisible by global_batch_size ({step})",
            ("generation_batch_size",),
        )
    if rollout % group:
        return _Fault(
            f"generation_batch_size ({rollout}) must be divisible by num_generations ({group})",
            ("global_batch_size" if sizes.generation_batch_size is None else "generation_batch_size",),
        )
    if step % (micro * dp):
        return _Fault(
            f"global batch size ({step}) is not divisible by micro batch size ({micro}) times data parallel size "
            f"({dp})",
            ("global_batch_size",),
        )
    return None


def _suggestions(sizes: Sizes, dp: int, flags: tuple[str, ...]) -> list[dict[str, int]]:
    """Return the nearest values of these flags, and of other flags that need a smaller change.

    If no single flag helps, return changes of two flags at once.
    """
    around = {flag: _nearest(sizes, dp, flag) for flag in _SIZE_FLAGS}
    smallest_change = min((change for flag in flags for change, _ in around[flag]), default=float("inf"))
    fixes = [{flag: value} for flag in flags for value in sorted(value for _, value in around[flag])]
    others = sorted(
        (change, flag, value) for flag in _SIZE_FLAGS if flag not in flags for change, value in around[flag]
    )
    fixes += [{flag: value} for change, flag, value in others if change < smallest_change][:2]
    return fixes or _both_batches(sizes, dp)


def _nearest(sizes: Sizes, dp: int, flag: str) -> list[tuple[float, int]]:
    """Return the nearest valid values below and above, each with its relative change."""
    current = getattr(sizes, flag)
    if current is None:
        return []
    around = _around(_candidates(sizes, dp, flag), current)
    valid = [v for v in around if _first_fault(replace(sizes, **{flag: v}), dp) is None]
    below = [v for v in valid if v < current][-1:]
    above = [v for v in valid if v > current][:1]
    return [(abs(v - current) / max(abs(current), 1), v) for v in below + above]


def _around(candidates: range, current: int) -> range:
    """Return the candidates next to the current value, so that the search also ends for sizes of a billion."""
    if not candidates:
        return candidates
    place = min(max(0, (current - candidates.start) // candidates.step), len(candidates))
    return candidates[max(0, place - _REACH) : place + _REACH]


def _candidates(sizes: Sizes, dp: int, flag: str) -> range:
    """Return the values of `flag` to try, in ascending order, up to a bound that includes the next valid one."""
    micro, step, group = max(sizes.micro_batch_size, 1), max(sizes.global_batch_size, 1), max(sizes.num_generations, 1)
    given = sizes.generation_batch_size
    if flag == "micro_batch_size":
        return range(1, step // dp + 1)
    if flag == "global_batch_size":
        unit = micro * dp
        return range(unit, (step + unit * group if given is None else given) + 1, unit)
    if flag == "generation_batch_size":
        return range(step, max(sizes.rollout, step) + step * group + 1, step)
    if flag == "steps_per_generation":
        return range(1, max(sizes.rollout // step, 1) + group + 1)
    return range(2, sizes.rollout + 1)


def _both_batches(sizes: Sizes, dp: int) -> list[dict[str, int]]:
    """Return the nearest global batch sizes, each with its generation batch size, if no single flag helps."""
    step = max(sizes.global_batch_size, 1)
    steps = max(1, round(sizes.rollout / step))
    free = Sizes(max(sizes.micro_batch_size, 1), step, max(sizes.num_generations, 2), None, steps)
    fits = _first_fault(free, dp) is None
    values = [step] if fits else sorted(value for _, value in _nearest(free, dp, "global_batch_size"))
    also = {flag: getattr(free, flag) for flag in ("micro_batch_size", "num_generations") if getattr(sizes, flag) <= 0}
    if sizes.steps_per_generation is not None:
        also["steps_per_generation"] = steps
    return [{"global_batch_size": value, "generation_batch_size": value * steps} | also for value in values]


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
