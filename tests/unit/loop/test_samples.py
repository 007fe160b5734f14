"""Completions as training samples: one for each of their sequences."""

from __future__ import annotations

import numpy as np

from swift_megatron_grpo.loop.samples import engine_experts, samples_of
from swift_megatron_grpo.types import ExpertRows, Graded, Prompt, Rollout, TokenSequence

PROMPT = Prompt("0-0", {"messages": [{"role": "user", "content": "?"}]})


def test_experts_of_the_engine_belong_to_the_last_sequence_alone() -> None:
    """An earlier one has another context. Samples are in the order of their tokens."""
    last, other = np.full((3, 1, 2), 1, np.uint8), np.full((2, 1, 2), 3, np.uint8)
    earlier = TokenSequence([2], [7], [-1.0])  # shorter than the last one, and behind it in the order of tokens
    several = Rollout(PROMPT, [1, 1], [5, 6], [-1.0, -1.0], "", "stop", 0, routed_experts=last, earlier=(earlier,))
    single = Rollout(PROMPT, [1, 1], [9], [-1.0], "", "stop", 0, routed_experts=other)
    graded = [Graded(rollout, [1.0], 1.0, 0.5) for rollout in (several, single)]
    samples = samples_of(graded, 2, False, None, replays_engine=True)
    assert [sample.tokens for sample in samples] == [[1, 1, 5, 6], [2, 7], [1, 1, 9]]
    expected: list[ExpertRows | None] = [last, None, other]
    assert all(sample.routed_experts is rows for sample, rows in zip(samples, expected, strict=True))
    assert all(found is rows for found, rows in zip(engine_experts([several, single]), expected, strict=True))
