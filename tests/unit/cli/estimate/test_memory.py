"""Parts of the plan. That of whole runs is compared with measured ones in test_measured.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder, Tokens
from swift_megatron_grpo.cli.estimate.memory import (
    ASLEEP_BYTES,
    BESIDE_BYTES,
    OUTSIDE_BYTES,
    OUTSIDE_BYTES_WITH_EXPERTS,
    Engine,
    RankMemory,
    Training,
    master_bytes,
    plan_memory,
)
from swift_megatron_grpo.cli.estimate.parameters import tensors_of
from swift_megatron_grpo.settings.layout import Layout

GPU = 85e9
DECODER = Decoder(layers=1, hidden=4096, queries=4096, keys=1024, ffn=12288, vocabulary=1024, tied=False)
TENSORS = tensors_of({"model.layers.0.mlp.down_proj.weight": (10**6, 10**4)})  # 20 GB in bf16
ENGINE = Engine(60e9, 1e5, key_heads=8, longest=4096, ranks=2, utilization=0.5)  # 30 GB on a GPU
OFFLOADING = Training(
    Layout(1), Tokens(64, 64, 32), 1, lora_rank=8, offload_model=True, offload_optimizer=True, offload_grad=True
)


def planned(engine: Engine | None, training: Training = OFFLOADING) -> RankMemory:
    [rank] = plan_memory(TENSORS, DECODER, training, engine, GPU)
    return rank


def test_the_weights_of_both_are_on_the_gpu_in_the_weight_sync() -> None:
    rank = planned(ENGINE)
    beside = BESIDE_BYTES + OUTSIDE_BYTES
    assert rank.phases["generation"] == pytest.approx(0.5 * GPU + beside)
    assert rank.phases["weight sync"] == pytest.approx(rank.weights + 30e9 + ASLEEP_BYTES + beside)
    kept = planned(ENGINE, replace(OFFLOADING, offload_model=False, offload_optimizer=False, offload_grad=False))
    assert kept.phases["weight sync"] == pytest.approx(kept.states + 30e9 + ASLEEP_BYTES + OUTSIDE_BYTES)


def test_a_vllm_that_stays_awake_has_its_cache_in_the_weight_sync() -> None:
    rank = planned(replace(ENGINE, sleep_level=0))
    assert (
        rank.phases["weight sync"]
        == rank.phases["generation"]
        == pytest.approx(rank.states + 0.5 * GPU + OUTSIDE_BYTES)
    )
    assert planned(None).phases["weight sync"] == pytest.approx(rank.states + OUTSIDE_BYTES)


def test_a_given_cache_takes_the_place_of_the_share() -> None:
    given = replace(ENGINE, given_cache=8e9)
    assert planned(given).vllm == 30e9 + 8e9 + 2e9 and given.cache(GPU) == 8e9


def test_experts_on_several_gpus_need_more_outside_of_pytorch() -> None:
    assert planned(None).outside == OUTSIDE_BYTES
    layout = Layout(2, expert_model_parallel_size=2)
    assert planned(None, replace(OFFLOADING, layout=layout)).outside == OUTSIDE_BYTES_WITH_EXPERTS


@pytest.mark.parametrize(
    ("main_params", "precision_aware", "bf16", "expected"),
    [(4, False, True, 4), (4, True, True, 2), (2, True, True, 2), (4, True, False, 4)],
)
def test_the_upper_half_of_a_master_is_the_bf16_weight(
    main_params: int, precision_aware: bool, bf16: bool, expected: int
) -> None:
    assert master_bytes(main_params, precision_aware, bf16) == expected


def test_muon_has_one_state_for_a_matrix_and_two_for_the_rest() -> None:
    tensors = tensors_of({"model.embed_tokens.weight": (1024, 64), "model.layers.0.mlp.down_proj.weight": (64, 128),
                          "model.layers.0.input_layernorm.weight": (64,)})  # fmt: skip
    muon = Training(Layout(2), Tokens(64, 64, 32), 1, optimizer_bytes=12, matrix_bytes=8, shards_optimizer=False)
    [rank] = plan_memory(tensors, DECODER, muon, None, GPU)
    assert rank.optimizer == 12 * (1024 * 64 + 64) + 8 * 64 * 128
    [adapter] = plan_memory(tensors, DECODER, replace(muon, lora_rank=8), None, GPU)
    assert adapter.optimizer == 8 * 8 * (64 + 128)
