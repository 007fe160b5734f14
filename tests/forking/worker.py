"""The interpreter of pytest-xdist's workers, each a fork that has imported the packages: 25 CPU seconds less for each.

    pytest --tx "2*popen//python=python -m tests.forking.worker"

Execnet starts it like Python, with the arguments `-u -c CODE`, and talks to it through its standard streams.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.forking.client import fork_server

if __name__ == "__main__":
    code = sys.argv[sys.argv.index("-c") + 1]
    worker = fork_server("upstream").start(
        "worker", [code], 0, Path.cwd(), sys.stdout, os.environ, more_streams=(sys.stdin, sys.stderr)
    )
    # From here on the streams are the worker's alone: execnet waits for the end of its output.
    for number in (0, 1):
        os.close(number)
    select.select([os.pidfd_open(worker.pid)], [], [])
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)  # a child that holds the streams would hide from pytest that it crashed
    os._exit(worker.wait())
