"""The flags of datasets."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.settings.run import Data
from tests.unit.settings.flags import faults, of

STREAM = {"streaming": True, "dataset": ["rows.jsonl"], "train_iters": 3}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({}, ""),
        ({"val_dataset": ["other.jsonl"]}, ""),
        ({"streaming": False, "train_iters": None, "num_train_epochs": 1, "split_dataset_ratio": 0.1}, ""),
        ({"train_iters": None}, "use --train_iters 100"),
        ({"num_train_epochs": 1}, "leave --num_train_epochs out"),
        ({"save_strategy": "epoch"}, "use --save_strategy steps"),
        ({"split_dataset_ratio": 0.1}, "use --val_dataset"),
        ({"dataset": ["rows.jsonl", "org/name:default#500"]}, "--train_iters says how many rows are read"),
        ({"shuffle_buffer_size": 0}, "use --shuffle_buffer_size 1000"),
    ],
)
def test_a_stream_is_as_long_as_the_run(typed: dict[str, Any], message: str) -> None:
    found = faults(Data, **STREAM | typed)
    assert message in found and bool(found) == bool(message)


def test_the_order_of_a_stream_is_kept() -> None:
    assert of(Data).shuffles and not of(Data, **STREAM).shuffles
    assert not of(Data, train_dataloader_shuffle=False).shuffles
