"""Saves: enough space before, the manifest last, and nothing incomplete after a full disk."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from swift_megatron_grpo.output.checkpoints import saving as saving_module
from swift_megatron_grpo.output.checkpoints.manifest import (
    MANIFEST,
    has_manifest,
    list_files,
    read_manifest,
    write_manifest,
)
from swift_megatron_grpo.output.checkpoints.saving import owned_files
from swift_megatron_grpo.output.disk.folder_lock import FolderNotShared
from swift_megatron_grpo.output.disk.full_disk import NoSpace, free_bytes
from tests.unit.output.checkpoints.saved import FILES, IDENTITY, save, write_files, writer
from tests.unit.output.disk.small_files import file_size_limit


def test_the_manifest_describes_every_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, prompts=24)
    manifest = read_manifest(folder)
    assert {name: entry.size for name, entry in manifest.files.items()} == FILES == list_files(folder)
    assert (manifest.step, manifest.prompts, manifest.size) == (7, 24, sum(FILES.values()))
    assert (manifest.model, manifest.tokenizer, manifest.dataset) == (
        IDENTITY.model, IDENTITY.tokenizer, IDENTITY.dataset,
    )  # fmt: skip
    assert json.loads((folder / MANIFEST).read_text())["files"]["args.json"].keys() == {"size", "crc32"}


def test_a_manifest_is_written_once_the_save_has_succeeded(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    folder = save(tmp_path, 1)
    with pytest.raises(KeyError), saving.writing(1, 0, estimate=0):
        assert not has_manifest(folder)  # an earlier run's, which this save overwrites
        raise KeyError("another error of the save")
    assert folder.is_dir() and not has_manifest(folder)
    assert not saving.finish()
    assert not has_manifest(folder)


def test_a_checkpoint_that_lacks_the_part_of_a_rank_gets_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of that rank has written it to another folder. One that is seen late is waited for."""
    monkeypatch.setattr(saving_module, "SEEN_SECONDS", 1.0)
    saving, part = writer(tmp_path), tmp_path / "checkpoint-2" / "iter_0000002" / "__0_0.distcp"
    save(tmp_path, 1)
    with saving.writing(2, 0, estimate=0):
        save_part(part.parent)
    elsewhere = part.rename(tmp_path / "part")
    expected = (
        rf"{part.parents[1]} lacks __0_0.distcp, which rank 0 on .* has written: {tmp_path} is no longer the same"
    )
    with pytest.raises(FolderNotShared, match=f"{expected}.*--resume auto.* is {tmp_path}/checkpoint-1$"):
        saving.finish()
    assert not has_manifest(part.parents[1])
    monkeypatch.setattr(saving_module, "SEEN_SECONDS", 60.0)
    Timer(0.5, elsewhere.rename, [part]).start()
    assert saving.finish() and f"iter_0000002/{part.name}" in read_manifest(part.parents[1]).files


def test_a_part_of_an_earlier_save_does_not_hide_that_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "SEEN_SECONDS", 0.1)
    saving, folder = writer(tmp_path), tmp_path / "checkpoint-2" / "iter_0000002"
    save_part(folder)
    with saving.writing(2, 0, estimate=0):
        save_part(tmp_path / "elsewhere")
        folder.mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / ".metadata").rename(folder / ".metadata")
    with pytest.raises(FolderNotShared, match=r"lacks __0_0\.distcp"):
        saving.finish()


def save_part(folder: Path) -> None:
    checkpoint.save({"a": torch.ones(4)}, storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)


