"""Errors for arguments of flash-linear-attention that the stand-in does not implement."""

from __future__ import annotations

import torch


def reject_unsupported(owner: str, **arguments: object) -> None:
    """Raise NotImplementedError for the first argument that is set, that is, not None and not False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(
                f"{owner}({name}={shown}) is not implemented on the CPU platform (real flash-linear-attention needs "
                "CUDA)"
            )
