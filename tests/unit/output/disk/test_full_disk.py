"""A full disk is recognised behind the errors of all writers of a checkpoint.

A limit on the size of a file stands in for a full disk where mounting a small file system is not permitted.
"""

from __future__ import annotations

import errno
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swift_megatron_grpo.output.disk.full_disk import (
    NoSpace,
    format_bytes,
    free_bytes,
    naming_full_disk,
    reason_of,
    why_full,
)
from tests.unit.output.disk.small_files import file_size_limit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder that holds 1 MB, or one whose files may not be larger if mounting is not permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode == 0:
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # torch leaves a file open when a write fails
    else:
        with file_size_limit(2**20):
            yield folder


def test_the_reason_is_found_in_any_error_of_the_chain() -> None:
    assert reason_of(OSError(errno.ENOSPC, "No space left on device")) == "no space left on device"
    assert reason_of(OSError(errno.EDQUOT, "Disk quota exceeded")) == "the disk quota is exceeded"
    assert reason_of(RuntimeError("I/O error: No space left on device (os error 28)")) == "no space left on device"
    assert reason_of(RuntimeError("Worker failure: [Errno 28] No space")) == "no space left on device"
    try:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904  # as torch's writer does
    except RuntimeError as error:
        assert reason_of(error) == "no space left on device"
        assert reason_of(pickle.loads(pickle.dumps(error))) is None  # as from a writer's process
    assert reason_of(OSError(errno.EACCES, "Permission denied")) is None
    assert reason_of(ValueError("[Errno 13] os error 13")) is None
    assert reason_of(None) is None


def test_a_full_disk_is_found_by_writing_to_it(small_disk: Path, tmp_path: Path) -> None:
    assert why_full(small_disk) in ("no space left on device", "a file may not be larger (ulimit -f)")
    assert list(small_disk.iterdir()) == []


def test_a_disk_with_space_is_not_full(tmp_path: Path) -> None:
    assert why_full(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def write_with_torch(folder: Path) -> None:
    torch.save(torch.zeros(2**20), folder / "common.pt")


def write_with_torch_to_a_stream(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("wb") as stream:
        torch.save(torch.zeros(2**20), stream)


def write_with_safetensors(folder: Path) -> None:
    save_file({"x": torch.zeros(2**20)}, folder / "model.safetensors")


@pytest.mark.parametrize("write", [write_with_torch, write_with_torch_to_a_stream, write_with_safetensors])
def test_a_full_disk_is_found_after_any_writer_of_a_checkpoint_has_failed(small_disk: Path, write: object) -> None:
    with pytest.raises(Exception) as failed:
        write(small_disk)  # type: ignore[operator]
    assert (reason_of(failed.value) or why_full(small_disk)) is not None


def test_other_errors_keep_their_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError), naming_full_disk(tmp_path / "x", "--flag", "advice"):
        raise KeyError("x")
    complaint = r"no space: --flag cannot write .*/x: no space left on device; .* are free there; advice"
    with pytest.raises(NoSpace, match=complaint), naming_full_disk(tmp_path / "x", "--flag", "advice"):
        raise OSError(errno.ENOSPC, "full")


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0


def test_sizes_are_formatted_for_people() -> None:
    sizes = (0, 999, 1000, 1_234_567, 999_600_000, 5_200_000_000, 1_500_000_000_000)
    assert [format_bytes(size) for size in sizes] == [
        "0 bytes", "999 bytes", "1 kB", "1.23 MB", "1000 MB", "5.2 GB", "1500 GB",
    ]  # fmt: skip
