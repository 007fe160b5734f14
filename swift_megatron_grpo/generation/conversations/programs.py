"""Runs a program in a process group of its own, which ends with its time, with its output's room, or with this process.

Input and output are files in memory: no program can block on a pipe, and none outlives its reader by holding one open.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 2**20  # of each of a program's outputs
_POLL_SECONDS = 0.05
_FIRST = Path(__file__).with_name("first_program.py")


@dataclass(frozen=True, slots=True)
class Ended:
    code: int  # below 0: the signal that ended it
    output: str
    errors: str


class TooMuchOutput(Exception):
    """A program wrote more than it may."""


async def run_program(
    words: Sequence[str], text: str, environment: Mapping[str, str], most_bytes: int = MOST_BYTES
) -> Ended:
    """Run a program to its end, with `text` as its input. It is killed if this coroutine is cancelled.

    So are all processes of its group, also after it ended by itself.
    """
    with ExitStack() as files:
        given, output, errors = (
            files.enter_context(open(os.memfd_create(name), "w+b", buffering=0)) for name in ("in", "out", "err")
        )
        given.write(text.encode())
        given.seek(0)
        command = [sys.executable, "-I", "-S", str(_FIRST), str(os.getpid()), *words]
        process = subprocess.Popen(
            command, stdin=given, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            # it stays a zombie, whose number is that of its group, until the group is killed
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                await asyncio.sleep(_POLL_SECONDS)
                if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > most_bytes:
                    raise TooMuchOutput(f"it wrote more than {most_bytes} bytes")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = (os.pread(file.fileno(), most_bytes, 0).decode(errors="replace") for file in (output, errors))
        return Ended(process.returncode, *texts)
