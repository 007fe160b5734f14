"""Notes of the start-up log that depend on the model and the layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.arguments import start_up_log
from swift_megatron_grpo.arguments.derived import shape_of


@pytest.mark.parametrize(
    ("experts", "gpus_of_an_engine", "uses_servers", "is_noted"),
    [(8, 2, False, True), (8, 1, False, False), (8, 2, True, False), (None, 2, False, False)],
)
def test_fp8_is_noted_where_gpus_of_a_run_share_the_experts_of_an_engine(
    experts: int | None, gpus_of_an_engine: int, uses_servers: bool, is_noted: bool
) -> None:
    sizes = {} if experts is None else {"num_experts": experts}
    args: Any = SimpleNamespace(
        model_shape=shape_of({"model_type": "any", **sizes}, "m"),
        uses_servers=uses_servers, vllm_tensor_parallel_size=gpus_of_an_engine,
        rollout_quantization="fp8", rollout_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    assert bool(start_up_log._quantization_notes(args)) == is_noted
