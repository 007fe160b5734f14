"""A run warns once of an allocator that finds no room."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.output.console.callback import SETTINGS, AllocatorRetries

TOKENS = "--max_tokens_per_micro_batch 8192"


def test_retries_are_those_since_the_last_log() -> None:
    counts = iter([3, 5, 5, 9])
    retries = AllocatorRetries(lambda: next(counts))
    assert [retries.since_last_log() for _ in range(3)] == [2, 0, 4]


def test_a_run_warns_once_and_not_of_its_first_step() -> None:
    retries = AllocatorRetries(lambda: 0)
    first, second, third, fourth = [retries.warning(number, TOKENS) for number in (7, 0, 4, 2)]
    assert third is not None and "found no room 4 times" in third
    assert first is second is fourth is None


@pytest.mark.parametrize("name", SETTINGS)
def test_the_advice_is_what_is_not_set_yet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in SETTINGS:
        monkeypatch.delenv(other, raising=False)
    warnings = []
    for value in ("", "max_split_size_mb:512,expandable_segments:True"):
        monkeypatch.setenv(name, value)
        retries = AllocatorRetries(lambda: 0)
        warnings.append([retries.warning(number, TOKENS) for number in (0, 1)][-1])
    without, with_segments = map(str, warnings)
    assert f"set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower {TOKENS}" in without
    assert with_segments.endswith(f"slower: lower {TOKENS}")
