"""Keeps a forked child of a reward function from continuing as a second copy of its rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_process(name: str) -> Iterator[None]:
    """End a child that reward function `name` has forked where it would leave the function.

    A child that calls sys.exit ends with its exit code, as it would in a script.
    """
    rank = os.getpid()
    try:
        yield
    except SystemExit as end:
        if os.getpid() != rank:
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    finally:
        if os.getpid() != rank:
            line = (
                f"swift_megatron_grpo: reward function {name} forked a process that left the function; it is ended, "
                "because it would continue as a second copy of this rank. End it with os._exit in the function\n"
            )
            os.write(2, line.encode())
            os._exit(1)
