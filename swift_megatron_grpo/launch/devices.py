"""The GPUs of this machine, for its members."""

from collections.abc import Mapping

import torch


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that this process may use, by name or number; None: torch is a build for the CPU."""
    if torch.version.cuda is None:
        return None
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [device for device in named.split(",") if device]


def take(left: list[str], number: int) -> dict[str, str]:
    """Return the variable for a process that takes so many of the GPUs that are left."""
    taken, left[:] = left[:number], left[number:]
    return {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
