"""Steps that are traced."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.arguments.trace_steps import read_trace_steps


def test_a_step_or_a_range_is_read() -> None:
    assert read_trace_steps(None) is None
    assert read_trace_steps("3") == (3, 3) and read_trace_steps(" 3-5 ", train_iters=4) == (3, 5)


@pytest.mark.parametrize(
    ("text", "advice"),
    [("0-2", "use --trace_steps 3-5"), ("5-3", "use --trace_steps 3-5"), ("a", "use --trace_steps 3-5"),
     ("1-1000", "use --trace_steps 1-100"), ("20-30", "use --trace_steps 9")],
)  # fmt: skip
def test_steps_that_cannot_be_traced_are_refused(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        read_trace_steps(text, train_iters=10)


def test_a_run_that_only_generates_has_no_steps_to_trace() -> None:
    with pytest.raises(ValueError, match="leave --trace_steps out"):
        read_trace_steps("1", train_iters=10, rollout_only=True)
