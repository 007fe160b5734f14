"""The first program of a process that programs.py starts: it prepares the process, and becomes the program.

    python -I -S first_program.py PARENT WORD ...

It imports only what starts in milliseconds. The kernel kills the process when the thread that started it ends.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


def main(parent: str, *words: str) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == int(parent):  # else it has ended already
        os.execvp(words[0], words)


if __name__ == "__main__":
    main(*sys.argv[1:])
