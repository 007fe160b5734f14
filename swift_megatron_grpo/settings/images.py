"""Runs on images: the trained parts of the model, and layouts that its image part excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.flag import Faults, Flags, rule
from swift_megatron_grpo.settings.layout import DataShape, Layout, ModelShape, layers_of_stages


class Images(Flags):
    """The image part of the model: trained or frozen, and divided by Megatron and vLLM."""

    freeze_vit: bool
    freeze_aligner: bool
    language_model_only: bool
    vit_lr: float | None
    aligner_lr: float | None
    vllm_mode: str | None
    vllm_tensor_parallel_size: int
    vllm_engine_kwargs: Any
    adapter: Adapter

    @rule
    def rows_have_what_is_trained(self, rows: DataShape) -> Faults:
        parts = {"freeze_vit": self.freeze_vit, "freeze_aligner": self.freeze_aligner}
        trained = [part for part, frozen in parts.items() if rows.model_sees and not frozen]
        if self.language_model_only and (rows.seen or rows.recordings):
            of_rows = {"images": rows.images, "videos": rows.videos, "audios": rows.recordings}
            column = next(name for name, number in of_rows.items() if number)
            media = "recordings" if column == "audios" else column
            yield (
                f"--language_model_only true builds no image or audio part, and rows of the dataset have {media}; use "
                f"--language_model_only false, or remove the column {column}"
            )
        elif trained and not (rows.seen or rows.recordings) and not self.adapter.exists:
            yield (
                f"--{trained[0]} false: no row of the dataset has images, videos or audio, which alone train the parts "
                f"that embed them; use --{trained[0]} true"
            )
        elif trained and self.adapter.vllm_enable_lora:
            yield (
                f"--vllm_enable_lora true with --{trained[0]} false: vLLM runs adapters in the language model only; "
                "use --vllm_enable_lora false, which merges them"
            )
        for flag, rate, part in (
            ("vit_lr", self.vit_lr, "freeze_vit"),
            ("aligner_lr", self.aligner_lr, "freeze_aligner"),
        ):
            if rate is not None and part not in trained:
                yield (
                    f"--{flag} {rate:g}: the part of the model that it is for is not trained; use --{part} false, or "
                    f"leave --{flag} out"
                )

    @rule
    def vllm_divides_the_image_part(self, config: Mapping[str, Any], rows: DataShape) -> Faults:
        heads, size = _vision(config).get("num_heads"), self.vllm_tensor_parallel_size
        if self.vllm_mode == "server" or not rows.seen or not isinstance(heads, int):
            return
        if (self.vllm_engine_kwargs or {}).get("mm_encoder_tp_mode") != "data" and heads % size:
            yield (
                f"--vllm_tensor_parallel_size {size} does not divide the {heads} attention heads of the image part; "
                """use --vllm_engine_kwargs '{"mm_encoder_tp_mode": "data"}', or a size that divides them"""
            )

    @rule
    def the_first_stage_has_the_layers_of_images(
        self, config: Mapping[str, Any], layout: Layout, shape: ModelShape, rows: DataShape
    ) -> Faults:
        """Refuse a first stage without all layers to which the image part of Qwen3-VL adds its rows."""
        needed, size = len(_vision(config).get("deepstack_visual_indexes") or ()), layout.pipeline_model_parallel_size
        if not needed or not rows.seen or shape.layers is None or size == 1:
            return
        first, virtual = layers_of_stages(layout, shape.layers)[0], layout.virtual_pipeline_model_parallel_size
        if first < needed:
            both = needed * virtual
            advice = (
                f"--virtual_pipeline_model_parallel_size 1 or a --decoder_first_pipeline_num_layers of {both}"
                if virtual > 1
                else f"--decoder_first_pipeline_num_layers {needed}, or --pipeline_model_parallel_size below {size}"
            )
            yield (
                f"the first pipeline stage has {first} layers, and the image part of this model adds to the first "
                f"{needed} layers, which must be on it; use {advice}"
            )

    def trained_share(self, images: int) -> float:
        """Return the share of the vision tower's work that a training pass has. `images`: and videos, of a row.

        With a trained aligner alone, the vision tower runs forward, which is a third. Rows of a frozen one are kept.
        """
        if not images:
            return 0.0
        if not self.freeze_vit:
            return 1.0
        return 0.0 if self.freeze_aligner else 1 / 3


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    thinker = config.get("thinker_config", config)  # of a Qwen-Omni
    return thinker.get("vision_config") or {}
