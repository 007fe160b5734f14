"""--resume auto continues from the newest whole checkpoint, and names what it skips."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.output.checkpoints.manifest import MANIFEST, FileEntry, read_manifest, write_manifest
from swift_megatron_grpo.output.checkpoints.newest import Checkpoint, find_newest, open_checkpoint
from swift_megatron_grpo.output.checkpoints.sources import BadCheckpoint
from swift_megatron_grpo.output.disk.files import checksum, file_checksum
from tests.unit.output.checkpoints.saved import save, writer


def saved(output_dir: Path, step: int, at: float, **arguments: object) -> Path:
    """Save a checkpoint with readable args.json and tracker; `at`: seconds since 1970."""
    folder = save(output_dir, step)
    (folder / "args.json").write_text(json.dumps({"tuner_type": "full", "no_save_optim": False, **arguments}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    manifest = read_manifest(folder)
    files = {name: FileEntry((folder / name).stat().st_size, file_checksum(folder / name)) for name in manifest.files}
    write_manifest(folder, replace(manifest, files=files, saved_at=at))
    return folder


def test_the_checkpoint_saved_last_is_found_in_the_folders_of_all_runs(tmp_path: Path) -> None:
    saved(tmp_path / "v0-20260101-000000", 100, at=50.0)
    newest = saved(tmp_path / "v10-20260102-000000", 20, at=70.0)  # a later run, which began again
    saved(tmp_path / "v9-20260102-000000", 30, at=60.0)
    saved(tmp_path / "vault", 40, at=80.0)  # no run of this output folder
    shutil.copytree(newest, newest.with_name("checkpoint-20-merged"))
    (newest.parent / "last-checkpoint").symlink_to(newest)
    for path in tmp_path.rglob("manifest.json"):
        os.utime(path, (1, 1))  # copied
    assert find_newest(tmp_path) == (Checkpoint(newest, 20, has_adapter=False), [])


def test_the_order_does_not_depend_on_names_or_steps_alone(tmp_path: Path) -> None:
    saved(tmp_path, 9, at=1.0)
    saved(tmp_path, 10, at=1.0)
    assert find_newest(tmp_path)[0] == Checkpoint(tmp_path / "checkpoint-10", 10, False)
    saved(tmp_path, 5, at=2.0)  # the run was continued from checkpoint-4 once more
    assert find_newest(tmp_path)[0] == Checkpoint(tmp_path / "checkpoint-5", 5, False)


@pytest.mark.parametrize(("earlier_run", "this_run"), [("", ""), ("v0-20260101-000000", "v1-20260101-000000")])
def test_a_new_checkpoint_is_the_newest_whatever_the_clock_says(
    tmp_path: Path, earlier_run: str, this_run: str
) -> None:
    earlier = saved(tmp_path / earlier_run, 1, at=4e9)  # by a clock that was far ahead, of this machine or another one
    saving = writer(tmp_path / this_run)
    for step in (2, 3):
        folder = tmp_path / this_run / f"checkpoint-{step}"
        with saving.writing(step, 8, estimate=1000):
            shutil.copytree(earlier, folder)
            (folder / MANIFEST).unlink()
            (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        saving.finish()
        assert find_newest(tmp_path) == (Checkpoint(folder, step, False), [])
    assert 4e9 < read_manifest(folder).saved_at < 4e9 + 1


def test_a_higher_step_that_is_passed_over_is_named(tmp_path: Path) -> None:
    other, newest = saved(tmp_path, 200, at=50.0), saved(tmp_path, 100, at=60.0)
    saved(tmp_path / "v0-20260101-000000", 300, at=40.0)  # another run
    assert find_newest(tmp_path) == (
        Checkpoint(newest, 100, False),
        [
            f"{other}: it was saved before checkpoint-100, by the times in their manifests; --resume {other} continues "
            "from it"
        ],
    )


def test_a_linked_folder_of_another_run_is_not_followed(tmp_path: Path) -> None:
    own = saved(tmp_path / "out", 1, at=1.0)
    saved(tmp_path / "other", 2, at=2.0)
    (tmp_path / "out" / "v9-20260101-000000").symlink_to(tmp_path / "other")
    assert find_newest(tmp_path / "out")[0] == Checkpoint(own, 1, False)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes a manifest and computes its checksum again."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        del content["crc32"]
        change(content)
        content["crc32"] = checksum(json.dumps(content, sort_keys=True).encode())
        (folder / MANIFEST).write_text(json.dumps(content))

    return edit


def pipe(name: str) -> Callable[[Path], None]:
    """Return what puts a named pipe, which nobody writes to, in the place of a file."""

    def replace_file(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace_file


def cut(folder: Path) -> None:
    path = folder / "iter_0000001/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace("0", "1", 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "it has no manifest.json, which is written last"),
        (cut, "__0_0.distcp has 1999 bytes instead of 2000"),
        (flip, "manifest.json is damaged"),
        (lambda folder: (folder / "args.json").unlink(), "args.json is missing"),
        (pipe(MANIFEST), "it has no manifest.json"),
        (pipe("args.json"), "args.json cannot be read: .* is not a regular file"),
        (edited(lambda content: content.pop("format")), "manifest.json is in format None"),
        (edited(lambda content: content.pop("files")), "files: Field required"),
        (edited(lambda content: content.update(tokenizer=None)), "tokenizer: Input should be an object"),
        (edited(lambda content: content.update(model=[])), "model: Input should be an object"),
        (edited(lambda content: content.update(saved_at="now")), "saved_at: Input should be a valid number"),
        (edited(lambda content: content.update(prompts="8")), "prompts: Input should be a valid integer"),
        (
            edited(lambda content: content["files"].update(x={"size": None, "crc32": ""})),
            "files.x.size: Input should be a valid integer",
        ),
        (
            edited(lambda content: content["dataset"].update(digests={"0": 1})),
            "dataset.digests.0: Input should be a valid string",
        ),
        (lambda folder: (folder / MANIFEST).write_text("[" * 10**5), "manifest.json cannot be read"),
    ],
)
def test_an_incomplete_or_damaged_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    whole = saved(tmp_path, 1, at=1.0)
    newest = saved(tmp_path, 2, at=2**33)
    damage(newest)
    os.utime(newest, (2**32, 2**32))
    found, skipped = find_newest(tmp_path)
    assert found == Checkpoint(whole, 1, False)
    assert len(skipped) == 1 and re.match(rf"{newest}: .*{reason}", skipped[0])


def test_a_checkpoint_without_optimizer_state_is_skipped_if_that_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1, at=1.0)
    saved(tmp_path, 2, at=2.0, no_save_optim=True)
    newest, skipped = find_newest(tmp_path)
    assert newest is not None and newest.step == 1 and "--no_save_optim true" in skipped[0]
    unread, _ = find_newest(tmp_path, loads_optimizer=False)
    assert unread is not None and unread.step == 2


def test_a_run_starts_again_if_its_first_save_was_interrupted(
    tmp_path: Path,
) -> None:
    """It does not if all checkpoints are damaged."""
    assert find_newest(tmp_path / "none") == find_newest(tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    newest, skipped = find_newest(tmp_path)
    assert newest is None and len(skipped) == 1
    cut(saved(tmp_path, 2, at=2.0))
    with pytest.raises(BadCheckpoint, match=r"no checkpoint in .*: .*checkpoint-2: .*distcp.*use --resume never"):
        find_newest(tmp_path)


def test_the_flags_that_load_a_checkpoint_depend_on_what_it_holds(tmp_path: Path) -> None:
    full, adapter = saved(tmp_path, 1, at=1.0), saved(tmp_path, 2, at=2.0, tuner_type="lora")
    assert open_checkpoint(full).settings() == {"finetune": False, "mcore_model": str(full)}
    assert open_checkpoint(adapter).settings() == {"finetune": False, "mcore_adapter": str(adapter)}
    assert open_checkpoint(adapter).run_folder == tmp_path
    (tmp_path / "last-checkpoint").symlink_to(adapter)
    assert open_checkpoint(tmp_path / "last-checkpoint").folder == adapter
    with pytest.raises(BadCheckpoint, match="use --resume auto, or a folder checkpoint-N"):
        open_checkpoint(tmp_path)
