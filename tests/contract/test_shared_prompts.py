"""Seams of training/layers/shared_prompts.py: parameters of the attention, and who takes rotary angles by position."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        import dataclasses
        from mcore_bridge import patcher
        from mcore_bridge.config import ModelConfig
        from mcore_bridge.model import GPTModel
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer import attention

        result = {
            "fields": [field.name for field in dataclasses.fields(PackedSeqParams)],
            "attention": source(TEDotProductAttention),
            "attend": parameters(TEDotProductAttention.forward),
            "angles": parameters(GPTModel._get_rotary_pos_emb),
            "forward": source(GPTModel.forward),
            "length": source(RotaryEmbedding.get_rotary_seq_len),
            "rotate": source(patcher),
            "layer": source(attention),
            "config": [field.name for field in dataclasses.fields(ModelConfig)],
        }
        """
    )
    return result


def test_attention_takes_only_the_fields_of_megatrons_own_class() -> None:
    """SharedPrompts adds fields, which must not become arguments of Transformer Engine."""
    assert "PackedSeqParams)" in upstream()["attention"].split("self.kept_packed_seq_params = ")[1][:200]
    assert upstream()["attend"][:6] == ["self", "query", "key", "value", "attention_mask", "attn_mask_type"]
    assert "packed_seq_params" in upstream()["attend"] and "attn_mask_type.name" in upstream()["attention"]


def test_layers_pass_the_parameters_of_the_micro_batch_to_attention() -> None:
    assert "packed_seq_params=packed_seq_params" in upstream()["layer"]
    assert {"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"} <= set(upstream()["fields"])


def test_angles_are_read_by_position_unless_a_fused_kernel_reads_by_place() -> None:
    assert upstream()["angles"][:4] == ["self", "decoder_input", "position_ids", "packed_seq_params"]
    assert "packed_seq and not self.config.apply_rope_fusion" in upstream()["forward"]
    assert "rotary_pos_emb[position_ids[0]]" in upstream()["forward"]
    assert "max(packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv)" in upstream()["length"]
    assert "freqs.shape[0] == t.shape[0]" in upstream()["rotate"]


def test_settings_that_decide_whether_prompts_are_shared_have_these_names() -> None:
    names = {"experimental_attention_variant", "multi_latent_attention", "window_size", "engram_enabled",
             "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
             "apply_rope_fusion"}  # fmt: skip
    assert names <= set(upstream()["config"])
