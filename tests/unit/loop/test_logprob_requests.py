"""Log-probs of vLLM are requested exactly where something reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.loop.rollout_queue import logprobs_requested
from swift_megatron_grpo.settings.losses import Correction

_NONE = Correction()


def requested(
    interval: int,
    first: int,
    correction: Correction = _NONE,
    max_staleness: int = 0,
    dump: str | None = None,
    predicts_drafts: bool = False,
) -> list[int]:
    config: Any = SimpleNamespace(
        loss=SimpleNamespace(correction=correction), max_staleness=max_staleness,
        recording=SimpleNamespace(dump=dump), rollout_logprobs_interval=interval,
        engine=SimpleNamespace(predicts_drafts=predicts_drafts),
    )  # fmt: skip
    return [rollout for rollout in range(first, 12) if logprobs_requested(config, rollout, first)]


@pytest.mark.parametrize(
    ("interval", "first", "expected"),
    [
        (1, 0, list(range(12))),
        (5, 0, [0, 5, 10]),
        (5, 3, [3, 5, 10]),  # a resumed run compares its first rollout again
        (0, 0, [0]),
        (0, 7, [7]),
    ],
)
def test_without_readers_the_first_rollout_and_every_nth_have_them(
    interval: int, first: int, expected: list[int]
) -> None:
    assert requested(interval, first) == expected


@pytest.mark.parametrize(
    "reader",
    [
        {"correction": Correction(rollout_importance_sampling_mode="token_truncate")},
        {"correction": Correction(log_rollout_offpolicy_metrics=True)},
        {"correction": Correction(off_policy_sequence_mask_delta=0.1)},
        {"correction": Correction(m2_threshold=0.04)},
        {"correction": Correction(old_logprobs="engine")},
        {"max_staleness": 1},
        {"predicts_drafts": True},
        {"dump": "folder"},
    ],
    ids=["correction", "metrics", "mask", "second moment", "old", "staleness", "predicted drafts", "dump"],
)
def test_a_reader_gets_them_with_every_rollout(reader: dict[str, Any]) -> None:
    assert requested(0, 0, **reader) == list(range(12))
