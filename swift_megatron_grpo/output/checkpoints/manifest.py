"""manifest.json of a checkpoint, written last: its files with sizes and checksums, its model, tokenizer and dataset."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swift_megatron_grpo.output.disk.files import checksum, read_regular, sync_folder, write_durably

MANIFEST = "manifest.json"
FORMAT = 1
_SAMPLED_ROWS = 64
_PART = re.compile(rb"__\d+_\d+\.distcp")
# Its tokens depend on the merges and on how text is split before them, which the vocabulary alone does not show.
_PROBE_TEXT = "The quick brown fox: 3.14159 + 2,718 = ?\n\tdéjà vu, 你好, Ünïcödé <think>{}</think>"


class BadManifest(ValueError):
    """The manifest cannot be used. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """Number of rows, and digests of the first, the last, and some rows in between, by their index."""

    rows: int
    digests: Mapping[str, str]  # JSON has no integer keys


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Number of tokens, and a digest of the vocabulary, the end token and the tokens of a fixed text."""

    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The model, tokenizer and dataset of a run, and the order of its optimizer's state."""

    model: Mapping[str, Any]  # values of config.json, as generation/protocol/model_identity.py selects them
    tokenizer: TokenizerIdentity
    dataset: DatasetIdentity
    # The optimizer's state has trained weights of experts in the order of the experts; otherwise in the reverse order,
    # which is Megatron's own.
    experts_in_order: bool


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Manifest(Identity):
    """The content of manifest.json."""

    step: int
    prompts: int  # taken from the dataset before the next rollout
    files: Mapping[str, FileEntry]  # by path below the checkpoint's folder
    saved_at: float  # seconds since 1970, and later than every other save in the output folder, whatever the clock says

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def list_files(folder: Path) -> dict[str, int]:
    """Return the size of every file below a folder, by its path, without the manifest."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if not path.is_symlink()}
    sizes.pop(MANIFEST, None)
    return dict(sorted(sizes.items()))


def written_parts(folder: Path) -> set[str]:
    """Return the names of the files that ranks have written, by Megatron's index, a pickle that rank 0 writes last."""
    return {part.decode() for index in folder.glob("*/.metadata") for part in _PART.findall(index.read_bytes())}


def prepare_overwriting(folder: Path) -> None:
    """Mark an earlier checkpoint in this folder as incomplete, and remove the files that ranks have written.

    One of them would hide that the new file of its name is missing.
    """
    if has_manifest(folder):
        (folder / MANIFEST).unlink()
        sync_folder(folder)
    for file in [*folder.glob("*/.metadata"), *folder.glob("*/*.distcp")]:
        file.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest once the names of all other files are on disk; their contents must be already."""
    for inner in {folder, *((folder / name).parent for name in manifest.files)}:
        sync_folder(inner)
    content = {"format": FORMAT, **asdict(manifest)}
    content["crc32"] = _content_checksum(content)
    write_durably(folder / MANIFEST, [json.dumps(content, indent=1), "\n"])
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest; raise BadManifest if it is damaged."""
    try:
        content = json.loads(read_regular(folder / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:  # not there, not UTF-8, or not JSON
        raise BadManifest(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("crc32", None) != _content_checksum(content):
        raise BadManifest(f"{MANIFEST} is damaged: its checksum does not match")
    written = content.pop("format", None)
    if written != FORMAT:
        raise BadManifest(
            f"{MANIFEST} is in format {written}, but this version reads format {FORMAT}; use the version of "
            "this package that wrote it"
        )
    try:
        return _MANIFEST.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:  # it was edited, and its checksum computed again
        place, problem = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise BadManifest(f"{MANIFEST} is not one that a save writes: {place}: {problem}; restore the file") from None


def _content_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


# ---- identities


def dataset_identity(rows: Sequence[Mapping[str, Any]]) -> DatasetIdentity:
    """Return the identity of a dataset, in the order in which it was loaded."""
    last = len(rows) - 1
    places = sorted({last * step // (_SAMPLED_ROWS - 1) for step in range(_SAMPLED_ROWS)})
    return DatasetIdentity(len(rows), {str(place): _digest(rows[place]) for place in places})


def tokenizer_identity(tokenizer: Any) -> TokenizerIdentity:
    """Return the identity of a tokenizer of transformers; its chat template is not part of it."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens: list[int] = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    return TokenizerIdentity(
        len(vocabulary), _digest([sorted(vocabulary.items()), tokens, tokenizer.eos_token_id], size=16)
    )


def difference_of_models(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the values that differ between two models; None: they can load the same weights.

    A value that only one of them has does not count: transformers omits values that equal its defaults.
    """
    differing = [key for key in saved if key in here and saved[key] != here[key]]
    if not differing:
        return None
    values = ", ".join(f"{key} {saved[key]} instead of {here[key]}" for key in differing)
    return f"it was saved by a run of another model, with {values}; use the --model of that run"


def difference_of_tokenizers(saved: TokenizerIdentity, here: TokenizerIdentity) -> str | None:
    """Return how two tokenizers differ; None: they are the same."""
    if saved == here:
        return None
    if saved.tokens != here.tokens:
        how = f"of {saved.tokens} tokens instead of {here.tokens}"
    else:
        how = f"of as many tokens, {saved.tokens}, that encodes text differently"
    return f"it was saved by a run with another tokenizer, {how}; use the tokenizer files of that run"


def difference_of_datasets(saved: DatasetIdentity, here: DatasetIdentity) -> str | None:
    """Return how two datasets differ, as far as their sampled rows show it; None: they are the same."""
    if saved.rows != here.rows:
        return f"the dataset has {here.rows} rows, and had {saved.rows}"
    differing = [place for place in saved.digests if saved.digests[place] != here.digests.get(place)]
    if not differing:
        return None
    return (
        f"row {differing[0]} of the dataset is another one, and so are {len(differing) - 1} of the other "
        f"{len(saved.digests) - 1} rows that were compared"
    )


def _digest(value: Any, size: int = 8) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=size).hexdigest()
