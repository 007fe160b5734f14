"""Upstream's linear attention and composite models: what this package corrects, replaces or relies on.

A test that fails after an upgrade names what has changed: if upstream is right now, delete the correction.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcore_bridge
import megatron.core
import pytest
import torch
from mcore_bridge.bridge.gpt_bridge import GPTBridge
from mcore_bridge.config import parser
from mcore_bridge.model import MultimodalGPTModel
from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit
from mcore_bridge.model.modules import GatedDeltaNet
from mcore_bridge.model.register import MODEL_MAPPING
from mcore_bridge.tuners import lora
from megatron.core.distributed import finalize_model_grads as finalize_module
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.platforms.cpu.linear_attention import fla
from swift_megatron_grpo.training.upstream_fixes import linear_attention as fixes
from swift_megatron_grpo.training.upstream_fixes.linear_attention import bounds
from swift_megatron_grpo.types import Sample

FORWARD = inspect.getsource(GatedDeltaNet.forward)
FINALIZE = inspect.getsource(inspect.getmodule(finalize_module))  # type: ignore[arg-type]


def names_imported_of_fla(package: Any) -> set[tuple[str, str]]:
    found = set()
    for file in Path(package.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fla."):
                found |= {(node.module or "", alias.name) for alias in node.names}
    return found


def test_the_stand_in_has_what_supported_models_import_of_fla() -> None:
    needed = names_imported_of_fla(mcore_bridge) | names_imported_of_fla(megatron.core)
    others = {(module, name) for module, name in needed if "kda" in module or "gla" in module}  # of untested types
    for module, name in needed - others:
        assert name in fla._CONTENTS[module.removeprefix("fla.")], (module, name)


def test_the_delta_net_gathers_tokens_before_its_first_norm() -> None:
    """Each tensor-parallel rank therefore has the whole gradient of in_proj's norm, which is marked to be summed."""
    gather, project = FORWARD.index("gather_from_sequence_parallel_region"), FORWARD.index("self.in_proj(")
    assert gather < FORWARD.index("_set_linear_sequence_parallel(False)") < project
    assert "tensor_parallel_output_grad=False" in FORWARD[gather:project]
    assert 'getattr(param, "sequence_parallel", False)' in FINALIZE or "sequence_parallel" in FINALIZE


def test_nothing_sums_out_norms_gradient_without_sequence_parallelism() -> None:
    assert "q_layernorm" in FINALIZE and "k_layernorm" in FINALIZE and "out_norm" not in FINALIZE


def test_adapters_of_a_delta_net_are_marked_like_those_of_other_layers() -> None:
    assert "sequence_parallel" in inspect.getsource(lora)


class Net(GatedDeltaNet):  # type: ignore[misc]
    """The parts of a delta net that the corrections read."""

    def __init__(self, decoupled: bool) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(linear_decoupled_in_proj=decoupled, sequence_parallel=True)
        for name in ("in_proj", "out_norm", "out_proj"):
            module = torch.nn.Linear(2, 2)
            for parameter in module.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
            setattr(self, name, module)


@pytest.mark.parametrize("decoupled", [False, True])
def test_marks_of_both_projections_are_removed_and_out_norms_stays(decoupled: bool) -> None:
    net = Net(decoupled)
    fixes.unmark_gathered_projections([torch.nn.ModuleList([net])])
    assert net.in_proj.weight.sequence_parallel is decoupled
    assert net.out_proj.weight.sequence_parallel is False and net.out_norm.weight.sequence_parallel is True


def test_megatron_below_0_17_has_no_context_parallelism_for_delta_nets() -> None:
    """Once no supported version lacks it, delete linear_attention_context.py."""
    has_it = "tensor_a2a_cp2hp" in inspect.getsource(gated_delta_net)  # defined or, from 0.19 on, imported
    check = inspect.getsource(inspect.unwrap(TransformerConfig.__post_init__))
    assert has_it == (Version(version("megatron-core")) >= Version("0.17"))
    assert ("Gated delta net does not support context parallel for now" in check) != has_it
    assert "tensor_a2a_cp2hp, tensor_a2a_hp2cp" in FORWARD and "self.cp_size" in FORWARD


