"""Drafts from the model's own layers of multi-token prediction, which vLLM holds as a second model.

vLLM proposes and schedules them; they are verified as all drafts are (verification.py). Here they are only counted.
"""

from collections.abc import Iterable
from typing import Any

from swift_megatron_grpo.types import DraftCounts

METHOD = "mtp"  # vLLM's name for all of them


def engine_settings(most: int) -> dict[str, Any]:
    """Return vLLM's settings of an engine that verifies `most` drafts of every request in a step."""
    return {"speculative_config": {"method": METHOD, "num_speculative_tokens": most}}


class PredictedDrafts:
    """Counts what the scheduler of an engine, which runs on each of its ranks, sends and gets back."""

    def __init__(self, scheduler: Any) -> None:
        self._counts = DraftCounts()
        finish_step = scheduler.update_from_output

        def finish_and_count(sent: Any, output: Any) -> Any:
            steps = sum(bool(len(tokens)) for tokens in output.sampled_token_ids)
            drafted = sum(map(len, sent.scheduled_spec_decode_tokens.values()))
            self._counts += DraftCounts(steps=steps, drafted=drafted)
            return finish_step(sent, output)

        scheduler.update_from_output = finish_and_count

    def remember(self, completions: Iterable[object]) -> None:
        """Do nothing: they are predicted from the model's hidden states alone."""

    def end_generation(self, tokens: int) -> None:
        self._counts += DraftCounts(tokens=tokens)

    def take_counts(self) -> DraftCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts
