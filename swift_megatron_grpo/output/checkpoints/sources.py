"""The checkpoints that a run loads: what it reads of them, what is wrong with them, and what to use instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.checkpoints import manifest as manifests
from swift_megatron_grpo.output.disk.files import file_checksum, read_regular, regular_size
from swift_megatron_grpo.runtime.failures import Ranks

ARGUMENTS = "args.json"  # ms-swift writes it into every checkpoint, as the next one
TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"checkpoint-(\d+)(-merged)?")
_SMALL = 2**20  # bytes; the checksum of a smaller file takes no time
_SHOWN = 3  # files that an error names


class BadCheckpoint(ValueError):
    """A checkpoint that a flag names is incomplete, damaged, or of another run; `whole`: the one to use instead."""

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

    def entries(self, manifest: manifests.Manifest) -> dict[str, manifests.FileEntry]:
        return {name: entry for name, entry in manifest.files.items() if self.reads(name)}

    def __str__(self) -> str:
        return f"--{self.flag} {self.folder}"


def find_manifest(source: Source) -> manifests.Manifest | None:
    """Return the manifest; None: the folder was not written by this version or later.

    Raises BadManifest if it is damaged, or if only this one of the output folder's checkpoints has none.
    """
    if manifests.has_manifest(source.folder):
        return manifests.read_manifest(source.folder)
    if any(manifests.has_manifest(other) for other in _siblings(source.folder)):
        raise manifests.BadManifest(
            f"it has no {manifests.MANIFEST}, which is written last, and other checkpoints in that folder have one, so "
            "its save was interrupted"
        )
    return None


def check_quickly(sources: Iterable[Source]) -> None:
    """Raise BadCheckpoint for missing files, wrong sizes, and damage of files up to 1 MiB."""
    for source in sources:
        faults = quick_faults(source)
        if faults:
            raise refusal(source, faults, first_whole(source, lambda other: not quick_faults(other)))


def check_optimizer_state(sources: Iterable[Source]) -> None:
    """Raise BadCheckpoint if an optimizer state is to be loaded that was not saved."""
    for source in sources:
        if not source.megatron or not (source.folder / ARGUMENTS).is_file():
            continue
        if saved_arguments(source.folder).get("no_save_optim"):
            flag = "--adapters" if source.flag == "mcore_adapter" else "--model"
            instead = f"--{source.flag}" + ("" if source.flag == "resume" else " and --finetune false")
            raise BadCheckpoint(
                f"{source}: it was saved with --no_save_optim true, so it has no optimizer state to resume with; to "
                f"start a new run from its weights, use {flag} {source.folder} without {instead}"
            )


def saved_arguments(folder: Path) -> dict[str, object]:
    """Return the flags of the run that saved a checkpoint."""
    content = json.loads(read_regular(folder / ARGUMENTS))
    if not isinstance(content, dict):
        raise ValueError(f"{ARGUMENTS} is not a JSON object")
    return content


def quick_faults(source: Source) -> list[str]:
    """Return what is wrong with a source, as far as it can be found out in no time."""
    try:
        manifest = find_manifest(source)
    except manifests.BadManifest as problem:
        return [str(problem)]
    if manifest is None:
        return []
    found = (file_fault(source.folder / name, name, entry, _SMALL) for name, entry in source.entries(manifest).items())
    return [fault for fault in found if fault is not None]


def file_fault(path: Path, name: str, entry: manifests.FileEntry, largest: int | None = None) -> str | None:
    """Return what is wrong with a file; None: nothing. Beyond `largest` bytes no checksum is computed."""
    try:
        size = regular_size(path)
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
        advice = f"no other checkpoint in {source.folder.resolve().parent} is whole, so the run must start again"
    else:
        advice = f"use {whole}"
    return BadCheckpoint(
        f"{source}: {shown}; {advice} (--verify_checkpoint false loads a checkpoint unverified)", whole
    )


def first_whole(source: Source, is_whole: Callable[[Source], bool]) -> Source | None:
    """Return the newest whole checkpoint before a damaged one, or else the oldest whole one after it; None: none is."""
    step = step_of(source.folder.resolve())
    others = [other for other in _siblings(source.folder) if manifests.has_manifest(other)]
    before = sorted((other for other in others if step_of(other) < step), key=step_of, reverse=True)
    after = sorted((other for other in others if step_of(other) > step), key=step_of)
    candidates = (replace(source, folder=other) for other in (*before, *after))
    return next((other for other in candidates if is_whole(other)), None)


def _siblings(folder: Path) -> Iterator[Path]:
    """Yield the other checkpoints of the same output folder: merged ones for a merged one, otherwise the others."""
    real = folder.resolve()  # it may be the link `last-checkpoint`
    match = _NAME.fullmatch(real.name)
    if match is not None:
        for other in real.parent.glob("checkpoint-*"):
            found = _NAME.fullmatch(other.name)
            if other != real and found is not None and found[2] == match[2]:
                yield other


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint by the name of its folder; -1: it has another name."""
    match = _NAME.fullmatch(folder.name)
    return -1 if match is None else int(match[1])


