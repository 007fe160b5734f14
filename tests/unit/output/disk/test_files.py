"""Checksums of files, and files that are complete or absent."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from swift_megatron_grpo.output.disk import files
from swift_megatron_grpo.output.disk.files import (
    checksum,
    file_checksum,
    file_checksums,
    threads_of_a_rank,
    write_durably,
)
from tests.unit.output.disk.small_files import file_size_limit


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    contents = [b"", b"x", os.urandom(files._CHUNK), os.urandom(2 * files._CHUNK + 7)]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    expected = [f"{zlib.crc32(content):08x}" for content in contents]
    assert [checksum(content) for content in contents] == expected
    assert [file_checksum(path, sync=True) for path in paths] == expected
    assert file_checksums(paths, threads=3) == expected
    assert file_checksums([], threads=0) == []


def test_every_rank_has_at_least_one_thread() -> None:
    assert threads_of_a_rank(10**6) == 1
    assert 1 <= threads_of_a_rank(1) <= 4


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, ["old\n"])
    with file_size_limit(10_000), pytest.raises(OSError, match="File too large"):
        write_durably(path, ["new\n"] * 10_000)
    assert path.read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
