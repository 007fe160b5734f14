"""Verification of the checkpoints that a run loads: every rank reads a part of their files.

The quick checks of sources.py run earlier, before ms-swift reads any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from swift_megatron_grpo.output.checkpoints.identity import (
    DatasetIdentity,
    TokenizerIdentity,
    difference_of_datasets,
    difference_of_models,
    difference_of_tokenizers,
)
from swift_megatron_grpo.output.checkpoints.manifest import BadManifest, Manifest
from swift_megatron_grpo.output.checkpoints.sources import (
    BadCheckpoint,
    Source,
    file_fault,
    find_manifest,
    first_whole,
    is_unverifiable,
    refusal,
)

T = TypeVar("T")


class Ranks(Protocol):
    """The exchange of values between ranks; parallel.Coordinator has it."""

    rank: int
    world_size: int

    def all_gather(self, value: T) -> list[T]: ...

    def all_gather_or_raise(self, work: Callable[[], T], task: str) -> list[T]: ...


def check_sources(
    sources: Sequence[Source],
    model: Mapping[str, Any],
    tokenizer: TokenizerIdentity | None,
    verify: bool,
    ranks: Ranks,
    threads: int,
) -> list[str]:
    """Refuse damaged checkpoints, and checkpoints of another model or tokenizer; return warnings about the others.

    `tokenizer` is None if the run does not resume. Without `verify`, no file is read and every fault is a warning.
    """
    if verify:
        verify_files(sources, ranks, threads)
    found = _differences(sources, model, tokenizer)
    if found and verify:
        raise BadCheckpoint("\n".join(found))
    return _unverifiable(sources) + found


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


def _unverifiable(sources: Iterable[Source]) -> list[str]:
    """Return a warning for every checkpoint without a manifest."""
    return [
        f"{source} has no manifest.json, as earlier versions of this package wrote checkpoints: damage in it is not "
        "detected"
        for source in sources
        if is_unverifiable(source)
    ]


def _differences(sources: Iterable[Source], model: Mapping[str, Any], tokenizer: TokenizerIdentity | None) -> list[str]:
    """Return a line for every checkpoint that was saved by a run of another model or, unless it is None, tokenizer."""
    found: list[str] = []
    for source, manifest in _with_manifests(sources):
        if source.flag not in ("model", "ref_model"):  # these are the model
            lines = [difference_of_models(manifest.model, model)]
            if tokenizer is not None:
                lines.append(difference_of_tokenizers(manifest.tokenizer, tokenizer))
            found.extend(f"{source}: {line}" for line in lines if line is not None)
    return found


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


def compare_datasets(sources: Iterable[Source], dataset: DatasetIdentity) -> str | None:
    """Return a warning if the run that resumes has other data; raise BadCheckpoint if it cannot continue in it.

    The position in the data is a number of prompts, which means another prompt in another dataset.
    """
    for source, manifest in _with_manifests(sources):
        difference = difference_of_datasets(manifest.dataset, dataset)
        if difference is None:
            return None
        epoch, place = divmod(manifest.prompts, manifest.dataset.rows)
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
    except BadManifest as problem:
        manifest, local = None, [str(problem)]
    entries = {} if manifest is None else source.entries(manifest)
    share = deal({name: entry.size for name, entry in entries.items()}, ranks.world_size)[ranks.rank]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda name: file_fault(source.folder / name, name, entries[name]), share)
        local.extend(fault for fault in found if fault is not None)
    return sorted({fault for faults in ranks.all_gather(local) for fault in faults})


def _with_manifests(sources: Iterable[Source]) -> Sequence[tuple[Source, Manifest]]:
    """Return the sources with a readable manifest; a damaged one is refused earlier, or is not to be verified."""
    found = []
    for source in sources:
        try:
            manifest = find_manifest(source)
        except BadManifest:
            continue
        if manifest is not None:
            found.append((source, manifest))
    return found
