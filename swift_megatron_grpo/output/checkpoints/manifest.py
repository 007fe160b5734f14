"""The manifest of a checkpoint: manifest.json, written last, so a checkpoint without one is incomplete.

It holds every file with its size and checksum, and the identities of model, tokenizer and dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.checkpoints.identity import DatasetIdentity, TokenizerIdentity
from swift_megatron_grpo.output.disk.files import checksum, sync_folder, write_durably

MANIFEST = "manifest.json"
FORMAT = 1


class BadManifest(ValueError):
    """The manifest cannot be used. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    prompts: int  # taken from the dataset before the next rollout
    model: Mapping[str, Any]  # values of config.json, as generation/protocol/model_identity.py selects them
    tokenizer: TokenizerIdentity
    dataset: DatasetIdentity
    files: Mapping[str, FileEntry]  # by path below the checkpoint's folder
    saved_at: float | None = None  # seconds since 1970; None: saved by an earlier version
    # The optimizer's state has trained weights of experts in the order of the experts; otherwise in the reverse order,
    # which is Megatron's own.
    experts_in_order: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def list_files(folder: Path) -> dict[str, int]:
    """Return the size of every file below a folder, by its path, without the manifest."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if not path.is_symlink()}
    sizes.pop(MANIFEST, None)
    return dict(sorted(sizes.items()))


def remove_manifest(folder: Path) -> None:
    """Mark a checkpoint that is about to be overwritten as incomplete."""
    if has_manifest(folder):
        (folder / MANIFEST).unlink()
        sync_folder(folder)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest once the names of all other files are on disk; their contents must be already."""
    for inner in _folders(folder, manifest.files):
        sync_folder(inner)
    content = {"format": FORMAT, **asdict(manifest)}
    content["crc32"] = _content_checksum(content)
    write_durably(folder / MANIFEST, [json.dumps(content, indent=1), "\n"])
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest; raise BadManifest if it is damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, not UTF-8, or not JSON
        raise BadManifest(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("crc32", None) != _content_checksum(content):
        raise BadManifest(f"{MANIFEST} is damaged: its checksum does not match")
    if content["format"] != FORMAT:
        raise BadManifest(
            f"{MANIFEST} is in format {content['format']}, but this version reads format {FORMAT}; use the version of "
            "this package that wrote it"
        )
    return Manifest(
        step=content["step"],
        prompts=content["prompts"],
        model=content["model"],
        tokenizer=TokenizerIdentity(**content["tokenizer"]),
        dataset=DatasetIdentity(**content["dataset"]),
        files={name: FileEntry(**entry) for name, entry in content["files"].items()},
        saved_at=content.get("saved_at"),
        experts_in_order=content.get("experts_in_order", False),  # earlier versions did not write it
    )


def _folders(folder: Path, names: Iterable[str]) -> list[Path]:
    return sorted({folder, *((folder / name).parent for name in names)})


def _content_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())
