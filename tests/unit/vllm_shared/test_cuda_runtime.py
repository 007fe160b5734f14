"""vLLM finds the CUDA runtime beside a library whose name only contains its name, as tilelang has one."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from swift_megatron_grpo.vllm_shared import cuda_runtime


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Path]:
    """Map a stub and a runtime into this process, as libraries are."""
    folders = [tmp_path / "a" / "libcudart_stub.so", tmp_path / "b" / "libcudart.so.13"]
    maps = []
    for path in folders:
        path.parent.mkdir()
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    yield folders[1]
    for mapped in maps:
        mapped.close()


def first_line_with(name: str) -> str | None:
    """Search as vLLM up to 0.25.1 does, whichever comes first in the maps."""
    return next((path for path in cuda_runtime.mapped_files() if f"{name}_stub" in path), None)


def test_the_runtime_is_found_and_not_the_stub(runtime: Path) -> None:
    utils = ModuleType("system_utils")
    vars(utils)["find_loaded_library"] = first_line_with
    assert "stub" in utils.find_loaded_library("libcudart")
    cuda_runtime._wrap(utils)
    assert utils.find_loaded_library("libcudart") == str(runtime)


def test_a_library_that_is_not_loaded_is_left_to_vllm() -> None:
    utils = ModuleType("system_utils")
    vars(utils)["find_loaded_library"] = lambda name: f"vllm searched for {name}"
    cuda_runtime._wrap(utils)
    assert utils.find_loaded_library("libnothing") == "vllm searched for libnothing"


def test_this_version_of_vllm_finds_it_as_well(runtime: Path) -> None:
    from vllm.utils.system_utils import find_loaded_library

    assert find_loaded_library("libcudart") == str(runtime)


@pytest.mark.parametrize("name", ["libcudart.so.13", "libcudart-d0da41ae.so.11.0"])
def test_versions_and_hashes_belong_to_the_name(name: str) -> None:
    assert cuda_runtime.library_among(["/x/libcudart_stub.so", f"/y/{name}"], "libcudart") == f"/y/{name}"
