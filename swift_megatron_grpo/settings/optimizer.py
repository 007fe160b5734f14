"""Learning rate, weight decay and optimizer, which Megatron runs. It checks them after the model is built, or never."""

from __future__ import annotations

from typing import Annotated

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, rule, rule_as_typed

_DECAYS = "it is a moving average, which would never forget"
_BELOW_1 = Range(0, 0.9, high=1, below_high=True, why=_DECAYS)


class LearningRate(Flags):
    lr: Annotated[float | None, Range(0, 1e-6, high=1e4, above_low=True, why="at 0 no weight is trained")]
    min_lr: Annotated[float, AtLeast(0, use=0)]
    lr_warmup_init: Annotated[float, AtLeast(0, use=0)]
    lr_warmup_iters: Annotated[int, AtLeast(0, use=0)]
    lr_warmup_fraction: Annotated[float | None, Range(0, 0.05, high=1, below_high=True)]
    lr_decay_style: str
    lr_decay_iters: Annotated[int | None, AtLeast(1, use=1000)]
    lr_wsd_decay_iters: Annotated[int | None, AtLeast(1, use=100)]
    train_iters: int | None

    @rule
    def lr_is_the_highest(self) -> Faults:
        for name in ("min_lr", "lr_warmup_init"):
            value = getattr(self, name)
            if self.lr is not None and 0 < self.lr < value:
                yield f"--{name} {value:g} must not be above --lr {self.lr:g}; use --{name} 0"

    @rule
    def one_flag_sets_the_warm_up(self) -> Faults:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            yield (
                f"--lr_warmup_iters {self.lr_warmup_iters} has no effect with --lr_warmup_fraction "
                f"{self.lr_warmup_fraction:g}, which also sets the warm-up; leave one of them out"
            )

    @rule
    def lr_is_reached(self) -> Faults:
        iterations, warm_up = self.lr_decay_iters or self.train_iters, self.lr_warmup_iters
        if iterations is not None and self.lr_warmup_fraction is None and 0 < iterations <= warm_up:
            yield (
                f"--lr_warmup_iters {warm_up} must be below the {iterations} iterations of training, or --lr would "
                f"never be reached; use --lr_warmup_iters {iterations // 10}"
            )

    @rule
    def wsd_has_its_iterations(self) -> Faults:
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            iterations = self.lr_decay_iters or self.train_iters or 1000
            yield (
                "--lr_decay_style WSD decays over the last --lr_wsd_decay_iters iterations, and this flag is not set; "
                f"use --lr_wsd_decay_iters {max(1, iterations // 10)}, or --lr_decay_style cosine"
            )


class Optimizer(Flags):
    weight_decay: Annotated[float, AtLeast(0, use=0.1)]
    weight_decay_incr_style: str
    start_weight_decay: Annotated[float | None, AtLeast(0, use=0.1)]
    end_weight_decay: Annotated[float | None, AtLeast(0, use=0.1)]
    clip_grad: Annotated[float, AtLeast(0, use=1.0, why="0 does not clip")]
    adam_beta1: Annotated[float, _BELOW_1]
    adam_beta2: Annotated[float, Range(0, 0.95, high=1, below_high=True, why=_DECAYS)]
    adam_eps: Annotated[float, Above(0, use=1e-8, why="at 0, a weight without a gradient becomes 0/0")]
    sgd_momentum: Annotated[float, _BELOW_1]

    @rule
    def weight_decay_grows(self) -> Faults:
        start, end = self.start_weight_decay, self.end_weight_decay
        if start is not None and end is not None and start > end:
            yield (
                f"--start_weight_decay {start:g} must not be above --end_weight_decay {end:g}; use "
                f"--start_weight_decay {end:g}"
            )

    @rule_as_typed  # ms-swift sets those that are left out
    def weight_decay_has_both_ends_or_none(self) -> Faults:
        ends = ("start_weight_decay", "end_weight_decay")
        given = [name for name in ends if getattr(self, name) is not None]
        if self.weight_decay_incr_style == "constant" and given:
            yield (
                f"--{given[0]} {getattr(self, given[0]):g} has no effect on a constant weight decay; use "
                "--weight_decay_incr_style linear, or leave it out and use --weight_decay"
            )
        elif self.weight_decay_incr_style != "constant" and len(given) < len(ends):
            yield (
                f"--weight_decay_incr_style {self.weight_decay_incr_style} needs both ends; use --start_weight_decay 0 "
                f"--end_weight_decay {self.weight_decay:g}, or --weight_decay_incr_style constant"
            )
