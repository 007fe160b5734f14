"""The advice names a flag and a value that works."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.memory.out_of_memory import RECOMPUTE, out_of_memory_advice, smaller_micro_batches


def test_the_story_names_rank_phase_and_remedy_and_keeps_torchs_own() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"rank 3 ran out of GPU memory in training: less\. Tried"),
        out_of_memory_advice("training", 3, "less"),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match=r"^no$"), out_of_memory_advice("the train phase", 0, "less"):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("tokens", "completions", "longest", "advice"),
    [
        (16384, 1, 4000, "lower --flag from 16384 to 8192"),
        (16384, 1, 9000, "lower --flag from 16384 to 9000"),
        (4096, 1, 4096, "--flag 4096 just holds the longest completion with its prompt, 4096 tokens"),
        (None, 4, 900, "lower --flag from 4 to 2"),
        (None, 1, 900, "--flag is 1 and the longest completion with its prompt has 900 tokens"),
    ],
)
def test_advice(tokens: int | None, completions: int, longest: int, advice: str) -> None:
    told = smaller_micro_batches("--flag", tokens, completions, longest, train=True)
    assert told.startswith(advice), told
    assert RECOMPUTE in told
    assert RECOMPUTE not in smaller_micro_batches("--flag", tokens, completions, longest, train=False)
