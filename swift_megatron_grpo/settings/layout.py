"""Facts that rules may know beyond the flags: the parallel layout, the model, and the images of the datasets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of every kind of parallelism, under ms-swift's flag names. parallel.py checks them."""

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    microbatch_group_size_per_vp_stage: int | None = None
    sequence_parallel: bool = False
    vllm_tensor_parallel_size: int = 1  # of a vLLM inside the training processes
    first_stage_layers: int | None = None  # None: the same number as the other stages
    last_stage_layers: int | None = None
    stages: str | None = None  # --pipeline_model_parallel_layout; None: stages of equal size
    extra_layers: int = 0  # the embedding and the loss, if they count as layers of their stages

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model."""
        return math.prod(
            (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        )

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.model_parallel

    @property
    def is_positive(self) -> bool:
        """True if no size is 0 or below, as a user may type them."""
        return all(getattr(self, field.name) > 0 for field in fields(self) if field.name.endswith("_parallel_size"))

    def __str__(self) -> str:
        sequence = " with SP" if self.sequence_parallel else ""
        virtual = self.virtual_pipeline_model_parallel_size
        interleaved = f" with VPP {virtual}" if virtual > 1 else ""
        return (
            f"TP {self.tensor_model_parallel_size}{sequence}, PP {self.pipeline_model_parallel_size}{interleaved}, "
            f"CP {self.context_parallel_size}, EP {self.expert_model_parallel_size}, DP {self.data_parallel}"
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that a layout must divide. None: config.json has no such value under a common name."""

    name: str
    attention_heads: int | None
    kv_heads: int | None  # of attention with grouped queries
    ffn: int | None
    layers: int | None
    experts: int | None
    expert_ffn: int | None
    linear_heads: tuple[int, ...] = ()  # of linear attention
    modules: tuple[str, ...] = ()  # their paths in Megatron; empty: not known
    repeats_prompts: str | None = None  # why its attention needs a copy of the prompt for each completion
    unread_window: int | None = None  # tokens that a layer attends to in vLLM, and not in Megatron


_WINDOWS_READ = ("gpt_oss", "gemma4_text", "gemma4_unified_text", "muse_glimmer_text", "deepseek_v4")


def why_repeated(text: Mapping[str, Any]) -> str | None:
    """Return why this attention cannot share prompts, where training/layers/shared_prompts.py would refuse it late."""
    if text.get("model_type") == "gpt_oss":  # the one text model whose sliding_window mcore-bridge reads
        return "layers attend to a window of tokens"
    if "linear_num_key_heads" in text:
        return "layers with linear attention have a state that runs along each sequence"
    if "kv_lora_rank" in text:
        return "multi-latent attention takes positions from the bounds of sequences"
    return None


def unread_window(text: Mapping[str, Any]) -> int | None:
    """Return the sliding window that vLLM and transformers use, and that mcore-bridge 1.6.5 does not read."""
    window, kind, listed = text.get("sliding_window"), str(text.get("model_type")), text.get("layer_types")
    used = text.get("use_sliding_window", not kind.startswith(("qwen", "mimo")))  # whose default is false
    if not window or not used or kind in _WINDOWS_READ:
        return None
    layers = text.get("num_hidden_layers", 0)
    active = (
        "sliding_attention" in listed if listed else kind == "qwen2_moe" or text.get("max_window_layers", 0) < layers
    )
    return int(window) if active else None


@dataclass(frozen=True, slots=True)
class DataShape:
    images: int  # the most in a row
    model_sees: bool = True  # the model has an image part
    recordings: int = 0  # the most in a row
    videos: int = 0  # the most in a row

    @property
    def seen(self) -> int:
        """Return a number above 0 if rows have images or videos, which the image part embeds."""
        return self.images + self.videos

    @property
    def media(self) -> str | None:
        return "images" if self.images else "videos" if self.videos else "audio" if self.recordings else None


@dataclass(frozen=True, slots=True)
class Facts:
    """State what is known beyond the flags; rules name the facts that they need as parameters."""

    layout: Layout
    config: Mapping[str, Any] | None = None  # the content of the model's config.json
    shape: ModelShape | None = None  # of the model
    rows: DataShape | None = None  # of the datasets
    typed: bool = False  # the flags are as typed: ms-swift has filled nothing in yet


def parse_stages(layout: str) -> tuple[str, ...]:
    """Return the parts of every stage of --pipeline_model_parallel_layout: one letter each, t for a layer."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return tuple(layout.split("|"))


def layers_of_stages(layout: Layout, layers: int) -> list[int]:
    """Return the number of layers of every stage, in the order of the model; ranks take turns in a virtual pipeline."""
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if layout.stages is not None:
        return [stage.count("t") for stage in parse_stages(layout.stages)]
    first, last = layout.first_stage_layers, layout.last_stage_layers
    given = [size for size in (first, last) if size is not None]
    places = pipeline - len(given)
    middle = (layers - sum(given) + layout.extra_layers) // places if places > 0 else 0
    ranks = [middle] * pipeline
    if layout.extra_layers:  # the embedding and the loss count as layers of the first and of the last stage
        ranks[0] -= 1
        ranks[-1] -= layout.extra_layers - 1
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return [ranks[rank] // virtual for _ in range(virtual) for rank in range(pipeline)]
