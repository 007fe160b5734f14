"""Runs a program in a process group of its own, which ends with its time, with its output's room, or with this process.

Input and output are files in memory: no program can block on a pipe, and none outlives its reader by holding one open.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 2**20  # of each of a program's outputs
_POLL_SECONDS = 0.5  # between two looks at the size of the outputs
_FIRST = Path(__file__).with_name("first_program.py")


class CannotStart(Exception):
    """A program was not started, or not with its limits."""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int  # 128 and the number of a signal that ended it; below 0: it was stopped
    output: str
    errors: str
    stopped: str = ""  # why it was killed; empty: it ended by itself


@asynccontextmanager
async def _ended(process: int) -> AsyncIterator[asyncio.Event]:
    """Set an event when a process ends. It stays a zombie, whose number is that of its group, until it is waited for.

    Hundreds of agents may wait in one process: a look at each would take the time of vLLM's thread.
    """
    loop, ended, file = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process)
    loop.add_reader(file, ended.set)
    try:
        yield ended
    finally:
        loop.remove_reader(file)
        os.close(file)


async def run_program(
    words: Sequence[str],
    text: str,
    environment: Mapping[str, str],
    *,
    seconds: float | None = None,
    most_bytes: int = MOST_BYTES,
    isolation: Mapping[str, Any] | None = None,
) -> Ended:
    """Run a program to its end, with `text` as its input. It is killed if this coroutine is cancelled.

    So are all processes of its group, also after it ended by itself. `isolation` is what first_program.py reads.
    """
    with ExitStack() as files:
        given, output, errors, failure = (
            files.enter_context(open(os.memfd_create(name), "w+b", buffering=0)) for name in ("in", "out", "err", "bad")
        )
        given.write(text.encode())
        given.seek(0)
        settings = json.dumps({"parent": os.getpid(), "failure": failure.fileno(), "isolation": isolation})
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FIRST), settings, *words],
            stdin=given, stdout=output, stderr=errors, env=environment, start_new_session=True,
            pass_fds=[failure.fileno()],
        )  # fmt: skip
        stopped = ""
        try:
            async with asyncio.timeout(seconds), _ended(process.pid) as ended:
                while not ended.is_set() and not stopped:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), _POLL_SECONDS)
                    if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > most_bytes:
                        stopped = f"it wrote more than {most_bytes} bytes"
        except TimeoutError:
            stopped = f"it did not end within {seconds:g} seconds"
        finally:
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        if reason := os.pread(failure.fileno(), MOST_BYTES, 0).decode():
            raise CannotStart(reason)
        written, said = (os.pread(file.fileno(), most_bytes, 0).decode(errors="replace") for file in (output, errors))
        return Ended(process.returncode, written, said, stopped)
