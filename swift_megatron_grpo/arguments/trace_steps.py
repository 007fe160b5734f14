"""The steps of --trace_steps."""

from __future__ import annotations

import re

_MOST_STEPS = 100


def read_trace_steps(
    text: str | None, train_iters: int | None = None, rollout_only: bool = False
) -> tuple[int, int] | None:
    """Return the first and the last step to trace; None: none. Raise ValueError for anything else than 3 or 3-5."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"trace_steps must be a step or a range of steps, from 1 on, got {text!r}; use --trace_steps 3-5"
        )
    if last - first >= _MOST_STEPS:
        raise ValueError(
            f"trace_steps {text} are {last - first + 1} steps, and a trace has at most {_MOST_STEPS}; "
            f"use --trace_steps {first}-{first + _MOST_STEPS - 1}"
        )
    if train_iters is not None and first > train_iters:
        raise ValueError(
            f"trace_steps {text} begin after the last step ({train_iters}); use --trace_steps {max(train_iters - 1, 1)}"
        )
    if rollout_only:
        raise ValueError("trace_steps: --rollout_only true has no steps of training; leave --trace_steps out")
    return first, last
