"""Sizes of micro batches."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.arguments.derived import shape_of
from swift_megatron_grpo.settings.batches import Batches, MicroBatches
from tests.unit.settings.flags import faults


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            (0, None, None),
            "--max_tokens_per_micro_batch 0 must be at least 1; use --max_tokens_per_micro_batch 16384",
        ),
        ((None, -5, None), "--infer_max_tokens_per_micro_batch -5 must be at least 1"),
        ((None, None, 0), "--infer_batch_size 0 must be at least 1; use --infer_batch_size 16"),
        ((None, 4096, 4), "--infer_max_tokens_per_micro_batch 4096 and --infer_batch_size 4 both set"),
        ((1, 1, None), ""),
    ],
)
def test_invalid_sizes_of_micro_batches(typed: tuple[int | None, int | None, int | None], message: str) -> None:
    flags = ("max_tokens_per_micro_batch", "infer_max_tokens_per_micro_batch", "infer_batch_size")
    found = faults(MicroBatches, **dict(zip(flags, typed, strict=True)))
    assert message in found and bool(found) == bool(message)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("true", 2, None, 4), "--share_prompts true with --context_parallel_size 2"),
        (("true", 1, None, 1), "no effect in micro batches of one completion; use --max_tokens_per_micro"),
        (("true", 1, 100, 1), ""),
        (("true", 1, None, 8), ""),
        (("auto", 2, None, 1), ""),
        (("false", 2, None, 1), ""),
    ],
)
def test_prompts_that_cannot_be_shared_are_refused_on_request(typed: tuple[Any, ...], message: str) -> None:
    flags = ("share_prompts", "context_parallel_size", "max_tokens_per_micro_batch", "micro_batch_size")
    found = faults(MicroBatches, **dict(zip(flags, typed, strict=True)))
    assert message in found and bool(found) == bool(message)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ({"linear_num_key_heads": 2}, "have a state"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"model_type": "gpt_oss", "sliding_window": 128}, "a window"),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
    ],
)
def test_attention_that_cannot_share_prompts_is_refused_on_request(attention: dict[str, Any], reason: str) -> None:
    shape = shape_of({"model_type": "any", **attention}, "m")
    found = faults(MicroBatches, shape=shape, share_prompts="true", micro_batch_size=8)
    assert reason in found and bool(found) == bool(reason)
    assert faults(MicroBatches, shape=shape, share_prompts="auto") == ""


def test_batch_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    assert faults(Batches) == ""
    assert "use --global_batch_size 48 or 56" in faults(Batches, global_batch_size=50)
    assert "use --num_iterations 1" in faults(Batches, num_iterations=0)
