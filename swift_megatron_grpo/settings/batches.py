"""Batch sizes of a run. Every size counts completions, never prompts.

    data parallel size    = world size / (TP * PP * CP)
    global_batch_size     = micro_batch_size * data parallel size * accumulation steps      one optimizer step
    generation_batch_size = global_batch_size * steps_per_generation                        one rollout
    rollout prompts       = generation_batch_size / num_generations

If sizes do not fit together, the error ends with the nearest ones that do. The messages use ms-swift's terms, because
its users know them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Annotated, Any, Literal

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, as_typed, flag, rule
from swift_megatron_grpo.settings.layout import Layout, ModelShape

SharePrompts = Literal["auto", "true", "false"]
SHARE_PROMPTS_FROM: dict[SharePrompts, float | None] = {"auto": 0.05, "true": 0.0, "false": None}
_LAYOUT_FLAGS = ("context_parallel_size", "pipeline_model_parallel_size", "tensor_model_parallel_size")
_SIZES = (
    "global_batch_size", "generation_batch_size", "steps_per_generation", "micro_batch_size", "num_generations",
)  # fmt: skip
_MOST = 10**8


class BatchError(ValueError):
    """Sizes that do not fit together. Each suggestion is a complete fix: flags and their new values."""

    def __init__(self, fault: str, suggestions: Iterable[dict[str, int]]) -> None:
        self.suggestions = tuple(suggestions)
        values: dict[str, list[str]] = {}  # by what precedes them: --global_batch_size 48 or 64
        for suggestion in self.suggestions:
            typed, _, last = " ".join(f"--{flag} {size}" for flag, size in suggestion.items()).rpartition(" ")
            values.setdefault(typed.replace("--world_size", "a world size of"), []).append(last)
        advice = ", or ".join(f"{typed} {' or '.join(sizes)}" for typed, sizes in values.items())
        super().__init__(f"{fault}; use {advice}" if advice else fault)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes that fit together."""

    layout: Layout
    micro_batch_size: int
    global_batch_size: int
    generation_batch_size: int
    steps_per_generation: int
    num_generations: int

    @property
    def rollout_prompts(self) -> int:
        return self.generation_batch_size // self.num_generations

    @property
    def train_prompts(self) -> int:
        """Number of whole prompts of one optimizer step, at least 1: a step may end within a prompt's completions."""
        return max(1, self.global_batch_size // self.num_generations)

    def table(self, max_tokens: int | None = None) -> list[str]:
        """Return lines for the start-up log. `max_tokens`: the token budget of micro batches, if any."""
        layout, dp = self.layout, self.layout.data_parallel
        cp, pp, tp = (getattr(layout, flag) for flag in _LAYOUT_FLAGS)
        steps = self.global_batch_size // (self.micro_batch_size * dp)
        train_prompts = self.global_batch_size / self.num_generations
        micro = [
            ("micro batch", self.micro_batch_size, "completions of one forward pass on one data-parallel rank"),
            ("accumulation steps", steps, "micro batches of one step on each data-parallel rank"),
        ]
        if max_tokens is not None:
            micro = [("micro batch", max_tokens, "maximum tokens of one forward pass; micro_batch_size is ignored")]
        rows = [
            ("data parallel size", dp, f"world size {layout.world_size} / (TP {tp} * PP {pp} * CP {cp})"),
            *micro,
            ("global batch", self.global_batch_size, "completions of one optimizer step"),
            ("steps per generation", self.steps_per_generation, "optimizer steps that train on one rollout"),
            ("generation batch", self.generation_batch_size, "completions of one rollout"),
            ("completions per prompt", self.num_generations, "num_generations"),
            ("rollout prompts", self.rollout_prompts, "generation batch / completions per prompt"),
            ("train prompts", train_prompts, "global batch / completions per prompt"),
            ("prompts per DP group", train_prompts / dp, "train prompts / data parallel size"),
        ]
        return [f"  {name:<24}{value:>8g}   {meaning}" for name, value, meaning in rows]

    def notes(self) -> list[str]:
        """Return one line if ms-swift's own trainer would refuse these sizes, for users who switch back."""
        dp, prompts, rollout = self.layout.data_parallel, self.rollout_prompts, self.generation_batch_size
        count = f"generation_batch_size ({rollout}) // num_generations ({self.num_generations})"
        if prompts % dp:
            objection = f"num_rollout_prompt ({prompts}) = {count} is not divisible by dp_size ({dp})"
        elif prompts // dp % self.micro_batch_size:
            objection = (
                f"Per-device rollout prompt count ({prompts // dp}) = ({count}) // dp_size ({dp}) is not divisible by "
                f"micro_batch_size ({self.micro_batch_size})"
            )
        elif rollout % self.layout.world_size:
            objection = (
                f"generation_batch_size ({rollout}) is not divisible by the world size ({self.layout.world_size})"
            )
        else:
            return []
        here = "ms-swift's own trainer refuses that; this one distributes single completions to ranks and accepts it"
        return [f"{objection}. {here}."]


class Batches(Flags):
    """Completions of a rollout and of an optimizer step; the loop reads them."""

    micro_batch_size: int
    global_batch_size: int
    num_generations: int
    generation_batch_size: int | None
    steps_per_generation: int | None
    num_iterations: Annotated[int, AtLeast(1, use=1)]
    max_tokens_per_micro_batch: int | None

    @rule
    def sizes_fit_together(self, layout: Layout) -> None:
        if layout.is_positive:
            self.sizes(layout)

    def sizes(self, layout: Layout) -> BatchSizes:
        """Fill in the sizes that are not typed. Raises BatchError if they do not fit together."""
        if self.max_tokens_per_micro_batch is not None:  # --micro_batch_size is ignored
            return replace(self, micro_batch_size=1, max_tokens_per_micro_batch=None).sizes(layout)
        _check_world_size(layout)
        for name, size in self._typed.items():
            if size > _MOST and name.endswith("batch_size"):
                advice = {name: 128 * self.num_generations}
                raise BatchError(f"--{name} {size} is more than {_MOST} completions", [advice])
        fault = self._fault(layout.data_parallel)
        if fault is not None:
            raise BatchError(fault, self._fixes(layout.data_parallel))
        return BatchSizes(
            layout=layout,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            generation_batch_size=self._rollout,
            steps_per_generation=self._rollout // self.global_batch_size,
            num_generations=self.num_generations,
        )

    @property
    def _typed(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in _SIZES}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def _rollout(self) -> int:
        steps = 1 if self.steps_per_generation is None else self.steps_per_generation
        return self.global_batch_size * steps if self.generation_batch_size is None else self.generation_batch_size

    def _fault(self, dp: int) -> str | None:
        for name, size in self._typed.items():
            if size <= 0:
                return f"{name} must be > 0, got {size}"
        micro, step, rollout = self.micro_batch_size, self.global_batch_size, self._rollout
        steps = self.steps_per_generation
        if steps is not None and rollout != step * steps:
            return (
                f"generation_batch_size ({rollout}) must equal global_batch_size ({step}) * steps_per_generation "
                f"({steps}) = {step * steps}"
            )
        for name in ("global_batch_size", "num_generations"):
            if rollout % getattr(self, name):
                return f"generation_batch_size ({rollout}) must be divisible by {name} ({getattr(self, name)})"
        if step % (micro * dp):
            return (
                f"global batch size ({step}) is not divisible by micro batch size ({micro}) times data parallel size "
                f"({dp})"
            )
        return None

    def _fixes(self, dp: int) -> list[dict[str, int]]:
        """Return the flags to change, for the nearest sizes below and above that fit together."""
        micro, step, rollout = max(self.micro_batch_size, 1), max(self.global_batch_size, 1), self._rollout
        group = self.num_generations if self.num_generations > 0 else 2
        if lcm(micro * dp, group) > _MOST:
            micro, group = 1, min(group, 8)
        steps, given = self.steps_per_generation or 0, self.generation_batch_size is not None
        if given and step == self.global_batch_size and step % (micro * dp) == 0:  # only the rollout is at fault
            both = (step * steps, *_multiples(rollout, lcm(step, group)))
            fits = [(step, size) for size in both if size > 0 and size % group == 0]
        else:
            steps = max(1, round(rollout / step) if given else steps)
            fits = [(size, size * steps) for size in _multiples(step, lcm(micro * dp, group // gcd(group, steps)))]
        fixes: list[dict[str, int]] = []
        for size, completions in fits:
            fixed = dict(zip(_SIZES, (size, completions, completions // size, micro, group), strict=True))
            fix = {name: fixed[name] for name, typed in self._typed.items() if typed != fixed[name]}
            fixes += [fix] if fix not in fixes else []
        return fixes


def _multiples(size: int, unit: int) -> list[int]:
    """Return the nearest multiples of `unit` below and above a size, or the size if it is one."""
    below = size // unit * unit
    return [multiple for multiple in dict.fromkeys((below, -(-size // unit) * unit)) if multiple > 0] or [unit]


def _check_world_size(layout: Layout) -> None:
    """Raise BatchError unless the world size is a multiple of the ranks that one copy of the model needs."""
    world, ranks = layout.world_size, layout.model_parallel
    if world % ranks == 0:
        return
    fixes = [{"world_size": size} for size in _multiples(world, ranks)]  # not a flag: NPROC_PER_NODE * NNODES
    for name in _LAYOUT_FLAGS:
        size = getattr(layout, name)
        smaller = (n for n in range(min(size - 1, world), 0, -1) if size % n == 0 and world % (ranks // size * n) == 0)
        fixes += [{name: n} for n in list(smaller)[:1]]
    cp, pp, tp = (getattr(layout, flag) for flag in _LAYOUT_FLAGS)
    raise BatchError(
        f"world size ({world}) must be divisible by tensor_model_parallel_size ({tp}) * pipeline_model_parallel_size "
        f"({pp}) * context_parallel_size ({cp}) = {ranks}",
        fixes,
    )


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

    @rule
    def the_attention_can_share_prompts(self, shape: ModelShape) -> Faults:
        if self.share_prompts == "true" and shape.repeats_prompts is not None:
            yield f"--share_prompts true: {shape.repeats_prompts}; use --share_prompts auto, which repeats prompts here"

    @property
    def share_prompts_from(self) -> float | None:
        """The share of a step's FLOPs that sharing prompts must save to be done; None: prompts are repeated."""
        return SHARE_PROMPTS_FROM[self.share_prompts]
