"""Each stage receives, by its own plan, the shapes that its neighbours send by theirs; another shape is not sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.training.stage_shapes import PlannedExchanges, UnplannedShape


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_neighbours_have_the_same_shapes_in_the_same_order(stages: int, chunks: int, groups: int, more: int) -> None:
    size = stages + more
    shapes = [[number + 1, 1, 8] for number in range(groups * size)]
    plans = [PlannedExchanges(shapes, stage, stages, chunks, size) for stage in range(stages)]
    for one, next_one in pairwise(range(stages)):
        assert list(plans[one]._to_next) == list(plans[next_one]._from_previous)
        assert list(plans[next_one]._to_previous) == list(plans[one]._from_next)
    # Chunks but the last one of the last stage are followed by those of the first stage.
    assert list(plans[-1]._to_next) == list(plans[0]._from_previous) == shapes_of_the_wrap(shapes, chunks, size)
    assert list(plans[0]._to_previous) == list(plans[-1]._from_next) == shapes_of_the_wrap(shapes, chunks, size)


def shapes_of_the_wrap(shapes: list[list[int]], chunks: int, size: int) -> list[list[int]]:
    groups = [shapes[start : start + size] for start in range(0, len(shapes), size)]
    return [shape for group in groups for _ in range(chunks - 1) for shape in group]


def test_a_tensor_of_another_shape_is_refused_before_it_is_sent() -> None:
    plan = PlannedExchanges([[4, 1, 8], [6, 1, 8]], stage=0, stages=2, chunks=1, group_size=1)
    assert plan.shapes(torch.zeros(4, 1, 8), None, False, True) == ([0, 0, 0], [4, 1, 8])
    with pytest.raises(UnplannedShape, match=r"\[5, 1, 8\] where the plan has \[6, 1, 8\]"):
        plan.shapes(torch.zeros(5, 1, 8), None, False, True)
