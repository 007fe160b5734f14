"""Surround a save of ms-swift's trainer: check the free space before it, write the manifest after it.

A save that a full disk ends is removed, so that no incomplete checkpoint stays, and the error names the disk. One that
lacks the files of a machine, which has unmounted the output folder since the run began, gets no manifest.
"""

import ctypes
import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from swift_megatron_grpo.output.checkpoints import manifest as manifests
from swift_megatron_grpo.output.checkpoints.newest import last_save, saved_at
from swift_megatron_grpo.output.checkpoints.sources import deal
from swift_megatron_grpo.output.disk.files import file_checksums, threads_of_a_rank
from swift_megatron_grpo.output.disk.folder_lock import SEEN_SECONDS, FolderNotShared
from swift_megatron_grpo.output.disk.full_disk import NoSpace, format_bytes, free_bytes, reason_of, why_full
from swift_megatron_grpo.runtime.failures import Ranks

_WRITTEN_BY_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
_TICK = 0.001  # seconds between two saves, at least
_FAILURES = (Exception, CheckpointException)  # the latter is not an Exception


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint without a manifest so far: with --async_save its files are still being written."""

    folder: Path
    step: int
    prompts: int

    @property
    def folders(self) -> list[Path]:
        """The checkpoint, and its copy with merged adapters (--merge_lora) if there is one."""
        merged = self.folder.with_name(f"{self.folder.name}-merged")
        return [self.folder, *([merged] if merged.is_dir() else [])]

    def prepare_overwriting(self) -> None:
        for folder in self.folders:
            manifests.prepare_overwriting(folder)


class CheckpointWriter:
    """The saves of one run. Every rank calls every method."""

    def __init__(
        self,
        output_dir: Path,
        ranks: Ranks,
        ranks_of_this_machine: int,
        identity: manifests.Identity,
        log: Callable[[str], object],
    ) -> None:
        self._output_dir = output_dir.absolute()
        self._ranks = ranks
        self._ranks_of_rank_0 = ranks.all_gather(ranks_of_this_machine)[0]
        self._named = ranks.all_gather(f"rank {ranks.rank} on {socket.gethostname()}")
        self._threads = threads_of_a_rank(ranks_of_this_machine)
        self._identity = identity
        self._log = log
        self._pending: deque[_Pending] = deque()
        self._last_size: int | None = None  # of the last checkpoint of this run; the next one has the same
        self._saved_at: float | None = None  # time of the last save; None: this run has not saved

    def announce_size(self, step: int, estimate: float) -> None:
        """Log the size of a checkpoint at the start of a run, or raise NoSpace if it does not fit on the disk."""
        needed, free = self.check_space(step, estimate)
        if self._ranks.rank == 0:
            self._log(
                f"a checkpoint takes {format_bytes(needed)} or a little more, and {self._output_dir} has "
                f"{format_bytes(free)} free"
            )

    def check_space(self, step: int, estimate: float) -> tuple[int, int]:
        """Raise NoSpace, on every rank, if a checkpoint does not fit on the disk; return the bytes needed and free.

        `estimate`: the bytes that this rank will write; later checkpoints take as much as the first one. What an
        earlier run has saved at this step is overwritten, so its space counts as free.
        """
        needed = self._last_size or int(sum(self._ranks.all_gather(estimate)))
        free = self._ranks.all_gather(self._free(step) if self._ranks.rank == 0 else 0)[0]
        if needed > free:
            raise NoSpace(
                f"no space: {self._folder(step).name} needs {format_bytes(needed)}, and {self._output_dir} has "
                f"{format_bytes(free)} free; {self._advice()}"
            )
        return needed, free

    def _free(self, step: int) -> int:
        overwritten = sum(
            sum(manifests.list_files(folder).values()) for folder in _Pending(self._folder(step), step, 0).folders
        )
        return free_bytes(self._output_dir) + overwritten

    @contextmanager
    def writing(self, step: int, prompts: int, estimate: float) -> Iterator[None]:
        """Surround the code that writes a checkpoint. `prompts`: those taken before the next rollout."""
        self.check_space(step, estimate)
        pending = _Pending(self._folder(step), step, prompts)
        self._ranks.all_gather_or_raise(
            lambda: pending.prepare_overwriting() if self._ranks.rank == 0 else None, f"overwriting {pending.folder}"
        )
        with self._naming_full_disk(pending):
            yield
        self._pending.append(pending)

    @contextmanager
    def finishing_earlier_saves(self) -> Iterator[None]:
        """Surround code that raises the failure of an asynchronous save (--async_save)."""
        failure = (CheckpointException,)
        with self._naming_full_disk(self._pending[0], only=failure) if self._pending else nullcontext():
            yield

    def finish(self) -> bool:
        """Write the manifests of complete checkpoints; return True if there were any."""
        finished = bool(self._pending)
        while self._pending:
            pending = self._pending[0]
            with self._naming_full_disk(pending):
                self._last_size = sum(self._write_manifest(folder, pending) for folder in pending.folders)
            self._pending.popleft()
        if finished:
            # glibc keeps what a save has freed, and takes more for the next one
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        return finished

    def _write_manifest(self, folder: Path, pending: _Pending) -> int:
        """Compute checksums, each rank for its own files, and write the manifest. Return the checkpoint's size."""
        began = time.monotonic()
        listed = self._ranks.all_gather_or_raise(
            lambda: self._list_whole(folder) if self._ranks.rank == 0 else {}, f"listing {folder}"
        )
        sizes = listed[0]
        names = owned_files(sizes, self._ranks.world_size, self._ranks_of_rank_0)[self._ranks.rank]
        gathered = self._ranks.all_gather_or_raise(
            lambda: dict(
                zip(names, file_checksums([folder / name for name in names], self._threads, sync=True), strict=True)
            ),
            f"computing checksums of {folder}",
        )
        checksums = {name: value for part in gathered for name, value in part.items()}
        manifest = manifests.Manifest(
            **{field.name: getattr(self._identity, field.name) for field in fields(manifests.Identity)},
            step=pending.step,
            prompts=pending.prompts,
            files={name: manifests.FileEntry(size, checksums[name]) for name, size in sizes.items()},
            saved_at=self._next_time() if self._ranks.rank == 0 else 0.0,
        )
        self._ranks.all_gather_or_raise(
            lambda: manifests.write_manifest(folder, manifest) if self._ranks.rank == 0 else None, f"writing {folder}"
        )
        if self._ranks.rank == 0:
            self._log(
                f"{folder.name} is complete: {len(sizes)} files, {format_bytes(manifest.size)}, checksums and manifest "
                f"in {time.monotonic() - began:.1f} s"
            )
        return manifest.size

    def _list_whole(self, folder: Path) -> dict[str, int]:
        """Return the size of every file; raise FolderNotShared if those of a rank are not there."""
        end = time.monotonic() + SEEN_SECONDS
        while True:
            sizes = manifests.list_files(folder)
            missing = sorted(manifests.written_parts(folder) - {name.rpartition("/")[2] for name in sizes})
            if not missing:
                return sizes
            if time.monotonic() > end:
                rank = int(missing[0].split("_")[2])
                raise FolderNotShared(
                    f"{folder} lacks {missing[0]}, which {self._named[rank]} has written: {self._output_dir} is no "
                    "longer the same folder on all machines; mount it there again, and use the same command with "
                    f"--resume auto{self._kept()}"
                )
            time.sleep(0.2)

    def _next_time(self) -> float:
        """Return the time, or if the clock was set back, a time after the last save: --resume auto goes by it."""
        if self._saved_at is None:
            self._saved_at = last_save(self._output_dir)
        self._saved_at = max(time.time(), self._saved_at + _TICK)
        return self._saved_at

    @contextmanager
    def _naming_full_disk(self, pending: _Pending, only: tuple[type[BaseException], ...] = _FAILURES) -> Iterator[None]:
        try:
            yield
        except only as error:
            reason, failed = reason_of(error) or why_full(self._output_dir), self._ranks.rank
            if isinstance(error, CheckpointException):  # raised by all ranks, but only rank 0 has its cause
                failed = next(iter(error.failures), failed)
                reasons = self._ranks.all_gather((reason, failed))
                reason, failed = next((each for each in reasons if each[0] is not None), (None, failed))
            if reason is None:
                raise
            free = free_bytes(self._output_dir)
            self._remove(pending)
            raise NoSpace(
                f"no space: {pending.folder} could not be written by {self._named[failed]}: {reason}, with "
                f"{format_bytes(free)} free; the incomplete checkpoint is removed; {self._advice()}"
            ) from error

    def _remove(self, pending: _Pending) -> None:
        for folder in pending.folders:
            shutil.rmtree(folder, ignore_errors=True)
        link = self._output_dir / "last-checkpoint"  # ms-swift's
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)

    def _advice(self) -> str:
        return (
            "free space there, use another --output_dir, keep fewer checkpoints with --save_total_limit, or save less "
            f"with --no_save_optim true, after which a run cannot resume{self._kept()}"
        )

    def _kept(self) -> str:
        saved = [folder for folder in self._output_dir.glob("checkpoint-*[0-9]") if manifests.has_manifest(folder)]
        newest = max(saved, key=saved_at, default=None)
        return "" if newest is None else f"; earlier checkpoints are kept, the newest whole one is {newest}"

    def _folder(self, step: int) -> Path:
        return self._output_dir / f"checkpoint-{step}"


def in_order_of_removal(checkpoints: Sequence[str], resumed_from: Iterable[str], best: str | None) -> list[str]:
    """Return the checkpoints that --save_total_limit may remove: incomplete ones, then by age, and the best one last.

    Those that the run resumed from are kept. ms-swift goes by the times of folders, which the clock sets.
    """
    kept = {os.path.realpath(path) for path in resumed_from}
    removable = [path for path in checkpoints if os.path.realpath(path) not in kept]
    return sorted(removable, key=lambda path: (path == best, manifests.has_manifest(Path(path)), saved_at(Path(path))))


def owned_files(sizes: Mapping[str, int], ranks: int, ranks_of_rank_0: int) -> list[list[str]]:
    """Return the files that each rank computes checksums of: the ones it has written, which are still in its memory.

    Rank 0 has written all others; the ranks of its machine share them.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    others: dict[str, int] = {}
    for name, size in sizes.items():
        match = _WRITTEN_BY_RANK.fullmatch(name)
        if match is not None and int(match[1]) < ranks:
            shares[int(match[1])].append(name)
        else:
            others[name] = size
    for rank, names in enumerate(deal(others, min(ranks, ranks_of_rank_0))):
        shares[rank].extend(names)
    return shares
