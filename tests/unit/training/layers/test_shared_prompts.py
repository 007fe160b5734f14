"""Models and layouts that repeat prompts, each with its reason; and the angles for a fused rotary kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.training.layers.shared_prompts import (
    SharedPrompts,
    _angles_of_tokens,
    packed_params,
    why_repeated,
)
from swift_megatron_grpo.types import Sample

DENSE: dict[str, Any] = {
    "attention_backend": AttnBackend.flash,
    "experimental_attention_variant": None,
    "multi_latent_attention": False,
    "window_size": None,
    "engram_enabled": False,
    "num_moe_experts": None,
}
MOE = {
    **DENSE,
    "num_moe_experts": 8,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
}


def config(base: dict[str, Any], **changes: Any) -> Any:
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_plain_attention_shares_prompts(base: dict[str, Any]) -> None:
    assert why_repeated(config(base), 1, on_request=False) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention_backend": AttnBackend.unfused}, "unfused"),
        ({"experimental_attention_variant": "gated_delta_net"}, "gated_delta_net"),
        ({"multi_latent_attention": True}, "latent"),
        ({"window_size": (127, 0)}, "window"),
        ({"engram_enabled": True}, "n-grams"),
    ],
)
def test_layers_that_need_whole_sequences_repeat_prompts(changes: dict[str, Any], word: str) -> None:
    reason = why_repeated(config(DENSE, **changes), 1, on_request=True)
    assert reason is not None and word in reason


def test_context_parallelism_repeats_prompts() -> None:
    reason = why_repeated(config(DENSE), 2, on_request=True)
    assert reason is not None and "--context_parallel_size 2" in reason


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_aux_loss_coeff": 1e-3},
        {"moe_aux_loss_coeff": [0.0, 1e-3]},
        {"moe_z_loss_coeff": 1e-3},
        {"moe_router_enable_expert_bias": True},
    ],
)
def test_losses_of_routers_share_prompts_only_on_request(changes: dict[str, Any]) -> None:
    reason = why_repeated(config(MOE, **changes), 1, on_request=False)
    assert reason is not None and "would count the tokens of a prompt once" in reason
    assert why_repeated(config(MOE, **changes), 1, on_request=True) is None


def test_a_fused_rotary_kernel_gets_the_angle_of_each_token() -> None:
    """The kernel takes row i of the table for token i of a sequence, and the micro batch is one sequence to it."""
    samples = [Sample([1, 2, 3, c], [False] * 3 + [True], 1.0) for c in (4, 5)]
    inputs = collate(
        samples, [0, 1], count(samples), Alignment(1, 1), 0, 1, torch.device("cpu"), share_prompts=True
    ).inputs
    packed = packed_params(inputs)
    assert isinstance(packed, SharedPrompts)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 5] and packed.max_seqlen_kv == 4
    assert packed.cu_seqlens_q.is_contiguous()
    assert packed.segments is not None and packed.segments.cu_seqlens_kv.tolist() == [0, 3, 7, 11]

    table = torch.arange(4.0)[:, None, None, None]

    def angles(fused: bool, params: Any) -> list[float]:
        settings: Any = SimpleNamespace(apply_rope_fusion=fused)
        rows, _, _ = _angles_of_tokens(
            settings, lambda *a, **k: (table, None, None), table, inputs.position_ids, params
        )
        return [float(row) for row in rows.flatten()]

    assert angles(True, packed) == [0, 1, 2, 3, 3]
    assert angles(False, packed) == angles(True, packed.segments) == [0, 1, 2, 3]
