"""The `megatron` and `swift` scripts become the command that they start, so that signals reach it.

ms-swift starts torchrun, a rank or the server with subprocess.run and waits. A SIGTERM to the script then ends the
script alone, and the processes below it continue. With os.execv there is no process in between.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from swift_megatron_grpo.plugin.command_line import RANK, ROLLOUT, TORCHRUN, classify


def replace_on_run(run: Callable[..., Any] = subprocess.run) -> None:
    """Make subprocess.run replace this process, for commands of this package; other commands run as before."""

    def run_or_become(command: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(command):
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(command[0], command)
        return run(command, *args, **kwargs)

    subprocess.run = run_or_become  # type: ignore[assignment]


def is_ours(command: Any) -> bool:
    """Return True for a command line that starts ranks of this trainer or this package's server."""
    if not isinstance(command, list) or not command or command[0] != sys.executable:
        return False
    argv = ["-m", *command[3:]] if command[1:2] == ["-m"] else command[1:]
    return classify(argv, command) in (RANK, ROLLOUT, TORCHRUN)
