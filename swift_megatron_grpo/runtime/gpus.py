"""Memory and speed of GPUs, from their makers' data sheets."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. GB are 10**9 bytes."""

    name: str
    memory_gb: float  # that CUDA reports, a little less than on the data sheet
    bf16_tflops: float  # dense
    bandwidth_gb: float  # GB/s of its memory

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


_GPUS = [
    Gpu("A100-40G", 42.3, 312, 1555),
    Gpu("A100-80G", 84.9, 312, 2039),
    Gpu("A800-80G", 84.9, 312, 2039),
    Gpu("H20-96G", 102.0, 148, 4000),
    Gpu("H100-80G", 85.0, 989, 3350),
    Gpu("H800-80G", 85.0, 989, 3350),
    Gpu("H200-141G", 150.1, 989, 4800),
    Gpu("B200-180G", 191.5, 2250, 8000),
    Gpu("L40S-48G", 47.7, 362, 864),
    Gpu("L20-48G", 47.7, 119, 864),
    Gpu("RTX-4090-24G", 25.4, 165, 1008),
    Gpu("RTX-5090-32G", 34.2, 210, 1792),
]
NAMES = [gpu.name for gpu in _GPUS]


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name such as H100-80G, h100 (its first in the list), or what CUDA reports."""
    wanted = re.sub(r"[\W_]", "", text.upper())
    for gpu in _GPUS:
        if gpu.name.replace("-", "") == wanted:
            return gpu
    for gpu in _GPUS:
        model = gpu.name.rsplit("-", 1)[0].replace("-", "[ -]?")
        if re.search(rf"(?<![A-Z0-9]){model}(?![0-9])", text.upper()):
            return gpu
    raise ValueError(f"--check_gpu {text}: there is no such GPU in the list; use one of {', '.join(NAMES)}")
