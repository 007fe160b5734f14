"""A run that is refused ends with one message: the ranks write it to files, and torchrun ends them and prints it.

Otherwise every rank would print it with its traceback, and 40 lines of torchrun would follow. A rank that only waits
for another one, or reads the same flags, prints nothing. An unexpected error goes the same way with its traceback in
front: the rank that it ends would be killed before it has printed it, once another rank has left its message. With
several machines, so does the error of a connection that broke: torchrun knows whether a machine is lost.
"""

import linecache
import os
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from swift_megatron_grpo.runtime.failures import RankFailure

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "SWIFT_MEGATRON_GRPO_REFUSALS"  # set by a torchrun with hooks, for its ranks
# Suffixes: of a rank that failed, of one that another rank's failure ends, and of one that lost a connection.
_FAILED, _FOLLOWS, _LOST = ".txt", ".follows", ".lost"
_FOLLOWING_SECONDS = 1.0
_FAULTS_OF_INPUT = (ValueError, RuntimeError, OSError, KeyError, ImportError)
_SECONDS = 30.0  # for torchrun to end a rank that has written its message; it looks ten times a second


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
        # also one of ms-swift, or of what reads flags for it
        _leave_to_torchrun(refusal, "before a model was loaded", is_expected=_raising_file(refusal) is not None)
        raise


@contextmanager
def set_up_reported_by_torchrun() -> Iterator[None]:
    """Do the same for every error, with the trainer and its models half built."""
    try:
        yield
    except Exception as failure:
        is_expected = isinstance(failure, ValueError | RuntimeError) and is_raised_by_package(failure)
        _leave_to_torchrun(failure, "while it was set up", is_expected)
        raise


@contextmanager
def lost_connections_reported_by_torchrun() -> Iterator[None]:
    """Leave the traceback of a connection that broke to torchrun, in a run on several machines."""
    try:
        yield
    except Exception as failure:
        if _is_lost_connection(failure):
            _leave_to_torchrun(failure, "", is_expected=False)
        raise


def _is_lost_connection(error: BaseException) -> bool:
    """Return True if another machine may be the cause: an error of NCCL, of a store, or of gloo, which has no type."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return False
    from torch.distributed import DistError  # not at the top, because torch is being imported when this is

    return isinstance(error, DistError) or "gloo/transport" in str(error)


def is_raised_by_package(error: BaseException) -> bool:
    """Return True if a `raise` statement of this package raised the error, not a function that failed."""
    file = _raising_file(error)
    return file is not None and file.is_relative_to(_PACKAGE)


def _raising_file(error: BaseException) -> Path | None:
    """Return the file with the `raise` statement of the error; None: another statement failed."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return None
    file = frame.tb_frame.f_code.co_filename
    return Path(file) if linecache.getline(file, frame.tb_lineno).lstrip().startswith("raise") else None


def is_caused_by_bug(error: BaseException) -> bool:
    """Return True if the error reports one of a type that no wrong value, file or server raises: code is at fault."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, _FAULTS_OF_INPUT) or is_caused_by_bug(cause))


def _leave_to_torchrun(error: Exception, stage: str, is_expected: bool) -> None:
    """Write the message of an error, with its traceback unless it is expected, and wait to be killed."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    suffix = _LOST if _is_lost_connection(error) else _FAILED
    if isinstance(error, RankFailure):  # the rank that failed writes first, if it is on this machine
        suffix = _FOLLOWS
        time.sleep(_FOLLOWING_SECONDS)
    message = f"this run was refused {stage}:\n{error}"
    if suffix == _LOST:
        message = "".join(traceback.format_exception(error)).rstrip("\n")
    elif not is_expected or is_caused_by_bug(error):
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        message = f"this run failed {stage}, with an error that may be a bug:\n{text}"
    _write(Path(folder), message, suffix)
    time.sleep(_SECONDS)


def _write(folder: Path, message: str, suffix: str) -> None:
    with suppress(OSError):  # of a full disk: the error is raised after all
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.part"
        unfinished.write_text(message, encoding="utf-8")
        unfinished.rename(folder / f"{int(os.environ.get('RANK', '0')):06}{suffix}")


def lost_connection(folder: Path) -> str | None:
    """Return the first traceback of a rank that lost a connection; None: there is none."""
    files = sorted(folder.glob(f"*{_LOST}"))
    return files[0].read_text(encoding="utf-8") if files else None


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
