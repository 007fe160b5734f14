"""Bounds the memory that Transformer Engine's Adam needs for states that are stored in bf16 or fp16.

Upstream: before its kernel runs, `FusedAdam` (up to 2.14 at least) has copied all such states of a group to fp32, which
takes 8 bytes a weight for both moments, twice what storing them in bf16 saves. With all weights of Qwen3-30B-A3B on
four GPUs, 7.6 billion each, that is 61 GB: the first step ran out of 150 GB.

Fix: a step goes through the weights in portions, whose copies take 512 MiB. Adam is elementwise, so the results are the
same bit by bit.

Tests: tests/unit/training/optimizer/test_adam_portions.py, and tests/gpu/test_adam_portions.py, which fails once
upstream copies less; then delete this file.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

import torch

LARGEST = 2**26  # weights of a portion; a parameter that is larger is one by itself
T = TypeVar("T")


def step_adam_in_portions() -> None:
    """Let all optimizers of this class step so from now on."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    if "in_portions" not in vars(FusedAdam.step):
        FusedAdam.step = in_portions(FusedAdam.step)
        FusedAdam.step.in_portions = True


def in_portions(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return `FusedAdam.step` for any number of weights."""

    @wraps(whole)  # keeps the mark of torch, which would add its hooks a second time
    def step_in_portions(self: Any, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        if self.capturable or all(dtype == torch.float32 for dtype in self.name_to_dtype_map.values()):
            return whole(self, closure, grad_scaler)
        loss = None if closure is None else closure()
        groups = self.param_groups
        all_parameters = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, all_parameters, strict=True):
                self.param_groups = [group]
                steps = group.get("step", 0)
                for portion in portions(parameters):
                    group.update(params=portion, step=steps)  # every call counts a step
                    whole(self, None, grad_scaler)
        finally:
            self.param_groups = groups
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters
        return loss

    return step_in_portions


def portions(
    items: Iterable[T],
    numel: Callable[[T], int] = torch.Tensor.numel,  # type: ignore[assignment]
    is_followed_by: Callable[[T, T], bool] = lambda one, other: True,
) -> Iterator[list[T]]:
    """Divide items, in their order, where a portion would be too large or an item does not follow the one before."""
    portion: list[T] = []
    total = 0
    for item in items:
        size = numel(item)
        if portion and (total + size > LARGEST or not is_followed_by(portion[-1], item)):
            yield portion
            portion = []
            total = 0
        portion.append(item)
        total += size
    if portion:
        yield portion
