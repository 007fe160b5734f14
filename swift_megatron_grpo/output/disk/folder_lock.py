"""Lock the folders that a run writes, so that no second run mixes its checkpoints, logs and rollouts with them.

All machines must see the same --output_dir: a checkpoint would otherwise lack the parts of some, and seem whole.

A POSIX lock belongs to a process: the kernel releases it when the process ends, however it ends, and no forked child
inherits it. A file system without locks (ENOLCK, ENOTSUP) is used without one.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from functools import partial
from pathlib import Path
from typing import IO

from swift_megatron_grpo.runtime.failures import Ranks

LOCK = ".run.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
SEEN_SECONDS = 10.0  # until a file of another machine is seen on a network file system


class FolderInUse(ValueError):
    """Another run writes to the folder. The message names the flag, the folder and the run."""


class FolderNotShared(ValueError):
    """A machine has another folder at the path of rank 0's."""


class FolderLock:
    """A locked folder; the lock lasts as long as this object and its process."""

    def __init__(self, folder: Path, flag: str) -> None:
        """Lock a folder, which is created if it does not exist; raise FolderInUse if another process has locked it."""
        owner = {"host": socket.gethostname(), "process": os.getpid(), "run": secrets.token_hex(8)}
        self.content = json.dumps(owner) + "\n"  # of the file
        folder.mkdir(parents=True, exist_ok=True)
        # Closing any other descriptor of this file would release the lock, so nothing else opens it.
        self._file: IO[str] = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                by = self._owner()
                self._file.close()
                raise FolderInUse(
                    f"{flag} {folder} is in use by another run{by}; wait until it has ended, stop it, or use "
                    f"another {flag}"
                ) from None
            if error.errno not in _WITHOUT_LOCKS:
                self._file.close()
                raise
        self._file.truncate(0)
        self._file.write(self.content)
        self._file.flush()

    def _owner(self) -> str:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
            return f" (process {owner['process']} on {owner['host']})"
        except (ValueError, KeyError, TypeError):  # it is being written
            return ""


class LockedFolders:
    """The folders of a run, locked by rank 0 until its process ends, and seen by all ranks."""

    def __init__(self, output_dir: str, dump: Path | None, ranks: Ranks) -> None:
        """Lock --output_dir and the folder of --rollout_dump; every rank raises if one is in use or not shared."""
        folders = {"--output_dir": Path(output_dir), **({} if dump is None else {"--rollout_dump": dump})}

        def lock() -> str:
            self._locks = [FolderLock(folder, flag) for flag, folder in folders.items()]
            return self._locks[0].content

        locked = ranks.all_gather_or_raise(lock if ranks.rank == 0 else str, "locking the folders of this run")
        # Rank 0 must not read it: closing the file again would release its lock.
        look = (lambda: None) if ranks.rank == 0 else partial(check_shared, Path(output_dir), locked[0])
        ranks.all_gather_or_raise(look, "looking for --output_dir")


def check_shared(folder: Path, content: str) -> None:
    """Raise FolderNotShared unless the lock in the folder has the content that rank 0 has written."""
    end = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            seen = (folder / LOCK).read_text(encoding="utf-8")
        except (OSError, ValueError):
            seen = ""
        if seen == content:
            return
        if time.monotonic() > end:
            raise FolderNotShared(
                f"--output_dir {folder}: {socket.gethostname()} does not see what rank 0 has written there, so "
                "checkpoints would lack parts; use a folder on a file system of all machines"
            )
        time.sleep(0.2)