def test_a_merged_copy_gets_a_manifest_too(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    with saving.writing(1, 0, estimate=0):
        write_files(tmp_path / "checkpoint-1", 0)
        write_files(tmp_path / "checkpoint-1-merged", 1)
    assert saving.finish()
    merged = read_manifest(tmp_path / "checkpoint-1-merged")
    assert merged.files != read_manifest(tmp_path / "checkpoint-1").files


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    save(tmp_path, 1)
    too_much = free_bytes(tmp_path) * 2.0
    expected = (
        rf"no space: checkpoint-2 needs .*B, and {tmp_path} has .*B free; free space there, .*--save_total_limit.*"
        rf"the newest whole one is {tmp_path}/checkpoint-1"
    )
    with pytest.raises(NoSpace, match=expected), saving.writing(2, 0, estimate=too_much):
        raise AssertionError("nothing is written")
    assert not (tmp_path / "checkpoint-2").exists() and has_manifest(tmp_path / "checkpoint-1")


def test_the_size_of_the_first_checkpoint_replaces_the_estimate(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    with saving.writing(1, 0, estimate=0):
        write_files(tmp_path / "checkpoint-1", 0)
    saving.finish()
    saving.check_space(2, free_bytes(tmp_path) * 2.0)  # the estimate is not used any more
    assert saving._last_size == sum(FILES.values())


def test_a_checkpoint_that_is_overwritten_counts_as_free_space(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    before = saving.check_space(1, 0)[1]
    (tmp_path / "checkpoint-1").mkdir()
    with (tmp_path / "checkpoint-1" / "model.safetensors").open("wb") as file:
        file.truncate(10**12)  # takes no space, so other programs that use this disk do not disturb the test
    assert saving.check_space(1, 0)[1] - before > 0.9 * 10**12
    assert saving.check_space(2, 0)[1] - before < 0.1 * 10**12


def test_a_full_disk_is_named_and_the_incomplete_checkpoint_removed(tmp_path: Path) -> None:
    """torch reports a position instead of the reason, which is found by writing to the same folder."""
    save(tmp_path, 1)
    saving = writer(tmp_path)
    folder = tmp_path / "checkpoint-2"
    expected = (
        rf"no space: {folder} could not be written by rank 0 on .*: .*; the incomplete .* removed; .*checkpoint-1"
    )
    with file_size_limit(2**16), pytest.raises(NoSpace, match=expected), saving.writing(2, 0, estimate=0):
        write_files(folder, 2)
        (tmp_path / "last-checkpoint").symlink_to("checkpoint-2")
        torch.save(torch.zeros(2**16), folder / "iter_0000001" / "common.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    assert not saving.finish()


def test_an_asynchronous_save_that_fails_is_named(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    with saving.writing(1, 0, estimate=0):
        write_files(tmp_path / "checkpoint-1", 0)
    named = pytest.raises(NoSpace, match="checkpoint-1 could not be written")
    with file_size_limit(2**16), named, saving.finishing_earlier_saves():
        raise CheckpointException("write", {})
    assert not (tmp_path / "checkpoint-1").exists()


def test_other_errors_during_an_asynchronous_save_keep_their_name(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    with saving.writing(1, 0, estimate=0):
        write_files(tmp_path / "checkpoint-1", 0)
    with file_size_limit(2**16), pytest.raises(ZeroDivisionError), saving.finishing_earlier_saves():
        raise ZeroDivisionError  # of a training step
    assert (tmp_path / "checkpoint-1").exists()


def test_a_disk_that_is_full_when_the_manifest_is_written(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    with saving.writing(1, 0, estimate=0):
        write_files(tmp_path / "checkpoint-1", 0)
    with (
        file_size_limit(100),
        pytest.raises(NoSpace, match=r"written by rank 0 on .*: a file may not be larger"),
    ):
        saving.finish()
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_crash_before_the_manifest_leaves_none(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    with file_size_limit(100), pytest.raises(OSError, match="File too large"):
        write_manifest(folder, manifest)
    assert list_files(folder) == FILES and not has_manifest(folder)


def test_every_rank_computes_the_checksums_of_its_own_files() -> None:
    sizes = {"iter/__0_0.distcp": 9, "iter/__3_1.distcp": 9, "iter/__7_0.distcp": 5, "a": 8, "b": 7, "c": 3}
    shares = owned_files(sizes, ranks=4, ranks_of_rank_0=2)
    assert shares[0][0] == "iter/__0_0.distcp" and shares[3] == ["iter/__3_1.distcp"]
    assert shares[2] == []  # on another machine than rank 0, which has written the rest
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert sorted(map(len, shares)) == [0, 1, 2, 3]


def test_freed_memory_returns_to_the_system_after_a_save(tmp_path: Path) -> None:
    def anonymous() -> int:
        return psutil.Process().memory_full_info().uss >> 20

    blocks = [b"x" * (2000 + i % 7) for i in range(50_000)]  # 100 MiB in blocks that glibc serves from its heap
    kept = blocks[:: len(blocks) // 10]  # which end the heap, so that it does not shrink by itself
    del blocks
    before = anonymous()
    save(tmp_path, 1)
    assert before - anonymous() > 60 and kept
