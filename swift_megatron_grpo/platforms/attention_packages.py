"""Packages of attention kernels: flash attention, and gated delta nets on Hopper GPUs. Imports nothing slow."""

from importlib.util import find_spec

from packaging.version import Version

FLASH_PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_4")


def has_flash_attention() -> bool:
    return any(find_spec(package) is not None for package in FLASH_PACKAGES)


def vision_tower_has_flash_attention() -> bool:
    """Return True if the package for `flash_attention_2` is installed, mcore-bridge's default for image parts."""
    return find_spec("flash_attn") is not None


def fault_of_delta_rule(triton: str, has_tilelang: bool) -> str | None:
    """Return why flash-linear-attention 0.6 would raise in the first backward pass on Hopper; None: it would not."""
    if has_tilelang or not Version("3.4") <= Version(triton) < Version("3.7.1"):
        return None
    return (
        f"Triton {triton} computes wrong gradients of gated delta nets on Hopper GPUs, so flash-linear-attention "
        "refuses to use it; install tilelang, whose kernel takes its place: pip install tilelang"
    )
