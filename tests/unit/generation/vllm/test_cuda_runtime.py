"""vLLM and FlashInfer find the CUDA runtime beside a library whose name only contains its name, as tilelang has one.

The runtime has another name here, because torch's CUDA build maps the real one.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_megatron_grpo.generation.vllm import cuda_runtime
from swift_megatron_grpo.runtime import import_hooks

# Searches while it is imported, as flashinfer.comm.cuda_ipc does: the first path that contains the name.
SEARCHING = """
def find_loaded_library(name):
    with open("/proc/self/maps") as file:
        for line in file:
            if name in line:
                return line[line.index("/"):].strip()

with open(__file__) as file:
    SOURCE = file.read()
FOUND = find_loaded_library("libmadeup")
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Map a stub on each side of a runtime into this process, as libraries are, and return the runtime."""
    stub = cuda_runtime.STUB.replace("libcudart", "libmadeup")
    monkeypatch.setattr(cuda_runtime, "STUB", stub)
    paths = [tmp_path / "a" / stub, tmp_path / "libmadeup.so.13", tmp_path / "b" / stub]
    maps = []
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    yield paths[1]
    for mapped in maps:
        mapped.close()


@pytest.fixture
def searching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that searches, by its name."""
    (tmp_path / "searching_for_cudart.py").write_text(SEARCHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "searching_for_cudart"
    sys.modules.pop("searching_for_cudart", None)


def test_a_module_that_searches_while_it_is_imported_finds_the_runtime(
    runtime: Path, searching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(line for line in Path(cuda_runtime.MAPS).read_text().splitlines() if "libmadeup" in line)
    assert first.endswith(cuda_runtime.STUB)  # without the change, it is found
    monkeypatch.setattr(cuda_runtime, "SEARCHING", (searching,))
    cuda_runtime.find_runtime_beside_tilelang()
    module = __import__(searching)
    assert str(runtime) == module.FOUND == module.find_loaded_library("libmadeup")
    assert module.SOURCE == SEARCHING  # other files are read as they are


def test_a_module_that_is_already_imported_finds_it_in_its_next_search(runtime: Path, searching: str) -> None:
    module = __import__(searching)
    assert module.FOUND.endswith(cuda_runtime.STUB)
    import_hooks.give_name(searching, "open", cuda_runtime.open_without_stub)
    assert module.find_loaded_library("libmadeup") == str(runtime)


def test_this_version_of_vllm_finds_it_as_well(runtime: Path) -> None:
    from vllm.utils.system_utils import find_loaded_library

    assert find_loaded_library("libmadeup") == str(runtime)
