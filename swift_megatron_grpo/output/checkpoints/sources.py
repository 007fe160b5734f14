"""The checkpoints that a run loads: which of their files it reads, what is wrong with them, and what to use instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift_megatron_grpo.output.checkpoints.manifest import (
    MANIFEST,
    BadManifest,
    FileEntry,
    Manifest,
    has_manifest,
    read_manifest,
)
from swift_megatron_grpo.output.disk.files import file_checksum

ARGUMENTS = "args.json"  # ms-swift writes it into every checkpoint, as the next one
TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"checkpoint-(\d+)(-merged)?")
_SMALL = 2**20  # bytes; the checksum of a smaller file takes no time
_SHOWN = 3  # files that an error names


class BadCheckpoint(ValueError):
    """A checkpoint that a flag names is incomplete, damaged, or of another run. The message says what to use.

    `whole`: the checkpoint to use instead of a damaged one, if there is one.
    """

    def __init__(self, message: str, whole: Source | None = None) -> None:
        super().__init__(message)
        self.whole = whole


@dataclass(frozen=True, slots=True)
class Source:
    """A flag that names a folder, which may be a checkpoint of this package."""

    flag: str  # without dashes
    folder: Path
    megatron: bool  # True: loaded in Megatron's format, as --mcore_model; False: only the files of transformers

    def reads(self, name: str) -> bool:
        """Return True if loading this source reads a file of the checkpoint."""
        if self.megatron:
            return not name.endswith(".safetensors")
        return "/" not in name or name.endswith("/common.pt")  # ms-swift reads the number of samples from common.pt

    def entries(self, manifest: Manifest) -> dict[str, FileEntry]:
        """Return the files that loading this source reads."""
        return {name: entry for name, entry in manifest.files.items() if self.reads(name)}

    def __str__(self) -> str:
        return f"--{self.flag} {self.folder}"


def find_manifest(source: Source) -> Manifest | None:
    """Return the manifest; None: the folder was not written by this version or later.

    Raises BadManifest if it is damaged, or if only this one of the output folder's checkpoints has none.
    """
    if has_manifest(source.folder):
        return read_manifest(source.folder)
    if any(has_manifest(other) for other in _siblings(source.folder)):
        raise BadManifest(
            f"it has no {MANIFEST}, which is written last, and other checkpoints in that folder have one, so its save "
            "was interrupted"
        )
    return None


def is_unverifiable(source: Source) -> bool:
    """Return True for a checkpoint without a manifest, as earlier versions wrote it; False for other models."""
    return not has_manifest(source.folder) and (source.megatron or (source.folder / TRACKER).is_file())


def check_quickly(sources: Iterable[Source]) -> None:
    """Raise BadCheckpoint for missing files, wrong sizes, and damage of files up to 1 MiB."""
    for source in sources:
        faults = quick_faults(source)
        if faults:
            raise refusal(source, faults, first_whole(source, lambda other: not quick_faults(other)))


def check_optimizer_state(sources: Iterable[Source]) -> None:
    """Raise BadCheckpoint if an optimizer state is to be loaded that was not saved."""
    for source in sources:
        arguments = source.folder / ARGUMENTS
        if not source.megatron or not arguments.is_file():
            continue
        if json.loads(arguments.read_text(encoding="utf-8")).get("no_save_optim"):
            flag = "--adapters" if source.flag == "mcore_adapter" else "--model"
            instead = f"--{source.flag}" + ("" if source.flag == "resume" else " and --finetune false")
            raise BadCheckpoint(
                f"{source}: it was saved with --no_save_optim true, so it has no optimizer state to resume with; to "
                f"start a new run from its weights, use {flag} {source.folder} without {instead}"
            )


def quick_faults(source: Source) -> list[str]:
    """Return what is wrong with a source, as far as it can be found out in no time."""
    try:
        manifest = find_manifest(source)
    except BadManifest as problem:
        return [str(problem)]
    if manifest is None:
        return []
    found = (file_fault(source.folder / name, name, entry, _SMALL) for name, entry in source.entries(manifest).items())
    return [fault for fault in found if fault is not None]


def file_fault(path: Path, name: str, entry: FileEntry, largest: int | None = None) -> str | None:
    """Return what is wrong with a file; None: nothing. Beyond `largest` bytes no checksum is computed."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{name} has {size} bytes instead of {entry.size}"
        if largest is not None and size > largest:
            return None
        intact = file_checksum(path) == entry.crc32
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:  # such as a read error of the disk
        return f"{name} cannot be read: {error}"
    return None if intact else f"{name} is damaged: its checksum does not match"


def refusal(source: Source, faults: Sequence[str], whole: Source | None) -> BadCheckpoint:
    """Return the error for a checkpoint with these faults. `whole`: the one to use instead."""
    shown = "; ".join(faults[:_SHOWN]) + (f"; and {len(faults) - _SHOWN} more files" if len(faults) > _SHOWN else "")
    if whole is None:
        advice = f"no other checkpoint in {_real(source.folder).parent} is whole, so the run must start again"
    else:
        advice = f"use {whole}"
    return BadCheckpoint(
        f"{source}: {shown}; {advice} (--verify_checkpoint false loads a checkpoint unverified)", whole
    )


def first_whole(source: Source, is_whole: Callable[[Source], bool]) -> Source | None:
    """Return the newest whole checkpoint before a damaged one, or else the oldest whole one after it; None: none is."""
    candidates = alternatives(source)
    return next((other for other in candidates if is_whole(other)), None)


def alternatives(source: Source) -> list[Source]:
    """Return the other checkpoints with a manifest: those before it, newest first, then those after it."""
    step = _step(_real(source.folder))
    others = [other for other in _siblings(source.folder) if has_manifest(other)]
    before = sorted((other for other in others if _step(other) < step), key=_step, reverse=True)
    after = sorted((other for other in others if _step(other) > step), key=_step)
    return [replace(source, folder=other) for other in (*before, *after)]


def _siblings(folder: Path) -> Iterator[Path]:
    """Yield the other checkpoints of the same output folder: merged ones for a merged one, otherwise the others."""
    real = _real(folder)
    match = _NAME.fullmatch(real.name)
    if match is not None:
        for other in real.parent.glob("checkpoint-*"):
            found = _NAME.fullmatch(other.name)
            if other != real and found is not None and found[2] == match[2]:
                yield other


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return -1 if match is None else int(match[1])


def _real(folder: Path) -> Path:
    """Resolve the link `last-checkpoint`."""
    return folder.resolve()