# ---- verification on all ranks


def check_sources(
    sources: Sequence[Source],
    model: Mapping[str, Any],
    tokenizer: manifests.TokenizerIdentity | None,
    verify: bool,
    ranks: Ranks,
    threads: int,
) -> list[str]:
    """Refuse damaged checkpoints, and checkpoints of another model or tokenizer; return warnings about the others.

    `tokenizer` is None if the run does not resume. Without `verify`, no file is read and every fault is a warning.
    """
    if verify:
        verify_files(sources, ranks, threads)
    found: list[str] = []
    for source, manifest in _with_manifests(sources):
        if source.flag not in ("model", "ref_model"):  # these are the model
            lines = [manifests.difference_of_models(manifest.model, model)]
            if tokenizer is not None:
                lines.append(manifests.difference_of_tokenizers(manifest.tokenizer, tokenizer))
            found.extend(f"{source}: {line}" for line in lines if line is not None)
    if found and verify:
        raise BadCheckpoint("\n".join(found))
    unverifiable = [
        f"{source} has no manifest.json, as ms-swift's own trainers write checkpoints: damage in it is not detected"
        for source in sources
        if not manifests.has_manifest(source.folder) and (source.megatron or (source.folder / TRACKER).is_file())
    ]
    return unverifiable + found


def verify_files(sources: Iterable[Source], ranks: Ranks, threads: int) -> None:
    """Raise BadCheckpoint, on every rank, if a file that one of the sources reads is missing or damaged."""
    for source in sources:
        faults = _faults(source, ranks, threads)
        if faults:
            raise refusal(source, faults, first_whole(source, lambda other: not _faults(other, ranks, threads)))


def deal(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Distribute files over ranks, so that each rank has about as many bytes to read."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += sizes[name]
    return shares


def check_order_of_experts(source: Source | None, in_order: bool) -> None:
    """Refuse an optimizer state that has the weights of experts in the other order.

    It would be loaded without an error, into other experts. `source`: None if no state is loaded.
    """
    for _, manifest in _with_manifests([] if source is None else [source]):
        if manifest.experts_in_order != in_order:
            wanted = str(manifest.experts_in_order).lower()
            raise BadCheckpoint(
                f"{source} has the optimizer's state of experts in the order of --fast_kernels {wanted}; set "
                f"--fast_kernels {wanted}, or --no_load_optim true to continue without the optimizer's state"
            )


def compare_datasets(sources: Iterable[Source], dataset: manifests.DatasetIdentity) -> str | None:
    """Return a warning if the run that resumes has other data; raise BadCheckpoint if it cannot continue in it.

    The position in the data is a number of prompts, which means another prompt in another dataset.
    """
    for source, manifest in _with_manifests(sources):
        difference = manifests.difference_of_datasets(manifest.dataset, dataset)
        if difference is None:
            return None
        epoch, place = divmod(manifest.prompts, max(manifest.dataset.rows, 1))
        if place >= dataset.rows:
            raise BadCheckpoint(
                f"{source} continues at prompt {place} of epoch {epoch}, which this dataset does not have: "
                f"{difference}; use the --dataset of the checkpoint's run, or --finetune true to begin with step 1"
            )
        return (
            f"{source} was saved by a run with other data: {difference}. The run continues at prompt {place} of epoch "
            f"{epoch}, which is not the prompt at which that run stopped; some prompts may be skipped or repeated. Use "
            "the --dataset, --data_seed and --dataset_shuffle of that run to continue it exactly"
        )
    return None


def _faults(source: Source, ranks: Ranks, threads: int) -> list[str]:
    """Return what is wrong with a source, the same on every rank."""
    local: list[str] = []
    try:
        manifest = find_manifest(source)
    except manifests.BadManifest as problem:
        manifest, local = None, [str(problem)]
    entries = {} if manifest is None else source.entries(manifest)
    share = deal({name: entry.size for name, entry in entries.items()}, ranks.world_size)[ranks.rank]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda name: file_fault(source.folder / name, name, entries[name]), share)
        local.extend(fault for fault in found if fault is not None)
    return sorted({fault for faults in ranks.all_gather(local) for fault in faults})


def _with_manifests(sources: Iterable[Source]) -> Sequence[tuple[Source, manifests.Manifest]]:
    """Return the sources with a readable manifest; a damaged one is refused earlier, or is not to be verified."""
    found = []
    for source in sources:
        try:
            manifest = find_manifest(source)
        except manifests.BadManifest:
            continue
        if manifest is not None:
            found.append((source, manifest))
    return found
