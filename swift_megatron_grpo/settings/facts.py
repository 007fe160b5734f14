"""Facts that rules may know beyond the flags: the shape of the model and that of the datasets."""

from __future__ import annotations

from dataclasses import dataclass


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
