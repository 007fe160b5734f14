"""A sandbox for code that the policy writes: a process without network, with limits, that sees programs and no data.

    ended = await run_in_sandbox(["python3", "-c", code], limits=Limits(seconds=5))

It needs namespaces of Linux, which many containers forbid: then it refuses to run anything. It bounds mistakes and
common mischief of a policy. Code that attacks the kernel needs a virtual machine.
"""

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from swift_megatron_grpo.generation.conversations.programs import CannotStart, Ended, run_program

_PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives")
_CANNOT_RUN = 126  # what a shell returns; the policy wrote this, so the run continues


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds what a program in a sandbox may use."""

    seconds: float = 10.0  # of wall-clock time, and of CPU time of each process
    memory_bytes: int = 2**29  # of each process
    processes: int = 16
    disk_bytes: int = 2**26  # of all files together, which are in memory
    output_bytes: int = 2**16  # of standard output, and of standard error


async def run_in_sandbox(
    words: Sequence[str], text: str = "", limits: Limits | None = None, visible: Sequence[str] = ()
) -> Ended:
    """Run a program with `text` as its input. It sees folders with programs, Python's, and those of `visible`.

    Raises CannotStart where a sandbox is impossible.
    """
    if fault := _fault_of(words, text):
        return Ended(_CANNOT_RUN, "", fault)
    limits = limits or Limits()
    folders = sorted({*_PROGRAMS, sys.base_prefix, sys.prefix, *visible})
    shown = [each for each in folders if os.path.isdir(each) and not any(_is_inside(each, other) for other in folders)]
    resources = {
        "AS": limits.memory_bytes, "CPU": int(limits.seconds) + 1, "FSIZE": limits.disk_bytes,
        "NPROC": limits.processes, "NOFILE": 256, "CORE": 0,
    }  # fmt: skip
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    try:
        return await run_program(
            words,
            text,
            {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"},
            seconds=limits.seconds,
            most_bytes=limits.output_bytes,
            isolation={"visible": shown, "disk_bytes": limits.disk_bytes, "resources": resources},
        )
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        return Ended(_CANNOT_RUN, "", "the words are too long for a process")
    except CannotStart as reason:
        raise CannotStart(
            f"the sandbox cannot start: {reason}; a container needs the right to create namespaces (docker run "
            "--security-opt seccomp=unconfined --cap-add SYS_ADMIN), or use a sandbox on another machine"
        ) from None


def _fault_of(words: Sequence[str], text: str) -> str:
    """Return why no process can have these words and this input; empty: one can."""
    if any("\0" in word for word in words):
        return "a word has a null character"
    try:
        for each in (*words, text):
            each.encode()
    except UnicodeEncodeError:
        return "a text has half of a surrogate pair"
    return ""


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
