"""Packages from which Transformer Engine, and vision towers of transformers, have flash attention."""

from __future__ import annotations

from importlib.util import find_spec

FLASH_PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_4")


def has_flash_attention() -> bool:
    """Return True if one of the packages is installed."""
    return any(find_spec(package) is not None for package in FLASH_PACKAGES)


def vision_tower_has_flash_attention() -> bool:
    """Return True if the package for `flash_attention_2` is installed, mcore-bridge's default for image parts."""
    return find_spec("flash_attn") is not None
