"""The export of a tiny policy has the tensors of its checkpoint, with adapters merged into them and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from swift_megatron_grpo.weights.export.export import WeightExport
from tests.fakes.one_rank import TinyPolicy, megatron_on_one_rank, tiny_policy

SCALING = 2.0
ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[TinyPolicy]:
    with megatron_on_one_rank():
        yield tiny_policy(tmp_path)


@pytest.fixture
def adapted(policy: TinyPolicy) -> TinyPolicy:
    """Return the policy with an adapter that changes every product."""
    get_peft_model(policy.megatron, LoraConfig(r=2, lora_alpha=4, target_modules=list(ADAPTED)))
    for name, parameter in policy.megatron.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return policy


def test_the_tensors_are_those_of_the_checkpoint(policy: TinyPolicy) -> None:
    stored = policy.transformers.state_dict()
    export = WeightExport(policy.bridge, [policy.megatron])
    for _ in range(2):  # every sync exports the same
        exported = dict(export())
        assert set(exported) == set(stored)
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
    assert export.adapted_count == export.pop_merged_count() == 0


def test_tensors_that_no_engine_holds_are_left_out(policy: TinyPolicy) -> None:
    export = WeightExport(policy.bridge, [policy.megatron], left_out=("model.layers.0.", "lm_head."))
    kept = {name for name in policy.transformers.state_dict() if not name.startswith(("model.layers.0.", "lm_head."))}
    assert {name for name, _ in export()} == kept


def test_adapters_are_merged_and_the_base_stays(adapted: TinyPolicy) -> None:
    stored = adapted.transformers.state_dict()
    before = {name: parameter.clone() for name, parameter in adapted.megatron.named_parameters()}
    export = WeightExport(adapted.bridge, [adapted.megatron])
    exported = dict(export())
    for layer, block in enumerate(adapted.megatron.decoder.layers):
        for module, name in (
            (block.self_attention.linear_proj, f"model.layers.{layer}.self_attn.o_proj.weight"),
            (block.mlp.linear_fc2, f"model.layers.{layer}.mlp.down_proj.weight"),
        ):
            delta = SCALING * module.lora_B["default"].weight @ module.lora_A["default"].weight
            torch.testing.assert_close(exported[name], stored[name] + delta)
            assert delta.norm() > 0.01 * stored[name].norm()
    untouched = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(torch.equal(exported[name], stored[name]) for name in untouched)
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapted.megatron.named_parameters())


def test_each_adapter_that_was_merged_is_counted_once(adapted: TinyPolicy) -> None:
    export = WeightExport(adapted.bridge, [adapted.megatron])
    assert export.adapted_count == len([m for m in adapted.megatron.modules() if isinstance(m, LoraLayer)]) == 8
    assert export.pop_merged_count() == 0
    for _ in export():
        pass
    assert export.pop_merged_count() == 8
    assert export.pop_merged_count() == 0


def test_an_export_that_ends_early_leaves_the_base_in_place(adapted: TinyPolicy) -> None:
    stored = adapted.transformers.state_dict()
    weights = WeightExport(adapted.bridge, [adapted.megatron])()
    for name, _ in weights:
        if "layers.1" in name:
            break
    weights.close()  # type: ignore[attr-defined]  # a generator
    for module in adapted.megatron.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = 0.0
    exported = dict(WeightExport(adapted.bridge, [adapted.megatron])())
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


def test_an_adapter_alone_is_exported_under_names_of_peft(adapted: TinyPolicy) -> None:
    export = WeightExport(adapted.bridge, [adapted.megatron], adapter_only=True)
    exported = dict(export())
    assert all(".lora_A." in name or ".lora_B." in name for name in exported)
    merged = dict(WeightExport(adapted.bridge, [adapted.megatron])())
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    delta = SCALING * exported[f"{prefix}.lora_B.weight"] @ exported[f"{prefix}.lora_A.weight"]
    stored = adapted.transformers.state_dict()["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(merged["model.layers.1.mlp.down_proj.weight"], stored + delta)
    assert json.loads(json.dumps(export.adapter)) == {
        "r": 2, "lora_alpha": 4, "target_modules": sorted(ADAPTED), "use_rslora": False, "bias": "none",
        "modules_to_save": None,
    }  # fmt: skip


def test_the_base_below_an_adapter_is_that_of_the_checkpoint(adapted: TinyPolicy) -> None:
    stored = adapted.transformers.state_dict()
    export = WeightExport(adapted.bridge, [adapted.megatron], adapter_only=True, left_out=("lm_head.",))
    base = dict(export.base())
    assert set(base) == {name for name in stored if not name.startswith("lm_head.")}
    assert all(torch.equal(base[name], stored[name]) for name in base)
    assert export.pop_merged_count() == 0


def test_an_adapter_of_no_weights_is_an_error(policy: TinyPolicy) -> None:
    get_peft_model(policy.megatron, LoraConfig(r=2, target_modules=["linear_proj"]))
    export = WeightExport(policy.bridge, [policy.megatron], adapter_only=True)
    for block in policy.megatron.decoder.layers:
        block.self_attention.linear_proj = block.self_attention.linear_proj.base_layer
    with pytest.raises(RuntimeError, match="--target_modules"):
        dict(export())
