"""Facts that rules may know beyond the flags: the layout, the model's config.json, and the images of the datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_megatron_grpo.settings.layout import Layout


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


@dataclass(frozen=True, slots=True)
class DataShape:
    """The datasets."""

    images: int  # the most in a row
    model_sees: bool = True  # the model has an image part


@dataclass(frozen=True, slots=True)
class Facts:
    """State what is known beyond the flags; rules name the facts that they need as parameters."""

    layout: Layout
    config: Mapping[str, Any] | None = None  # the content of the model's config.json
    shape: ModelShape | None = None  # of the model
    rows: DataShape | None = None  # of the datasets
    typed: bool = False  # the flags are as typed: ms-swift has filled nothing in yet