def test_a_delta_net_reads_sequence_bounds_on_the_host_and_passes_a_view() -> None:
    """Once it does neither, delete `leave_bounds_unread`."""
    check = inspect.getsource(GatedDeltaNet._resolve_cu_seqlens)
    assert "cu_seqlens = cu_seqlens.reshape(-1)" in check and "cu_seqlens[0] != 0:" in check
    assert "self._resolve_cu_seqlens(" in FORWARD and isinstance(
        inspect.getattr_static(GatedDeltaNet, "_resolve_cu_seqlens"), staticmethod
    )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_bounds_of_a_micro_batch_pass_the_check_of_delta_nets(cp_size: int, tp_size: int) -> None:
    samples = [Sample(tokens=[1] * n, completion_mask=[False] + [True] * (n - 1), advantage=0.0) for n in (2, 9, 5)]
    align = Alignment.of_layout(tp_size, cp_size, sequence_parallel=tp_size > 1)
    batch = collate(samples, range(3), count(samples), align, 0, cp_size, torch.device("cpu"))
    given = batch.inputs.cu_seqlens
    checked = GatedDeltaNet._resolve_cu_seqlens(None, given, batch.inputs.packed_ids.shape[1], cp_size=cp_size)
    assert checked is not None and torch.equal(checked, given) and checked is not given
    assert bounds(None, given, batch.inputs.packed_ids.shape[1], cp_size=cp_size) is given


def test_the_bridge_reads_the_full_attention_interval_not_the_layer_list() -> None:
    """Fails once it reads layer_types; then delete check_attention_layers."""
    assert parser.config_mapping["linear_attention_freq"] == ["full_attention_interval"]
    branch = inspect.getsource(parser.hf_to_mcore_config).partition("hf_model_type in {'qwen3_5', 'qwen3_5_moe'")[2]
    assert "res.setdefault('linear_attention_freq', 4)" in branch[:500]


def test_a_tower_runs_on_a_blank_image_for_text() -> None:
    assert "torch.zeros(16 * 16" in inspect.getsource(HuggingFaceVit._hf_get_inputs_embeds)
    embedding = inspect.signature(HuggingFaceVit.get_inputs_embeds_language_model)
    assert list(embedding.parameters)[:2] == ["self", "inputs_embeds"]
    assert "self.visual.get_inputs_embeds(res, **kwargs)" in inspect.getsource(MultimodalGPTModel)


def test_the_bridge_names_the_towers_of_every_supported_type() -> None:
    from swift_megatron_grpo.arguments.refused import COMPOSITE

    for meta in MODEL_MAPPING.values():
        if {*meta.model_types} & {*COMPOSITE}:
            old_names = meta.bridge_cls.hf_state_dict_mapping
            if {*meta.model_types} == {"internvl"}:
                towers = {"vision_tower", "multi_modal_projector"}
                assert meta.visual_cls.module_mapping == {f"model.{name}": name for name in towers}
                assert towers <= {*old_names}
                continue
            assert meta.visual_cls.module_mapping == {"model.visual": "visual"}
            assert (old_names.get("visual") == "model.visual") == any(
                name.startswith("qwen2") for name in meta.model_types
            )


def test_the_bridge_copies_missing_tensors_through_one_method() -> None:
    assert "self._save_missing_weights(saver, saved_keys, source_model_dir)" in inspect.getsource(GPTBridge)


def test_vllm_registers_its_delta_net_as_an_operator_of_these_arguments() -> None:
    core = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    assert list(inspect.signature(core.cpu_gdn_attention_core).parameters) == [
        "mixed_qkv", "b", "a", "core_attn_out", "layer_name"
    ]  # fmt: skip
    source = inspect.getsource(core)
    assert "op_func=cpu_gdn_attention_core" in source and "CPU GDN attention requires BF16" in source
