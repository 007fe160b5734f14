"""A run that is refused ends with one message: the ranks write it to files, and torchrun ends them and prints it.

Otherwise every rank would print it with its traceback, and 40 lines of torchrun would follow. A rank that only waits
for another one, or reads the same flags, prints nothing. While the trainer is built, only errors that this package
raises on purpose are treated like this: a traceback is what finds an unexpected one.
"""

from __future__ import annotations

import linecache
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from swift_megatron_grpo.failures import RankFailure

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "SWIFT_MEGATRON_GRPO_REFUSALS"  # set by a torchrun with hooks, for its ranks
_FAILED, _FOLLOWS = ".txt", ".follows"  # suffixes: of a rank that failed, and of one that another rank's failure ends
_FOLLOWING_SECONDS = 1.0
_SECONDS = 30.0  # in which torchrun ends a rank that has written its message; it looks ten times a second


def expect_refusals(environ: MutableMapping[str, str]) -> Path:
    """Name the folder for the messages of ranks that this process will start. A rank creates it."""
    folder = Path(tempfile.gettempdir()) / f"swift_megatron_grpo-{secrets.token_hex(8)}"
    environ[_FOLDER] = str(folder)
    return folder


@contextmanager
def reported_by_torchrun() -> Iterator[None]:
    """Leave the message of a ValueError to torchrun, which ends this process. Without its hooks the error is raised."""
    try:
        yield
    except ValueError as refusal:
        _leave_to_torchrun(refusal, "before a model was loaded")
        raise


@contextmanager
def set_up_reported_by_torchrun() -> Iterator[None]:
    """Do the same for errors that this package raises on purpose, with the trainer and its models half built."""
    try:
        yield
    except (ValueError, RuntimeError) as failure:
        if is_raised_by_package(failure):
            _leave_to_torchrun(failure, "while it was set up")
        raise


def is_raised_by_package(error: BaseException) -> bool:
    """Return True if a `raise` statement of this package raised the error, not a function that failed."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    file = Path(traceback.tb_frame.f_code.co_filename)
    statement = linecache.getline(str(file), traceback.tb_lineno).lstrip()
    return file.is_relative_to(_PACKAGE) and statement.startswith("raise")


def _leave_to_torchrun(error: Exception, stage: str) -> None:
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    suffix = _FAILED
    if isinstance(error, RankFailure):  # the rank that failed writes first, if it is on this machine
        suffix = _FOLLOWS
        time.sleep(_FOLLOWING_SECONDS)
    _write(Path(folder), f"this run was refused {stage}:\n{error}", suffix)
    time.sleep(_SECONDS)


def _write(folder: Path, message: str, suffix: str) -> None:
    with suppress(OSError):  # of a full disk: the error is raised after all
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.part"
        unfinished.write_text(message, encoding="utf-8")
        unfinished.rename(folder / f"{int(os.environ.get('RANK', '0')):06}{suffix}")


def take_refusals(folder: Path) -> str | None:
    """Return the messages of the ranks so far, each once, and remove the folder; None: no rank was refused.

    A rank that names another rank's failure is left out if that rank has written its own.
    """
    if not folder.is_dir():
        return None
    files = sorted(folder.glob(f"*{_FAILED}")) or sorted(folder.glob(f"*{_FOLLOWS}"))
    messages = [file.read_text(encoding="utf-8") for file in files]
    if not messages:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return "\n".join(dict.fromkeys(messages))
