"""Make vLLM up to 0.25.1 find the CUDA runtime in a process that has imported tilelang.

vLLM takes the first mapped file whose path contains `libcudart`. Tilelang, which flash-linear-attention needs on Hopper
with Triton 3.4 to 3.7.0, maps `libcudart_stub.so`, and vLLM fails with "undefined symbol: cudaDeviceReset". Newer
versions compare the whole name, as this module does; tests/contract tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from swift_megatron_grpo.import_hooks import after_import

_MAPS = Path("/proc/self/maps")


def find_libraries_by_whole_name() -> None:
    """Wrap vLLM's search before another of its modules imports it by name."""
    after_import("vllm.utils.system_utils", _wrap)


def _wrap(system_utils: ModuleType) -> None:
    search: Callable[[str], str | None] = system_utils.find_loaded_library

    def find_loaded_library(lib_name: str) -> str | None:
        return library_among(mapped_files(), lib_name) or search(lib_name)

    vars(system_utils)["find_loaded_library"] = find_loaded_library


def library_among(paths: Iterable[str], name: str) -> str | None:
    """Return the first path to a library of this name, such as libcudart.so.13 or libcudart-d0da41ae.so.11.0."""
    return next((path for path in paths if Path(path).name.startswith((f"{name}.", f"{name}-"))), None)


def mapped_files() -> Iterator[str]:
    for line in _MAPS.read_text().splitlines():
        start = line.find("/")
        if start >= 0:
            yield line[start:]
