"""Compare the attention of a model with exact arithmetic on forked ranks, also with a kernel that is wrong on one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import Attention

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.training.layers import attention_check
from tests.programs.dist.engine_runs import make_trainer


def errors(out: str, flags: list[str]) -> None:
    """Report the errors of the first attention layer, its sizes, and those of the values that its kernel gets."""
    trainer = make_trainer(flags)
    layer = next(layer for layer in trainer.unwrapped_models[0].modules() if isinstance(layer, Attention))
    shape = attention_check._shape(layer)
    engine = trainer.build_engine()
    with recorded_channels() as compared:
        found = attention_check.compare(layer, shape, RankPosition.from_megatron())
    with recorded_channels() as trained:
        engine.infer(fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True))
    sizes = [shape.heads, shape.groups, shape.key_channels, shape.value_channels]
    report = {"errors": found, "sizes": sizes, "comparable": attention_check._is_comparable(layer)}
    write(out, report | {"compared": sorted(compared), "trained": sorted(trained)})


@contextmanager
def recorded_channels() -> Iterator[set[tuple[int, int]]]:
    """Record the channels of keys and values of all calls of the kernel."""
    channels = set[tuple[int, int]]()
    forward = attention_check.TEDotProductAttention.forward

    def recording(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        channels.add((key.shape[-1], value.shape[-1]))
        return forward(self, query, key, value, *rest, **named)

    attention_check.TEDotProductAttention.forward = recording
    try:
        yield channels
    finally:
        attention_check.TEDotProductAttention.forward = forward


def short_output(out: str, flags: list[str]) -> None:
    """Report how the trainer starts when the kernel leaves out the last channel of each token."""
    forward = attention_check.TEDotProductAttention.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_check.TEDotProductAttention, "forward", lambda *args, **named: forward(*args, **named)[..., :-1]
        )
        write_error_of_start(out, flags)


def wrong_gradient(out: str, flags: list[str], rank: int, shapes: int = 1) -> None:
    """Report how the trainer starts when the gradient of keys is a tenth too large on a rank.

    `shapes`: the layers count as that many kernels.
    """
    shape_of, layers = attention_check._shape, count()
    forward = attention_check.TEDotProductAttention.forward

    def numbered(layer: Any) -> Any:
        return replace(shape_of(layer), scale=shape_of(layer).scale + next(layers) % shapes / 1e9)

    def wrong(self: Any, query: torch.Tensor, key: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
        if key.requires_grad:
            key = key.view_as(key)
            key.register_hook(lambda gradient: 1.1 * gradient)
        return forward(self, query, key, *others, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_check, "_shape", numbered)
        if int(os.environ["RANK"]) == rank:
            patch.setattr(attention_check.TEDotProductAttention, "forward", wrong)
        write_error_of_start(out, flags)


def write_error_of_start(out: str, flags: list[str]) -> None:
    try:
        make_trainer(flags)
        write(out, {"error": None})
    except RuntimeError as error:
        write(out, {"error": f"{type(error).__name__}: {error}"})


def write(out: str, report: dict[str, Any]) -> None:
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
