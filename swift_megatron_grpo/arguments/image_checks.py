"""Checks of runs on images, once it is known how many a row has. Pure functions on plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.settings.layout import Layout, parse_stages


def check_parts(
    images: int,
    freeze_vit: bool,
    freeze_aligner: bool,
    language_model_only: bool,
    adapter_only: bool,
    has_adapter: bool,
    vit_lr: float | None = None,
    aligner_lr: float | None = None,
) -> None:
    """Raise ValueError unless the rows have what the trained parts need, and vLLM can run what is trained.

    `images`: the most in one row. `adapter_only`: vLLM runs the adapter on the checkpoint.
    """
    trained = [flag for flag, frozen in (("freeze_vit", freeze_vit), ("freeze_aligner", freeze_aligner)) if not frozen]
    if language_model_only and images:
        raise ValueError(
            "--language_model_only true builds no image part, and rows of the dataset have images; use "
            "--language_model_only false, or remove the column images"
        )
    if trained and not images and not has_adapter:
        raise ValueError(
            f"--{trained[0]} false: no row of the dataset has images, which alone train the image part; use "
            f"--{trained[0]} true"
        )
    for flag, rate, part in (("vit_lr", vit_lr, "freeze_vit"), ("aligner_lr", aligner_lr, "freeze_aligner")):
        if rate is not None and part not in trained:
            raise ValueError(
                f"--{flag} {rate:g}: the part of the model that it is for is not trained; use --{part} false, or leave "
                f"--{flag} out"
            )
    if trained and adapter_only:
        raise ValueError(
            f"--vllm_enable_lora true with --{trained[0]} false: vLLM runs adapters in the language model only; use "
            "--vllm_enable_lora false, which merges them"
        )


def vision_tower_share(freeze_vit: bool, freeze_aligner: bool) -> float:
    """Return the share of a trained vision tower's work that a training pass has.

    With a trained aligner alone, the vision tower runs forward, which is a third. Rows of a frozen one are kept.
    """
    if not freeze_vit:
        return 1.0
    return 0.0 if freeze_aligner else 1 / 3


def check_vision_tower_heads(
    vision: Mapping[str, Any], tensor_parallel_size: int, engine_kwargs: Mapping[str, Any] | None
) -> None:
    """Raise ValueError if vLLM cannot divide the image part. `vision`: the vision_config of config.json."""
    heads = vision.get("num_heads")
    if (engine_kwargs or {}).get("mm_encoder_tp_mode") == "data" or not isinstance(heads, int):
        return
    if heads % tensor_parallel_size:
        raise ValueError(
            f"--vllm_tensor_parallel_size {tensor_parallel_size} does not divide the {heads} attention heads of the "
            """image part; use --vllm_engine_kwargs '{"mm_encoder_tp_mode": "data"}', or a size that divides them"""
        )


def check_deepstack(vision: Mapping[str, Any], layout: Layout, layers: int | None) -> None:
    """Raise ValueError unless the first stage has the layers that take rows of the image part (Qwen3-VL)."""
    needed = len(vision.get("deepstack_visual_indexes") or ())
    if not needed or layers is None or layout.pipeline_model_parallel_size == 1:
        return
    first = layers_of_first_stage(layout, layers)
    if first < needed:
        size = layout.pipeline_model_parallel_size
        virtual = layout.virtual_pipeline_model_parallel_size
        advice = (
            f"--virtual_pipeline_model_parallel_size 1 or a --decoder_first_pipeline_num_layers of {needed * virtual}"
            if virtual > 1
            else f"--decoder_first_pipeline_num_layers {needed}, or --pipeline_model_parallel_size below {size}"
        )
        raise ValueError(
            f"the first pipeline stage has {first} layers, and the image part of this model adds to the first {needed} "
            f"layers, which must be on it; use {advice}"
        )


def layers_of_first_stage(layout: Layout, layers: int) -> int:
    """Return the layers of the first stage; with a virtual pipeline, of the first stage of the first rank."""
    if layout.stages is not None:
        return parse_stages(layout.stages)[0].count("t")
    of_rank = layout.first_stage_layers
    if of_rank is None:
        others = layout.pipeline_model_parallel_size - (layout.last_stage_layers is not None)
        of_rank = (layers - (layout.last_stage_layers or 0)) // others
    return of_rank // layout.virtual_pipeline_model_parallel_size
