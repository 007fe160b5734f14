"""Each test asserts that upstream still sets a wrong mark, and that megatron_fixes corrects it.

A test that fails here after an upgrade of megatron-core, mcore-bridge or Transformer Engine means that upstream has
changed: if its mark is right now, delete the fix. On a CPU, Transformer Engine is this repository's stand-in, which
copies the marks of version 2.11; run the file on a GPU to see those of the installed version.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import mpu
from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig

from swift_megatron_grpo.training.megatron_fixes.expert_marks import mark_experts
from swift_megatron_grpo.training.megatron_fixes.tensor_parallel_marks import mark_sharded_parameters


def config(**settings: Any) -> TransformerConfig:
    """Return a config as mcore-bridge makes it: weights are loaded later, not initialised."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        perform_initialization=False,
        use_cpu_initialization=True,
        **settings,
    )


def embedding() -> torch.nn.Module:
    return VocabParallelEmbedding(16, 8, init_method=torch.nn.init.normal_, config=config())


def output_layer() -> torch.nn.Module:
    return ColumnParallelLinear(8, 16, config=config(), init_method=torch.nn.init.normal_, bias=False)


def duplicated_linear() -> torch.nn.Module:
    """Return the kind of layer that holds the half of a LoRA adapter which is replicated on tensor-parallel ranks."""
    return TELinear(
        8, 4, parallel_mode="duplicated", config=config(), init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "upstream", "fixed"),
    [(embedding, False, True), (output_layer, False, True), (duplicated_linear, True, False)],
)
def test_upstream_marks_sharded_parameters_wrongly_and_the_fix_corrects_it(
    build: Any, upstream: bool, fixed: bool
) -> None:
    module = torch.nn.ModuleList([build()])
    [weight] = module.parameters()
    assert getattr(weight, "tensor_model_parallel", False) is upstream, "upstream is fixed: see this file's docstring"
    mark_sharded_parameters([module])
    assert weight.tensor_model_parallel is fixed


def test_upstream_marks_experts_as_dense_without_expert_parallelism_and_the_fix_corrects_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = config(tensor_model_parallel_size=2, num_moe_experts=2, sequence_parallel=True, add_bias_linear=False)
    experts = TEGroupedLinear(
        2, 8, 4, parallel_mode="column", config=layout, init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, is_expert=True, pg_collection=SimpleNamespace(expt_tp=None),
    )  # fmt: skip
    assert all(weight.allreduce for weight in experts.parameters()), "upstream is fixed: see this file's docstring"
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_expert_tensor_parallel_world_size", lambda: 1)
    mark_experts([torch.nn.ModuleList([experts])])
    assert not any(weight.allreduce for weight in experts.parameters())
