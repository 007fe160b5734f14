"""The room of vLLM's share, in whole numbers that are checked by hand."""

from __future__ import annotations

from dataclasses import replace

from swift_megatron_grpo.cli.estimate.advice import engines_that_fit
from swift_megatron_grpo.cli.estimate.memory import Engine

GPU = 80e9
# 16 GB of weights, 0.2 MB of cache per token: 40 GB - 16 GB - 2 GB hold 110,000 tokens.
ENGINE = Engine(16e9, 0.2e6, key_heads=2, longest=10_000, ranks=1, utilization=0.5)


def test_the_cache_is_what_weights_leave() -> None:
    assert ENGINE.cache(GPU) == 22e9 and ENGINE.sequences(GPU, 10_000) == 11 and ENGINE.fits(GPU)


def test_ranks_divide_weights_and_heads_until_there_are_no_more_heads() -> None:
    assert replace(ENGINE, ranks=2).sequences(GPU, 10_000) == 30  # 30 GB of 0.1 MB
    assert replace(ENGINE, ranks=4).sequences(GPU, 10_000) == 34  # 34 GB of 0.1 MB


def test_a_given_cache_counts_as_it_is() -> None:
    assert replace(ENGINE, given_cache=4e9).sequences(GPU, 10_000) == 2


def test_a_share_without_room_for_one_sequence_gets_settings_that_have_it() -> None:
    small = replace(ENGINE, utilization=0.2)
    assert not small.fits(GPU)
    assert [flags for flags, _ in engines_that_fit(small, GPU, 8)] == [
        "--vllm_gpu_memory_utilization 0.3",
        "--vllm_tensor_parallel_size 2",
    ]
    assert all(engine.fits(GPU) for _, engine in engines_that_fit(small, GPU, 8))
    assert not list(engines_that_fit(replace(ENGINE, weight_bytes=1e12), GPU, 4))
