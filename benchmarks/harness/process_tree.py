"""Host memory, open files and threads of all processes of a run, from /proc."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil


def read_tree(root: int) -> dict[str, float]:
    """Return host memory, open files and threads of a process and its descendants together, and their number.

    Memory is the proportional set size in GiB: a page that n processes share counts 1/n in each. Pages of files, such
    as libraries, are counted apart, because other runs share them and the kernel may drop them at any time.
    """
    total = Counter[str]()
    with suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            with suppress(OSError):  # it has ended meanwhile
                total += _read(Path("/proc", str(process.pid)))
    return dict(total)


def _read(process: Path) -> Counter[str]:
    lines = (process / "smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split()[0]: int(line.split()[1]) for line in lines}
    return Counter({
        "host memory": (kib["Pss_Anon:"] + kib["Pss_Shmem:"]) / 2**20,
        "files in memory": kib["Pss_File:"] / 2**20,
        "open files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "processes": 1,
    })  # fmt: skip
