"""Predicted drafts are counted by what the scheduler sends and gets back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swift_megatron_grpo.generation.vllm.predicted_drafts import PredictedDrafts
from swift_megatron_grpo.types import DraftCounts


def test_a_step_counts_the_requests_that_got_tokens_and_all_drafts() -> None:
    finished: list[Any] = []
    scheduler: Any = SimpleNamespace(update_from_output=lambda sent, output: finished.append(sent) or "outputs")
    drafts = PredictedDrafts(scheduler)
    first = SimpleNamespace(scheduled_spec_decode_tokens={})
    second = SimpleNamespace(scheduled_spec_decode_tokens={"0": [5, 6, 7], "1": [8]})
    assert scheduler.update_from_output(first, SimpleNamespace(sampled_token_ids=[[1], [2], []])) == "outputs"
    scheduler.update_from_output(second, SimpleNamespace(sampled_token_ids=[[5, 6, 3], [4], []]))
    drafts.end_generation(6)
    assert finished == [first, second]
    counts = drafts.take_counts()
    assert counts == DraftCounts(tokens=6, steps=4, drafted=4) and counts.accepted == 2
    assert drafts.take_counts() == DraftCounts()
