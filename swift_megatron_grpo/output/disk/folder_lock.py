"""Lock the folders that a run writes, so that no second run mixes its checkpoints, logs and rollouts with them.

A POSIX lock belongs to a process: the kernel releases it when the process ends, however it ends, and no forked child
inherits it. A file system without locks (ENOLCK, ENOTSUP) is used without one.
"""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO

from swift_megatron_grpo.runtime.failures import Ranks

LOCK = ".run.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderInUse(ValueError):
    """Another run writes to the folder. The message names the flag, the folder and the run."""


class FolderLock:
    """A locked folder; the lock lasts as long as this object and its process."""

    def __init__(self, folder: Path, flag: str) -> None:
        """Lock a folder, which is created if it does not exist; raise FolderInUse if another process has locked it."""
        folder.mkdir(parents=True, exist_ok=True)
        # Closing any other descriptor of this file would release the lock, so nothing else opens it.
        self._file: IO[str] = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._owner()
            self._file.close()
            if error.errno in _HELD:
                raise FolderInUse(
                    f"{flag} {folder} is in use by another run{owner}; wait until it has ended, stop it, or use "
                    f"another {flag}"
                ) from None
            if error.errno not in _WITHOUT_LOCKS:
                raise
            return
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n")
        self._file.flush()

    def _owner(self) -> str:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
            return f" (process {owner['process']} on {owner['host']})"
        except (ValueError, KeyError, TypeError):  # it is being written
            return ""


class LockedFolders:
    """The folders of a run, locked by rank 0 until its process ends."""

    def __init__(self, output_dir: str, dump: Path | None, ranks: Ranks) -> None:
        """Lock --output_dir and the folder of --rollout_dump; every rank raises if one of them is in use."""
        folders = {"--output_dir": Path(output_dir), **({} if dump is None else {"--rollout_dump": dump})}

        def lock() -> None:
            self._locks = [FolderLock(folder, flag) for flag, folder in folders.items()]

        ranks.all_gather_or_raise(lock if ranks.rank == 0 else lambda: None, "locking the folders of this run")
