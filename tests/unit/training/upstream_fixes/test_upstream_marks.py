"""Asserts which versions of upstream set a mark wrongly, and that megatron_fixes corrects it in all of them.

A test that fails here after an upgrade of megatron-core, mcore-bridge or Transformer Engine means that upstream has
changed: update the version below and in docs/versions.md, and delete a fix that no supported version needs. On a CPU,
Transformer Engine is this repository's stand-in, which copies the marks of version 2.11; run the file on a GPU to see
those of the installed version.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine
from megatron.core import __version__, mpu
from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from packaging.version import Version

from swift_megatron_grpo.training.upstream_fixes.marks import mark_experts, mark_sharded_parameters
from tests.unit.training.upstream_fixes.newer_transformer_engine import experts_unmarked

installed = Version(__version__)
SHARDED_RIGHT = installed >= Version("0.18")  # seen in 0.18.2 and 0.19.2, not in 0.17.1
DUPLICATED_RIGHT = installed >= Version("0.17")  # seen in 0.17.1, 0.18.2 and 0.19.2
OLDER_TRANSFORMER_ENGINE = torch.cuda.is_available() and Version(transformer_engine.__version__) < Version("2.13")
EXPERTS_RIGHT = installed >= Version("0.19")  # seen in 0.19.2, not in 0.18.2


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


def experts(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Return whole experts of a layout with tensor parallelism and without expert parallelism."""
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_expert_tensor_parallel_world_size", lambda: 1)
    layout = config(
        tensor_model_parallel_size=2, expert_tensor_parallel_size=1, num_moe_experts=2, sequence_parallel=True,
        add_bias_linear=False,
    )  # fmt: skip
    return TEGroupedLinear(
        2, 8, 4, parallel_mode="column", config=layout, init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, is_expert=True, pg_collection=SimpleNamespace(expt_tp=None, expt_gtp_remat=None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "right", "right_upstream"),
    [
        (embedding, True, SHARDED_RIGHT),
        (output_layer, True, SHARDED_RIGHT),
        (duplicated_linear, False, DUPLICATED_RIGHT),
    ],
)
def test_the_fix_corrects_sharded_parameters_that_megatron_marks_wrongly(
    build: Any, right: bool, right_upstream: bool
) -> None:
    """Megatron below 0.18 marks them wrongly."""
    module = torch.nn.ModuleList([build()])
    [weight] = module.parameters()
    seen = getattr(weight, "tensor_model_parallel", False) is right
    assert seen is right_upstream, "upstream has changed: see this file's docstring"
    mark_sharded_parameters([module])
    assert weight.tensor_model_parallel is right


def test_the_fix_corrects_experts_that_megatron_marks_as_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron below 0.19 does so without expert parallelism."""
    module = experts(monkeypatch)
    upstream_is_right = not any(weight.allreduce for weight in module.parameters())
    assert upstream_is_right is EXPERTS_RIGHT, "upstream has changed: see this file's docstring"
    mark_experts([torch.nn.ModuleList([module])])
    assert not any(weight.allreduce for weight in module.parameters())


def test_the_fix_marks_experts_that_transformer_engine_leaves_unmarked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformer Engine from 2.13 on and Megatron below 0.19 leave them unmarked."""
    with experts_unmarked():
        module = experts(monkeypatch)
    marks = {getattr(weight, "tensor_model_parallel", False) for weight in module.parameters()}
    assert marks == {EXPERTS_RIGHT or OLDER_TRANSFORMER_ENGINE}, "upstream has changed: see this file's docstring"
    mark_sharded_parameters([torch.nn.ModuleList([module])])
    assert all(weight.tensor_model_parallel for weight in module.parameters())


@pytest.mark.parametrize("build", [embedding, output_layer, duplicated_linear])
def test_the_fix_changes_no_mark_that_is_right(build: Any) -> None:
    module = torch.nn.ModuleList([build()])
    mark_sharded_parameters([module])
    [weight] = module.parameters()
    marked = {name: vars(weight)[name] for name in ("tensor_model_parallel", "partition_dim", "partition_stride")}
    mark_sharded_parameters([module])
    assert {name: vars(weight)[name] for name in marked} == marked
